"""The kernels of gated delta nets that process row by row; `delta_net.py` launches them.

A row's bits depend only on the state before it and on its own numbers, not on the pass or on other
rows: tiles have one size, and a state is advanced by one row at a time.
"""

import triton
import triton.language as tl

from slipstream.kernels.triton.activation import SILU, gated_value
from slipstream.kernels.triton.launch import launch_dependents, wait_for_inputs

L2_EPS = tl.constexpr(1e-6)


@triton.jit
def moves_of(moves, request):
    """(first row of the pass, number of all rows, of waiting rows, of committed rows, of committed
    rows that the checkpoint includes, slot, place of the checkpoint) of a request.

    Rows are counted from the first waiting one, which follows those that the state includes. All
    are 0 if the request has no rows in this pass, and a checkpoint of 0 rows is not saved.
    """
    query_start, positions, slots, num_known, pending, save_at, saved = moves
    first = tl.load(query_start + request).to(tl.int32)
    rows = tl.load(query_start + request + 1).to(tl.int32) - first
    waiting = tl.load(pending + request).to(tl.int32)
    taken = waiting + tl.load(num_known + request).to(tl.int32)
    start = tl.load(positions + first, mask=rows > 0, other=0).to(tl.int32)
    save = tl.load(save_at + request).to(tl.int32) - (start - waiting)
    save = tl.where((save > 0) & (save <= taken), save, 0)
    total = tl.where(rows > 0, waiting + rows, 0)
    slot = tl.load(slots + request).to(tl.int64)
    return first, total, waiting, taken, save, slot, tl.load(saved + request).to(tl.int64)


@triton.jit
def _rows_at(row, waiting, first, slot, stored, fresh, most_drafts, width, stride):
    """The addresses of rows of a request: of waiting rows, or of rows of this pass."""
    return tl.where(
        row < waiting,
        stored + (slot * most_drafts + row) * width,
        fresh + (first + row - waiting).to(tl.int64) * stride,
    )


@triton.jit
def _raw(
    at, there, mixed, windows, drafted, move, column, before: tl.constexpr, most_drafts, channels,
    mixed_stride,
):  # fmt: skip
    """Rows before the convolution; rows before row 0 are in the window."""
    first, _, waiting, _, _, slot, _ = move
    rows = _rows_at(at, waiting, first, slot, drafted, mixed, most_drafts, channels, mixed_stride)
    rows = tl.where(at < 0, windows + (slot * before + before + at) * channels, rows)
    return tl.load(rows[:, None] + column[None, :], mask=there, other=0.0)


@triton.jit
def _keep_drafts(
    stored, fresh, slot, first, waiting, taken, total, column, inside, most_drafts, width, stride,
    tile: tl.constexpr,
):  # fmt: skip
    """Store the first rows that are not committed yet for the next pass; columns [N]."""
    for begin in range(0, tl.minimum(total - taken, most_drafts), tile):
        draft = begin + tl.arange(0, tile)
        there = (draft < tl.minimum(total - taken, most_drafts))[:, None] & inside[None, :]
        source = fresh + (first + taken - waiting + draft).to(tl.int64) * stride
        value = tl.load(source[:, None] + column[None, :], mask=there)
        target = stored + (slot * most_drafts + draft) * width
        tl.store(target[:, None] + column[None, :], value, mask=there)


