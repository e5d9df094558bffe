"""What fused sampling has to do in each backend: in C++ at every level, in Triton on the GPU where
there is one, else interpreted.

Probabilities agree up to rounding, so choices may differ where two tokens are as good as equal:
tests of tokens use few enough numbers that this does not happen by chance.
"""

import importlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch

from slipstream.kernels.reference import SAMPLING as PLAIN
from slipstream.kernels.sampling import SampleRows, SamplingOps, rates_by_request
from slipstream.sampling.state import Uses
from slipstream.sampling.verification import sample_draft, verify
from tests.kernels.conftest import LEVELS
from tests.kernels.device import DEVICE, INTERPRETED, ON_GPU
from tests.kernels.sampling_cases import (
    FULL,
    GREEDY,
    KINDS,
    LEAN,
    PROCESSED,
    SAMPLED,
    judge,
    make_batch,
    make_state,
    served_by,
)

HAS_TRITON = importlib.util.find_spec("triton") is not None
if HAS_TRITON:  # here, so that interpreted kernels are watched
    from slipstream.kernels.triton import sampling as triton_sampling

pytestmark = INTERPRETED


@dataclass(frozen=True)
class Backend:
    """Ops, where they run, and whether they take large sizes in little time."""

    ops: SamplingOps
    device: torch.device
    quick: bool


@pytest.fixture(params=[*LEVELS, *["triton"] * HAS_TRITON])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    if request.param == "triton":
        if not ON_GPU:  # several chunks and groups even of a small vocabulary
            tiles = triton_sampling.SamplingTiles(block=256, group=16, groups_at_once=8)
            monkeypatch.setattr(triton_sampling, "TILES", tiles)
        yield Backend(triton_sampling.SAMPLING, DEVICE, ON_GPU)
        return
    cpp = importlib.import_module("_slipstream_cpu")
    before = cpp.level()
    cpp.set_level(request.param)
    ops = importlib.import_module("slipstream.kernels.cpu.sampling").SAMPLING
    yield Backend(ops, torch.device("cpu"), True)
    cpp.set_level(before)


@pytest.mark.parametrize("most_drafts", [0, 2, 4])
def test_synthetic_rates(most_drafts: int, backend: Backend) -> None:
    state = make_state(LEAN, 37, backend.device)
    lists = torch.tensor([(1.0, 0.6, 0.3, 0.0), (0.5, 0.5, 0.5, 0.5)], device=backend.device)
    for seed in range(3):
        _, rows = batch = make_batch(state, most_drafts, seed, False, True)
        rates = rates_by_request(lists, state.seeds[rows.slots])
        assert judge(backend.ops, *batch, state, rates) == judge(PLAIN, *batch, state, rates)


