"""Paged attention over ragged rows: prompt chunks, plain decode and verification of 1+k rows.

The query heads that share a KV head and the rows of one request are folded into one axis, line
m = row * groups + head, so that keys are read once for all of them and meet the tensor cores.

A request of at most `SHORT_ROWS` rows is read in splits of its context at fixed tokens
(`splits.py`), whose folds are combined afterwards; a longer one (a prompt chunk) in one go by
larger tiles. Which of the two follows from the request's own rows, so a row of a decoding request
has the same bits alone, in any batch, and with any number of draft rows beside it (up to that
limit). The host looks at shapes only.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from slipstream.kernels.table import AttentionInputs
from slipstream.kernels.triton.attention_kernels import chunk_kernel, combine_kernel, split_kernel
from slipstream.kernels.triton.splits import SMALLEST, most_splits

SHORT_ROWS = 16
# Enough programs to fill the machine some times over; more would mostly find nothing to do.
PROGRAMS = 1024
COMBINED_AT_ONCE = 16


@dataclass(frozen=True)
class Tiles:
    """Lines and cached tokens of one tile, and how its kernel is built.

    Triton counts a stage for the block table and one for the keys and values that it leads to, so
    it takes two more of them (3, 5, 7) to have one more tile of keys on its way.
    """

    lines: int
    tokens: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Extras:
    """What some models and token trees add to causal attention.

    Attributes:
        mask: [T, most new rows of a request] bool: which of its request's new tokens a row sees,
            instead of those at positions up to its own; all cached tokens before them are seen.
        softcap: scores become softcap * tanh(score / softcap).
        sinks: [Hq], a score per head that takes weight and has no value.
    """

    mask: Tensor | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


PLAIN = Extras()


def short_tiles(groups: int, block_d: int, dtype: torch.dtype) -> Tiles:
    """By the shape of the layer only: 8 rows of a request fit up to 8 heads a KV head."""
    if dtype == torch.float32:
        return Tiles(16, 32, 4, 1)
    lines = min(64, max(16, 8 * triton.next_power_of_2(groups)))
    return Tiles(lines, 64, 4, 5 if block_d <= 128 else 3)


def chunk_tiles(block_d: int, dtype: torch.dtype) -> Tiles:
    if dtype == torch.float32:
        return Tiles(32, 32, 4, 1)
    return Tiles(128, 64, 8, 5) if block_d <= 128 else Tiles(64, 64, 4, 3)


def paged_attention(
    query: Tensor,
    cache: tuple[Tensor, Tensor],
    inputs: AttentionInputs,
    scale: float,
    window: int | None,
    extras: Extras = PLAIN,
) -> Tensor:
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if not out.numel():
        return out
    keys, values = cache
    assert query[0].is_contiguous()
    assert query.dtype == keys.dtype == values.dtype
    assert keys.is_contiguous()
    assert values.is_contiguous()
    assert SMALLEST % short_tiles(1, 16, query.dtype).tokens == 0, "tiles do not cross splits"
    most_rows = min(len(query), inputs.max_rows or len(query))
    _short(query, cache, inputs, scale, window, extras, out, min(most_rows, SHORT_ROWS))
    if most_rows > SHORT_ROWS:
        _chunks(query, cache, inputs, scale, window, extras, out)
    return out


def _short(
    query: Tensor,
    cache: tuple[Tensor, Tensor],
    inputs: AttentionInputs,
    scale: float,
    window: int | None,
    extras: Extras,
    out: Tensor,
    most_rows: int,
) -> None:
    """Requests of at most `most_rows` rows: folds of splits, then their combination."""
    (_, heads, head_dim), (keys, values) = query.shape, cache
    block_size, kv_heads = keys.shape[1:3]
    requests, splits = len(inputs.context_lens), most_splits(_most_tokens(inputs, block_size))
    block_d = _padded(head_dim)
    tiles = short_tiles(heads // kv_heads, block_d, query.dtype)
    sizes = (requests, most_rows, heads, splits)
    part = torch.empty((*sizes, head_dim), dtype=torch.float32, device=query.device)
    part_largest, part_total = torch.empty((2, *sizes), dtype=torch.float32, device=query.device)
    pairs = kv_heads * triton.cdiv(most_rows * (heads // kv_heads), tiles.lines)
    lanes = min(splits, triton.cdiv(PROGRAMS, requests * pairs))
    split_kernel[(lanes, pairs, requests)](
        query, keys, values, part, part_largest, part_total, inputs.query_start,
        inputs.context_lens, inputs.block_tables, inputs.positions, *_mask(extras),
        query.stride(0), kv_heads * head_dim, inputs.block_tables.stride(0), scale, extras.softcap,
        window, most_rows, splits, kv_heads, first_seen=inputs.first_seen,
        groups=heads // kv_heads, head_dim=head_dim, block_size=block_size, block_m=tiles.lines,
        block_n=tiles.tokens, block_d=block_d, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    combine_kernel[(most_rows, heads, requests)](
        part, part_largest, part_total, out, inputs.query_start, inputs.context_lens,
        inputs.positions, extras.sinks, window, most_rows, splits, causal=extras.mask is None,
        head_dim=head_dim, chunk=COMBINED_AT_ONCE, block_d=block_d, num_warps=2,
    )  # fmt: skip


def _chunks(
    query: Tensor,
    cache: tuple[Tensor, Tensor],
    inputs: AttentionInputs,
    scale: float,
    window: int | None,
    extras: Extras,
    out: Tensor,
) -> None:
    """Requests of more than `SHORT_ROWS` rows."""
    (rows, heads, head_dim), (keys, values) = query.shape, cache
    block_size, kv_heads = keys.shape[1:3]
    requests, groups = len(inputs.context_lens), heads // kv_heads
    block_d = _padded(head_dim)
    tiles = chunk_tiles(block_d, query.dtype)
    most = triton.cdiv(rows * groups, tiles.lines) + min(requests, rows // SHORT_ROWS)
    chunk_kernel[(most, kv_heads)](
        query, keys, values, out, inputs.query_start, inputs.context_lens, inputs.block_tables,
        inputs.positions, *_mask(extras), extras.sinks, query.stride(0), kv_heads * head_dim,
        inputs.block_tables.stride(0), scale, extras.softcap, window, requests, SHORT_ROWS,
        kv_heads, first_seen=inputs.first_seen, groups=groups, head_dim=head_dim,
        block_size=block_size, block_m=tiles.lines, block_n=tiles.tokens, block_d=block_d,
        block_r=triton.next_power_of_2(requests), num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip


def _most_tokens(inputs: AttentionInputs, block_size: int) -> int:
    return int(inputs.block_tables.shape[1]) * block_size


def _padded(head_dim: int) -> int:
    """The tensor cores take 16 columns at a time."""
    return int(max(16, triton.next_power_of_2(head_dim)))


def _mask(extras: Extras) -> tuple[Tensor | None, int]:
    if extras.mask is None:
        return None, 0
    assert extras.mask.stride(1) == 1
    return extras.mask.view(torch.uint8), extras.mask.stride(0)
