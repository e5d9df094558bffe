"""Rounding in C++, at every level of instructions: the numbers of plain torch, bit for bit."""

import pytest
import torch
from torch import Tensor

from slipstream.kernels.formats.float8 import ToFloat8
from slipstream.kernels.formats.int4 import ToInt4
from slipstream.kernels.formats.int8 import ToInt8
from slipstream.kernels.formats.weight import Rounding
from slipstream.kernels.reference import REFERENCE

cpp = pytest.importorskip("_slipstream_cpu", reason="the C++ kernels are not built")
from slipstream.kernels.cpu import matmul  # noqa: E402

ROWS, COLUMNS = 100, 256
FORMS = [
    ToInt8(),
    ToInt8(True),
    *(ToInt4(group, zeros) for group in (32, 128) for zeros in (False, True)),
]


def normal(columns: int = COLUMNS) -> Tensor:
    return torch.randn(ROWS, columns, generator=torch.Generator().manual_seed(columns)) * 0.02


def odd_numbers() -> Tensor:
    """Rows that are hard to round: huge, tiny, one-sided, with outliers, ties and zeros."""
    matrix = normal() * torch.logspace(-36, 36, ROWS).unsqueeze(-1)
    matrix[1::7] = matrix[1::7] + matrix[1::7].abs().amax(-1, keepdim=True)
    matrix[2::7, 5::64] *= 1000
    matrix[3::7] = (matrix[3::7] / matrix[3::7].abs().amax(-1, keepdim=True) * 16).round() / 2
    matrix[4] = 0
    matrix[5] = -0.37
    matrix[6, :128] = 0
    matrix[7, 1:] = 0
    matrix[8] = torch.arange(COLUMNS) * 1e-44  # smaller than any normal number
    return matrix


def same(matrix: Tensor, form: Rounding) -> bool:
    """Whether both ways give weights of the same numbers: each is multiplied by 1 alone."""
    found, expected = matmul.rounded(matrix, form), matmul.pack(REFERENCE.round(matrix, form))
    assert isinstance(found, matmul.CpuMatrix)
    assert (found.shape, found.nbytes) == (tuple(matrix.shape), expected.nbytes)
    ones = torch.eye(matrix.shape[1])
    return torch.equal(found.logits(ones), expected.logits(ones))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_numbers_are_the_references(level: str, form: Rounding, dtype: torch.dtype) -> None:
    assert same(normal().to(dtype), form)
    assert same(odd_numbers().to(dtype), form)


@pytest.mark.parametrize("columns", [1, 33, 72])
def test_any_width_has_eight_bits(level: str, columns: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert same(normal(columns).to(dtype), ToInt8())


def test_threads_and_strides_change_nothing() -> None:
    threads, wide = cpp.num_threads(), normal(2 * COLUMNS)
    for count in (1, 3):
        cpp.set_num_threads(count)
        for form in FORMS:
            assert same(wide[:, ::2], form)
    cpp.set_num_threads(threads)


def test_what_the_kernels_do_not_serve_is_left_to_plain_torch() -> None:
    for matrix, form in ((normal(), ToFloat8()), (normal().half(), ToInt8())):
        found, expected = matmul.rounded(matrix, form), REFERENCE.round(matrix, form)
        assert type(found) is type(expected)
        assert not isinstance(found, matmul.CpuMatrix)


def test_groups_that_do_not_fit_are_refused() -> None:
    for group in (64, 128):
        with pytest.raises(ValueError, match="groups"):
            cpp.round_to_int4(torch.zeros(4, 96), group, False)
