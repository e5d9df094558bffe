"""Launches the attention of prompt chunks on Hopper: `attention_stream_kernel.py`."""

from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.pass_inputs import PassInputs, Visibility
from slipstream.kernels.triton.attention_shapes import (
    MULTIPROCESSORS,
    SHORT_ROWS,
    AttentionShape,
    most_tokens_of,
    room_for,
    tree_of,
)
from slipstream.kernels.triton.launch import cdiv, options
from slipstream.kernels.triton.matmul import ALIGNMENT, is_hopper

try:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from slipstream.kernels.triton.attention_segments import (
        CHAINED,
        LINES,
        SPLIT,
        WHOLE,
        join_segments_kernel,
        most_segments,
    )
    from slipstream.kernels.triton.attention_stream_kernel import SWIZZLED, attention_stream_kernel
    from slipstream.kernels.triton.attention_stream_loads import HALF
except ImportError:  # Gluon is still an experiment of Triton's
    attention_stream_kernel = None

# With more tiles of all KV heads, programs have enough to do without sharing contexts.
FEW_TILES = MULTIPROCESSORS
MOST_BYTES = 128 * 2**20  # of sums of segments
JOINED_HEADS = 16  # of a program of `join_segments_kernel`


def streams(
    query: Tensor, layer: AttentionShape, sees: Visibility, cache: tuple[Tensor, Tensor]
) -> bool:
    """Whether `stream` computes the prompt chunks of this layer.

    It is one kernel for requests of any length, so that a row's bits do not depend on the pass.
    """
    return (
        attention_stream_kernel is not None
        and is_hopper(query.device)
        and query.dtype in (torch.bfloat16, torch.float16)
        and cache[0].dtype == query.dtype
        and layer.head_dim in (64, 128)
        and layer.window is None
        and layer.softcap is None
        and sees.causal
        and sees.first_seen == 0
        and cache[0].shape[1] in (8, 16, 32, 64, 128)  # the copy engine swizzles 8 rows at once
        and all(pages.data_ptr() % ALIGNMENT == 0 for pages in cache)
    )


def stream(
    query: Tensor,
    layer: AttentionShape,
    inputs: PassInputs,
    cache: tuple[Tensor, Tensor],
    out: Tensor,
) -> None:
    """Write `out` for requests of more than `SHORT_ROWS` rows: one program a multiprocessor, which
    has no room for two."""
    rows, paging, sees = inputs.rows, inputs.paging, inputs.sees
    count, requests, block_size = len(query), len(paging.context_lens), cache[0].shape[1]
    most = cdiv(count * layer.groups, 2 * LINES.value) + min(requests, count // SHORT_ROWS)
    tiles = layer.kv_heads * most
    segments = most_segments(most_tokens_of(paging, block_size))
    mode = _mode_of(tiles, segments, segments * out.numel() * 4).value
    programs = MULTIPROCESSORS if mode == SPLIT.value else min(MULTIPROCESSORS, tiles)
    parts = _room_for_sums(mode, programs, segments, count, layer, query.device)
    keys, values = (_described(pages) for pages in cache)
    attention_stream_kernel[(programs,)](
        query, keys, values, out, *parts, rows.query_start, paging.context_lens,
        paging.block_tables, rows.in_context, *tree_of(sees), sees.last_seen, layer.sinks,
        query.stride(0), paging.block_tables.stride(0), layer.scale, count, requests, SHORT_ROWS,
        kv_heads=layer.kv_heads, groups=layer.groups, block_size=block_size,
        block_r=room_for(requests), mode=mode, num_warps=4, **options(query.device),
    )  # fmt: skip
    if mode == SPLIT.value:
        join_segments_kernel[(count, cdiv(layer.heads, JOINED_HEADS))](
            *parts, out, rows.query_start, paging.context_lens, rows.in_context, tree_of(sees)[0],
            sees.last_seen, requests, SHORT_ROWS, heads=layer.heads, head_dim=layer.head_dim,
            block_h=JOINED_HEADS, block_r=room_for(requests), num_warps=4, **options(query.device),
        )  # fmt: skip


def _mode_of(tiles: int, segments: int, size: int) -> Any:
    """The mode of `attention_stream_kernel` for a number of tiles and of segments, whose sums take
    `size` bytes."""
    if segments == 1:
        return WHOLE
    return SPLIT if tiles < FEW_TILES and size <= MOST_BYTES else CHAINED


def _room_for_sums(
    mode: int, programs: int, segments: int, rows: int, layer: AttentionShape, device: torch.device
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """What the kernel needs beside `out`: weighted values, largest scores and sums of weights."""
    if mode == WHOLE.value:
        return None, None, None
    if mode == CHAINED.value:
        sizes = programs, 2 * LINES.value, layer.head_dim
        return torch.empty(sizes, dtype=torch.float32, device=device), None, None
    lines = segments, rows, layer.heads
    part = torch.empty((*lines, layer.head_dim), dtype=torch.float32, device=device)
    largest, total = part.new_empty((2, *lines))
    return part, largest, total


def _described(pages: Tensor) -> "TensorDescriptor":
    """The cache as a matrix [tokens, Hk * D], of which a copy brings one head of some tokens."""
    blocks, block_size, kv_heads, head_dim = pages.shape
    sizes, strides = [blocks * block_size, kv_heads * head_dim], [kv_heads * head_dim, 1]
    box = [min(block_size, HALF.value), head_dim]
    return TensorDescriptor(pages, sizes, strides, box, SWIZZLED.value)
