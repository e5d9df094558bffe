"""Noise: what its keys mean, its range, and its distribution."""

import math

import pytest
import torch
from scipy import stats

from slipstream.core.request import derive_seed
from slipstream.kernels.reference import noise
from slipstream.kernels.reference.noise import NoiseKeys, Purpose, gumbel, uniform
from tests.unit.test_philox import philox_in_python

SEED = 0x0123456789ABCDEF


def keys(num: int = 1, seed: int = SEED, position: int = 5, step: int = 3) -> NoiseKeys:
    return NoiseKeys(
        torch.full((num,), seed), torch.full((num,), position), torch.full((num,), step)
    )


def word(index: int, position: int, step: int, purpose: Purpose, place: int) -> int:
    seed = (SEED & 0xFFFFFFFF, SEED >> 32)
    return philox_in_python((index, position, step, int(purpose)), seed)[place]


def test_uniform_is_the_first_word() -> None:
    got = uniform(keys(), Purpose.ACCEPT)
    assert got.dtype == torch.float32
    assert got.item() == (word(0, 5, 3, Purpose.ACCEPT, 0) >> 8) / (1 << 24)


@pytest.mark.parametrize("token", [0, 1, 2, 3, 4, 9])
def test_gumbel_word_of_a_token(token: int) -> None:
    got = gumbel(keys(), Purpose.RESIDUAL, 10)
    assert got.shape == (1, 10)
    assert got.dtype == torch.float32
    u = (word(token // 4, 5, 3, Purpose.RESIDUAL, token % 4) + 0.5) / 2**32
    assert got[0, token].item() == pytest.approx(-math.log(-math.log1p(-u)), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("token", [0, 1, 2, 7])
def test_fp64_gumbel_words_of_a_token(token: int) -> None:
    got = gumbel(keys(), Purpose.DRAFT, 8, fp64=True)
    assert got.dtype == torch.float64
    high, low = (word(token // 2, 5, 3, Purpose.DRAFT, 2 * (token % 2) + i) for i in (0, 1))
    u = ((high << 31 | low >> 1) + 0.5) / 2**63
    assert got[0, token].item() == pytest.approx(-math.log(-math.log1p(-u)), rel=1e-12)


def test_noise_does_not_depend_on_the_batch_or_the_vocabulary() -> None:
    alone = gumbel(keys(), Purpose.DRAFT, 7)
    assert torch.equal(gumbel(keys(3), Purpose.DRAFT, 11)[1:2, :7], alone)


@pytest.mark.parametrize("purpose", [Purpose.DRAFT, Purpose.ACCEPT, Purpose.RESIDUAL])
def test_every_part_of_the_key_counts(purpose: Purpose) -> None:
    base = gumbel(keys(), purpose, 64)
    others = [
        gumbel(keys(seed=SEED + 1), purpose, 64),
        gumbel(keys(seed=SEED ^ 1 << 40), purpose, 64),
        gumbel(keys(position=6), purpose, 64),
        gumbel(keys(step=4), purpose, 64),
        *(gumbel(keys(), other, 64) for other in Purpose if other != purpose),
    ]
    for other in others:
        assert (base == other).float().mean() < 0.1


def test_target_noise_has_no_step() -> None:
    zero = gumbel(keys(step=0), Purpose.TARGET, 16)
    assert torch.equal(gumbel(keys(step=9), Purpose.TARGET, 16), zero)
    assert torch.equal(uniform(keys(step=9), Purpose.TARGET), uniform(keys(step=0), Purpose.TARGET))


def test_purpose_may_differ_by_row() -> None:
    purposes = torch.tensor([int(purpose) for purpose in Purpose])
    mixed = gumbel(keys(4), purposes, 9)
    for row, purpose in enumerate(Purpose):
        assert torch.equal(mixed[row : row + 1], gumbel(keys(), purpose, 9))
    assert torch.equal(uniform(keys(4), purposes)[2:3], uniform(keys(), Purpose.ACCEPT))


@pytest.mark.parametrize("fp64", [False, True])
@pytest.mark.parametrize("value", [0, 1, (1 << 32) - 1])
def test_noise_is_finite_at_the_ends(
    monkeypatch: pytest.MonkeyPatch, value: int, fp64: bool
) -> None:
    def constant(counter: noise.Words4, key: tuple[torch.Tensor, torch.Tensor]) -> noise.Words4:
        shape = torch.broadcast_shapes(*(part.shape for part in (*counter, *key)))
        one = torch.full(shape, value)
        return one, one, one, one

    monkeypatch.setattr(noise, "philox", constant)
    assert gumbel(keys(2), Purpose.TARGET, 5, fp64).isfinite().all()
    assert 0 <= uniform(keys(), Purpose.ACCEPT).item() < 1


def test_distributions() -> None:
    num = 20_000
    many = NoiseKeys(torch.full((num,), 7), torch.arange(num), torch.zeros(num, dtype=torch.int64))
    assert stats.kstest(uniform(many, Purpose.ACCEPT).numpy(), "uniform").pvalue > 1e-3
    for fp64 in (False, True):
        noise_values = gumbel(many, Purpose.DRAFT, 3, fp64).flatten().double().numpy()
        assert stats.kstest(noise_values, "gumbel_r").pvalue > 1e-3


def test_gumbel_max_samples_from_the_weights() -> None:
    weights = torch.tensor([0.1, 0.0, 0.6, 0.3], dtype=torch.float64)
    num = 40_000
    many = NoiseKeys(torch.arange(num), torch.zeros_like(torch.arange(num)), torch.arange(num))
    picked = (weights.log() + gumbel(many, Purpose.DRAFT, 4)).argmax(-1)
    counts = torch.bincount(picked, minlength=4)
    assert counts[1] == 0
    kept = [0, 2, 3]
    assert stats.chisquare(counts[kept], weights[kept] * num).pvalue > 1e-3


def test_derived_seeds() -> None:
    assert derive_seed(42, 0) == 42
    seeds = {derive_seed(seed, index) for seed in range(50) for index in range(50)}
    assert len(seeds) == 2500
    assert all(0 <= seed < 1 << 64 for seed in seeds)
    assert derive_seed(-1, 3) == derive_seed((1 << 64) - 1, 3)
    # Every output bit depends on the index.
    flips = [(derive_seed(42, i) ^ derive_seed(42, i + 1)).bit_count() for i in range(1, 200)]
    assert 28 < sum(flips) / len(flips) < 36