@triton.jit
def _convolve(
    mixed, taps, windows, drafted, active, numbers, move, source, begin, end, keeps, head,
    mixed_stride, key_heads: tl.constexpr, value_heads: tl.constexpr, key_dim: tl.constexpr,
    value_dim: tl.constexpr, before: tl.constexpr, most_drafts: tl.constexpr,
    block_d: tl.constexpr, tile: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """Rows [begin, end) of one head of queries, keys or values, and its part of the window."""
    first, total, waiting, taken, save, slot, place = move
    channels: tl.constexpr = 2 * key_heads * key_dim + value_heads * value_dim
    width = tl.where(head < 2 * key_heads, key_dim, value_dim)
    column = tl.arange(0, block_d)
    inside = column < width
    behind_keys = 2 * key_heads * key_dim + (head - 2 * key_heads) * value_dim
    column += tl.where(head < 2 * key_heads, head * key_dim, behind_keys)
    tap_rows = taps + column * (before + 1)
    wait_for_inputs(pdl)
    for start in range(begin, end, tile):
        row = start + tl.arange(0, tile)
        value = tl.zeros((tile, block_d), tl.float32)
        for tap in tl.static_range(before + 1):
            at = row + tap - before
            there = (row < end)[:, None] & inside[None, :]
            raw = _raw(
                at, there, mixed, windows, drafted, move, column, before, most_drafts, channels,
                mixed_stride,
            ).to(tl.float32)  # fmt: skip
            gain = tl.load(tap_rows + tap, mask=inside, other=0.0).to(tl.float32)
            value += raw * gain[None, :]
        rounded = (value / (1.0 + tl.exp(-value))).to(active.dtype.element_ty)
        target = source + row
        tl.store(
            active + target[:, None] * channels + column[None, :], rounded,
            mask=(row < end)[:, None] & inside[None, :],
        )  # fmt: skip
        if head < 2 * key_heads:
            wide = rounded.to(tl.float32)
            inverse = tl.rsqrt(tl.sum(wide * wide, axis=1) + L2_EPS)
            inverse *= tl.where(head < key_heads, key_dim**-0.5, 1.0)
            own = numbers + target * (2 * key_heads + 2 * value_heads) + head
            tl.store(own, inverse, mask=row < end)
    if keeps:
        index = tl.arange(0, triton.next_power_of_2(before))
        there = (index < before)[:, None] & inside[None, :]
        kept = _raw(
            taken - before + index, there, mixed, windows, drafted, move, column, before,
            most_drafts, channels, mixed_stride,
        )  # fmt: skip
        checkpoint = _raw(
            save - before + index, there, mixed, windows, drafted, move, column, before,
            most_drafts, channels, mixed_stride,
        )  # fmt: skip
        tl.debug_barrier()  # other threads of this program still read data that is written next
        target = (slot * before + index) * channels
        tl.store(windows + target[:, None] + column[None, :], kept, mask=there)
        if save > 0:
            target = (place * before + index) * channels
            tl.store(windows + target[:, None] + column[None, :], checkpoint, mask=there)
        _keep_drafts(
            drafted, mixed, slot, first, waiting, taken, total, column, inside, most_drafts,
            channels, mixed_stride, tile,
        )  # fmt: skip


@triton.jit
def _gates(
    gates, decay, step_bias, drafted_gates, numbers, move, source, begin, end, keeps, gates_stride,
    key_heads: tl.constexpr, value_heads: tl.constexpr, most_drafts: tl.constexpr,
    block_h: tl.constexpr, tile: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """Write strengths and logarithms of decays, of rows [begin, end)."""
    first, total, waiting, taken, _, slot, _ = move
    head = tl.arange(0, block_h)
    inside = head < value_heads
    rate = tl.load(decay + head, mask=inside, other=0.0)
    bias = tl.load(step_bias + head, mask=inside, other=0.0)
    wait_for_inputs(pdl)
    for start in range(begin, end, tile):
        row = start + tl.arange(0, tile)
        there = (row < end)[:, None] & inside[None, :]
        rows = _rows_at(
            row, waiting, first, slot, drafted_gates, gates, most_drafts, 2 * value_heads,
            gates_stride,
        )  # fmt: skip
        rows = rows[:, None] + head[None, :]
        strength = tl.load(rows, mask=there, other=0.0).to(tl.float32)
        step = tl.load(rows + value_heads, mask=there, other=0.0).to(tl.float32) + bias[None, :]
        step = tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(tl.minimum(step, 20.0))))
        target = (source + row) * (2 * key_heads + 2 * value_heads) + 2 * key_heads
        target = numbers + target[:, None] + head[None, :]
        tl.store(target, 1.0 / (1.0 + tl.exp(-strength)), mask=there)
        tl.store(target + value_heads, rate[None, :] * step, mask=there)
    if keeps:
        tl.debug_barrier()  # as above
        column = tl.arange(0, 2 * block_h)
        _keep_drafts(
            drafted_gates, gates, slot, first, waiting, taken, total, column,
            column < 2 * value_heads, most_drafts, 2 * value_heads, gates_stride, tile,
        )  # fmt: skip


