"""The kernels of gated delta nets for requests of many rows (prompt chunks): see `delta_net.py`.

For a chunk of C rows, with G the cumulative sums of the logarithms of the decays, and S the state
before the chunk:

    A_ij = b_i exp(G_i - G_j) (k_i k_j) for j < i, M_ij = exp(G_i - G_j) (q_i k_j) for j <= i
    D = (I + A)^-1 diag(b) (V - diag(exp G) K S)
    out = diag(exp G) Q S + M D;  S <- exp(G_C) S + sum_j exp(G_C - G_j) k_j (x) d_j

(Yang et al. 2024, "Gated Delta Networks"). Queries and keys are the convolution's outputs; their
scales are included in the factors of their rows. Gates, sums and the state are float32; the tensor
cores multiply numbers in the dtype of the rows.
"""

import triton
import triton.language as tl

from slipstream.kernels.triton.delta_net_row_kernels import moves_of
from slipstream.kernels.triton.launch import launch_dependents, wait_for_inputs


@triton.jit
def _tile(active, at, there, column, inside, channels: tl.constexpr):
    return tl.load(
        active + at[:, None] * channels + column[None, :],
        mask=there[:, None] & inside[None, :], other=0.0,
    )  # fmt: skip


@triton.jit
def _inverse(lower, size: tl.constexpr, levels: tl.constexpr, precision: tl.constexpr):
    """(I + lower)^-1 of a strictly lower triangular matrix of 2^levels rows.

    [[X, 0], [L, Y]] has the inverse [[X', 0], [-Y' L X', Y']]: pairs of blocks, from size 1 on.
    """
    row = tl.arange(0, size)[:, None]
    column = tl.arange(0, size)[None, :]
    found = tl.where(row == column, 1.0, 0.0) + tl.zeros((size, size), tl.float32)
    found -= tl.where((row == column + 1) & (row % 2 == 1), lower, 0.0)
    for level in range(1, levels):
        pair = (row >> level == (column >> level) + 1) & ((row >> level) % 2 == 1)
        corner = tl.dot(tl.where(pair, lower, 0.0), found, input_precision=precision)
        found -= tl.dot(found, corner, input_precision=precision)
    return found


