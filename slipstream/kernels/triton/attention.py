"""Paged attention over ragged rows: prompt chunks, plain decode and verification of 1+k rows.

The query heads that share a KV head and the rows of one request are folded into one axis, line
m = row * groups + head, so that keys are read once for all of them and meet the tensor cores.

A request of at most `SHORT_ROWS` rows is read in splits of its context at fixed tokens
(`attention_parts.py`), and its queries and keys are normed and rotated by the same kernel; a longer
one (a prompt chunk) in one go by larger tiles, behind a kernel that rotates and stores. Which of
the two follows from the request's own rows, so a row of a decoding request has the same bits alone,
in any batch, and with any number of draft rows beside it (up to that limit). The host looks at
shapes only.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from slipstream.kernels.attention import FLOAT8_PAGES
from slipstream.kernels.composition import query_key_norms, split_heads
from slipstream.kernels.pass_inputs import PassInputs, Visibility
from slipstream.kernels.table import Heads
from slipstream.kernels.triton.activation import gated_rows
from slipstream.kernels.triton.attention_chunk_kernel import chunk_kernel
from slipstream.kernels.triton.attention_parts import SMALLEST, most_splits
from slipstream.kernels.triton.attention_short_kernels import combine_kernel, short_kernel
from slipstream.kernels.triton.launch import empty_rows, options
from slipstream.kernels.triton.rope import pages_of, rotate_and_store

SHORT_ROWS = 16
COMBINING = 1024  # programs
COMBINED_AT_ONCE = 16
NARROW_WINDOW = 256  # tokens, that one program reads sooner than it and others are added up
MULTIPROCESSORS = 132
# With dependent launch, tables, positions and the tokens of earlier passes are read before the
# kernel in front has ended. All of that must have been written before an ordinary launch (one
# without dependent launch, such as torch's) that stands between: the embedding of a pass does.
EARLY = True


@dataclass(frozen=True)
class Tiles:
    """Lines and cached tokens of one tile, and how its kernel is built."""

    lines: int
    tokens: int
    warps: int
    stages: int
    registers: int | None = None


@dataclass(frozen=True)
class Layer:
    """Shapes of a layer, and what its scores go through.

    Attributes:
        sinks: see `Heads`.
        softcap: scores become softcap * tanh(score / softcap).
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    sinks: Tensor | None
    softcap: float | None = None

    @property
    def groups(self) -> int:
        return self.heads // self.kv_heads

    @property
    def block_d(self) -> int:
        """The tensor cores take 16 columns of either half at a time."""
        return int(max(32, triton.next_power_of_2(self.head_dim)))


def short_lines(lines: int) -> int:
    """Lines of a tile, for requests of at most so many lines.

    A line's bits do not follow from how many there are: up to 32 lines the tensor cores are used in
    one way (from 64 on in another).
    """
    return int(min(32, max(16, triton.next_power_of_2(lines))))


def short_tiles(lines: int, pairs: int, block_d: int, dtype: torch.dtype) -> tuple[Tiles, int]:
    """Tiles of so many lines, and how many programs to divide `pairs` of a tile and a head among.

    Only `tokens` has to do with a line's bits; splits are multiples of it. With dependent launch,
    programs crowd on the multiprocessors that are free first, where there is room for several: the
    stages are as many as leave room for as many programs as each is to have.
    """
    if dtype == torch.float32:
        return Tiles(lines, 32 if block_d <= 256 else 16, 4, 1), 3 * MULTIPROCESSORS
    if block_d > 256:
        return Tiles(lines, 32, 8, 2), MULTIPROCESSORS
    if block_d > 128:
        return Tiles(lines, 64, 8, 2), 2 * MULTIPROCESSORS
    # A product of 32 lines is work enough; for 16, more and shorter programs are faster.
    if pairs * 3 <= MULTIPROCESSORS or (lines > 16 and pairs <= MULTIPROCESSORS):
        return Tiles(lines, 64, 4, 5), MULTIPROCESSORS
    if pairs * 2 <= 3 * MULTIPROCESSORS:
        return Tiles(lines, 64, 4, 3, 168), 3 * MULTIPROCESSORS
    return Tiles(lines, 64, 4, 4, 168), pairs


def chunk_tiles(block_d: int, dtype: torch.dtype) -> Tiles:
    if dtype == torch.float32:
        return Tiles(32, 32, 4, 1) if block_d <= 256 else Tiles(16, 16, 4, 1)
    if block_d > 256:
        return Tiles(64, 32, 8, 1)
    if block_d > 128:
        return Tiles(64, 64, 4, 2)
    # Two programs share a multiprocessor: one multiplies while the other weighs.
    return Tiles(128, 64, 8, 2, 128)


