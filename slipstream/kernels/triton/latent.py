"""Multi-head latent attention in absorbed form: latents are read once for all heads and rows.

For requests of few rows a layer has three launches (`latent_kernels.py`). The first projects
queries into the latent space and stores the new latents. The second computes partial sums over
splits of the context. The third adds them up and projects them to the values of the heads. Longer
requests (prompt chunks) use `latent_chunk_kernel.py` and a batched matmul in place of the last two.
As in `attention.py`, this depends only on a request's own rows, and the host reads shapes only.
"""

import torch
from torch import Tensor

from slipstream.kernels.latent_attention import LatentHeads
from slipstream.kernels.pass_inputs import PassInputs
from slipstream.kernels.triton.attention import EARLY, most_rows_of, most_splits_of, short_lines
from slipstream.kernels.triton.attention_shapes import SHORT_ROWS, room_for, tree_of
from slipstream.kernels.triton.latent_chunk_kernel import latent_chunk_kernel
from slipstream.kernels.triton.latent_kernels import TASKS, absorb_kernel, latent_kernel
from slipstream.kernels.triton.latent_values_kernel import values_kernel
from slipstream.kernels.triton.launch import (
    cdiv,
    empty_rows,
    next_power_of_2,
    options,
    shared_memory,
)

PROGRAMS = 132
STAGES, WARPS = 2, 8  # of a tile
LARGE_TILES = 190 * 1024  # bytes of shared memory for tiles of 128 tokens by 32 lines
FEWEST_LINES = 16  # two folds of more do not fit into registers


def latent_attention(
    queries: Tensor, latents: Tensor, heads: LatentHeads, inputs: PassInputs, cache: Tensor
) -> Tensor:
    """See `Ops.latent_attention`."""
    width = heads.num_heads * heads.value_dim
    out = empty_rows(len(queries), width, queries.dtype, queries.device)
    if not out.numel():
        return out
    assert queries.dtype == latents.dtype == cache.dtype
    assert queries.stride(1) == latents.stride(1) == 1
    assert cache.is_contiguous()
    absorbed = _absorbed(queries, latents, heads, inputs, cache)
    if most_rows_of(absorbed, inputs) > SHORT_ROWS:
        _chunks(absorbed, heads, inputs, cache, out)  # `_short` overwrites rows of short requests
    _short(absorbed, heads, inputs, cache, out)
    return out


def _absorbed(
    queries: Tensor, latents: Tensor, heads: LatentHeads, inputs: PassInputs, cache: Tensor
) -> Tensor:
    """Queries [T, H, R + P] in the latent space, to be multiplied by cached latents; also stores
    the latents of the rows in the cache."""
    rows, rank, rotary_dim = len(queries), heads.rank, heads.rotary_dim
    assert heads.keys.stride()[1:] == (rank, 1)
    absorbed = torch.empty(
        rows, heads.num_heads, rank + rotary_dim, dtype=queries.dtype, device=queries.device
    )
    block_m = int(min(64, max(16, next_power_of_2(rows))))
    block_k = max(16, next_power_of_2(heads.plain_dim))
    block_n = min(64 if rows <= 64 else 128, max(16, next_power_of_2(rank)))
    while (block_m + block_n) * block_k * queries.itemsize > shared_memory(queries.device):
        block_n //= 2
    tiles = cdiv(rank, block_n)
    others = cdiv(TASKS.value * min(rows, block_m), tiles)
    grid = tiles, heads.num_heads + others, cdiv(rows, block_m)
    launched = options(queries.device)
    absorb_kernel[grid](
        queries, latents, heads.keys, heads.norm_weight, heads.eps, heads.cos_sin,
        heads.query_scales, inputs.rows.positions, inputs.paging.slots, absorbed, cache,
        queries.stride(0), latents.stride(0), heads.keys.stride(0), rows, heads=heads.num_heads,
        rank=rank, plain_dim=heads.plain_dim, rotary_dim=rotary_dim, block_m=block_m,
        block_n=block_n, block_k=block_k,
        block_h=next_power_of_2(heads.num_heads), **_blocks(heads), num_warps=4,
        early=EARLY and launched["pdl"], **launched,
    )  # fmt: skip
    return absorbed


