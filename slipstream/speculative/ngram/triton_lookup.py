"""`lookup.py` for NVIDIA GPUs: one program reads a text once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.triton.launch import dense, next_power_of_2

BLOCK = 1024


@triton.jit
def _lookup_kernel(
    token_ids, slots, known, tokens, found, row_stride, shortest, longest: tl.constexpr,
    width: tl.constexpr, block_k: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """The best place is the one after the longest match; among equals, the latest."""
    request = tl.program_id(0)
    text = token_ids + tl.load(slots + request) * row_stride
    end = tl.load(known + request).to(tl.int32)
    best = tl.zeros((), tl.int64)  # (length of the run, place)
    for first in range(0, end, block):
        place = first + tl.arange(0, block)
        run = tl.zeros((block,), tl.int32)
        agrees = (place > 0) & (place < end)
        for size in tl.static_range(1, longest + 1):
            inside = agrees & (place >= size)
            last = tl.load(text + end - size, mask=size <= end, other=-1)
            agrees = inside & (tl.load(text + place - size, mask=inside, other=-2) == last)
            run += agrees.to(tl.int32)
        run = tl.where(run >= shortest, run, 0)
        score = run.to(tl.int64) * (1 << 32) + tl.where(run > 0, place, 0)
        best = tl.maximum(best, tl.max(score, axis=0))
    place = (best & 0xFFFFFFFF).to(tl.int32)
    column = tl.arange(0, block_k)
    source = place + column % tl.maximum(end - place, 1)
    inside = (column < width) & (source < end)
    token = tl.load(text + source, mask=inside, other=0)
    tl.store(tokens + request * width + column, token.to(tl.int64), mask=column < width)
    tl.store(found + request, place > 0)


def lookup_in_triton(
    token_ids: Tensor, slots: Tensor, known: Tensor, width: int, shortest: int, longest: int
) -> tuple[Tensor, Tensor]:
    assert token_ids.stride(1) == 1
    slots, known = dense(slots, known)
    tokens = torch.empty((len(slots), width), dtype=torch.int64, device=slots.device)
    found = torch.empty(len(slots), dtype=torch.bool, device=slots.device)
    _lookup_kernel[(len(slots),)](
        token_ids, slots, known, tokens, found, token_ids.stride(0), shortest, longest,
        width=width, block_k=next_power_of_2(max(1, width)), block=BLOCK, num_warps=8,
    )  # fmt: skip
    return tokens, found
