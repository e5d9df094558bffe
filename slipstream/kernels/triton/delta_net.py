"""Gated delta nets: one convolution and one recurrence for all rows of a pass.

The accepted rows in the cache and the rows of the pass are one sequence for each request: they are
convolved into scratch memory, where request r's rows begin at row `query_start[r] + r K`. A request
of at most `SHORT_ROWS` rows is then processed row by row, with its state in registers, so a row has
the same bits in plain decoding and in verification. A longer one (a prompt chunk) is split into
chunks of `CHUNK` rows for the tensor cores. The choice depends only on the request's own number of
rows. The host reads only shapes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.kernels.delta_net import DeltaCache, DeltaHeads
from slipstream.kernels.pass_inputs import PassInputs
from slipstream.kernels.triton.delta_net_chunk_kernels import chunks_kernel, solve_kernel
from slipstream.kernels.triton.delta_net_row_kernels import (
    convolve_kernel,
    gated_norm_kernel,
    recur_kernel,
)
from slipstream.kernels.triton.launch import cdiv, empty_rows, next_power_of_2, options

SHORT_ROWS = 16
CHUNK = 64  # rows
CONVOLVED = 64  # rows of a program, for requests with many; more than a request's waiting rows
CONVOLVED_AT_ONCE = 4
NORMED_AT_ONCE = 4
# Columns of values of a program. With one warp, sums over keys need no other warp: with four rows
# (9B on an H200, 32 requests) 32 columns with two warps took a fifth longer, but 13 percent less
# with one row.
ROW_COLUMNS = 16
CHUNK_COLUMNS = 32


@dataclass(frozen=True, eq=False)
class _Pieces:
    """Requests split into pieces of rows.

    Attributes:
        table: [pieces, 3] int32: request, first row, number of rows (0 for unused entries).
        first: [R] int32, the first piece of each request.
    """

    table: Tensor
    first: Tensor


@dataclass(frozen=True, eq=False)
class _Plan:
    """The pieces that all layers of a pass with a long request share: for the convolution, and
    chunks."""

    convolved: _Pieces
    chunks: _Pieces


def delta_net(
    mixed: Tensor,
    gates: Tensor,
    z: Tensor,
    heads: DeltaHeads,
    inputs: PassInputs,
    cache: DeltaCache,
    in_chunks: bool | None = None,
) -> Tensor:
    """See `Ops.delta_net`. `in_chunks`: whether long requests are split into chunks; None: unless
    rows are float32, whose exact products would take longer than the row by row kernel."""
    rows, states = inputs.rows, inputs.states
    assert states is not None, "layers with a state are told of it"
    assert mixed.stride(1) == gates.stride(1) == z.stride(1) == 1
    out = empty_rows(len(mixed), heads.num_value_heads * heads.value_dim, z.dtype, z.device)
    if not len(mixed):
        return out
    if in_chunks is None:
        in_chunks = mixed.dtype != torch.float32
    drafts, plan = cache.drafted.shape[1], None
    if min(len(mixed), rows.max_rows or len(mixed)) > SHORT_ROWS:
        plan = _plan(inputs, drafts, len(mixed))
    moves = (
        *(rows.query_start, rows.in_context, states.slots, states.num_known, states.pending),
        *(states.save_at, states.saved),
    )
    convolved = _convolved(mixed, gates, heads, moves, cache, plan)
    read = torch.empty(
        (len(mixed), heads.num_value_heads, heads.value_dim), dtype=torch.float32, device=z.device
    )
    block_v, columns = _block(heads.value_dim), min(_block(heads.value_dim), ROW_COLUMNS)
    launched = options(z.device)
    grid = cdiv(heads.value_dim, columns), heads.num_value_heads, len(states.slots)
    recur_kernel[grid](
        *convolved, cache.states, moves, read, SHORT_ROWS if in_chunks else len(mixed),
        **_shape(heads, drafts), block_k=_block(heads.key_dim), block_v=columns, num_warps=1,
        **launched,
    )  # fmt: skip
    if plan is not None and in_chunks:
        _chunks(*convolved, heads, drafts, cache.states, moves, plan.chunks, read)
    lines = len(mixed) * heads.num_value_heads
    gated_norm_kernel[(cdiv(lines, NORMED_AT_ONCE),)](
        read, z, heads.norm_weight, out, z.stride(0), heads.eps, lines,
        value_heads=heads.num_value_heads, value_dim=heads.value_dim, block_v=block_v,
        tile=NORMED_AT_ONCE, num_warps=1, **launched,
    )  # fmt: skip
    return out


def _shape(heads: DeltaHeads, drafts: int) -> dict[str, int]:
    """The compile-time sizes of the kernels."""
    return {
        "key_heads": heads.num_key_heads,
        "value_heads": heads.num_value_heads,
        "key_dim": heads.key_dim,
        "value_dim": heads.value_dim,
        "most_drafts": drafts,
    }


def _block(width: int) -> int:
    """The columns of a tile: a power of two, at least the 16 that tensor cores need."""
    return int(max(16, next_power_of_2(width)))


def _convolved(
    mixed: Tensor,
    gates: Tensor,
    heads: DeltaHeads,
    moves: tuple[Tensor, ...],
    cache: DeltaCache,
    plan: _Plan | None,
) -> tuple[Tensor, Tensor]:
    """(channels after the convolution, rounded; float32 numbers) of all rows, waiting ones
    included. The numbers are the factors of each query and key, the write strengths, and the
    logarithms of the decays."""
    slots, drafts = moves[2], cache.drafted.shape[1]
    scratch, value_heads = len(mixed) + len(slots) * drafts, heads.num_value_heads
    active = mixed.new_empty(scratch, heads.num_channels)
    counts = 2 * (heads.num_key_heads + value_heads)
    numbers = torch.empty((scratch, counts), dtype=torch.float32, device=mixed.device)
    pieces = None if plan is None else plan.convolved.table
    programs = 2 * heads.num_key_heads + value_heads + 1
    convolve_kernel[(programs, len(slots) if pieces is None else len(pieces))](
        mixed, gates, heads.taps, heads.decay, heads.step_bias,
        (cache.windows, cache.drafted, cache.drafted_gates), moves, pieces, active, numbers,
        mixed.stride(0), gates.stride(0), **_shape(heads, drafts),
        before=heads.taps.shape[1] - 1, block_d=_block(max(heads.key_dim, heads.value_dim)),
        block_h=next_power_of_2(value_heads), tile=CONVOLVED_AT_ONCE, num_warps=2,
        **options(mixed.device),
    )  # fmt: skip
    return active, numbers


def _chunks(
    active: Tensor,
    numbers: Tensor,
    heads: DeltaHeads,
    drafts: int,
    states: Tensor,
    moves: tuple[Tensor, ...],
    chunks: _Pieces,
    read: Tensor,
) -> None:
    """Requests of more than `SHORT_ROWS` rows."""
    count, value_heads = len(chunks.table), heads.num_value_heads
    inverses = active.new_empty(count, value_heads, CHUNK, CHUNK)
    mixing = torch.empty_like(inverses)
    factors = numbers.new_empty(count, value_heads, 4, CHUNK)
    launched = options(active.device)
    built = {
        **_shape(heads, drafts),
        "block_k": _block(heads.key_dim),
        "size": CHUNK,
        "precision": "tf32x3" if active.dtype == torch.float32 else "tf32",
        "num_warps": 4,
        **launched,
    }
    solve_kernel[(value_heads, count)](
        active, numbers, chunks.table, moves[0], inverses, mixing, factors,
        levels=CHUNK.bit_length() - 1, **built,
    )  # fmt: skip
    columns = min(_block(heads.value_dim), CHUNK_COLUMNS)
    chunks_kernel[(cdiv(heads.value_dim, columns), value_heads, len(chunks.first))](
        active, states, moves, chunks.first, inverses, mixing, factors, read, SHORT_ROWS,
        block_v=columns, stages=3 if launched["pdl"] else 2, **built,
    )  # fmt: skip


def _plan(inputs: PassInputs, drafts: int, num_rows: int) -> _Plan:
    """The plan of a pass, which is computed for its first layer and cached for the others."""
    found = inputs.prepared.get("delta net")
    if isinstance(found, _Plan):
        return found
    states, start = inputs.states, inputs.rows.query_start[:-1]
    assert states is not None
    rows = inputs.rows.query_start.diff()
    none = torch.zeros_like(rows)
    total = torch.where(rows > 0, states.pending + rows, none)
    taken = states.pending + states.num_known
    covered = inputs.rows.in_context[start.clamp_max(num_rows - 1)] - states.pending
    save = states.save_at - covered
    save = torch.where((save > 0) & (save <= taken), save, none)
    cuts = torch.stack((none, save, torch.maximum(save, taken), total), 1)
    cuts = torch.where((rows > SHORT_ROWS)[:, None], cuts, 0)
    every, requests = num_rows + len(rows) * drafts, len(rows)
    convolved = max(CONVOLVED, next_power_of_2(drafts + 8))
    plan = _Plan(
        _pieces(torch.stack((none, total), 1), convolved, every // convolved + requests),
        _pieces(cuts, CHUNK, every // CHUNK + 3 * min(requests, num_rows // SHORT_ROWS)),
    )
    inputs.prepared["delta net"] = plan
    return plan


def _pieces(cuts: Tensor, size: int, most: int) -> _Pieces:
    """Pieces of at most `size` rows between `cuts` [R, S + 1]; there are at most `most`."""
    begins, ends = cuts[:, :-1].flatten(), cuts[:, 1:].flatten()
    counts = (ends - begins + size - 1) // size
    until = counts.cumsum(0)
    number = torch.arange(most, device=cuts.device)
    part = torch.searchsorted(until, number, right=True)
    there = part < len(until)
    part = part.clamp_max(len(until) - 1)
    begin = begins[part] + (number - (until - counts)[part]) * size
    length = torch.where(there, (ends[part] - begin).clamp_max(size), 0)
    per_request = cuts.shape[1] - 1
    table = torch.stack((part // per_request, begin, length), 1).int()
    return _Pieces(table, (until - counts)[::per_request].int())
