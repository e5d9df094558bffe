"""Paged attention over ragged rows: prompt chunks, plain decode and verification of 1+k rows.

The rows of a request and the query heads that share a KV head are packed into one axis, line
m = row * groups + head, so that keys are read once for all of them and tensor cores can be used.

For a request of at most `SHORT_ROWS` rows, the context is split at fixed tokens
(`attention_parts.py`), and the same kernel norms and rotates queries and keys. A longer request (a
prompt chunk) is computed with larger tiles and without splits, after a kernel that rotates and
stores; `attention_stream.py` says when Hopper's own kernel does it, which may share out contexts.
Whether a request is short depends only on its own number of rows, so a row of a decoding request
has the same bits alone, in any batch, and with any number of draft rows up to that limit. The host
reads shapes only, and never waits for the device.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.attention import FLOAT8_PAGES, query_key_norms, split_heads
from slipstream.kernels.pass_inputs import PassInputs, SharedBlocks
from slipstream.kernels.table import Heads
from slipstream.kernels.triton import attention_stream
from slipstream.kernels.triton.activation import gated_rows
from slipstream.kernels.triton.attention_chunk_kernel import chunk_kernel
from slipstream.kernels.triton.attention_combine_kernel import combine_kernel
from slipstream.kernels.triton.attention_parts import SMALLEST, most_splits
from slipstream.kernels.triton.attention_shapes import (
    MULTIPROCESSORS,
    SHORT_ROWS,
    AttentionShape,
    most_tokens_of,
    room_for,
    tree_of,
)
from slipstream.kernels.triton.attention_shared_kernel import shared_kernel
from slipstream.kernels.triton.attention_short_kernels import short_kernel
from slipstream.kernels.triton.launch import (
    cdiv,
    empty_rows,
    fitting_stages,
    next_power_of_2,
    options,
    shared_memory,
)
from slipstream.kernels.triton.rope import pages_of, rotate_and_store

COMBINING = 1024  # programs of the combine kernel, about
COMBINED_AT_ONCE = 16
SHARED_TILES = 2  # of lines in a program for shared tokens; with more products would be the limit
# Time of a line with shared tokens, over that of a line of a tile of one request. Such tiles are
# padded, and hide their products behind loads, so sharing is faster only if most lines are padding.
SHARED_COST = 2
# Bytes of the partial sums of all requests; where they would be more, each reads shared tokens.
MOST_PART_BYTES = 256 << 20
NARROW_WINDOW = 256  # tokens; up to here one program is faster than several and a combine kernel
# With dependent launch, block tables, positions and cached tokens of earlier passes are read before
# the previous kernel has ended. So between the kernels that write them and this one there must be
# an ordinary launch (without dependent launch, as torch's are): the embedding of each pass is one.
EARLY = True


@dataclass(frozen=True)
class AttentionTiles:
    """Lines and cached tokens of one tile, and the options that its kernel is compiled with."""

    lines: int
    tokens: int
    warps: int
    stages: int
    registers: int | None = None


def short_lines(lines: int) -> int:
    """Lines of a tile, for requests of at most `lines` lines: 16 or 32.

    A line's bits do not depend on the choice: tensor cores add in the same order up to 32 lines,
    but not from 64 on.
    """
    return int(min(32, max(16, next_power_of_2(lines))))


def short_tiles(
    lines: int, pairs: int, block_d: int, dtype: torch.dtype, eight_bits: bool = False
) -> tuple[AttentionTiles, int]:
    """(tiles of `lines` lines, number of programs for `pairs` pairs of a tile and a KV head).

    A line's bits depend only on `AttentionTiles.tokens`, of which splits are multiples. With
    dependent launch, programs gather on the multiprocessors that become free first. The number of
    stages prevents that: it leaves shared memory only for the programs that each one should run.
    """
    if dtype == torch.float32:
        return AttentionTiles(lines, 32 if block_d <= 256 else 16, 4, 1), 3 * MULTIPROCESSORS
    if block_d > 256:
        return AttentionTiles(lines, 32, 8, 2), MULTIPROCESSORS
    if block_d > 128:
        return AttentionTiles(lines, 64, 8, 2), 2 * MULTIPROCESSORS
    # A tile's latency hardly depends on its tokens, so larger ones are faster; but those of 8 bits
    # need more registers to convert.
    tokens = 64 if eight_bits else 128
    # For 32 lines one program a multiprocessor is enough; for 16, more and shorter ones are faster.
    if pairs * 3 <= MULTIPROCESSORS or (lines > 16 and pairs <= MULTIPROCESSORS):
        # A page of 8 bits takes half the shared memory, and its conversion more time than loading.
        programs, stages = MULTIPROCESSORS * (2 if eight_bits else 1), 5 if eight_bits else 3
        return AttentionTiles(lines, tokens, 4, stages), programs
    if pairs * 2 <= 3 * MULTIPROCESSORS:
        registers, stages = (168, 3) if eight_bits else (None, 2)
        return AttentionTiles(lines, tokens, 4, stages, registers), 3 * MULTIPROCESSORS
    return AttentionTiles(lines, tokens, 4, 4 if eight_bits else 2), pairs


def chunk_tiles(block_d: int, dtype: torch.dtype, shared: int) -> AttentionTiles:
    """Tiles of prompts where a program may have `shared` bytes of shared memory."""
    if dtype == torch.float32:
        return AttentionTiles(32, 32, 4, 1) if block_d <= 256 else AttentionTiles(16, 16, 4, 1)
    if block_d > 256:
        return AttentionTiles(64, 32 if shared >= 128 * 1024 else 16, 8, 1)
    if block_d > 128:
        return AttentionTiles(64, 64, 4, 2)
    # Two programs share a multiprocessor: one multiplies while the other computes the softmax.
    return AttentionTiles(128, 64, 8, 2, 128)


def attend(qkv: Tensor, heads: Heads, inputs: PassInputs, cache: tuple[Tensor, Tensor]) -> Tensor:
    """See `Ops.attend`."""
    layer = AttentionShape(
        heads.num_heads,
        heads.num_kv_heads,
        heads.head_dim,
        heads.scale,
        heads.window,
        heads.sinks,
        heads.softcap,
    )
    query = None
    if most_rows_of(qkv, inputs) > SHORT_ROWS:
        # This stores the rows of short requests as well; `short_kernel` stores them once more.
        norms = query_key_norms(heads)
        query = rotate_and_store(*split_heads(qkv, heads), norms, heads.cos_sin, inputs, cache)
        query = query.flatten(-2)
    out = _attention(qkv, query, heads, layer, inputs, cache)
    return gated_rows(out, qkv[:, -out.shape[1] :]) if heads.gated else out


def paged_attention(
    query: Tensor,
    cache: tuple[Tensor, Tensor],
    inputs: PassInputs,
    scale: float,
    window: int | None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention of rotated queries [T, Hq, D] over keys and values in the cache: [T, Hq, D]."""
    heads, head_dim = query.shape[1:]
    layer = AttentionShape(heads, cache[0].shape[2], head_dim, scale, window, sinks, softcap)
    assert query[0].is_contiguous()
    flat = query.flatten(-2)
    return _attention(flat, flat, None, layer, inputs, cache).view(query.shape)


