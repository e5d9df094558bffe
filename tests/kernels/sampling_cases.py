"""States, batches and verdicts for tests of fused sampling."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from slipstream.core.request import Request
from slipstream.core.sampling_params import SamplingParams, Verification
from slipstream.kernels.reference.sampling import SAMPLING as PLAIN
from slipstream.kernels.sampling import SampleRows, SamplingOps
from slipstream.sampling.state import SamplingState, Uses
from slipstream.sampling.verification import sample_draft, verify
from tests.kernels.device import DEVICE


@contextmanager
def served_by(ops: SamplingOps, state: SamplingState) -> Iterator[None]:
    """Sampling from this state with these ops."""
    before, state.ops = state.ops, ops
    yield
    state.ops = before


# Batches


GREEDY: dict[str, Any] = {"temperature": 0.0}
SAMPLED: dict[str, Any] = {"temperature": 0.8}
PENALISED: dict[str, Any] = {
    "presence_penalty": 0.7,
    "frequency_penalty": -0.4,
    "repetition_penalty": 1.3,
}
LEAN: list[dict[str, Any]] = [GREEDY, SAMPLED, {"temperature": 1.0}, GREEDY, {"temperature": 1.7}]
TRUNCATED: list[dict[str, Any]] = [
    {"top_k": 3},
    SAMPLED | {"top_p": 0.83},
    GREEDY | {"top_k": 2},
    {"min_p": 0.07, "temperature": 1.3},
    {"top_k": 40, "top_p": 0.6, "min_p": 0.011},
]
PROCESSED: list[dict[str, Any]] = [
    SAMPLED | PENALISED,
    GREEDY | {"logit_bias": {0: 3.0}, "repetition_penalty": 0.8},
    SAMPLED,
    {"min_tokens": 6, "frequency_penalty": 1.1},
    GREEDY | {"min_tokens": 5},
]
FULL: list[dict[str, Any]] = [
    a | b for a, b in zip(TRUNCATED, [PENALISED, {}, {"min_tokens": 4}, PENALISED, {}], strict=True)
]
BLOCK: dict[str, Any] = {"verification": Verification.BLOCK}
OF_COUPLED: dict[str, Any] = {"verification": Verification.COUPLED}
COUPLED: list[dict[str, Any]] = [
    SAMPLED | OF_COUPLED,
    SAMPLED,
    GREEDY | OF_COUPLED,
    OF_COUPLED | {"top_p": 0.83, "top_k": 30, "temperature": 1.3},
    SAMPLED | PENALISED | OF_COUPLED,
]
KINDS: dict[str, list[dict[str, Any]]] = {
    "greedy": [GREEDY] * 5,
    "lean": LEAN,
    "truncated": TRUNCATED,
    "processed": PROCESSED,
    "full": FULL,
    "block": [BLOCK, SAMPLED | BLOCK, GREEDY | BLOCK, SAMPLED, {"temperature": 1.7} | BLOCK],
    "full block": [kind | BLOCK for kind in FULL],
    "coupled": COUPLED,
}


def make_state(
    kinds: Sequence[dict[str, Any]], vocab_size: int, device: torch.device = DEVICE
) -> SamplingState:
    """Slots in reverse order, with some history."""
    state = SamplingState(len(kinds), vocab_size, device)
    for index, kind in enumerate(kinds):
        params = dict(kind)
        verification = params.pop("verification", Verification.REJECTION)
        prompt = [token % vocab_size for token in (0, 3, 1, 30 + index)]
        request = Request(
            request_id=str(index),
            token_ids=list(prompt),
            params=SamplingParams(**params),
            seed=(1 << 63) + 77 * index,
            stop_token_ids=frozenset({2, 5 % vocab_size, vocab_size - 1}),
            max_tokens=100,
            num_speculative_tokens=4,
            arrival=index,
            verification=verification,
        )
        request.token_ids.extend(token % vocab_size for token in (7, 7, 36, 9))
        request.num_steps = 3 * index
        state.admit({len(kinds) - 1 - index: request})
    return state


def make_batch(
    state: SamplingState, most_drafts: int, seed: int, reduced: bool, uniform_rows: bool
) -> tuple[Tensor, SampleRows]:
    """(logits, rows): drafts of all lengths that are often right, some ended by -1."""
    generator = torch.Generator().manual_seed(seed)
    num, vocab_size = state.max_num_seqs, state.vocab_size
    logits = torch.randn(num, most_drafts + 1, vocab_size, generator=generator) * 2
    drafts = logits[:, :most_drafts].argmax(-1)
    chance = torch.rand(drafts.shape, generator=generator)
    drafts = torch.where(
        chance < 0.3, torch.randint(vocab_size, drafts.shape, generator=generator), drafts
    )
    drafts[chance > 0.97] = -1
    lengths = torch.randint(most_drafts + 1, (num,), generator=generator)
    vocabulary = None
    if reduced:
        vocabulary = torch.unique(
            torch.cat((drafts.clamp_min(0).flatten(), torch.arange(0, vocab_size, 3)))
        )
    width = vocab_size if vocabulary is None else len(vocabulary)
    probs = (torch.randn(num, most_drafts, width, generator=generator) * 2).softmax(-1)
    one_hot = torch.rand(num, generator=generator) < 0.3
    rows = SampleRows.build(
        torch.arange(num - 1, -1, -1).to(state.device),
        torch.randint(1, 1000, (num,), generator=generator).to(state.device),
        drafts.to(state.device),
        lengths.to(state.device),
        one_hot.to(state.device),
        probs.to(state.device) if most_drafts else None,
        None if vocabulary is None else vocabulary.to(state.device),
        num_rows=None if uniform_rows else int(lengths.sum()) + num,
    )
    logits = logits.to(state.device)
    return logits[rows.request, rows.offset].contiguous(), rows


def judge(
    ops: SamplingOps,
    logits: Tensor,
    rows: SampleRows,
    state: SamplingState,
    rates: Tensor | None = None,
) -> tuple[list[Any], ...]:
    """The tokens and counts of the verdict, after a check of its `largest`."""
    with served_by(ops, state):
        uses = state.uses(rows.slots.tolist())
        verdict = verify(logits, rows, state, uses, rates)
    largest = state.columns.largest(logits) if rows.peaks is None else rows.peaks[0]
    check_largest(verdict.largest, largest.squeeze(-1), rows)
    return tuple(
        part.tolist() for part in (verdict.token_ids, verdict.num_tokens, verdict.num_accepted)
    )


def check_largest(found: Tensor, expected: Tensor, rows: SampleRows) -> None:
    """[R, K + 1] has what is `expected` [N] of every row that a request has."""
    place = torch.arange(rows.max_draft_tokens + 1, device=found.device)
    used = place <= rows.num_draft_tokens.unsqueeze(-1)
    assert found.shape == used.shape
    assert found.dtype == torch.float32
    row = (rows.first_row.unsqueeze(-1) + place)[used]
    assert torch.equal(without_nan(found[used]), without_nan(expected[row]))


def without_nan(numbers: Tensor) -> Tensor:
    return torch.where(numbers.isnan(), torch.inf, numbers)


def check_confidences(
    ops: SamplingOps, name: str, vocab_size: int, legal: int, device: torch.device
) -> None:
    """They are softmax maxima of the raw logits, and change no token."""
    state = make_state(KINDS[name], vocab_size, device)
    uses, slots = state.uses(range(5)), torch.tensor([4, 0, 1, 3, 2], device=device)
    for spread in (1.0,) if vocab_size > 1000 else (0.02, 1.0, 30.0):
        logits = torch.randn(5, vocab_size, generator=torch.Generator().manual_seed(vocab_size))
        logits = (logits * spread - 100).to(device)
        width = min(legal, vocab_size)
        tokens = []
        for served, out in (
            (PLAIN, None),
            (PLAIN, torch.full((5,), torch.nan, device=device)),
            (ops, torch.full((5,), torch.nan, device=device)),
        ):
            probs = torch.empty(5, width, device=device) if Uses.SAMPLING in uses else None
            with served_by(served, state):
                tokens.append(
                    sample_draft(
                        logits, slots, slots + 9, state, uses, legal,
                        probs_out=probs, confidence_out=out,
                    )
                )  # fmt: skip
            assert torch.equal(tokens[0], tokens[-1])
            if out is not None:
                expected = logits.double()[:, :width].softmax(-1).amax(-1)
                torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=0)


# Coupled requests


def check_coupled(
    ops: SamplingOps, plain: SamplingOps, vocab_size: int, reduced: bool, device: torch.device
) -> None:
    """Drafts of the target's own logits are all accepted, and each token is that of plain decoding;
    tokens are those of `plain` ops.

    Args:
        reduced: the drafter knows a part of the vocabulary, and the target forbids the rest.
    """
    kinds = [SAMPLED | OF_COUPLED, OF_COUPLED | {"top_p": 0.83, "top_k": 30}, GREEDY | OF_COUPLED]
    state = make_state(kinds, vocab_size, device)
    uses, width, num = state.uses(range(3)), 4, len(kinds)
    generator = torch.Generator().manual_seed(vocab_size)
    logits = (torch.randn(num, width, vocab_size, generator=generator) * 1.5).to(device)
    slots, positions = torch.arange(num, device=device), torch.arange(num, device=device) + 9
    vocabulary = None
    if reduced:
        vocabulary = torch.arange(vocab_size, device=device)[1::3].contiguous()
        known = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        known[vocabulary] = True
        logits.masked_fill_(~known, -torch.inf)
    columns = logits if vocabulary is None else logits[..., vocabulary]
    drafts, probs = [], torch.empty(num, width - 1, columns.shape[-1], device=device)
    for place in range(width - 1):
        args = columns[:, place], slots, positions + place, state, uses, columns.shape[-1]
        picked = []
        for each in (plain, ops):
            with served_by(each, state):
                out = probs[:, place]
                picked.append(sample_draft(*args, probs_out=out, vocabulary=vocabulary))
        assert torch.equal(*picked)
        drafts.append(picked[1] if vocabulary is None else vocabulary[picked[1]])
    lengths = torch.full_like(slots, width - 1)
    rows = SampleRows.build(
        slots, positions, torch.stack(drafts, 1), lengths, slots < 0, probs, vocabulary
    )
    tokens, _, accepted = judge(ops, logits.flatten(0, 1), rows, state)
    assert accepted == [width - 1] * num
    for place in range(width):
        none = slots.new_empty(num, 0)
        rows = SampleRows.build(slots, positions + place, none, slots * 0, slots < 0)
        alone, _, _ = judge(ops, logits[:, place].contiguous(), rows, state)
        assert [row[place] for row in tokens] == [row[0] for row in alone]