def attend(qkv: Tensor, heads: Heads, inputs: PassInputs, cache: tuple[Tensor, Tensor]) -> Tensor:
    """See `AttendOp`."""
    layer = Layer(
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
        # Rows of short requests are stored once more, by their own kernel.
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
    """Attention of rotated queries [T, Hq, D] over keys and values that have been stored."""
    heads, head_dim = query.shape[1:]
    layer = Layer(heads, cache[0].shape[2], head_dim, scale, window, sinks, softcap)
    assert query[0].is_contiguous()
    flat = query.flatten(-2)
    return _attention(flat, flat, None, layer, inputs, cache).view(query.shape)


def _attention(
    source: Tensor,
    query: Tensor | None,
    turn: Heads | None,
    layer: Layer,
    inputs: PassInputs,
    cache: tuple[Tensor, Tensor],
) -> Tensor:
    """Requests of few rows from `source`, to be turned by `turn`, the others from `query`."""
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
    layer: Layer,
    inputs: PassInputs,
    cache: tuple[Tensor, Tensor],
    out: Tensor,
) -> None:
    """Requests of at most `SHORT_ROWS` rows: folds of splits, then their sums."""
    rows, paging, sees = inputs.rows, inputs.paging, inputs.sees
    most_rows = min(most_rows_of(source, inputs), SHORT_ROWS)
    block_size, requests = cache[0].shape[1], len(paging.context_lens)
    lines = short_lines(most_rows * layer.groups)
    pairs = layer.kv_heads * triton.cdiv(most_rows * layer.groups, lines)
    tiles, programs = short_tiles(lines, requests * pairs, layer.block_d, source.dtype)
    assert SMALLEST % tiles.tokens == 0, "tiles do not cross splits"
    splits = most_splits_of(inputs, block_size, layer.window, most_rows)
    lanes = max(1, min(splits, programs // (requests * pairs)))
    if layer.window is not None and layer.window + most_rows <= NARROW_WINDOW:
        lanes = 1
    part = part_exponent = part_total = None
    if lanes > 1:
        sizes = (len(source), layer.heads, splits)
        part = torch.empty((*sizes, layer.head_dim), dtype=torch.float32, device=source.device)
        part_exponent, part_total = part.new_empty((2, *sizes))
    window = layer.window
    launched = options(source.device)
    early = EARLY and launched["pdl"]
    short_kernel[(pairs, requests, lanes)](
        source, *pages_of(cache), out, part, part_exponent, part_total, rows.query_start,
        paging.context_lens, paging.block_tables, rows.positions, rows.places, paging.slots,
        *tree_of(sees), sees.last_seen, layer.sinks, *_turn(turn), source.stride(0),
        paging.block_tables.stride(0), layer.scale, layer.softcap, window, most_rows, splits,
        early=early,
        first_seen=sees.first_seen, causal=sees.causal,
        new_rows=max(4, triton.next_power_of_2(most_rows)),
        rotary_dim=layer.head_dim if turn is None else turn.rotary_dim,
        **_built(layer, cache, tiles), **launched,
    )  # fmt: skip
    if lanes > 1:
        combine_kernel[(min(most_rows * layer.heads, triton.cdiv(COMBINING, requests)), requests)](
            part, part_exponent, part_total, out, rows.query_start, paging.context_lens,
            layer.sinks, window, most_rows, splits, heads=layer.heads, head_dim=layer.head_dim,
            block_d=layer.block_d, block_s=64, at_once=COMBINED_AT_ONCE, num_warps=1, early=early,
            **launched,
        )  # fmt: skip


def _chunks(
    query: Tensor, layer: Layer, inputs: PassInputs, cache: tuple[Tensor, Tensor], out: Tensor
) -> None:
    """Requests of more than `SHORT_ROWS` rows."""
    rows, paging, sees = inputs.rows, inputs.paging, inputs.sees
    count, requests = len(query), len(paging.context_lens)
    tiles = chunk_tiles(layer.block_d, query.dtype)
    if sees.tree is not None:
        tiles = replace(tiles, registers=None)  # many would be spilled
    most = triton.cdiv(count * layer.groups, tiles.lines) + min(requests, count // SHORT_ROWS)
    chunk_kernel[(layer.kv_heads, most)](
        query, *pages_of(cache), out, rows.query_start, paging.context_lens, paging.block_tables,
        rows.in_context, *tree_of(sees), sees.last_seen, layer.sinks, query.stride(0),
        paging.block_tables.stride(0), layer.scale, layer.softcap, layer.window, requests,
        SHORT_ROWS, block_r=triton.next_power_of_2(requests), first_seen=sees.first_seen,
        causal=sees.causal, **_built(layer, cache, tiles),
        **options(query.device),
    )  # fmt: skip


def most_rows_of(source: Tensor, inputs: PassInputs) -> int:
    return min(len(source), inputs.rows.max_rows or len(source))


def most_splits_of(inputs: PassInputs, block_size: int, window: int | None, most_rows: int) -> int:
    """Splits that the rows of any request see."""
    tokens = int(inputs.paging.block_tables.shape[1]) * block_size
    if inputs.paging.max_context is not None:
        tokens = min(tokens, inputs.paging.max_context)
    splits = most_splits(tokens)
    if window is None:
        return splits
    # Rows together see window + rows - 1 tokens, and no two cuts are nearer than `SMALLEST`.
    return min(splits, 1 + int(triton.cdiv(window + most_rows - 2, SMALLEST)))


def _built(layer: Layer, cache: tuple[Tensor, Tensor], tiles: Tiles) -> dict[str, Any]:
    """What the kernels are compiled for."""
    built = {
        "kv_heads": layer.kv_heads,
        "groups": layer.groups,
        "head_dim": layer.head_dim,
        "stored_dim": cache[0].shape[3],
        "block_size": cache[0].shape[1],
        "block_m": tiles.lines,
        "block_n": tiles.tokens,
        "block_d": layer.block_d,
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
    }
    if tiles.registers is not None:
        built["maxnreg"] = tiles.registers
    return built


def _turn(heads: Heads | None) -> tuple[Tensor | None, Tensor | None, float, Tensor | None]:
    """(weight of the query norm, of the key norm, what they add to the mean, cos_sin)."""
    if heads is None:
        return None, None, 0.0, None
    query, key, eps = query_key_norms(heads) or (None, None, 0.0)
    return query, key, eps, heads.cos_sin


def tree_of(sees: Visibility) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(token of each row, its ancestors, where the trees begin)."""
    tree = sees.tree
    if tree is None:
        return None, None, None
    assert tree.tokens.is_contiguous()
    assert tree.ancestors.is_contiguous()
    assert tree.starts.is_contiguous()
    return tree.tokens, tree.ancestors, tree.starts