def _attention(
    source: Tensor,
    query: Tensor | None,
    turn: Heads | None,
    layer: AttentionShape,
    inputs: PassInputs,
    cache: tuple[Tensor, Tensor],
) -> Tensor:
    """Attention of all requests: [T, Hq * D].

    Short requests read `source`, which the kernel rotates as `turn` says (None: it is rotated);
    requests of more than `SHORT_ROWS` rows read the rotated `query`.
    """
    out = empty_rows(len(source), layer.heads * layer.head_dim, source.dtype, source.device)
    if not out.numel():
        return out
    keys, values = cache
    assert keys.dtype == values.dtype
    assert keys.dtype in (source.dtype, FLOAT8_PAGES)
    assert source.stride(1) == 1
    assert keys.is_contiguous()
    assert values.is_contiguous()
    _short(source, turn, layer, inputs, cache, out)
    if most_rows_of(source, inputs) > SHORT_ROWS:
        assert query is not None
        _chunks(query, layer, inputs, cache, out)
    return out


def _short(
    source: Tensor,
    turn: Heads | None,
    layer: AttentionShape,
    inputs: PassInputs,
    cache: tuple[Tensor, Tensor],
    out: Tensor,
) -> None:
    """Compute requests of at most `SHORT_ROWS` rows: sums of splits, then their total."""
    rows, paging, sees = inputs.rows, inputs.paging, inputs.sees
    most_rows = min(most_rows_of(source, inputs), SHORT_ROWS)
    block_size, requests = cache[0].shape[1], len(paging.context_lens)
    lines = short_lines(most_rows * layer.groups)
    pairs = layer.kv_heads * cdiv(most_rows * layer.groups, lines)
    eight_bits = cache[0].dtype == FLOAT8_PAGES
    tiles, programs = short_tiles(lines, requests * pairs, layer.block_d, source.dtype, eight_bits)
    assert SMALLEST % tiles.tokens == 0, "tiles do not cross splits"
    splits = most_splits_of(inputs, block_size, layer.window, most_rows)
    lanes = max(1, min(splits, programs // (requests * pairs)))
    if layer.window is not None and layer.window + most_rows <= NARROW_WINDOW:
        lanes = 1
    parts: tuple[Tensor | None, ...] = (None, None, None)
    sizes = (requests, most_rows, layer.heads, splits)  # no rows of chunks, which are many
    shared = paging.shared
    if (
        layer.window is not None
        or SHARED_COST * most_rows * layer.groups > lines
        or 4 * math.prod(sizes) * layer.head_dim > MOST_PART_BYTES
    ):
        shared = None
    if lanes > 1 or shared is not None:
        part = torch.empty((*sizes, layer.head_dim), dtype=torch.float32, device=source.device)
        parts = part, *part.new_empty((2, *sizes))
    if shared is not None:
        _shared(source, turn, layer, inputs, cache, shared, parts, sizes)
    window = layer.window
    launched = options(source.device)
    early = EARLY and launched["pdl"]
    short_kernel[(pairs, requests, lanes)](
        source, *pages_of(cache), out, *parts, rows.query_start,
        paging.context_lens, paging.block_tables, rows.positions, rows.places, paging.slots,
        *tree_of(sees), sees.last_seen, None if shared is None else shared.tokens, layer.sinks,
        *_turn(turn), source.stride(0), paging.block_tables.stride(0), layer.scale, layer.softcap,
        window, most_rows, splits, early=early,
        first_seen=sees.first_seen, causal=sees.causal,
        new_rows=max(4, next_power_of_2(most_rows)),
        rotary_dim=layer.head_dim if turn is None else turn.rotary_dim,
        **_built(layer, cache, tiles), **launched,
    )  # fmt: skip
    if parts[0] is not None:
        combine_kernel[(min(most_rows * layer.heads, cdiv(COMBINING, requests)), requests)](
            *parts, out, rows.query_start, paging.context_lens,
            layer.sinks, window, most_rows, splits, heads=layer.heads, head_dim=layer.head_dim,
            block_d=layer.block_d, block_s=64, at_once=COMBINED_AT_ONCE, num_warps=4, early=early,
            **launched,
        )  # fmt: skip


def _shared(
    source: Tensor,
    turn: Heads | None,
    layer: AttentionShape,
    inputs: PassInputs,
    cache: tuple[Tensor, Tensor],
    shared: SharedBlocks,
    parts: tuple[Tensor | None, ...],
    sizes: tuple[int, int, int, int],
) -> None:
    """Write the partial sums of the splits that lie in the shared tokens, for the group's rows.
    `parts` are those of `short_kernel`: [*sizes, head_dim], [*sizes] and [*sizes]."""
    rows, paging = inputs.rows, inputs.paging
    requests, most_rows, _, splits = sizes
    own, _ = short_tiles(32, 1, layer.block_d, source.dtype, cache[0].dtype == FLOAT8_PAGES)
    lines = requests * most_rows * layer.groups
    # Two tiles fit into the registers of 8 warps; small heads cannot be divided among so many.
    count = SHARED_TILES if 128 <= layer.block_d <= 256 and lines > own.lines else 1
    tiles = replace(own, warps=8 if count > 1 else own.warps, registers=None)
    pairs = layer.kv_heads * cdiv(lines, count * tiles.lines)
    # One program fits on a multiprocessor: all at once, or so many that the last ones matter less.
    waves = 1 if 2 * pairs <= MULTIPROCESSORS else 4
    lanes = max(1, min(splits, waves * MULTIPROCESSORS // pairs))
    launched = options(source.device)
    query_weight, _, eps, cos_sin = _turn(turn)
    shared_kernel[(pairs, lanes)](
        source, *pages_of(cache), *parts, rows.query_start, paging.context_lens,
        paging.block_tables, rows.positions, shared.tokens, shared.members, query_weight, eps,
        cos_sin, source.stride(0), paging.block_tables.stride(0), layer.scale, layer.softcap,
        requests, most_rows, splits, early=EARLY and launched["pdl"],
        first_seen=inputs.sees.first_seen,
        rotary_dim=layer.head_dim if turn is None else turn.rotary_dim, tiles=count,
        **_built(layer, cache, tiles, count), **launched,
    )  # fmt: skip


def _chunks(
    query: Tensor,
    layer: AttentionShape,
    inputs: PassInputs,
    cache: tuple[Tensor, Tensor],
    out: Tensor,
) -> None:
    """Write `out` for requests of more than `SHORT_ROWS` rows."""
    rows, paging, sees = inputs.rows, inputs.paging, inputs.sees
    if attention_stream.streams(query, layer, sees, cache):
        attention_stream.stream(query, layer, inputs, cache, out)
        return
    count, requests = len(query), len(paging.context_lens)
    tiles = chunk_tiles(layer.block_d, query.dtype, shared_memory(query.device))
    if sees.tree is not None:
        tiles = replace(tiles, registers=None)  # with the limit, many would spill
    most = cdiv(count * layer.groups, tiles.lines) + min(requests, count // SHORT_ROWS)
    chunk_kernel[(layer.kv_heads, most)](
        query, *pages_of(cache), out, rows.query_start, paging.context_lens, paging.block_tables,
        rows.in_context, *tree_of(sees), sees.last_seen, layer.sinks, query.stride(0),
        paging.block_tables.stride(0), layer.scale, layer.softcap, layer.window, requests,
        SHORT_ROWS, block_r=room_for(requests), first_seen=sees.first_seen,
        causal=sees.causal, **_built(layer, cache, tiles),
        **options(query.device),
    )  # fmt: skip


def most_rows_of(source: Tensor, inputs: PassInputs) -> int:
    return min(len(source), inputs.rows.max_rows or len(source))


def most_splits_of(inputs: PassInputs, block_size: int, window: int | None, most_rows: int) -> int:
    """The largest number of splits that the rows of one request may see."""
    splits = most_splits(most_tokens_of(inputs.paging, block_size))
    if window is None:
        return splits
    # The rows together see window + rows - 1 tokens, and a split has at least `SMALLEST` tokens.
    return min(splits, 1 + int(cdiv(window + most_rows - 2, SMALLEST)))


def _built(
    layer: AttentionShape, cache: tuple[Tensor, Tensor], tiles: AttentionTiles, count: int = 1
) -> dict[str, Any]:
    """The compile-time arguments and compiler options that the kernels have in common, for programs
    with `count` tiles of lines."""
    keys, itemsize = cache[0], max(2, cache[0].itemsize)
    pages, rows = tiles.tokens * layer.block_d, count * tiles.lines * layer.block_d
    stages = fitting_stages(
        keys.device, tiles.stages, tile=2 * pages * keys.itemsize, others=2 * rows * itemsize
    )
    built = {
        "kv_heads": layer.kv_heads,
        "groups": layer.groups,
        "head_dim": layer.head_dim,
        "stored_dim": keys.shape[3],
        "block_size": keys.shape[1],
        "block_m": tiles.lines,
        "block_n": tiles.tokens,
        "block_d": layer.block_d,
        "num_warps": tiles.warps,
        "num_stages": stages,
    }
    if tiles.registers is not None:
        built["maxnreg"] = tiles.registers
    return built


def _turn(heads: Heads | None) -> tuple[Tensor | None, Tensor | None, float, Tensor | None]:
    """(weight of the query norm, weight of the key norm, their epsilon, cos_sin)."""
    if heads is None:
        return None, None, 0.0, None
    query, key, eps = query_key_norms(heads) or (None, None, 0.0)
    return query, key, eps, heads.cos_sin
