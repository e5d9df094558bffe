"""Rounding to integers: how near, in which form, and that nothing odd breaks it."""

import math

import pytest
import torch
from torch import Tensor

from slipstream.kernels.formats import int4
from slipstream.kernels.formats.int4 import Int4Matrix, ToInt4, half_scales, unpacked
from slipstream.kernels.formats.int8 import ToInt8

GROUPS = [(32, False), (128, False), (32, True), (128, True)]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def per_column(values: Tensor, matrix: Int4Matrix) -> Tensor:
    return values.repeat_interleave(matrix.group, 1)


def test_int8_is_within_half_a_step() -> None:
    whole = numbers(23, 80)
    matrix = ToInt8().round(whole)
    torch.testing.assert_close(matrix.scales, whole.abs().amax(-1) / 127)
    error = (matrix.dequantised() - whole).abs()
    assert bool((error <= 0.5001 * matrix.scales.unsqueeze(-1)).all())
    assert int(matrix.values.abs().max()) == 127
    assert not matrix.rounds_input


@pytest.mark.parametrize(("group", "asymmetric"), GROUPS)
def test_int4_is_within_half_a_step_or_clipped(group: int, asymmetric: bool) -> None:
    whole = numbers(23, 256) + (0.3 if asymmetric else 0.0)
    matrix = ToInt4(group, asymmetric).round(whole)
    assert matrix.values.shape == (23, 128)
    assert matrix.scales.shape == (23, 256 // group)
    assert (matrix.zeros is None) is not asymmetric
    step = per_column(matrix.scales.abs(), matrix)
    error = (matrix.dequantised() - whole).abs()
    inside = error <= 0.5001 * step
    clipped = torch.isin(unpacked(matrix.values), torch.tensor([0, 15]))
    assert bool((inside | clipped).all())
    assert float(inside.float().mean()) > 0.9


@pytest.mark.parametrize(("group", "asymmetric"), GROUPS)
def test_int4_scales_fit_a_half_and_a_power_of_two_of_their_row(
    group: int, asymmetric: bool
) -> None:
    whole = numbers(16, 256) * torch.logspace(-20, 12, 16).unsqueeze(-1)
    matrix = ToInt4(group, asymmetric).round(whole)
    for row in matrix.scales:
        largest = float(row.abs().max())
        power = 2.0 ** (16 - math.frexp(largest)[1])
        assert torch.equal((row * power).half().float() / power, row)
    error = (matrix.dequantised() - whole).norm(dim=-1) / whole.norm(dim=-1)
    assert float(error.max()) < 0.13


def test_zeros_and_clips_lower_the_error() -> None:
    gauss, shifted = numbers(64, 256), numbers(64, 256) + 1.0

    def error(whole: Tensor, group: int, asymmetric: bool) -> float:
        return float((ToInt4(group, asymmetric).round(whole).dequantised() - whole).norm())

    plain = gauss.view(64, -1, 128)
    scales = plain.abs().amax(-1, keepdim=True) / 7
    textbook = float(((plain / scales).round().clamp(-8, 7) * scales - plain).norm())
    assert error(gauss, 128, False) < 0.9 * textbook
    assert error(gauss, 32, False) < error(gauss, 128, False)
    assert error(shifted, 128, True) < 0.8 * error(shifted, 128, False)


@pytest.mark.parametrize(("group", "asymmetric"), GROUPS)
def test_int4_of_zeros_and_of_constants(group: int, asymmetric: bool) -> None:
    whole = torch.zeros(4, 256)
    whole[1] = 0.5
    whole[2, :group] = -0.5
    found = ToInt4(group, asymmetric).round(whole).dequantised()
    torch.testing.assert_close(found, whole, rtol=1e-3, atol=0)
    assert not found[0].any()


@pytest.mark.parametrize("asymmetric", [False, True])
def test_int4_does_not_depend_on_slices_or_dtype(
    monkeypatch: pytest.MonkeyPatch, asymmetric: bool
) -> None:
    whole = numbers(37, 64).bfloat16()
    matrix = ToInt4(32, asymmetric).round(whole)
    monkeypatch.setattr(int4, "CACHED_SLICE", 100)
    again = ToInt4(32, asymmetric).round(whole.float())
    assert torch.equal(matrix.values, again.values)
    assert torch.equal(matrix.scales, again.scales)
    assert torch.equal(matrix.dequantised(), again.dequantised())
    assert torch.equal(ToInt8().round(whole).values, ToInt8().round(whole.float()).values)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scales_of_sixteen_bits_stay_as_they_are(dtype: torch.dtype) -> None:
    scales = (numbers(50, 16).exp() * 1e-3).to(dtype).float()
    assert torch.equal(half_scales(scales), scales)
    tiny = torch.tensor([[6e-8, 1.0], [3e-5, 60000.0], [0.0, 0.0]]).half().float()
    assert torch.equal(half_scales(tiny), tiny)
    assert half_scales(torch.tensor([[65535.0, 1.0]])).tolist() == [[65504.0, 1.0]]
