"""Floats of four and eight bits with scales of blocks: rounding, cutting, stacking, products."""

from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.core.errors import UsageError
from slipstream.kernels.formats import weight as weights
from slipstream.kernels.formats.float4 import MAGNITUDES
from slipstream.kernels.formats.float8_blocks import Float8BlockMatrix, ToFloat8Blocks
from slipstream.kernels.formats.int4 import unpacked
from slipstream.kernels.formats.mxfp4 import Mxfp4Matrix, ToMxfp4
from slipstream.kernels.formats.nvfp4 import Nvfp4Matrix, ToNvfp4
from slipstream.kernels.formats.weight import Rounding, Weight, stacked

ROUNDINGS: list[Rounding] = [ToMxfp4(), ToNvfp4(), ToFloat8Blocks()]
NUMBERS = torch.tensor([*MAGNITUDES, *(-it for it in MAGNITUDES)])


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def nearest(number: float) -> float:
    """The nearest e2m1 number; of two as near, the one whose code is even."""
    codes = sorted(range(8), key=lambda code: (abs(MAGNITUDES[code] - abs(number)), code % 2))
    return MAGNITUDES[codes[0]] if number >= 0 else -MAGNITUDES[codes[0]]


def test_mxfp4_has_the_nearest_numbers_and_ties_go_to_even_codes() -> None:
    middles = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    around = [it * side for it in (*middles, *MAGNITUDES) for side in (1, 1 - 2.0**-20, 1.01)]
    # The 4 makes the group's scale 1, or 2 ** -30 for the row below.
    row = torch.tensor([4.0, *around, 7.9, *(-it for it in around)])
    row = torch.cat([row, torch.zeros(-len(row) % 32)])
    whole = torch.stack([row, row * 2.0**-30])
    for start in range(0, len(row), 32):
        whole[:, start] = whole[:, 0]  # so that all groups have this scale
    matrix = ToMxfp4().round(whole)
    assert matrix.scales.unique(dim=1).flatten().tolist() == [127, 97]
    expected = torch.tensor([nearest(float(it)) for it in whole[0]])
    torch.testing.assert_close(matrix.dequantised()[0], expected, rtol=0, atol=0)
    torch.testing.assert_close(matrix.dequantised()[1], expected * 2.0**-30, rtol=0, atol=0)


def test_mxfp4_scales_follow_the_exponent_of_the_largest() -> None:
    whole = torch.zeros(6, 32)
    whole[5, 7] = 2.0**-126
    whole[:5, 3] = torch.tensor([4.0, 7.99, 8.0, 1e-3, -(2.0**126)])
    matrix = ToMxfp4().round(whole)
    assert matrix.scales.flatten().tolist() == [127, 127, 128, 115, 251, 1]
    assert matrix.dequantised()[5, 7] == 2.0**-126
    assert matrix.dequantised()[1, 3] == 6.0


def test_all_stored_scales_of_mxfp4_are_powers_of_two() -> None:
    scales = torch.arange(255, dtype=torch.uint8).view(-1, 1)
    values = torch.full((255, 16), 0x22, dtype=torch.uint8)
    expected = [2.0 ** (scale - 127) for scale in range(255)]
    assert Mxfp4Matrix(values, scales).dequantised()[:, 0].tolist() == expected


def test_the_even_column_is_in_the_lower_half_of_a_byte() -> None:
    values = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2]).byte()
    for matrix in (
        Mxfp4Matrix(values, torch.tensor([[128]]).byte()),
        Nvfp4Matrix(values, torch.ones(1, 2).to(torch.float8_e4m3fn), torch.full((1,), 2.0)),
    ):
        assert torch.equal(matrix.dequantised(), 2 * NUMBERS.repeat(2).unsqueeze(0))


