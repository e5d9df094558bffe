"""Dequantizes weights of four and eight bits to bfloat16 in registers, for the tensor cores.

Products are written as sums with -0, which change no bit and cost nothing more: before Hopper there
is `fma.rn.bf16x2` and no `mul.rn.bf16x2`.

The layouts describe where weights and scales are in shared memory (`fragments.py`), and in the
registers of the threads that need them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from slipstream.kernels.triton import fragments

# Codings of numbers, see `Fragments.coding`.
E2M1, INT4 = gl.constexpr(fragments.E2M1), gl.constexpr(fragments.INT4)
INT4_ZEROS, INT8 = gl.constexpr(fragments.INT4_ZEROS), gl.constexpr(fragments.INT8)
FLOAT8 = gl.constexpr(fragments.FLOAT8)

# Sixteen e2m1 numbers in two words ($8, $9), which are stored as `E2M1_TURNS` says, -> eight words
# of two bfloat16, times their scales. Sign, exponent and mantissa come to their places in a
# bfloat16, whose value is then 2 ** -126 times the number; the scales contain the factor 2 ** 126.
# A word ($10, $14) has two scales, of the two words if a group has 32 columns (MXFP4), of its own
# first and last 16 columns otherwise. A register with two equal halves costs nothing here: the
# product takes either half of a register for both.
_UNPACK_E2M1 = """{
.reg .b32 a, r, s, t, u, v, z; .reg .b16 l, h; mov.b32 z, 0x80008000;
mov.b32 {l, h}, $10; mov.b32 s, {l, l}; mov.b32 t, {h, h};
mov.b32 {l, h}, $14; mov.b32 u, {l, l}; mov.b32 v, {h, h};
and.b32 a, $8, PAIR; fma.rn.bf16x2 $0, a, s, z;
and.b32 a, $9, PAIR; fma.rn.bf16x2 $2, a, SECOND, z;
shl.b32 a, $8, 6; and.b32 a, a, PAIR; fma.rn.bf16x2 $1, a, s, z;
shl.b32 a, $9, 6; and.b32 a, a, PAIR; fma.rn.bf16x2 $3, a, SECOND, z;
shf.l.wrap.b32 a, $8, $8, 10; and.b32 a, a, PAIR; fma.rn.bf16x2 $4, a, FIRST, z;
shf.l.wrap.b32 a, $9, $9, 10; and.b32 a, a, PAIR; fma.rn.bf16x2 $6, a, v, z;
shl.b32 r, $9, 2; lop3.b32 r, $8, r, CHOSEN, 0xE4;
shl.b32 a, r, 2; and.b32 a, a, PAIR; fma.rn.bf16x2 $5, a, FIRST, z;
shf.l.wrap.b32 a, r, r, 12; and.b32 a, a, PAIR; fma.rn.bf16x2 $7, a, v, z;
}""".replace("PAIR", hex(fragments.E2M1_PAIR)).replace("CHOSEN", hex(fragments.E2M1_CHOSEN))
_UNPACK_MXFP4 = gl.constexpr(_UNPACK_E2M1.replace("SECOND", "v").replace("FIRST", "s"))
_UNPACK_NVFP4 = gl.constexpr(_UNPACK_E2M1.replace("SECOND", "u").replace("FIRST", "t"))
# The bits of an integer up to 255, read as a bfloat16, are the integer times 2 ** -133: subnormal
# numbers and those of the least exponent have the same spacing. One fused multiply-add, by the
# factors of `_INT4_FACTORS` or the constants of `_UNPACK_INT8`, subtracts the zero point and
# multiplies by the scale with one rounding. The result is 2 ** -7 times the weight, which
# `lift_back` or `row_scales` correct.
_UNPACK_INT4 = gl.constexpr("""{
.reg .b32 a, b, s, z; mov.b32 z, 0x80008000; mov.b32 s, 0x3D803D80;
fma.rn.bf16x2 s, s, $5, z; shr.u32 b, $4, 8;
and.b32 a, $4, 0x000F000F; fma.rn.bf16x2 $0, a, $5, $9;
and.b32 a, $4, 0x00F000F0; fma.rn.bf16x2 $1, a, s, $9;
and.b32 a, b, 0x000F000F; fma.rn.bf16x2 $2, a, $5, $9;
and.b32 a, b, 0x00F000F0; fma.rn.bf16x2 $3, a, s, $9;
}""")
_UNPACK_INT8 = gl.constexpr("""{
.reg .b32 a, s, m; mov.b32 s, 0x7E807E80; mov.b32 m, 0xBF80BF80;
and.b32 a, $2, 0x00FF00FF; fma.rn.bf16x2 $0, a, s, m;
shr.u32 a, $2, 8; and.b32 a, a, 0x00FF00FF; fma.rn.bf16x2 $1, a, s, m;
}""")
# Sign, exponent and mantissa of e4m3 are shifted to their places in a bfloat16, whose value is then
# 2 ** -120 times the number.
_UNPACK_FLOAT8 = gl.constexpr("""{
.reg .b32 a, w, s, z; mov.b32 z, 0x80008000; mov.b32 s, 0x7B807B80; shl.b32 w, $2, 8;
shr.u32 a, w, 4; and.b32 a, a, 0x07F007F0; and.b32 w, w, 0x80008000; or.b32 a, a, w;
fma.rn.bf16x2 $0, a, s, z;
shr.u32 a, $2, 4; and.b32 a, a, 0x07F007F0; and.b32 w, $2, 0x80008000; or.b32 a, a, w;
fma.rn.bf16x2 $1, a, s, z;
}""")
# With zero points: (128 + integer) - (128 + zero point) is exact in bfloat16, and only the product
# with the scale is rounded.
_UNPACK_ZEROS = gl.constexpr("""{
.reg .b32 a, b, m, z; mov.b32 m, 0xBF80BF80; mov.b32 z, 0x80008000;
lop3.b32 a, $4, 0x000F000F, 0x43004300, 0xEA;
fma.rn.bf16x2 a, $9, m, a; fma.rn.bf16x2 $0, a, $5, z;
shr.u32 b, $4, 4; lop3.b32 a, b, 0x000F000F, 0x43004300, 0xEA;
fma.rn.bf16x2 a, $9, m, a; fma.rn.bf16x2 $1, a, $5, z;
shr.u32 b, $4, 8; lop3.b32 a, b, 0x000F000F, 0x43004300, 0xEA;
fma.rn.bf16x2 a, $9, m, a; fma.rn.bf16x2 $2, a, $5, z;
shr.u32 b, $4, 12; lop3.b32 a, b, 0x000F000F, 0x43004300, 0xEA;
fma.rn.bf16x2 a, $9, m, a; fma.rn.bf16x2 $3, a, $5, z;
}""")
# One 16-bit half of a word, repeated in both halves.
_REPEAT_HALF = gl.constexpr("prmt.b32 $0, $1, 0, $2;")
# A scale s in half a word -> (s * 2 ** 126, -8 * s * 2 ** -7), each repeated in both halves.
_INT4_FACTORS = gl.constexpr("""{
.reg .b32 a, s, m, z; mov.b32 z, 0x80008000; prmt.b32 a, $2, 0, $3;
mov.b32 s, 0x7E807E80; fma.rn.bf16x2 $0, a, s, z; mov.b32 m, 0xBD80BD80; fma.rn.bf16x2 $1, a, m, z;
}""")
# Two bytes of a word -> two bfloat16 with the bits (byte << shift) + lift.
_SCALES_OF_BYTES = gl.constexpr("{ .reg .b32 a; prmt.b32 a, $1, 0, $2; mad.lo.u32 $0, a, $3, $4; }")


@gluon.jit
def _unpacked_scales(raw, coding: gl.constexpr, words: gl.constexpr, shift: gl.constexpr, lift):
    """raw: scales [2, chunks, words, 2, 4, 2, 1, 1, 1] of two chunks, or of both together.

    Returns two words for each word of weights: for E2M1 twice the same, two bfloat16 that
    `_UNPACK_E2M1` explains; else two equal bfloat16 each, the scale and what `_UNPACK_INT4` adds or
    `_UNPACK_ZEROS` subtracts.
    """
    layout: gl.constexpr = _register_layout()
    half = gl.convert_layout(gl.reshape(_zero_and_one(), (1, 1, 1, 1, 1, 1, 2, 1, 1)), layout)
    pair = gl.convert_layout(gl.reshape(_zero_and_one(), (1, 1, 1, 1, 1, 1, 1, 2, 1)), layout)
    if coding == INT4:
        raw = gl.convert_layout(gl.permute(raw, (0, 1, 3, 4, 5, 6, 7, 2, 8)), layout)
        scales, added = gl.inline_asm_elementwise(
            _INT4_FACTORS, "=r,=r,r,r", [raw, 0x1010 + 0x2222 * half],
            dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    elif coding == INT4_ZEROS:
        apart = gl.reshape(raw, _zero_point_shape(raw.shape))
        raw = gl.convert_layout(gl.permute(apart, (0, 1, 4, 5, 6, 7, 3, 2, 8)), layout)
        scales, added = _repeated_half(raw, 0x1010), _repeated_half(raw, 0x3232)
    else:
        raw = gl.convert_layout(gl.permute(raw, (0, 1, 3, 4, 5, 6, 2, 7, 8)), layout)
        bytes_ = 0x4140 + 0x0202 * (half if words == 1 else pair)
        scales = gl.inline_asm_elementwise(
            _SCALES_OF_BYTES, "=r,r,r,r,r", [raw, bytes_, 1 << shift, lift],
            dtype=gl.int32, is_pure=True, pack=1,
        )  # fmt: skip
        added = scales
    return scales, added


@gluon.constexpr_function
def _zero_point_shape(shape):
    """The words of scales as [.., words of 32 columns, rows g and g + 8, ..]."""
    return [*shape[:2], shape[2] // 2, 2, *shape[3:6], 1, 1]


@gluon.constexpr_function
def _chunk_pairs_shape(shape):
    return [2, 2, shape[1] // 2, *shape[2:]]


@gluon.jit
def chunk_pairs(raw, chunks: gl.constexpr):
    """raw [2, entries, ..] of rank 9, of `chunks` chunks -> one tensor for each two chunks."""
    if chunks == 4:
        apart = gl.reshape(raw, _chunk_pairs_shape(raw.shape))
        first, second = gl.split(gl.permute(apart, (0, 2, 3, 4, 5, 6, 7, 8, 9, 1)))
        both = (first, second)
    else:
        both = (raw,)  # type: ignore[assignment]
    return both


@gluon.jit
def _zero_and_one():
    """0 and 1 in the registers of each thread."""
    layout: gl.constexpr = gl.DistributedLinearLayout(
        [[1]], [[0], [0], [0], [0], [0]], [[0], [0]], [], [2]
    )
    return gl.arange(0, 2, layout=layout)


@gluon.jit
def _repeated_half(raw, selector):
    return gl.inline_asm_elementwise(
        _REPEAT_HALF, "=r,r,r", [raw, selector], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.constexpr_function
def scale_layout(entries, words):
    """Layout of a tile's scales in memory, the fastest dimension first: row g of 8, 16 rows,
    further words of an entry, entry (of one or two chunks), 32 rows."""
    registers = [[16 * bit] for bit in (1, 2, 4, 8) if bit < entries * words]
    lanes = [[0], [0], [1], [2], [4]]
    size = 2 * entries * 16 * words
    return gl.DistributedLinearLayout(registers, lanes, [[8], [size // 2]], [], [size])


@gluon.constexpr_function
def raw_layout(chunks):
    """Layout of a tile's weights in memory, the fastest dimension first: 16 bytes of a thread,
    thread, 16 rows, chunk, 32 rows."""
    registers = [[0, 1], [0, 2], [0, 4], [0, 8], [8, 0], [16, 0]][: 4 + chunks // 2]
    lanes = [[0, 16], [0, 32], [0, 64], [1, 0], [2, 0]]
    warps = [[4, 0], [8 * chunks, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [16 * chunks, 128])


@gluon.constexpr_function
def _register_layout():
    """Layout of the bytes of two chunks: 32 rows, chunk, 16 rows, row (4 and 2), thread, row + 8,
    word, byte."""
    return gl.BlockedLayout(
        [1, 2, 1, 1, 1, 1, 2, 2, 4],
        [1, 1, 1, 4, 2, 4, 1, 1, 1],
        [2, 1, 2, 1, 1, 1, 1, 1, 1],
        [8, 7, 6, 5, 4, 3, 2, 1, 0],
    )


@gluon.jit
def dequantized(
    raw, raw_scales, sums_layout: gl.constexpr, coding: gl.constexpr, words: gl.constexpr,
    shift: gl.constexpr, lift,
):  # fmt: skip
    """The weights [64, columns] of two chunks in bfloat16, as the first operand of `warpgroup_mma`
    that adds to sums of `sums_layout`."""
    raw = gl.convert_layout(raw, _register_layout(), assert_trivial=True)
    taken: gl.constexpr = gl.DotOperandLayout(0, sums_layout, 2)
    if coding == INT8 or coding == FLOAT8:  # noqa: SIM109 - Gluon has no `in`
        unpack: gl.constexpr = _UNPACK_INT8 if coding == INT8 else _UNPACK_FLOAT8
        both = gl.inline_asm_elementwise(
            unpack, "=r,=r,r", [raw], dtype=gl.bfloat16, is_pure=True, pack=4
        )
        both = gl.reshape(both, (2, 2, 2, 4, 2, 4, 2, 2, 2, 2))
        both = gl.permute(both, (0, 2, 6, 3, 4, 1, 7, 8, 5, 9))
        weights = gl.reshape(both, (64, 64))
    else:
        factors, added = _unpacked_scales(raw_scales, coding, words, shift, lift)
        if coding == E2M1:
            unpack8: gl.constexpr = _UNPACK_MXFP4 if words == 1 else _UNPACK_NVFP4
            low, high = gl.inline_asm_elementwise(
                unpack8, "=r" + ",=r" * 7 + ",r" * 10, [raw, factors],
                dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=8,
            )  # fmt: skip
        else:
            unpack4: gl.constexpr = _UNPACK_INT4 if coding == INT4 else _UNPACK_ZEROS
            low, high = gl.inline_asm_elementwise(
                unpack4, "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r", [raw, factors, added],
                dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=4,
            )  # fmt: skip
        both = gl.reshape(gl.join(low, high), (2, 2, 2, 4, 2, 4, 2, 2, 2, 2, 2))
        both = gl.permute(both, (0, 2, 6, 3, 4, 1, 7, 10, 8, 5, 9))
        weights = gl.reshape(both, (64, 128))
    return gl.convert_layout(weights, taken, assert_trivial=True)
