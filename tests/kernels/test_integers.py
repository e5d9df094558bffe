"""Matrices of integers: their rows, and products by the meaning of `kernels/table.py`."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from slipstream.core.errors import UsageError
from slipstream.kernels.formats import int8
from slipstream.kernels.formats import weight as weight_formats
from slipstream.kernels.formats.dense import DenseMatrix
from slipstream.kernels.formats.float8 import Float8Matrix, ToFloat8
from slipstream.kernels.formats.int4 import Int4Matrix, ToInt4, unpacked
from slipstream.kernels.formats.int8 import Int8Matrix, ToInt8
from slipstream.kernels.formats.weight import Weight, stacked
from slipstream.kernels.reference import REFERENCE

N, K, ROWS = 37, 256, 5


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def every_kind(rows: int = N, seed: int = 0) -> dict[str, Weight]:
    matrix = numbers(rows, K, seed=seed)
    return {
        "whole": DenseMatrix(matrix),
        "fp8": ToFloat8().round(matrix),
        "int8": ToInt8().round(matrix),
        "int8-dynamic": ToInt8(rounds_input=True).round(matrix),
        "int4": ToInt4(32).round(matrix),
        "int4-g128": ToInt4(128).round(matrix),
        "int4-asym": ToInt4(32, zeros=True).round(matrix),
    }


KINDS = list(every_kind())


def by_hand(weight: Int8Matrix | Int4Matrix) -> Tensor:
    """[N, K] float64, number by number from the definition."""
    rows, columns = weight.shape
    out = torch.empty(rows, columns, dtype=torch.float64)
    for row in range(rows):
        for column in range(columns):
            if isinstance(weight, Int8Matrix):
                out[row, column] = weight.values[row, column] * weight.scales[row].double()
                continue
            byte = int(weight.values[row, column // 2])
            value = byte >> 4 if column % 2 else byte & 15
            group = column // weight.group
            zero = 8 if weight.zeros is None else int(weight.zeros[row, group])
            out[row, column] = (value - zero) * weight.scales[row, group].double()
    return out


@pytest.mark.parametrize("kind", ["int8", "int4", "int4-g128", "int4-asym"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_the_numbers_that_are_meant(kind: str, dtype: torch.dtype) -> None:
    weight = every_kind()[kind]
    assert isinstance(weight, Int8Matrix | Int4Matrix)
    meant = by_hand(weight)
    torch.testing.assert_close(weight.dequantised().double(), meant, rtol=1e-6, atol=0)
    x, bias = numbers(ROWS, K, seed=1).to(dtype), numbers(N, seed=2).to(dtype)
    expected = x.double() @ meant.T
    found = REFERENCE.logits(x, weight)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)
    product = REFERENCE.linear(x, weight, bias)
    assert product.dtype == dtype
    assert torch.equal(product, found.to(dtype) + bias)
    assert torch.equal(REFERENCE.linear(x, weight, None), found.to(dtype))


def test_rounded_activations_make_exact_sums() -> None:
    weight = every_kind()["int8-dynamic"]
    assert isinstance(weight, Int8Matrix)
    x = numbers(ROWS, K, seed=1)
    x[2] = 0
    scales = x.abs().amax(-1) / 127
    integers_of_x = (x / scales.clamp_min(1e-30).unsqueeze(-1)).round().long()
    assert int(integers_of_x.abs().max()) == 127
    exact = integers_of_x @ weight.values.long().T
    expected = exact.double() * scales.double().unsqueeze(-1) * weight.scales.double()
    found = REFERENCE.logits(x, weight)
    torch.testing.assert_close(found.double(), expected, rtol=3e-7, atol=0)
    assert not found[2].any()


def test_exact_sums_are_longer_than_float32_could_hold() -> None:
    columns = 16384  # times 127 * 127 is more than 2 ** 24
    values = torch.full((1, columns), 127, dtype=torch.int8)
    values[0, 0] = 126
    weight = Int8Matrix(values, torch.ones(1), rounds_input=True)
    x = torch.full((1, columns), 127.0)
    product = float(REFERENCE.logits(x, weight))
    assert product == torch.tensor(127.0 * 127 * columns - 127).item()


def test_products_do_not_depend_on_the_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, since float32 holds all sums of these numbers: any order of them will do."""
    kinds = {
        kind: replace(weight, scales=weight.scales.abs().log2().round().exp2())
        for kind, weight in every_kind().items()
        if isinstance(weight, Int8Matrix | Int4Matrix)
    }
    x = numbers(ROWS, K, seed=1).round()
    whole = {kind: REFERENCE.logits(x, weight) for kind, weight in kinds.items()}
    for module in (weight_formats, int8):
        monkeypatch.setattr(module, "PRODUCT_SLICE", 3 * K)
    for kind, weight in kinds.items():
        assert torch.equal(REFERENCE.logits(x, weight), whole[kind]), kind
        if kind != "int8-dynamic":
            exact = x.double() @ weight.dequantised().double().T
            assert torch.equal(whole[kind].double(), exact), kind


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_every_kind(kind: str) -> None:
    weight = every_kind()[kind]
    meant = weight.dequantised()
    assert weight.shape == (N, K)
    index = torch.tensor([5, 0, 36, 5])
    assert torch.equal(weight.select(index).dequantised(), meant[index])
    assert torch.equal(weight.rows(3, 9).dequantised(), meant[3:9])
    tail = weight.rows(30)
    assert torch.equal(tail.dequantised(), meant[30:])
    assert tail.shape == (7, K)
    assert type(tail) is type(weight)
    joined = stacked([weight, tail])
    assert joined is not None
    assert type(joined) is type(weight)
    assert torch.equal(joined.dequantised(), torch.cat((meant, meant[30:])))
    x = numbers(ROWS, K, seed=1)
    torch.testing.assert_close(
        REFERENCE.logits(x, tail), REFERENCE.logits(x, weight)[:, 30:], rtol=1e-5, atol=1e-4
    )


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_of_a_matrix_moves(kind: str) -> None:
    moved = every_kind()[kind].to(torch.device("meta"))
    assert moved.dequantised().device.type == "meta"