@pytest.mark.parametrize(("name", "vocab_size"), [("lean", 151), ("full", 37), ("full", 4100)])
def test_a_grammar_forbids_tokens(name: str, vocab_size: int, backend: Backend) -> None:
    vocab_size = vocab_size if backend.quick else min(vocab_size, 300)
    state = make_state(KINDS[name], vocab_size, backend.device)
    logits, rows = make_batch(state, 2, 5, False, True)
    words = -(-vocab_size // 32)
    generator = torch.Generator().manual_seed(1)
    allowed = torch.randint(-(1 << 31), 1 << 31, (rows.num_rows, words), generator=generator)
    allowed[0, 1:] = -1
    allowed[2] = 0
    allowed[2, -1] = 1  # all but one
    rows = replace(rows, allowed=allowed.to(backend.device, torch.int32))
    assert judge(backend.ops, logits, rows, state) == judge(PLAIN, logits, rows, state)


@pytest.mark.parametrize("uniform_rows", [True, False])
def test_some_drafts_of_a_sampled_request_are_certain(uniform_rows: bool, backend: Backend) -> None:
    state, changed = make_state(LEAN, 151, backend.device), 0
    for seed in range(4):
        logits, rows = make_batch(state, 3, seed, bool(seed % 2), uniform_rows)
        before = judge(PLAIN, logits, rows, state)
        chance = torch.rand(rows.draft_tokens.shape, generator=torch.Generator().manual_seed(seed))
        rows = replace(rows, certain=(chance < 0.5).to(backend.device))
        expected = judge(PLAIN, logits, rows, state)
        assert judge(backend.ops, logits, rows, state) == expected
        changed += expected != before
    assert changed


def test_the_smallest_of_equal_tokens_is_chosen(backend: Backend) -> None:
    vocab_size, at = (9000, 4300) if backend.quick else (1000, 300)
    state = make_state([GREEDY] * 3, vocab_size, backend.device)
    logits = torch.zeros(3, vocab_size, device=backend.device)
    logits[0, [at, at - 1, vocab_size - 1]] = 7.0
    logits[1, 0], logits[1, 1] = -0.0, 0.0
    logits[2] = -torch.inf
    rows = make_batch(state, 0, 0, False, True)[1]
    assert judge(backend.ops, logits, rows, state)[0] == [[at - 1], [0], [0]]


@pytest.mark.parametrize("kinds", [LEAN, FULL], ids=["lean", "full"])
def test_rows_without_a_legal_logit_give_a_legal_token(
    kinds: list[dict[str, Any]], backend: Backend
) -> None:
    state = make_state(kinds, 300, backend.device)
    for value in (-torch.inf, torch.nan, torch.inf):
        logits, rows = make_batch(state, 1, 0, False, True)
        logits[:] = value
        for tokens, count, _ in zip(*judge(backend.ops, logits, rows, state), strict=True):
            assert all(0 <= token < 300 for token in tokens[:count])


@pytest.mark.parametrize("uniform_rows", [True, False])
@pytest.mark.parametrize(
    ("name", "vocab_size"),
    [("greedy", 1), ("greedy", 8197), ("lean", 301), ("full", 37), ("full", 8197), ("coupled", 65)],
)
def test_the_largest_logits_show_what_is_no_number(
    name: str, vocab_size: int, uniform_rows: bool, backend: Backend
) -> None:
    """Wherever it is in a row, and also if a grammar forbids its token; `judge` checks them."""
    vocab_size = vocab_size if backend.quick else min(vocab_size, 301)
    state = make_state(KINDS[name], vocab_size, backend.device)
    columns = sorted({0, vocab_size // 2, vocab_size - 1})
    words = -(-vocab_size // 32)
    for seed, value in enumerate((torch.nan, -torch.nan, torch.inf)):
        logits, rows = make_batch(state, 2, seed, False, uniform_rows)
        for index, column in enumerate(columns):
            logits[index :: len(columns) + 1, column] = value
        logits[len(columns) :: 4, 0] = -torch.inf  # which is allowed
        allowed = torch.full((rows.num_rows, words), -1, dtype=torch.int32)
        for column in columns:
            allowed[:, column // 32] ^= 1 << column % 32
        masked = replace(rows, allowed=allowed.to(backend.device))
        for ops, given in product((PLAIN, backend.ops), (rows, masked)):
            judge(ops, logits, given, state)


def test_the_largest_logits_of_all_zeros_are_zero(backend: Backend) -> None:
    """The host takes such rows, too, for broken ones."""
    state = make_state(LEAN, 151, backend.device)
    logits, rows = make_batch(state, 2, 0, False, True)
    judge(backend.ops, logits * 0, rows, state)


def test_an_empty_residual_samples_the_target(backend: Backend) -> None:
    """A draft that is refused although it is the target's only token."""
    state = make_state([SAMPLED] * 5, 37, backend.device)
    logits, rows = make_batch(state, 1, 0, False, True)
    logits[:] = -torch.inf
    logits[:, 11] = 1.0
    probs = torch.zeros(5, 1, 37, device=backend.device)
    probs[..., 11] = 1.0
    rows = replace(
        rows,
        draft_tokens=torch.full_like(rows.draft_tokens, 12),
        num_draft_tokens=torch.ones_like(rows.num_draft_tokens),
        one_hot=rows.slots < 3,
        draft_probs=probs,
    )
    assert judge(backend.ops, logits, rows, state)[0] == [[11, -1]] * 5


def test_the_verdict_does_not_depend_on_the_layout_of_the_batch(backend: Backend) -> None:
    """One request alone with K draft tokens, ragged, and beside others, uniform."""
    state = make_state([*LEAN, *FULL], 9001 if backend.quick else 151, backend.device)
    logits, rows = make_batch(state, 3, 1, False, True)
    tokens, _, accepted = judge(backend.ops, logits, rows, state)
    for index in range(10):
        length = int(rows.num_draft_tokens[index])
        one = slice(index, index + 1)
        alone = SampleRows.build(
            rows.slots[one],
            rows.positions[one],
            rows.draft_tokens[one, :length],
            rows.num_draft_tokens[one],
            rows.one_hot[one],
            None if rows.draft_probs is None else rows.draft_probs[one, :length],
            num_rows=length + 1,
        )
        found = judge(backend.ops, logits[index * 4 : index * 4 + length + 1], alone, state)
        assert found[0][0] == tokens[index][: length + 1]
        assert found[2][0] == accepted[index]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("legal", [30, 151, 1000])
@pytest.mark.parametrize("name", ["greedy", "lean", "truncated", "coupled"])
def test_draft(name: str, legal: int, dtype: torch.dtype, backend: Backend) -> None:
    vocab_size = 151
    state = make_state(KINDS[name], 1000, backend.device)
    uses, slots = state.uses(range(5)), torch.tensor([4, 0, 1, 3, 2], device=backend.device)
    for seed in range(3 if backend.quick else 2):
        logits = torch.randn(5, vocab_size, generator=torch.Generator().manual_seed(seed)) * 2
        logits = logits.to(backend.device, dtype)
        found = []
        for ops in (PLAIN, backend.ops):
            whole = torch.full((5, 3, min(legal, vocab_size)), torch.nan, device=backend.device)
            out = whole[:, 1] if Uses.SAMPLING in uses else None
            with served_by(ops, state):
                tokens = sample_draft(logits, slots, slots + 9, state, uses, legal, probs_out=out)
            assert whole[:, ::2].isnan().all()
            found.append((tokens, whole[:, 1]))
        assert torch.equal(found[0][0], found[1][0])
        torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-5, atol=1e-9, equal_nan=True)
        with served_by(backend.ops, state):
            tokens = sample_draft(logits, slots, slots, state, uses, legal, greedy_only=True)
        assert torch.equal(tokens, logits[:, :legal].argmax(-1))


@pytest.mark.parametrize("rows", [1, 5, 9])
def test_numbers_of_requests_may_have_gaps_or_be_one(rows: int, backend: Backend) -> None:
    """`expand` and slices make such tensors; the gaps have other requests' numbers."""
    state = make_state(LEAN, 151, backend.device)
    uses = state.uses(range(5))
    logits = torch.randn(rows, 151, generator=torch.Generator().manual_seed(2)).to(backend.device)
    numbers = torch.tensor([2, 0, 1, 3, 4] * 4, device=backend.device)
    for view in (numbers[:1].expand(rows), numbers[: 2 * rows : 2]):
        found = []
        for ops, slots, positions in (
            (PLAIN, view, view + 9),
            (backend.ops, view, (numbers + 9)[: 2 * rows : 2] if view.stride(0) else view + 9),
        ):
            probs = torch.empty(rows, 151, device=backend.device)
            with served_by(ops, state):
                found.append(
                    sample_draft(logits, slots, positions, state, uses, 151, probs_out=probs)
                )
        assert torch.equal(*found)


@pytest.mark.parametrize("penalties", [False, True])
def test_commit(penalties: bool, backend: Backend) -> None:
    device = backend.device
    states = [make_state(PROCESSED, 37, device) for _ in range(2)]
    slots = torch.tensor([3, 0, 4, 0], device=device)  # padding stands in slot 0 again
    token_ids = torch.tensor([[4, 4, 4], [1, -1, -1], [8, 2, -1], [9, 9, 9]], device=device)
    counts = torch.tensor([3, 1, 2, 0], device=device)
    uses = frozenset({Uses.PENALTIES} if penalties else ())
    for state, ops in zip(states, (PLAIN, backend.ops), strict=True):
        with served_by(ops, state):
            state.commit(slots, token_ids, counts, uses)
    for name in ("ints", "floats", "output_counts", "prompt_mask"):
        assert torch.equal(getattr(states[0], name), getattr(states[1], name)), name
    fresh = make_state(PROCESSED, 37, device)
    assert states[0].output_counts is not None
    assert fresh.output_counts is not None
    assert torch.equal(states[0].output_counts, fresh.output_counts) != penalties


def test_batches_without_requests(backend: Backend) -> None:
    state = make_state(LEAN, 37, backend.device)
    none = torch.zeros(0, dtype=torch.int64, device=backend.device)
    rows = SampleRows.build(none, none, none.view(0, 2), none, none > 0)
    with served_by(backend.ops, state):
        logits = torch.zeros(0, 37, device=backend.device)
        assert verify(logits, rows, state, frozenset({Uses.SAMPLING})).token_ids.shape == (0, 3)
        assert sample_draft(logits, none, none, state, frozenset(), 37).shape == (0,)
        state.commit(none, none.view(0, 3), none, frozenset())
