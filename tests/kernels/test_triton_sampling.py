"""Fused sampling against plain torch: on the GPU where there is one, else interpreted.

Probabilities agree up to rounding, so choices may differ where two tokens are as good as equal:
tests of tokens use few enough numbers that this does not happen by chance.
"""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="it is there for Linux only")

import triton
import triton.language as tl

from slipstream.core.request import Request
from slipstream.core.sampling_params import SamplingParams
from slipstream.kernels.reference import SAMPLING as PLAIN
from slipstream.kernels.reference import noise
from slipstream.kernels.reference.noise import NoiseKeys, Purpose
from slipstream.kernels.reference.processors import TRUNCATIONS, probabilities, process
from slipstream.kernels.registry import kernels_for
from slipstream.kernels.sampling import SampleRows, SamplingNeeds
from slipstream.kernels.triton import sampling as fused
from slipstream.kernels.triton.launch import options
from slipstream.kernels.triton.philox import noise_words, token_noise, uniform
from slipstream.sampling.state import SamplingState, Uses
from slipstream.sampling.verification import needs_of, sample_draft
from tests.kernels.device import DEVICE, INTERPRETED, ON_GPU
from tests.kernels.sampling_cases import (
    KINDS,
    LEAN,
    PROCESSED,
    TRUNCATED,
    check_confidences,
    check_coupled,
    judge,
    make_batch,
    make_state,
    served_by,
)

pytestmark = INTERPRETED