@triton.jit
def convolve_kernel(
    mixed, gates, taps, decay, step_bias, cache, moves, pieces, active, numbers, mixed_stride,
    gates_stride, key_heads: tl.constexpr, value_heads: tl.constexpr, key_dim: tl.constexpr,
    value_dim: tl.constexpr, before: tl.constexpr, most_drafts: tl.constexpr,
    block_d: tl.constexpr, block_h: tl.constexpr, tile: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """Programs (head of queries, keys, values, then one for all gates; request or piece of one).

    The first program of a request also updates its part of the window, and stores draft rows: no
    other program reads these. A piece has more rows than can wait.
    """
    launch_dependents(pdl)
    windows, drafted, drafted_gates = cache
    head = tl.program_id(0)
    if pieces is None:
        request = tl.program_id(1)
        move = moves_of(moves, request)
        begin, end = 0, move[1]
    else:
        wait_for_inputs(pdl)
        piece = pieces + tl.program_id(1) * 3
        request = tl.load(piece)
        move = moves_of(moves, request)
        begin = tl.load(piece + 1)
        end = begin + tl.load(piece + 2)
    if begin >= end:
        wait_for_inputs(pdl)
        return
    source = move[0].to(tl.int64) + request * most_drafts
    if head < 2 * key_heads + value_heads:
        _convolve(
            mixed, taps, windows, drafted, active, numbers, move, source, begin, end, begin == 0,
            head, mixed_stride, key_heads, value_heads, key_dim, value_dim, before, most_drafts,
            block_d, tile, pdl,
        )  # fmt: skip
    else:
        _gates(
            gates, decay, step_bias, drafted_gates, numbers, move, source, begin, end, begin == 0,
            gates_stride, key_heads, value_heads, most_drafts, block_h, tile, pdl,
        )  # fmt: skip


@triton.jit
def _row(
    active, numbers, source, row, total, head, key, column, key_heads: tl.constexpr,
    value_heads: tl.constexpr, key_dim: tl.constexpr, value_dim: tl.constexpr,
):  # fmt: skip
    """(query, key, value, write strength, decay) of a row; zeros after the last row."""
    channels: tl.constexpr = 2 * key_heads * key_dim + value_heads * value_dim
    key_head = head // (value_heads // key_heads)
    of_keys = (row + 0 * key < total) & (key < key_dim)
    of_values = (row + 0 * column < total) & (column < value_dim)
    own = active + (source + row) * channels
    own_keys = own + key_head * key_dim + key
    query = tl.load(own_keys, mask=of_keys, other=0.0).to(tl.float32)
    keys = tl.load(own_keys + key_heads * key_dim, mask=of_keys, other=0.0).to(tl.float32)
    own += 2 * key_heads * key_dim + head * value_dim
    value = tl.load(own + column, mask=of_values, other=0.0).to(tl.float32)
    own = numbers + (source + row) * (2 * key_heads + 2 * value_heads)
    query *= tl.load(own + key_head, mask=row < total, other=0.0)
    keys *= tl.load(own + key_heads + key_head, mask=row < total, other=0.0)
    own += 2 * key_heads + head
    strength = tl.load(own, mask=row < total, other=0.0)
    kept = tl.exp(tl.load(own + value_heads, mask=row < total, other=0.0))
    return query, keys, value, strength, kept


@triton.jit
def _add_both(one, two, more_one, more_two):
    return one + more_one, two + more_two


@triton.jit
def recur_kernel(
    active, numbers, states, moves, read, most_rows, key_heads: tl.constexpr,
    value_heads: tl.constexpr, key_dim: tl.constexpr, value_dim: tl.constexpr,
    most_drafts: tl.constexpr, block_k: tl.constexpr, block_v: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """Programs (columns of values, value head, request): the request's rows one after the other,
    with the state in registers. read [T, Hv, Dv] float32.

    The state is loaded before the previous kernel has ended, since an earlier pass has written it.
    """
    launch_dependents(pdl)
    head, request = tl.program_id(1), tl.program_id(2)
    move = moves_of(moves, request)
    first, total, waiting, taken, save, slot, place = move
    if (total == 0) | (total - waiting > most_rows):
        wait_for_inputs(pdl)
        return
    key = tl.arange(0, block_k)
    column = tl.program_id(0) * block_v + tl.arange(0, block_v)
    inside = (key < key_dim)[:, None] & (column < value_dim)[None, :]
    own = (key * value_dim)[:, None] + column[None, :]
    source = states + (slot * value_heads + head) * key_dim * value_dim
    state = tl.load(source + own, mask=inside, other=0.0)
    wait_for_inputs(pdl)
    at = first.to(tl.int64) + request * most_drafts
    query, keys, value, strength, kept = _row(
        active, numbers, at, 0, total, head, key, column, key_heads, value_heads, key_dim,
        value_dim,
    )  # fmt: skip
    for row in range(total):
        # Both are computed from the state before the row, so that neither waits for the other.
        found, result = tl.reduce((state * keys[:, None], state * query[:, None]), 0, _add_both)
        written = (value - found * kept) * strength
        result = result * kept + written * tl.sum(query * keys, axis=0)
        state = state * kept + keys[:, None] * written[None, :]
        query, keys, value, strength, kept = _row(
            active, numbers, at, row + 1, total, head, key, column, key_heads, value_heads,
            key_dim, value_dim,
        )  # fmt: skip
        if row + 1 == save:
            target = states + (place * value_heads + head) * key_dim * value_dim
            tl.store(target + own, state, mask=inside)
        if row + 1 == taken:
            tl.store(source + own, state, mask=inside)
        target = ((first + row - waiting).to(tl.int64) * value_heads + head) * value_dim
        shown = (row + 0 * column >= waiting) & (column < value_dim)
        tl.store(read + target + column, result, mask=shown)


@triton.jit
def gated_norm_kernel(
    read, z, weight, out, z_stride, eps, lines, value_heads: tl.constexpr,
    value_dim: tl.constexpr, block_v: tl.constexpr, tile: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """weight * read / rms(read) * silu(z), for `tile` lines: a line is a row and a value head."""
    launch_dependents(pdl)
    line = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    column = tl.arange(0, block_v)
    inside = (line < lines)[:, None] & (column < value_dim)[None, :]
    gain = tl.load(weight + column, mask=column < value_dim, other=0.0).to(tl.float32)
    own = line[:, None] * value_dim + column[None, :]
    of_z = line // value_heads * z_stride + line % value_heads * value_dim
    wait_for_inputs(pdl)
    value = tl.load(read + own, mask=inside, other=0.0)
    gate = tl.load(z + of_z[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=1) / value_dim + eps)
    result = gated_value(gate, value * scale[:, None] * gain[None, :], SILU)
    tl.store(out + own, result.to(out.dtype.element_ty), mask=inside)
