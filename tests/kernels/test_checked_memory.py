"""The watch over interpreted kernels sees what leaves their arguments, and nothing else."""

import pytest
import torch

pytest.importorskip("triton", reason="it is there for Linux only")
if torch.cuda.is_available():
    pytest.skip("kernels are interpreted where there is no GPU", allow_module_level=True)

import triton
import triton.language as tl

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning")


@triton.jit
def _copy_kernel(source, target, counter, first, last, block: tl.constexpr):
    place = first + tl.arange(0, block)
    inside = place < last
    tl.store(target + place, tl.load(source + place, mask=inside, other=0), mask=inside)
    if counter is not None:
        tl.atomic_add(counter + place, 1, mask=inside)


def copy(
    source: torch.Tensor, target: torch.Tensor, counter: torch.Tensor | None, first: int, last: int
) -> None:
    _copy_kernel[(1,)](source, target, counter, first, last, block=16)


def test_what_is_masked_off_may_lie_anywhere() -> None:
    source, target = torch.arange(9), torch.zeros(9, dtype=torch.int64)
    counter = torch.zeros(9, dtype=torch.int32)
    copy(source, target, counter, 2, 9)
    assert target.tolist() == [0, 0, 2, 3, 4, 5, 6, 7, 8]
    assert counter.tolist() == [0, 0, 1, 1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("short", "verb"), [("source", "loads"), ("target", "stores"), ("counter", "updates")]
)
def test_one_number_behind_an_argument_is_an_error(short: str, verb: str) -> None:
    # Views of 9 numbers with others' numbers around them, all far from each other.
    size = {"source": 12, "target": 12, "counter": 12, short: 9}
    source, target, counter = (
        torch.zeros(400, dtype=torch.int64)[100 : 100 + size[name]]
        for name in ("source", "target", "counter")
    )
    said = f"_copy_kernel {verb} 1 numbers .* the first 0 bytes after the end of {short}"
    with pytest.raises(Exception, match=said):
        copy(source, target, counter, 0, 10)


@pytest.mark.parametrize(("first", "last"), [(-1, 9), (1 << 40, 1 << 41)])
def test_what_is_far_off_is_an_error(first: int, last: int) -> None:
    source = torch.zeros(400, dtype=torch.int64)[100:109]
    with pytest.raises(Exception, match=r"_copy_kernel loads .* outside of its arguments"):
        copy(source, torch.zeros(9, dtype=torch.int64), None, first, last)


def test_an_argument_may_not_repeat_one_number() -> None:
    source = torch.arange(3)[:1].expand(9)
    with pytest.raises(IndexError, match="_copy_kernel takes source for dense; its stride is 0"):
        copy(source, torch.zeros(9, dtype=torch.int64), None, 0, 9)


@triton.jit
def _scaled_kernel(target, size):
    tl.store(target, size * size)


def test_places_that_overflow_are_an_error() -> None:
    _scaled_kernel[(1,)](torch.zeros(1, dtype=torch.int64), 46340)
    with pytest.raises(Exception, match="int32 overflows in mul"):
        _scaled_kernel[(1,)](torch.zeros(1, dtype=torch.int64), 46341)
