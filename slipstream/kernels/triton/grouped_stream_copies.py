"""Asynchronous copies of the grouped matmul of quantized weights into its ring buffers.

A group is 32 rows of a weight, a chunk of it 1,024 bytes, `columns` numbers of each row. Scales are
entries of words for a group and `span` chunks.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from slipstream.kernels.triton.matmul_stream_parts import _fetch

# Triton 3.6 has the second name, later versions the first.
_fetch_by_thread = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.jit
def weight_pointers(
    weight, group, last, up_offset, of_group, chunks: gl.constexpr, high: gl.constexpr
):
    """(pointers to `high` tiles of weights at chunk 0, how many chunks later each line is)."""
    layout: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    line = gl.arange(0, 16 * chunks * high, layout=gl.SliceLayout(1, layout))
    byte = gl.arange(0, 128, layout=gl.SliceLayout(0, layout))
    own = group + group_offset(line // (8 * chunks), last, up_offset)
    line = line % (8 * chunks)
    start = own.to(gl.int64) * of_group * 1024
    return (weight + start + line * 128)[:, None] + byte[None, :], line // 8


@gluon.jit
def scale_pointers(
    scales, group, last, up_offset, of_group, of_entry: gl.constexpr, of_half: gl.constexpr,
    high: gl.constexpr,
):  # fmt: skip
    """Pointers to the scales of the same tiles, `of_half` words for 32 rows; a group has `of_group`
    entries."""
    word = gl.arange(0, 2 * high * of_half, layout=gl.BlockedLayout([1], [32], [4], [0]))
    own = group + group_offset(word // of_half, last, up_offset)
    return scales + own.to(gl.int64) * of_group * of_entry + word % of_half


@gluon.jit
def group_offset(half, last, up_offset):
    """How many groups behind a program's first one the `half`-th 32 rows of its tiles are.

    If there is an `up_offset`, each tile has 32 rows of gate and then 32 of up. What lies behind
    the `last` group is that group."""
    if up_offset is None:
        offset = gl.minimum(half, last)
    else:
        offset = gl.minimum(half // 2, last) + half % 2 * up_offset
    return offset


@gluon.jit
def fetch_weights(weights, line_chunk, ring, slot, chunk, end):
    """Load weights from `chunk` on into a slot, zeros from chunk `end` on."""
    inside = line_chunk < end - chunk
    _fetch_by_thread(ring.index(slot), weights + chunk * 1024, mask=inside[:, None])


@gluon.jit
def fetch_rest(
    x_tiles, x_rows, there, place0, scales, ring_x, ring_scales, full, slot, chunk, end,
    last_column, chunks: gl.constexpr, words: gl.constexpr, span: gl.constexpr,
    high: gl.constexpr,
):  # fmt: skip
    """Load x and scales, like `fetch_weights`; x has zeros from `last_column` on."""
    width: gl.constexpr = ring_x.shape[2]
    column0 = chunk * (width // chunks)
    if x_tiles is None:
        x_layout: gl.constexpr = x_rows.type.layout.parent
        column = gl.arange(0, width, layout=gl.SliceLayout(0, x_layout))
        inside = there[:, None] & (column < last_column - column0)[None, :]
        place = ring_x.index(slot)
        _fetch_by_thread(place, x_rows[:, None] + (column0 + column)[None, :], mask=inside)
    else:
        mbarrier.expect(full.index(slot), 2 * width * ring_x.shape[1], chunk < end)
        _fetch(x_tiles, [place0, column0], full.index(slot), ring_x.index(slot), chunk < end)
    if words:
        of_entry: gl.constexpr = 16 * words
        count: gl.constexpr = of_entry * (chunks // span)
        word = gl.arange(0, 2 * high * count, layout=scales.type.layout) % count
        known = word // of_entry * span < end - chunk
        _fetch_by_thread(ring_scales.index(slot), scales + chunk // span * of_entry, mask=known)
    async_copy.commit_group()
