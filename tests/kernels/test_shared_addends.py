"""What ranks have made is added up by the op that takes it, where a backend's ops can do that."""

from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.kernels.formats.dense import DenseMatrix
from slipstream.kernels.reference import REFERENCE
from slipstream.kernels.table import Norm, PostNorm, PostNormAddend
from slipstream.kernels.triton import TRITON
from slipstream.layers.linear import Linear
from slipstream.layers.parameters import Share
from tests.kernels.device import DEVICE, INTERPRETED, ON_GPU

pytestmark = INTERPRETED
HALF = torch.bfloat16 if ON_GPU else torch.float16  # which the interpreter multiplies right
NO_INPUTS: Any = None  # nothing is asked of them without adapters


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("has_post_norm", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_sum_is_that_of_the_ranks_in_their_order(
    num_ranks: int, has_post_norm: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(num_ranks)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

    rows, width, inner = 3, 40, 16
    made = [draw(rows, width) for _ in range(num_ranks - 1)]

    def stack(mine: Tensor) -> Tensor:
        return torch.stack((mine, *made))

    def reduce(mine: Tensor) -> Tensor:
        return stack(mine).float().sum(0).to(mine.dtype)

    share = Share(0, num_ranks, reduce, stack=stack)
    x, residual, weight = draw(rows, inner), draw(rows, width), DenseMatrix(draw(width, inner))
    norm, post_norm = Norm(draw(width), 1e-6), Norm(draw(width), 1e-5)
    ours = Linear(TRITON.pack(weight), None, share).apply(TRITON, x, NO_INPUTS)
    assert isinstance(ours, Tensor)
    assert ours.shape == (num_ranks, rows, width)
    theirs = Linear(weight, None, share).apply(REFERENCE, x, NO_INPUTS)
    assert isinstance(theirs, Tensor)
    assert theirs.shape == (rows, width)
    if has_post_norm:
        joined = PostNorm(post_norm)
        found = TRITON.norm(PostNormAddend(ours, joined), residual, norm)
        expected = REFERENCE.norm(PostNormAddend(theirs, joined), residual, norm)
    else:
        found = TRITON.norm(ours, residual, norm)
        expected = REFERENCE.norm(theirs, residual, norm)
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)
    following = DenseMatrix(draw(16, width))
    first = TRITON.norm_linear(ours, residual, norm, TRITON.pack(following), None)[0]
    second = REFERENCE.norm_linear(theirs, residual, norm, following, None)[0]
    torch.testing.assert_close(first, second, atol=10 * tolerance, rtol=10 * tolerance)