def _short(
    absorbed: Tensor, heads: LatentHeads, inputs: PassInputs, cache: Tensor, out: Tensor
) -> None:
    """Write `out` for requests of at most `SHORT_ROWS` rows."""
    rows, paging, sees = inputs.rows, inputs.paging, inputs.sees
    most_rows = min(most_rows_of(absorbed, inputs), SHORT_ROWS)
    requests, block_size, rank = len(paging.context_lens), cache.shape[1], heads.rank
    device = absorbed.device
    launched = options(device)
    early = EARLY and launched["pdl"]
    floats = absorbed.dtype == torch.float32
    count = most_rows * heads.num_heads
    large = shared_memory(device) >= LARGE_TILES
    lines = _short_lines(count, requests) if large else FEWEST_LINES
    splits = most_splits_of(inputs, block_size, None, most_rows)
    lanes = max(1, min(splits, PROGRAMS // (requests * cdiv(count, lines))))
    joined = lanes == 1
    lines = FEWEST_LINES if joined else lines
    parts = 1 if joined else splits
    sizes = requests, most_rows, heads.num_heads, parts
    part = torch.empty(*sizes, rank, dtype=torch.float32, device=device)
    part_exponent, part_total = part.new_empty((2, *sizes))
    latent_kernel[(cdiv(count, lines), requests, lanes)](
        absorbed, cache, part, part_exponent, part_total, rows.query_start, paging.context_lens,
        paging.block_tables, rows.positions, rows.places, *tree_of(sees),
        paging.block_tables.stride(0), heads.scale, most_rows, parts, joined=joined,
        heads=heads.num_heads, rank=rank, rotary_dim=heads.rotary_dim, block_size=block_size,
        block_m=lines, block_n=16 if floats else 128 if large else 64, early=early,
        first_seen=sees.first_seen, causal=sees.causal, **_blocks(heads), num_warps=WARPS,
        num_stages=1 if floats else STAGES, **launched,
    )  # fmt: skip
    rows_at_once = min(32, next_power_of_2(len(out)))
    block_m = max(8, rows_at_once)
    block_v, block_c = min(64, max(16, next_power_of_2(heads.value_dim))), _blocks(heads)["block_c"]
    most = 32 * part.itemsize  # bytes of a column of the largest tile, whatever this one is
    while (block_v * absorbed.itemsize + most) * block_c > shared_memory(device):
        block_v //= 2
    grid = cdiv(heads.value_dim, block_v), heads.num_heads, cdiv(len(out), rows_at_once)
    values_kernel[grid](
        part, part_exponent, part_total, heads.values, out, rows.query_start, paging.context_lens,
        heads.values.stride(0), requests, len(out), most_rows, parts, heads=heads.num_heads,
        rank=rank, value_dim=heads.value_dim, lines=rows_at_once, block_m=block_m,
        block_v=block_v, block_c=block_c, block_r=next_power_of_2(requests),
        block_s=16, at_once=1 if joined else 64 // block_m, early=early, num_warps=8, **launched,
    )  # fmt: skip


def _chunks(
    absorbed: Tensor, heads: LatentHeads, inputs: PassInputs, cache: Tensor, out: Tensor
) -> None:
    """Write `out` for requests of more than `SHORT_ROWS` rows; other rows become undefined."""
    rows, paging, sees = inputs.rows, inputs.paging, inputs.sees
    count, requests = len(absorbed), len(paging.context_lens)
    floats = absorbed.dtype == torch.float32
    size = 16 if floats else 64 if shared_memory(absorbed.device) >= LARGE_TILES else 32
    most = cdiv(count * heads.num_heads, size) + min(requests, count // SHORT_ROWS)
    mixed = absorbed.new_empty(count, heads.num_heads, heads.rank)
    latent_chunk_kernel[(1, most)](
        absorbed, cache, mixed, rows.query_start, paging.context_lens, paging.block_tables,
        rows.in_context, *tree_of(sees), paging.block_tables.stride(0), heads.scale, requests,
        SHORT_ROWS, heads=heads.num_heads, rank=heads.rank, rotary_dim=heads.rotary_dim,
        block_size=cache.shape[1], block_m=size, block_n=size,
        block_r=room_for(requests), first_seen=sees.first_seen, causal=sees.causal,
        **_blocks(heads), num_warps=8, num_stages=1 if floats else 2, **options(absorbed.device),
    )  # fmt: skip
    by_head = out.view(count, heads.num_heads, heads.value_dim).transpose(0, 1)
    torch.bmm(mixed.transpose(0, 1), heads.values.transpose(1, 2), out=by_head)


def _short_lines(count: int, requests: int) -> int:
    """Lines of a tile, for requests of `count` lines. Queries are read from shared memory for every
    tile of tokens, which takes most of the time, so with few programs small tiles are faster."""
    few = 2 * requests * cdiv(count, FEWEST_LINES) <= PROGRAMS
    return FEWEST_LINES if few else short_lines(count)


def _blocks(heads: LatentHeads) -> dict[str, int]:
    return {
        "block_c": max(16, next_power_of_2(heads.rank)),
        "block_p": max(16, next_power_of_2(heads.rotary_dim)),
    }