def test_matrices_of_several_dtypes_are_not_stacked() -> None:
    matrix = numbers(N, K)
    assert stacked([DenseMatrix(matrix.bfloat16()), DenseMatrix(matrix)]) is None


@pytest.mark.parametrize("kind", KINDS)
def test_columns_of_every_kind(kind: str) -> None:
    weight = every_kind()[kind]
    part = weight.columns(128, 256)
    assert type(part) is type(weight)
    assert torch.equal(part.dequantised(), weight.dequantised()[:, 128:256])
    x = numbers(ROWS, 128, seed=1)
    assert part.logits(x).shape == (ROWS, N)


def test_groups_are_not_cut() -> None:
    with pytest.raises(UsageError, match=r"groups of 128 .* between columns 64 and 256"):
        every_kind()["int4-g128"].columns(64, 256)


def test_bytes_of_every_kind() -> None:
    sizes = {kind: weight.nbytes for kind, weight in every_kind().items()}
    assert sizes["whole"] == 4 * N * K
    assert sizes["fp8"] == sizes["int8"] == N * K + 4 * N
    assert sizes["int4"] == N * K // 2 + 4 * N * K // 32
    assert sizes["int4-g128"] == N * K // 2 + 4 * N * K // 128
    assert sizes["int4-asym"] == N * K // 2 + 5 * N * K // 32


def test_stacks_of_several_kinds() -> None:
    kinds, other = every_kind(), every_kind(rows=3, seed=9)
    mixed = stacked([kinds["int4-g128"], other["int4-asym"]])
    assert isinstance(mixed, Int4Matrix)
    assert mixed.group == 32
    expected = torch.cat((kinds["int4-g128"].dequantised(), other["int4-asym"].dequantised()))
    assert torch.equal(mixed.dequantised(), expected)
    for first, second in (
        ("int4", "int8"),
        ("int8", "int4"),
        ("int8", "int8-dynamic"),
        ("fp8", "int8"),
        ("whole", "int8"),
    ):
        assert stacked([kinds[first], other[second]]) is None
    floats = stacked([kinds["fp8"], other["fp8"]])
    assert isinstance(floats, Float8Matrix)


def test_smaller_groups_of_the_same_numbers() -> None:
    for zeros in (False, True):
        weight = ToInt4(128, zeros).round(numbers(N, K))
        smaller = weight.regrouped(32)
        assert smaller.group == 32
        assert torch.equal(smaller.dequantised(), weight.dequantised())


def test_unpacking_puts_the_even_column_first() -> None:
    assert unpacked(torch.tensor([[0x21, 0xF0]], dtype=torch.uint8)).tolist() == [[1, 2, 0, 15]]