VOCABULARIES = [1, 37, 1000, 151936] if ON_GPU else [1, 37, 151, 300]
DRAFTS = [*range(5), 8, 12]
CASES = list(product(KINDS, DRAFTS, VOCABULARIES))
# The interpreter takes milliseconds for each program: it gets every so manieth case (a number that
# is prime to those of all parameters, so that all values of them come up), in one layout.
INTERPRETED_SHARE = 11
VERIFIED = [
    (*case, (True, False) if ON_GPU else (index % 2 > 0,))
    for index, case in enumerate(CASES if ON_GPU else CASES[::INTERPRETED_SHARE])
]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks and groups even of a small vocabulary."""
    if not ON_GPU:
        tiles = fused.SamplingTiles(block=256, group=16, groups_at_once=8)
        monkeypatch.setattr(fused, "TILES", tiles)


# Noise


@triton.jit
def _noise_kernel(
    seeds, positions, steps, words, numbers, chances, purpose, counters: tl.constexpr
):
    row = tl.program_id(0)
    seed, position, step = tl.load(seeds + row), tl.load(positions + row), tl.load(steps + row)
    counter = tl.arange(0, counters)
    parts = noise_words(seed, position, step, purpose, counter)
    for place in tl.static_range(4):
        cell = row * counters * 4 + counter * 4 + place
        tl.store(words + cell, parts[place].to(tl.int64))
    cell = row * counters * 4 + counter[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(numbers + cell, token_noise(seed, position, step, purpose, counter))
    many = position + counter
    tl.store(chances + row * counters + counter, uniform(seed, many, step, purpose))


@pytest.mark.parametrize("purpose", list(Purpose))
def test_noise(purpose: Purpose) -> None:
    counters = 64
    seeds = torch.tensor([0x0123456789ABCDEF, -5, 1 << 62, 0]).to(DEVICE)
    positions = torch.tensor([0, 6, (1 << 31) + 3, 77]).to(DEVICE)
    steps = torch.tensor([3, 0, 1 << 31, 9]).to(DEVICE)
    words = torch.empty(4, counters * 4, dtype=torch.int64, device=DEVICE)
    numbers = torch.empty(4, counters * 4, device=DEVICE)
    chances = torch.empty(4, counters, device=DEVICE)
    _noise_kernel[(4,)](seeds, positions, steps, words, numbers, chances, int(purpose), counters)
    keys = NoiseKeys(seeds, positions, steps)
    index = torch.arange(counters, device=DEVICE)
    expected = noise._words(keys, purpose, index)
    assert torch.equal(words, torch.stack(expected, -1).flatten(1))
    truth = -torch.log1p(-noise._open_uniforms(expected).flatten(1).double())
    assert ((numbers.double() - truth).abs() <= 2 * ulp(truth)).all()
    for row in range(4):
        many = NoiseKeys(
            seeds[row].expand(counters), positions[row] + index, steps[row].expand(counters)
        )
        assert torch.equal(chances[row], noise.uniform(many, purpose))


def ulp(values: Tensor) -> Tensor:
    single = values.float()
    return (torch.nextafter(single, torch.full_like(single, torch.inf)) - single).double()


# Verification


@pytest.mark.parametrize(("name", "most_drafts", "vocab_size", "layouts"), VERIFIED)
def test_verify(name: str, most_drafts: int, vocab_size: int, layouts: tuple[bool, ...]) -> None:
    state = make_state(KINDS[name], vocab_size)
    accepted = 0
    for seed in range(6 if ON_GPU else 1):
        for uniform_rows in layouts:
            reduced = bool((seed + most_drafts + uniform_rows) % 2)
            logits, rows = make_batch(state, most_drafts, seed, reduced, uniform_rows)
            before = logits.clone()
            expected = judge(PLAIN, logits, rows, state)
            assert judge(fused.SAMPLING, logits, rows, state) == expected
            assert torch.equal(logits, before)
            accepted += sum(expected[2])
    assert accepted or not most_drafts or not ON_GPU


def test_sampled_requests_are_neither_all_accepted_nor_all_refused() -> None:
    """So `test_verify` tests both recovered and bonus tokens."""
    state = make_state(LEAN, 151)
    counts = [0, 0, 0]
    for seed in range(20):
        _, rows = batch = make_batch(state, 4, seed, bool(seed % 2), True)
        _, _, accepted = judge(PLAIN, *batch, state)
        for index in (1, 2, 4):
            short = accepted[index] < rows.num_draft_tokens[index]
            counts[int(rows.one_hot[index]) if short else 2] += 1
    assert min(counts) > 3, counts


def test_processed_logits_equal_the_reference_to_the_bit() -> None:
    for name in ("processed", "full"):
        state = make_state(KINDS[name], 151)
        logits, rows = make_batch(state, 3, 2, False, False)
        logits[0, 3] = -0.0
        logits[1] = -torch.inf
        uses = state.uses(range(5))
        needs = needs_of(uses)
        scanned = fused._scan(logits, rows, state.tensors(), needs, 151)
        expected = process(logits, rows, state.tensors(), needs_of(uses))
        assert torch.equal(scanned.source.view(torch.int32), expected.view(torch.int32))
        assert not torch.equal(expected, logits)


@pytest.mark.parametrize(
    ("vocab_size", "reduced"),
    [(37, False), (300, True), *([(151936, False), (151936, True)] if ON_GPU else [])],
)
def test_coupled_requests_get_the_tokens_of_plain_decoding(vocab_size: int, reduced: bool) -> None:
    check_coupled(fused.SAMPLING, PLAIN, vocab_size, reduced, DEVICE)


# Truncation


def facts_of(
    logits: Tensor, state: SamplingState, needs: SamplingNeeds
) -> tuple[fused.Scan, Tensor]:
    slots = torch.arange(len(logits), device=DEVICE)
    plain = fused._plain_rows(slots, slots)
    scanned = fused._scan(logits, plain, state.tensors(), needs, logits.shape[1])
    assert scanned.facts is not None
    return scanned, scanned.facts


@pytest.mark.parametrize(
    ("vocab_size", "spread"),
    [(1, 1.0), (37, 4.0), (151, 0.05), (500, 20.0)]
    + [pytest.param(300, 1.0, marks=pytest.mark.full)]
    + [(151936, spread) for spread in (0.05, 1.0, 4.0, 20.0) if ON_GPU],
)
def test_thresholds(vocab_size: int, spread: float) -> None:
    """Flat and peaked rows, with ties: what is kept, and the sum of what is kept."""
    kinds = [
        {"top_k": 1}, {"top_k": 5}, {"top_k": 200}, {"top_p": 0.5}, {"top_p": 0.987},
        {"top_p": 1e-6}, {"min_p": 0.3}, {"min_p": 0.02, "top_p": 0.7}, {"top_k": 60, "top_p": 0.9},
        {"top_k": 7, "min_p": 0.2, "top_p": 0.45}, {}, {"top_p": 0.9, "temperature": 100.0},
    ]  # fmt: skip
    state = SamplingState(len(kinds), vocab_size, DEVICE)
    for slot, params in enumerate(kinds):
        params = SamplingParams(**params)
        state.admit({slot: Request("", [0], params, 1, frozenset(), 9, 4, 0)})
    slots = torch.arange(len(kinds), device=DEVICE)
    for seed in range(3 if ON_GPU else 1):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(len(kinds), vocab_size, generator=generator) * spread
        if seed % 2 == 0:
            logits[::2] = (logits[::2] * 4).round() / 4
        logits = logits.to(DEVICE)
        _, facts = facts_of(logits, state, SamplingNeeds(True, True, True, True))
        expected = probabilities(
            logits, state.temperature, state.top_k, state.top_p, state.min_p, TRUNCATIONS
        )
        out = torch.empty_like(expected)
        needs = frozenset({Uses.SAMPLING, Uses.TOP_K, Uses.TOP_P, Uses.MIN_P})
        with served_by(fused.SAMPLING, state):
            sample_draft(logits, slots, slots, state, needs, vocab_size, probs_out=out)
        parted = (out > 0) != (expected > 0)
        if vocab_size > 1000:
            # Many tokens are equal, so rounding decides which is the last; a dozen may differ.
            whole = torch.softmax(logits.double() / state.temperature.double().unsqueeze(1), -1)
            assert (whole * parted).sum(-1).max() < 1e-4
        else:
            assert not parted.any()
        out = torch.where(parted, expected, out)
        torch.testing.assert_close(out, expected, rtol=2e-5, atol=1e-9)
        assert facts.isfinite()[:, :2].all()


def test_rows_do_not_depend_on_the_others_nor_on_what_they_need() -> None:
    """Bit for bit, lean kernels and full ones, alone and side by side."""
    state = make_state([*LEAN, *TRUNCATED, *PROCESSED], 1000 if not ON_GPU else 151936)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(15, state.vocab_size, generator=generator).to(DEVICE) * 3
    slots = torch.arange(14, -1, -1, device=DEVICE)
    positions = slots + 40
    needs = needs_of(state.uses(range(15)) - {Uses.BIAS, Uses.PENALTIES})
    rows = SampleRows.build(
        slots, positions, slots.new_zeros(15, 0), slots * 0, slots == slots, num_rows=None
    )
    all_of_it = replace(needs, penalties=True, bias=True, min_tokens=True, top_k=True)
    full = fused._scan(logits, rows, state.tensors(), all_of_it, state.vocab_size)
    assert full.facts is not None
    for index in range(15):
        one = slice(index, index + 1)
        alone = SampleRows.build(
            slots[one], positions[one], slots.new_zeros(1, 0), slots[one] * 0, slots[one] >= 0
        )
        own = needs_of(state.uses([14 - index]))
        found = fused._scan(logits[one].clone(), alone, state.tensors(), own, state.vocab_size)
        assert torch.equal(found.largest[0], full.largest[index])
        assert torch.equal(found.choice[0], full.choice[index])
        if not own.sampling:
            continue
        assert torch.equal(found.total[0], full.total[index])
        if found.facts is not None:
            assert torch.equal(found.facts[0], full.facts[index])


# Drafts and commits


@pytest.mark.parametrize(
    ("name", "vocab_size", "legal"),
    [("greedy", 1, 1), ("greedy", 4500, 1 << 20), ("lean", 2100, 1 << 20), ("truncated", 37, 30)],
)
def test_confidences(name: str, vocab_size: int, legal: int) -> None:
    check_confidences(fused.SAMPLING, name, vocab_size, legal, DEVICE)


def test_cuda_devices_are_served() -> None:
    assert kernels_for(torch.device("cuda")).sampling is fused.SAMPLING
    assert options(torch.device("cpu"))["pdl"] is False