def test_nvfp4_scales_groups_and_the_whole_by_their_largest() -> None:
    whole = numbers(5, 48) * torch.logspace(-3, 0, 5).unsqueeze(1)
    matrix = ToNvfp4().round(whole)
    shared = whole.abs().max() / (6 * 448)
    torch.testing.assert_close(matrix.global_scales, shared.expand(5))
    largest = whole.view(5, 3, 16).abs().amax(-1)
    expected = (largest / 6 / shared).to(torch.float8_e4m3fn)
    assert torch.equal(matrix.scales.float(), expected.float())
    for row in range(5):
        for column in range(48):
            step = float(expected[row, column // 16].float() * shared)
            got = float(matrix.dequantised()[row, column])
            assert got == pytest.approx(nearest(float(whole[row, column]) / step) * step, rel=1e-6)


@pytest.mark.parametrize("form", ROUNDINGS, ids=lambda it: type(it).__name__)
def test_zeros_and_groups_of_zeros(form: Rounding) -> None:
    whole = torch.zeros(4, 256)
    assert not bool(form.round(whole).dequantised().any())
    whole[2, 130:140] = 1e-3
    whole[3, 200] = 1e30
    back = form.round(whole).dequantised()
    assert bool(back.isfinite().all())
    assert not bool(back[:2].any())


@pytest.mark.parametrize(
    ("form", "error"), [(ToMxfp4(), 0.125), (ToNvfp4(), 0.1), (ToFloat8Blocks(), 0.03)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_errors_of_normal_numbers(form: Rounding, error: float, dtype: torch.dtype) -> None:
    whole = numbers(200, 320).to(dtype)
    back = form.round(whole).dequantised()
    assert 0.5 * error < float((back - whole.float()).norm() / whole.float().norm()) < error


@pytest.mark.parametrize("form", ROUNDINGS, ids=lambda it: type(it).__name__)
def test_rounding_what_was_rounded_changes_nothing(form: Rounding) -> None:
    # e4m3 scales of scales need one more step to settle; the others are powers or maxima.
    once = form.round(numbers(140, 160)).dequantised()
    again = form.round(once).dequantised()
    torch.testing.assert_close(again, form.round(again).dequantised(), rtol=1e-6, atol=0)
    if isinstance(form, ToMxfp4):
        assert torch.equal(once, again)


@pytest.mark.parametrize("form", ROUNDINGS, ids=lambda it: type(it).__name__)
def test_rounding_in_slices(form: Rounding, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = numbers(300, 96)
    expected = form.round(whole).dequantised()
    monkeypatch.setattr(weights, "_ROUNDED_ON_CPU", 7 * 96)
    assert torch.equal(form.round(whole).dequantised(), expected)


@pytest.mark.parametrize("form", ROUNDINGS, ids=lambda it: type(it).__name__)
def test_parts_of_a_matrix_are_parts_of_its_numbers(form: Rounding) -> None:
    weight = form.round(numbers(300, 320))
    whole = weight.dequantised()
    index = torch.tensor([299, 3, 130, 3])
    for start, stop in ((0, 300), (128, 256), (128, 300), (7, 200), (64, 65), (299, None)):
        assert torch.equal(weight.rows(start, stop).dequantised(), whole[start:stop])
        assert weight.rows(start, stop).shape == whole[start:stop].shape
    assert torch.equal(weight.select(index).dequantised(), whole[index])
    assert torch.equal(weight.columns(128, 256).dequantised(), whole[:, 128:256])
    assert torch.equal(weight.columns(256, 320).dequantised(), whole[:, 256:])
    assert torch.equal(weight.to(torch.device("cpu")).dequantised(), whole)
    with pytest.raises(UsageError, match="cannot be cut between columns 8 and 128"):
        weight.columns(8, 128)


@pytest.mark.parametrize("form", ROUNDINGS, ids=lambda it: type(it).__name__)
@pytest.mark.parametrize("rows", [(128, 256), (192, 192, 40), (5, 7), (300,)])
def test_stacks_keep_all_numbers(form: Rounding, rows: tuple[int, ...]) -> None:
    # Their sizes differ, so that global scales differ.
    parts = [form.round(numbers(count, 160, seed=count) * count) for count in rows]
    joined = stacked(parts)
    assert joined is not None
    assert torch.equal(joined.dequantised(), torch.cat([part.dequantised() for part in parts]))


@pytest.mark.parametrize("form", ROUNDINGS, ids=lambda it: type(it).__name__)
def test_what_lies_in_a_row_is_stacked_where_it_is(form: Rounding) -> None:
    weight: Any = form.round(numbers(384, 160))
    first, second = weight.rows(0, 128), weight.rows(128, 384)
    joined: Any = stacked([first, second])
    assert joined.values.data_ptr() == weight.values.data_ptr()
    assert torch.equal(joined.dequantised(), weight.dequantised())
    for parts in ([second, first], [first, weight.rows(256)], [first.columns(0, 128)] * 2):
        joined = stacked(parts)
        assert joined.values.data_ptr() != parts[0].values.data_ptr()
        assert torch.equal(joined.dequantised(), torch.cat([it.dequantised() for it in parts]))


def test_stacks_of_blocks_have_as_few_scales_as_their_parts_allow() -> None:
    def of(*rows: int) -> Weight | None:
        return stacked([ToFloat8Blocks().round(numbers(count, 160)) for count in rows])

    for rows, unit in (((256, 40), 128), ((192, 192), 64), ((64, 5, 3), 1)):
        joined = of(*rows)
        assert isinstance(joined, Float8BlockMatrix)
        assert joined.block_rows == unit


@pytest.mark.parametrize("form", ROUNDINGS, ids=lambda it: type(it).__name__)
def test_products_are_those_of_the_numbers(form: Rounding) -> None:
    weight = form.round(numbers(50, 96))
    x, bias = numbers(7, 96, seed=1), numbers(50, seed=2)
    expected = x @ weight.dequantised().T
    torch.testing.assert_close(weight.logits(x), expected)
    torch.testing.assert_close(weight.linear(x, bias), expected + bias)
    assert weight.linear(x.bfloat16(), None).dtype == torch.bfloat16


def test_bytes_are_those_in_memory() -> None:
    for form in ROUNDINGS:
        weight = form.round(numbers(256, 256))
        assert weight.nbytes == pytest.approx(256 * 256 * form.bytes_per_number, rel=0.03)
    nvidia = ToNvfp4().round(numbers(3, 32))
    assert isinstance(nvidia, Nvfp4Matrix)
    assert nvidia.nbytes == 3 * (16 + 2 + 4)
    assert unpacked(nvidia.values).shape == nvidia.shape


def test_odd_columns_stay_as_they_are() -> None:
    assert ToMxfp4().for_columns(48) is None
    assert ToMxfp4().for_columns(64) == ToMxfp4()
    assert ToNvfp4().for_columns(24) is None
    assert ToNvfp4().for_columns(48) == ToNvfp4()
