"""The grouped product of numbers of few bits, with Hopper's own instructions.

    out[pair, n] = sum of x[row, k] * weight[expert, n, k]

Weights lie in the order in which the tensor cores take them (`fragments.py`), so that a thread
makes its part of them from 16 bytes in a row, and they never return to shared memory. The copy
engine brings them through a ring of `stages` tiles; rows of x, which are gathered, and scales come
beside them. A sum runs through all of k in one chain of steps, whatever the number of rows.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from slipstream.kernels.triton import fragments
from slipstream.kernels.triton.matmul_stream_kernels import (
    _barrier,
    _fetch,
    gated_value,
    launch_dependents,
    wait_for_inputs,
)

# Triton 3.6 has the second name, later versions the first.
_fetch_by_thread = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

BYTES = gl.constexpr(gl.NVMMASharedLayout(128, 8, 2))
HALVES = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
WORDS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
# What numbers are: as in `fragments.py`.
E2M1, INT4 = gl.constexpr(fragments.E2M1), gl.constexpr(fragments.INT4)
INT4_ZEROS, INT8 = gl.constexpr(fragments.INT4_ZEROS), gl.constexpr(fragments.INT8)

# Of a word, eight numbers: each pair of them as two halves of a word, scaled. An exponent and a
# mantissa at their places are a number 2 ** 126 too small, which the scales make good.
_UNPACK = gl.constexpr("""{
.reg .b32 a, b;
and.b32 a, $4, 0x81C081C0; mul.rn.bf16x2 $0, a, $5;
shl.b32 a, $4, 3; and.b32 a, a, 0x81C081C0; mul.rn.bf16x2 $1, a, $5;
shl.b32 a, $4, 6; shl.b32 b, $4, 1; and.b32 a, a, 0x01C001C0;
lop3.b32 a, b, 0x80008000, a, 0xEA; mul.rn.bf16x2 $2, a, $9;
shr.u32 a, $4, 3; shl.b32 b, $4, 2; and.b32 a, a, 0x01C001C0;
lop3.b32 a, b, 0x80008000, a, 0xEA; mul.rn.bf16x2 $3, a, $9;
}""")
# Four bits below an exponent are 128 and more, exactly; the middle or the group's zero, 128 more as
# well, is taken off, and only the product with the scale is rounded.
_UNPACK_INT4 = """{
.reg .b32 a, b, z; mov.b32 z, ZERO;
lop3.b32 a, $4, 0x000F000F, 0x43004300, 0xEA;
sub.rn.bf16x2 a, a, z; mul.rn.bf16x2 $0, a, $5;
shr.u32 b, $4, 4; lop3.b32 a, b, 0x000F000F, 0x43004300, 0xEA;
sub.rn.bf16x2 a, a, z; mul.rn.bf16x2 $1, a, $5;
shr.u32 b, $4, 8; lop3.b32 a, b, 0x000F000F, 0x43004300, 0xEA;
sub.rn.bf16x2 a, a, z; mul.rn.bf16x2 $2, a, $5;
shr.u32 b, $4, 12; lop3.b32 a, b, 0x000F000F, 0x43004300, 0xEA;
sub.rn.bf16x2 a, a, z; mul.rn.bf16x2 $3, a, $5;
}"""
_UNPACK_MIDDLE = gl.constexpr(_UNPACK_INT4.replace("ZERO", "0x43084308"))
_UNPACK_ZEROS = gl.constexpr(_UNPACK_INT4.replace("ZERO", "$9"))
# A byte below the exponent of 2 ** 23 is that and itself, as float32. What is left without 2 ** 23
# and 128 has eight bits: the upper half of the float32 is the bfloat16.
_UNPACK_INT8 = gl.constexpr("""{
.reg .b32 a, b, c, d;
prmt.b32 a, $2, 0x4B000000, 0x7440; prmt.b32 b, $2, 0x4B000000, 0x7441;
prmt.b32 c, $2, 0x4B000000, 0x7442; prmt.b32 d, $2, 0x4B000000, 0x7443;
sub.rn.f32 a, a, 0f4B000080; sub.rn.f32 b, b, 0f4B000080;
sub.rn.f32 c, c, 0f4B000080; sub.rn.f32 d, d, 0f4B000080;
prmt.b32 $0, a, b, 0x7632; prmt.b32 $1, c, d, 0x7632;
}""")
# A half of a word twice.
_HALF = gl.constexpr("prmt.b32 $0, $1, 0, $2;")
# A byte of a word as two halves of a word, as bfloat16: times 2 ** shift, plus an exponent.
_FACTOR = gl.constexpr("{ .reg .b32 a; prmt.b32 a, $1, 0, $2; mad.lo.u32 $0, a, $3, $4; }")


@gluon.jit
def _scales(raw, coding: gl.constexpr, words: gl.constexpr, shift: gl.constexpr, lift):
    """Scales [2, chunks, words, 2, 4, 2, 1, 1, 1] of two chunks or of both -> those of the even
    steps and of the odd ones, each twice in a word; of integers scales and zeros."""
    spread: gl.constexpr = _spread()
    half = gl.convert_layout(gl.reshape(_two(), (1, 1, 1, 1, 1, 1, 2, 1, 1)), spread)
    pair = gl.convert_layout(gl.reshape(_two(), (1, 1, 1, 1, 1, 1, 1, 2, 1)), spread)
    if coding == INT4:
        raw = gl.convert_layout(gl.permute(raw, (0, 1, 3, 4, 5, 6, 7, 2, 8)), spread)
        even = _half(raw, 0x1010 + 0x2222 * half)
        odd = even
    elif coding == INT4_ZEROS:
        apart = gl.reshape(raw, _rows_apart(raw.shape))
        raw = gl.convert_layout(gl.permute(apart, (0, 1, 4, 5, 6, 7, 3, 2, 8)), spread)
        even, odd = _half(raw, 0x1010), _half(raw, 0x3232)
    elif words == 1:
        raw = gl.convert_layout(gl.permute(raw, (0, 1, 3, 4, 5, 6, 2, 7, 8)), spread)
        even = _factor(raw, half * 2 + pair, shift, lift)
        odd = even
    else:
        raw = gl.convert_layout(gl.permute(raw, (0, 1, 3, 4, 5, 6, 2, 7, 8)), spread)
        even = _factor(raw, pair * 2, shift, lift)
        odd = _factor(raw, pair * 2 + 1, shift, lift)
    return even, odd


@gluon.constexpr_function
def _rows_apart(shape):
    """Words by those of 32 columns, and rows 8 apart."""
    return [*shape[:2], shape[2] // 2, 2, *shape[3:6], 1, 1]


@gluon.constexpr_function
def _apart(shape):
    return [2, 2, shape[1] // 2, *shape[2:]]


@gluon.jit
def _halves(raw, chunks: gl.constexpr):
    """raw [2, chunks or half as many, ..] of rank 9 -> by two chunks."""
    if chunks == 4:
        apart = gl.reshape(raw, _apart(raw.shape))
        first, second = gl.split(gl.permute(apart, (0, 2, 3, 4, 5, 6, 7, 8, 9, 1)))
        both = (first, second)
    else:
        both = (raw,)  # type: ignore[assignment]
    return both


@gluon.jit
def _two():
    """0 and 1 in the registers of each thread."""
    layout: gl.constexpr = gl.DistributedLinearLayout(
        [[1]], [[0], [0], [0], [0], [0]], [[0], [0]], [], [2]
    )
    return gl.arange(0, 2, layout=layout)


@gluon.jit
def _factor(raw, byte, shift: gl.constexpr, lift):
    return gl.inline_asm_elementwise(
        _FACTOR, "=r,r,r,r,r", [raw, byte * 0x0101 + 0x4040, 1 << shift, lift],
        dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _half(raw, selector):
    return gl.inline_asm_elementwise(
        _HALF, "=r,r,r", [raw, selector], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.constexpr_function
def _words(entries, words):
    """Scales of a tile as they lie in memory: row g of 8, unit, the entry's other words, entry of
    a chunk or two, half."""
    registers = [[16 * bit] for bit in (1, 2, 4, 8) if bit < entries * words]
    lanes = [[0], [0], [1], [2], [4]]
    size = 2 * entries * 16 * words
    return gl.DistributedLinearLayout(registers, lanes, [[8], [size // 2]], [], [size])


@gluon.constexpr_function
def _bytes(chunks):
    """Weights of a tile as they lie in memory: 16 bytes of a thread, thread, unit, chunk, half."""
    registers = [[0, 1], [0, 2], [0, 4], [0, 8], [8, 0], [16, 0]][: 4 + chunks // 2]
    lanes = [[0, 16], [0, 32], [0, 64], [1, 0], [2, 0]]
    warps = [[4, 0], [8 * chunks, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [16 * chunks, 128])


@gluon.constexpr_function
def _spread():
    """Bytes of two chunks: half, chunk, unit, row (4 and 2), thread, row + 8, word, byte."""
    return gl.BlockedLayout(
        [1, 2, 1, 1, 1, 1, 2, 2, 4],
        [1, 1, 1, 4, 2, 4, 1, 1, 1],
        [2, 1, 2, 1, 1, 1, 1, 1, 1],
        [8, 7, 6, 5, 4, 3, 2, 1, 0],
    )


@gluon.jit
def _weights(
    raw, raw_scales, sums_layout: gl.constexpr, coding: gl.constexpr, words: gl.constexpr,
    shift: gl.constexpr, lift,
):  # fmt: skip
    """Weights [64, columns] of two chunks in registers, as the tensor cores take them."""
    raw = gl.convert_layout(raw, _spread(), assert_trivial=True)
    taken: gl.constexpr = gl.DotOperandLayout(0, sums_layout, 2)
    if coding == INT8:
        both = gl.inline_asm_elementwise(
            _UNPACK_INT8, "=r,=r,r", [raw], dtype=gl.bfloat16, is_pure=True, pack=4
        )
        both = gl.reshape(both, (2, 2, 2, 4, 2, 4, 2, 2, 2, 2))
        both = gl.permute(both, (0, 2, 6, 3, 4, 1, 7, 8, 5, 9))
        weights = gl.reshape(both, (64, 64))
    else:
        even, odd = _scales(raw_scales, coding, words, shift, lift)
        unpack: gl.constexpr = (
            _UNPACK if coding == E2M1 else _UNPACK_MIDDLE if coding == INT4 else _UNPACK_ZEROS
        )
        low, high = gl.inline_asm_elementwise(
            unpack, "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r", [raw, even, odd],
            dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=4,
        )  # fmt: skip
        both = gl.reshape(gl.join(low, high), (2, 2, 2, 4, 2, 4, 2, 2, 2, 2, 2))
        both = gl.permute(both, (0, 2, 6, 3, 4, 1, 7, 10, 8, 5, 9))
        weights = gl.reshape(both, (64, 128))
    return gl.convert_layout(weights, taken, assert_trivial=True)


@gluon.jit
def _fetch_weights(
    weight, ring, barrier, slot, group, beside, chunk, of_group, chunks: gl.constexpr,
    more: gl.constexpr, wanted,
):  # fmt: skip
    """Both halves of a tile: 32 rows each, of which the second are those `beside` the first.

    The barrier waits for `more` bytes of x as well."""
    mbarrier.expect(barrier, 2048 * chunks + more, wanted)
    place = ring.index(slot)
    per_row: gl.constexpr = 8 * chunks
    first = (group * of_group + chunk) * 8
    second = ((group + beside) * of_group + chunk) * 8
    _fetch(weight, [first, 0], barrier, place.slice(0, per_row), wanted)
    _fetch(weight, [second, 0], barrier, place.slice(per_row, per_row), wanted)


@gluon.jit
def _fetch_rest(
    x_tiles, barrier, place0, x_rows, there, scales, ring_x, ring_scales, slot, group, beside,
    chunk, end, of_group, chunks: gl.constexpr, words: gl.constexpr, span: gl.constexpr, wanted,
):  # fmt: skip
    """Rows of x and scales of the columns from `chunk` on; zeros from column `end` on."""
    width: gl.constexpr = ring_x.shape[2]
    column0 = chunk * (width // chunks)
    if x_tiles is None:
        x_layout: gl.constexpr = x_rows.type.layout.parent
        column = column0 + gl.arange(0, width, layout=gl.SliceLayout(0, x_layout))
        inside = (there & wanted)[:, None] & (column < end)[None, :]
        _fetch_by_thread(ring_x.index(slot), x_rows[:, None] + column[None, :], mask=inside)
    else:
        _fetch(x_tiles, [place0, column0], barrier, ring_x.index(slot), wanted)
    if words:
        of_entry: gl.constexpr = 16 * words
        count: gl.constexpr = 2 * of_entry * (chunks // span)
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        word = gl.arange(0, count, layout=layout)
        half = word // (count // 2)
        at = word % (count // 2)
        entry = chunk // span + at // of_entry
        first = ((group + half * beside) * (of_group // span) + chunk // span).to(gl.int64)
        known = (entry * span < of_group) & wanted
        _fetch_by_thread(ring_scales.index(slot), scales + first * of_entry + at, mask=known)
    async_copy.commit_group()


@gluon.jit
def _gated(sums, gated: gl.constexpr, limit: gl.constexpr, alpha: gl.constexpr):
    """[64, rows]: 32 gates, then what they multiply -> [32, rows]."""
    count: gl.constexpr = sums.shape[1]
    pairs: gl.constexpr = gl.BlockedLayout([1, 1, 2], [32, 1, 1], [1, 4, 1], [2, 0, 1])
    apart = gl.permute(gl.reshape(sums, (2, 32, count)), (1, 2, 0))
    gate, up = gl.split(gl.convert_layout(apart, pairs))
    if limit is None:
        active = gated_value(gate, up, gated)
    else:
        gate = gl.minimum(gate, limit)
        up = gl.minimum(gl.maximum(up, -limit), limit)
        active = (up + 1.0) * gate / (1.0 + gl.exp(-alpha * gate))
    return active


@gluon.jit
def _store(
    out, sums, bias, row_scales, factors, base, tile, pairs, place0, end, width, pitch, lift_back,
    gated: gl.constexpr, scatters: gl.constexpr, limit: gl.constexpr, alpha: gl.constexpr,
):  # fmt: skip
    count: gl.constexpr = sums.shape[1]
    line = gl.arange(0, 64, layout=gl.SliceLayout(1, sums.type.layout))
    if gated:
        row = gl.minimum(tile * 32 + line % 32, width - 1) + line // 32 * width
    else:
        row = gl.minimum(tile * 64 + line, width - 1)
    if row_scales is not None:
        sums *= gl.load(row_scales + base + row)[:, None]
    else:
        sums *= lift_back
    if bias is not None:
        added = gl.load(bias + base + row).to(gl.float32)
        sums += gl.where(gl.program_id(2) == 0, added, 0.0)[:, None]
    if gated:
        sums = _gated(sums, gated, limit, alpha)
    own: gl.constexpr = sums.shape[0]
    along: gl.constexpr = own // 32
    stored: gl.constexpr = gl.BlockedLayout([2, 1], [16, 2], [along, 4 // along], [0, 1])
    sums = gl.convert_layout(sums, stored)
    place = place0 + gl.arange(0, count, layout=gl.SliceLayout(0, stored))
    valid = place < end
    goes = place
    if scatters:
        goes = gl.load(pairs + place, mask=valid, other=0)
        sums *= gl.load(factors + goes, mask=valid, other=0.0)[None, :]
    column = tile * own + gl.arange(0, own, layout=gl.SliceLayout(1, stored))
    at = goes[None, :].to(gl.int64) * pitch + column[:, None]
    inside = (column < width)[:, None] & valid[None, :]
    gl.store(out + at, sums.to(out.dtype.element_ty), mask=inside)


@gluon.jit
def _expert_tile(starts, ends, slot, experts: gl.constexpr, block: gl.constexpr):
    """As `expert_tile` of `grouped_kernels.py`."""
    across: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    each = gl.arange(0, block, layout=across)
    after = gl.load(ends + each, mask=each < experts, other=2147483647)
    expert = gl.sum((after <= slot).to(gl.int32), axis=0)
    before = gl.max(gl.where(after <= slot, after, 0), axis=0)
    there = expert < experts
    first = gl.load(starts + expert, mask=there, other=0)
    end = gl.load(starts + expert + 1, mask=there, other=0)
    return expert, first, slot - before, end


@gluon.jit
def _sum(
    x, x_tiles, weight, scales, pairs, ring, ring_x, ring_scales, full, row_stride, base, tile,
    width, depth, place0, end, lift, part, chosen: gl.constexpr, gathers: gl.constexpr,
    coding: gl.constexpr, columns: gl.constexpr, words: gl.constexpr, span: gl.constexpr,
    shift: gl.constexpr, gated: gl.constexpr, stages: gl.constexpr, pdl: gl.constexpr,
):  # fmt: skip
    """[64, count]: the tile's products over all of k."""
    count: gl.constexpr = ring_x.shape[1]
    chunks: gl.constexpr = ring_x.shape[2] // columns
    of_x: gl.constexpr = 0 if x_tiles is None else 2 * columns * count * chunks
    if gated:
        group, beside = (base + tile * 32) // 32, width // 32
    else:
        group, beside = (base + tile * 64) // 32, 1
    first = gl.program_id(2) * part
    last_column = gl.minimum(first + part, depth)
    steps = (last_column - first + columns * chunks - 1) // (columns * chunks)
    first = first // columns
    of_group = depth // columns
    for slot in gl.static_range(stages - 1):
        _fetch_weights(
            weight, ring, full.index(slot), slot, group, beside, first + slot * chunks, of_group,
            chunks, of_x, slot < steps,
        )  # fmt: skip
    if pairs is None:
        wait_for_inputs(pdl)
    across: gl.constexpr = columns * chunks // 8
    x_layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // across, across], [4, 1], [1, 0])
    place = place0 + gl.arange(0, count, layout=gl.SliceLayout(1, x_layout))
    there = place < end
    source = place
    if gathers:
        source = gl.load(pairs + place, mask=there, other=0) // chosen
    x_rows = x + source.to(gl.int64) * row_stride
    for slot in gl.static_range(stages - 1):
        _fetch_rest(
            x_tiles, full.index(slot), place0, x_rows, there, scales, ring_x, ring_scales, slot,
            group, beside, first + slot * chunks, last_column, of_group, chunks, words, span,
            slot < steps,
        )  # fmt: skip
    sums_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, count, 16]
    )
    sums = gl.zeros([64, count], gl.float32, sums_layout)
    now, turn, last = 0, 0, stages - 1
    for step in range(steps):
        async_copy.wait_group(stages - 2)
        mbarrier.wait(full.index(now), turn)
        fence_async_shared()
        _barrier()  # all of the tile is there, and the step before is done in every warp
        raw = gl.reshape(ring.index(now).load(_bytes(chunks)), (2, chunks, 2, 4, 2, 4, 2, 2, 4))
        if words:
            raw_scales = ring_scales.index(now).load(_words(chunks // span, words))
            raw_scales = gl.reshape(raw_scales, (2, chunks // span, words, 2, 4, 2, 1, 1, 1))
            of_codes = _halves(raw_scales, chunks)
        else:
            of_codes = (None, None)
        chunk = first + (step + stages - 1) * chunks
        wanted = step + stages - 1 < steps
        _fetch_weights(
            weight,
            ring,
            full.index(last),
            last,
            group,
            beside,
            chunk,
            of_group,
            chunks,
            of_x,
            wanted,
        )
        _fetch_rest(
            x_tiles, full.index(last), place0, x_rows, there, scales, ring_x, ring_scales, last,
            group, beside, chunk, last_column, of_group, chunks, words, span, wanted,
        )  # fmt: skip
        codes = _halves(raw, chunks)
        tile_x = ring_x.index(now)
        taken = _weights(codes[0], of_codes[0], sums_layout, coding, words, shift, lift)
        begun = warpgroup_mma(
            taken, tile_x.slice(0, 2 * columns, dim=1).permute((1, 0)), sums, is_async=True
        )
        if chunks == 4:  # the tensor cores work while more becomes ready for them
            more = _weights(codes[1], of_codes[1], sums_layout, coding, words, shift, lift)
            rest = tile_x.slice(2 * columns, 2 * columns, dim=1)
            begun = warpgroup_mma(more, rest.permute((1, 0)), begun, is_async=True)
            sums, _, _ = warpgroup_mma_wait(0, deps=(begun, taken, more))
        else:
            sums, _ = warpgroup_mma_wait(0, deps=(begun, taken))
        last = now
        now += 1
        if now == stages:
            now, turn = 0, turn ^ 1
    async_copy.wait_group(0)
    return sums


@gluon.jit(do_not_specialize=["rows"])
def grouped_stream_kernel(
    x, x_tiles, weight, scales, row_scales, bias, pairs, starts, ends, factors, out, row_stride,
    rows, width, depth, part, size, pitch, lift, lift_back, experts: gl.constexpr,
    block: gl.constexpr, chosen: gl.constexpr, gathers: gl.constexpr, coding: gl.constexpr,
    columns: gl.constexpr, words: gl.constexpr, span: gl.constexpr, shift: gl.constexpr,
    gated: gl.constexpr, limit: gl.constexpr, alpha: gl.constexpr, count: gl.constexpr,
    chunks: gl.constexpr, stages: gl.constexpr, pdl: gl.constexpr,
):  # fmt: skip
    """Programs (tile of n, tile of `count` rows, split); arguments as of `grouped_kernel`.

    A split adds up `part` columns, and its `out` is that of the split before it plus `size`; rows
    of `out` begin every `pitch` numbers.

    x_tiles describes x by tiles, where its rows follow one another and the copy engine reads them.
    weight describes the fragments [.., 128] bytes by the 32 rows and `chunks` chunks of `columns`
    fetched at once; scales: `words` words of every 16 rows and `span` chunks, in their order.
    """
    launch_dependents(pdl)
    tile = gl.program_id(0)
    ring = gl.allocate_shared_memory(gl.uint8, [stages, 16 * chunks, 128], BYTES)
    ring_x = gl.allocate_shared_memory(
        x.dtype.element_ty, [stages, count, columns * chunks], HALVES
    )
    ring_scales = None
    if words:
        ring_scales = gl.allocate_shared_memory(
            gl.int32, [stages, 32 * words * chunks // span], WORDS
        )
    full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(stages):
        mbarrier.init(full.index(slot), count=1)
    if pairs is not None:
        wait_for_inputs(pdl)
        expert, first, line, end = _expert_tile(starts, ends, gl.program_id(1), experts, block)
        base = expert * (width * 2 if gated else width)
    else:
        expert, first, line, end, base = 0, 0, gl.program_id(1), rows, 0
    if expert < experts:
        place = first + line * count
        sums = _sum(
            x, x_tiles, weight, scales, pairs, ring, ring_x, ring_scales, full, row_stride, base,
            tile, width, depth, place, end, lift, part, chosen, gathers, coding, columns, words,
            span, shift, gated, stages, pdl,
        )  # fmt: skip
        own = out + gl.program_id(2).to(gl.int64) * size
        _store(
            own, sums, bias, row_scales, factors, base, tile, pairs, place, end, width, pitch,
            lift_back, gated, not gathers and pairs is not None, limit, alpha,
        )  # fmt: skip