@triton.jit
def solve_kernel(
    active, numbers, pieces, query_start, inverses, mixing, factors, key_heads: tl.constexpr,
    value_heads: tl.constexpr, key_dim: tl.constexpr, value_dim: tl.constexpr,
    most_drafts: tl.constexpr, block_k: tl.constexpr, size: tl.constexpr,
    levels: tl.constexpr, precision: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """Programs (value head, chunk): the part of a chunk that does not depend on the state.

    inverses [chunks, Hv, C, C]: (I + A)^-1 diag(b); mixing, of the same shape: M; factors [chunks,
    Hv, 4, C] float32: of keys that read the state, of queries, of keys that are written, and of the
    state.
    """
    launch_dependents(pdl)
    wait_for_inputs(pdl)
    head, chunk = tl.program_id(0), tl.program_id(1)
    request = tl.load(pieces + chunk * 3)
    begin = tl.load(pieces + chunk * 3 + 1)
    length = tl.load(pieces + chunk * 3 + 2)
    if length == 0:
        return
    channels: tl.constexpr = 2 * key_heads * key_dim + value_heads * value_dim
    width: tl.constexpr = 2 * key_heads + 2 * value_heads
    key_head = head // (value_heads // key_heads)
    row, column = tl.arange(0, size), tl.arange(0, block_k)
    there = row < length
    first = tl.load(query_start + request).to(tl.int64)
    at = first + request * most_drafts + begin + row
    keys = _tile(
        active, at, there, (key_heads + key_head) * key_dim + column, column < key_dim, channels
    )
    query = _tile(active, at, there, key_head * key_dim + column, column < key_dim, channels)
    of_query = tl.load(numbers + at * width + key_head, mask=there, other=0.0)
    of_key = tl.load(numbers + at * width + key_heads + key_head, mask=there, other=0.0)
    at = at * width + 2 * key_heads + head
    strength = tl.load(numbers + at, mask=there, other=0.0)
    step = tl.load(numbers + at + value_heads, mask=there, other=0.0)
    kept = tl.cumsum(step, axis=0)
    all_kept = tl.sum(step, axis=0)
    earlier = row[:, None] > row[None, :]
    # The difference first: the decay over a whole chunk may underflow to 0.
    between = tl.where(row[:, None] >= row[None, :], kept[:, None] - kept[None, :], 0.0)
    between = tl.exp(between) * of_key[None, :]
    lower = tl.dot(keys, tl.trans(keys), input_precision=precision)
    lower = tl.where(earlier, lower * between * (strength * of_key)[:, None], 0.0)
    mixed = tl.dot(query, tl.trans(keys), input_precision=precision) * between * of_query[:, None]
    mixed = tl.where(row[:, None] >= row[None, :], mixed, 0.0)
    inverse = _inverse(lower, size, levels, precision) * strength[None, :]
    dtype: tl.constexpr = inverses.dtype.element_ty
    place = (chunk.to(tl.int64) * value_heads + head) * size
    own = place * size + row[:, None] * size + row[None, :]
    tl.store(inverses + own, inverse.to(dtype))
    tl.store(mixing + own, mixed.to(dtype))
    own = factors + place * 4 + row
    tl.store(own, tl.exp(kept) * of_key)
    tl.store(own + size, tl.exp(kept) * of_query)
    tl.store(own + 2 * size, tl.exp(all_kept - kept) * of_key)
    tl.store(own + 3 * size, tl.exp(all_kept) + tl.zeros_like(kept))


@triton.jit
def chunks_kernel(
    active, states, moves, first_chunks, inverses, mixing, factors, read, most_rows,
    key_heads: tl.constexpr, value_heads: tl.constexpr, key_dim: tl.constexpr,
    value_dim: tl.constexpr, most_drafts: tl.constexpr, block_k: tl.constexpr,
    block_v: tl.constexpr, size: tl.constexpr, stages: tl.constexpr, precision: tl.constexpr,
    pdl: tl.constexpr,
):  # fmt: skip
    """Programs (columns of values, value head, request): the request's chunks one after the other.

    Chunks end where the checkpoint is saved, and after the last committed row.
    read [T, Hv, Dv] float32.
    """
    launch_dependents(pdl)
    wait_for_inputs(pdl)
    head, request = tl.program_id(1), tl.program_id(2)
    first, total, waiting, taken, save, slot, saved_place = moves_of(moves, request)
    if total - waiting <= most_rows:
        return
    channels: tl.constexpr = 2 * key_heads * key_dim + value_heads * value_dim
    key_head = head // (value_heads // key_heads)
    row, key = tl.arange(0, size), tl.arange(0, block_k)
    column = tl.program_id(0) * block_v + tl.arange(0, block_v)
    inside = (key < key_dim)[:, None] & (column < value_dim)[None, :]
    own = (key * value_dim)[:, None] + column[None, :]
    source = states + (slot * value_heads + head) * key_dim * value_dim
    state = tl.load(source + own, mask=inside, other=0.0)
    place = (tl.load(first_chunks + request).to(tl.int64) * value_heads + head) * size
    square = row[:, None] * size + row[None, :]
    dtype: tl.constexpr = active.dtype.element_ty
    for part in range(3):
        from_row = tl.where(part == 0, 0, tl.where(part == 1, save, taken))
        end = tl.where(part == 0, save, tl.where(part == 1, taken, total))
        for begin in tl.range(from_row, end, size, num_stages=stages):
            there = begin + row < end
            at = first.to(tl.int64) + request * most_drafts + begin + row
            query = _tile(active, at, there, key_head * key_dim + key, key < key_dim, channels)
            keys = _tile(
                active, at, there, (key_heads + key_head) * key_dim + key, key < key_dim, channels
            )
            value = _tile(
                active, at, there, 2 * key_heads * key_dim + head * value_dim + column,
                column < value_dim, channels,
            )  # fmt: skip
            inverse = tl.load(inverses + place * size + square)
            mixed = tl.load(mixing + place * size + square)
            of_key = tl.load(factors + place * 4 + row)
            of_query = tl.load(factors + place * 4 + size + row)
            of_written = tl.load(factors + place * 4 + 2 * size + row)
            kept = tl.load(factors + place * 4 + 3 * size)
            place += value_heads * size
            before = state.to(dtype)
            found = tl.dot(keys, before, input_precision=precision) * of_key[:, None]
            written = tl.dot(
                inverse, (value.to(tl.float32) - found).to(dtype), input_precision=precision
            )
            result = tl.dot(query, before, input_precision=precision) * of_query[:, None]
            result = tl.dot(mixed, written.to(dtype), result, input_precision=precision)
            written = (written * of_written[:, None]).to(dtype)
            state = tl.dot(tl.trans(keys), written, state * kept, input_precision=precision)
            shown = there & (begin + row >= waiting)
            at = ((first + begin + row - waiting).to(tl.int64) * value_heads + head) * value_dim
            tl.store(
                read + at[:, None] + column[None, :], result,
                mask=shown[:, None] & (column < value_dim)[None, :],
            )  # fmt: skip
        if (part == 0) & (save > 0):
            target = states + (saved_place * value_heads + head) * key_dim * value_dim
            tl.store(target + own, state, mask=inside)
        if part == 1:
            tl.store(source + own, state, mask=inside)
