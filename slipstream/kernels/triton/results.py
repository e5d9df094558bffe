"""Joins the results of a step in one launch."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.triton.launch import (
    dense,
    launch_dependents,
    next_power_of_2,
    options,
    wait_for_inputs,
)


@triton.jit
def _bits(number):
    """The bits of float32 numbers, as int64; int64 numbers as they are."""
    if number.dtype == tl.float32:
        number = number.to(tl.int32, bitcast=True)
    return number.to(tl.int64)


@triton.jit
def _results_kernel(
    tokens, largest, more, counts, times, out, token_stride, largest_stride, more_stride,
    out_stride, width, added, block_w: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """Programs (request): `PreparationOps.pack_results`."""
    launch_dependents(pdl)
    wait_for_inputs(pdl)
    request, column = tl.program_id(0), tl.arange(0, block_w)
    line, inside = out + request * out_stride, column < width
    # All loads come first, so that none waits for another one.
    token = tl.load(tokens + request * token_stride + column, mask=inside)
    peak = tl.load(largest + request * largest_stride + column, mask=inside)
    number = token
    if more is not None:
        number = tl.load(more + request * more_stride + column, mask=column < added)
    singles = ()
    for index in tl.static_range(len(counts)):
        singles += (tl.load(counts[index] + request),)  # type: ignore[assignment]
    for index in tl.static_range(len(times)):
        singles += (tl.load(times[index]),)  # type: ignore[assignment]
    tl.store(line + column, token, mask=inside)
    tl.store(line + width + column, _bits(peak), mask=inside)
    line += 2 * width
    tl.store(line + column, _bits(number), mask=column < added)
    for index in tl.static_range(len(singles)):
        tl.store(line + added + index, singles[index])


def pack_results(
    tokens: Tensor,
    largest: Tensor,
    more: Tensor | None,
    counts: Sequence[Tensor],
    times: Sequence[Tensor | int],
) -> Tensor:
    """See `PreparationOps.pack_results`."""
    requests, width = tokens.shape
    device, added = tokens.device, 0 if more is None else more.shape[1]
    size = 2 * width + added + len(counts) + len(times)
    out = torch.empty((requests, size), dtype=torch.int64, device=device)
    if not requests:
        return out
    stamps = tuple(torch.as_tensor(it, device=device) for it in times)  # ints have no clock
    if more is not None and more.stride(1) != 1:
        more = more.contiguous()
    assert tokens.stride(1) == largest.stride(1) == 1
    _results_kernel[(requests,)](
        tokens, largest, more, dense(*counts), stamps, out, tokens.stride(0), largest.stride(0),
        0 if more is None else more.stride(0), size, width, added,
        block_w=next_power_of_2(max(width, added)), num_warps=1, **options(device),
    )  # fmt: skip
    return out
