"""Products of low rank: the fast backends against plain torch, and plain torch against a sum."""

import importlib.util

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from slipstream.kernels.adapters import Adapted, LowRank
from slipstream.kernels.reference.dense import add_low_rank
from tests.kernels.batches import seeded
from tests.kernels.device import DEVICE, INTERPRETED, ON_GPU

HAS_CPP = importlib.util.find_spec("_slipstream_cpu") is not None
# (rows, ends of parts, K, rank): nothing fills a vector, a tile or a task.
SIZES = [
    (1, (5,), 3, 1),
    (7, (40, 57, 74), 70, 3),
    (5, (530,), 1030, 8),
    (3, (300, 615), 33, 37),
]
SLOTS = 3


def factors(
    ends: tuple[int, ...], columns: int, rank: int, dtype: torch.dtype, slots: int = SLOTS
) -> LowRank:
    made, generator = LowRank.empty(slots, rank, ends, columns, dtype, DEVICE), seeded(1)
    for values in (made.down, made.up):
        values.copy_(torch.randn(values.shape, generator=generator) / values.shape[1] ** 0.5)
    return made


def rows_of(count: int, width: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn((count, width), generator=seeded(seed)).to(dtype).to(DEVICE)


def adapters_of(count: int, slots: int = SLOTS) -> Tensor:
    """Some of them without one, and neighbours with others."""
    return (torch.arange(count, device=DEVICE) * 2 + 1) % (slots + 1) - 1


def test_a_row_gains_what_the_two_factors_of_its_part_make() -> None:
    made, dtype = factors((4, 10), 6, 2, torch.float64), torch.float64
    x, y = rows_of(4, 6, 2, dtype), rows_of(4, 10, 3, dtype)
    slots = torch.tensor([2, -1, 0, 2], device=DEVICE)
    found = add_low_rank(y.clone(), x, Adapted(made, slots))
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            assert torch.equal(found[row], y[row])
            continue
        first, second = made.down[slot], made.up[slot]
        gains = (second[:, :4].T @ (first[:2] @ x[row]), second[:, 4:].T @ (first[2:] @ x[row]))
        assert_close(found[row], y[row] + torch.cat(gains))


@pytest.mark.skipif(not HAS_CPP, reason="the C++ kernels are not built")
@pytest.mark.usefixtures("level", "two_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_cpp_equals_the_reference_and_a_row_its_bits_alone(
    size: tuple[int, tuple[int, ...], int, int], dtype: torch.dtype
) -> None:
    from slipstream.kernels.cpu.rows import add_low_rank as add_in_cpp

    rows, ends, columns, rank = size
    made, slots = factors(ends, columns, rank, dtype), adapters_of(rows)
    x, y = rows_of(rows, columns, 2, dtype), rows_of(rows, ends[-1], 3, dtype)
    found = add_in_cpp(y.clone(), x, Adapted(made, slots))
    # The order of the reference's sums is that of the processor's library.
    rtol, atol = (2e-5, 2e-5) if dtype == torch.float32 else (1.6e-2, 1e-5)
    truth = add_low_rank(y.clone(), x, Adapted(made, slots))
    assert_close(found, truth, rtol=rtol, atol=atol)
    assert torch.equal(found[slots < 0], y[slots < 0])
    for row in range(rows):
        alone = Adapted(made, slots[row : row + 1])
        own = add_in_cpp(y[row : row + 1].clone(), x[row : row + 1], alone)
        assert torch.equal(own[0], found[row])


@pytest.mark.skipif(not HAS_CPP, reason="the C++ kernels are not built")
def test_cpp_refuses_a_slot_that_is_not_there() -> None:
    from slipstream.kernels.cpu.rows import add_low_rank as add_in_cpp

    made, slots = factors((5,), 3, 1, torch.float32), torch.tensor([SLOTS])
    with pytest.raises(ValueError, match="no such slot"):
        add_in_cpp(torch.zeros(1, 5), torch.zeros(1, 3), Adapted(made, slots))


class TestTriton:
    pytestmark = INTERPRETED

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
    @pytest.mark.parametrize("size", SIZES if ON_GPU else SIZES[1:], ids=str)
    def test_equals_the_reference_and_a_row_its_bits_alone(
        self, size: tuple[int, tuple[int, ...], int, int], dtype: torch.dtype
    ) -> None:
        pytest.importorskip("triton", reason="it is there for Linux only")
        from slipstream.kernels.triton import adapters

        rows, ends, columns, rank = size
        made, slots = factors(ends, columns, rank, dtype), adapters_of(rows)
        x, y = rows_of(rows, columns, 2, dtype), rows_of(rows, ends[-1], 3, dtype)
        found = adapters.add_low_rank(y.clone(), x, Adapted(made, slots))
        assert_close(found, add_low_rank(y.clone(), x, Adapted(made, slots)))
        parts = torch.stack((y.float(), torch.zeros_like(y.float())))  # still to be added up
        summed = adapters.add_low_rank(parts, x, Adapted(made, slots)).sum(0)
        assert_close(summed.to(dtype), found)
        row = rows // 2
        alone = Adapted(made, slots[row : row + 1])
        own = adapters.add_low_rank(y[row : row + 1].clone(), x[row : row + 1], alone)
        assert torch.equal(own[0], found[row])

    @pytest.mark.parametrize(
        "size",
        [
            (1, (40,), 70, 1, 2),
            (7, (40, 57, 74), 70, 3, 3),
            pytest.param((64, (48, 96), 600, 20, 5), marks=pytest.mark.full),
            (33, (100,), 1100, 40, 3),
            (2, (30, 70), 40, 130, 2),  # a slot has several chunks
            (7, (40, 56, 72), 128, 16, 3),  # of whole groups, with tiles of several parts
            pytest.param((33, (104,), 1152, 48, 3), marks=pytest.mark.full),
            (64, (48, 96), 640, 32, 12),
            (2, (32, 168), 64, 144, 2),
        ],
        ids=str,
    )
    def test_products_of_few_rows_add_them(
        self, size: tuple[int, tuple[int, ...], int, int, int]
    ) -> None:
        pytest.importorskip("triton", reason="it is there for Linux only")
        from slipstream.kernels.formats.dense import DenseMatrix
        from slipstream.kernels.triton import TRITON

        (rows, ends, columns, rank, count), dtype = size, torch.float16
        made = factors(ends, columns, rank, dtype, count)
        x, slots = rows_of(rows, columns, 2, dtype), adapters_of(rows, count)
        slots[slots == 0] = -1  # a slot that no row names
        slots[0] = count - 1
        made.down[0] = float("nan")  # is not read
        made.up[0] = float("nan")
        weight = DenseMatrix(rows_of(ends[-1], columns, 3, dtype) / columns**0.5)
        expected = add_low_rank(x.float() @ weight.values.float().T, x, Adapted(made, slots))
        for joined in (False, True):

            def product(x: Tensor, adapted: Adapted | None, joined: bool = joined) -> Tensor:
                if joined:
                    return TRITON.joined_linear([(x, None)], weight, None, adapted)
                y = TRITON.linear(x, weight, None, adapted)
                return y.sum(0) if y.ndim == 3 else y

            found = product(x, Adapted(made, slots))
            assert_close(found.float(), expected, rtol=3e-3, atol=3e-3)
            assert torch.equal(found[slots < 0], product(x, None)[slots < 0])
            for row in {0, rows // 2}:
                own = product(x[row : row + 1], Adapted(made, slots[row : row + 1]))
                assert torch.equal(own[0], found[row])
        # The bits are those of any other slot that has the same factors.
        made.down[0], made.up[0] = made.down[-1], made.up[-1]
        moved = product(x[:1], Adapted(made, torch.zeros_like(slots[:1])))
        assert torch.equal(moved[0], found[0])

    @pytest.mark.parametrize(("columns", "width", "rank"), [(24, 40, 4), (128, 96, 16)])
    def test_the_ops_of_a_layer_apply_them(self, columns: int, width: int, rank: int) -> None:
        pytest.importorskip("triton", reason="it is there for Linux only")
        from slipstream.kernels.formats.dense import DenseMatrix
        from slipstream.kernels.norm import Activation
        from slipstream.kernels.reference import REFERENCE
        from slipstream.kernels.table import Norm
        from slipstream.kernels.triton import TRITON

        dtype = torch.float16
        x, residual = rows_of(6, columns, 5, dtype), rows_of(6, columns, 6, dtype)
        weight = DenseMatrix(rows_of(width, columns, 7, dtype) / columns**0.5)
        norm = Norm(torch.ones(columns, dtype=dtype, device=DEVICE), 1e-5)
        adapted = Adapted(factors((width // 2, width), columns, rank, dtype), adapters_of(6))
        given = x, residual, norm, weight, None
        for ops in ("norm_linear", "norm_gated_linear"):
            own = (Activation.SILU, adapted) if "gated" in ops else (adapted,)
            found, expected = (getattr(it, ops)(*given, *own) for it in (TRITON, REFERENCE))
            assert_close(found[0], expected[0], rtol=1e-2, atol=1e-2)
            assert torch.equal(found[1], expected[1])
            bare = getattr(TRITON, ops)(*given)[0]
            plain = adapted.slots < 0
            assert torch.equal(found[0][plain], bare[plain])
            assert not torch.equal(found[0][~plain], bare[~plain])
        made = TRITON.linear(x, weight, None, adapted)
        made = made.sum(0).to(dtype) if made.ndim == 3 else made
        expected = REFERENCE.linear(x, weight, None, adapted)
        assert_close(made, expected, rtol=1e-2, atol=1e-2)
        sides = [(x[:, :16].contiguous(), None), (x[:, 16:].contiguous(), None)]
        joined = TRITON.joined_linear(sides, weight, None, adapted)
        assert_close(joined, expected, rtol=1e-2, atol=1e-2)
