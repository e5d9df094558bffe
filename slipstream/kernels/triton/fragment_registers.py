"""Fragments in the registers of Hopper's tensor cores: numbers of few bits become bfloat16.

Layouts say how weights and scales lie in memory (`fragments.py`) and in the threads that take them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from slipstream.kernels.triton import fragments

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
# Numbers of at most eight bits are a bfloat16's lowest: themselves times 2 ** -133, since the least
# exponent has the steps of none. With the factors of `_MIDDLES` or those below, one rounding makes
# them what is meant, times 2 ** -7, which the sums make good.
_UNPACK_MIDDLE = gl.constexpr("""{
.reg .b32 a, b, s; mov.b32 s, 0x3D803D80; mul.rn.bf16x2 s, s, $5; shr.u32 b, $4, 8;
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
# A group's zero may have four bits: it is taken off, exactly, from 128 and more, and only the
# product with the scale is rounded.
_UNPACK_ZEROS = gl.constexpr("""{
.reg .b32 a, b;
lop3.b32 a, $4, 0x000F000F, 0x43004300, 0xEA;
sub.rn.bf16x2 a, a, $9; mul.rn.bf16x2 $0, a, $5;
shr.u32 b, $4, 4; lop3.b32 a, b, 0x000F000F, 0x43004300, 0xEA;
sub.rn.bf16x2 a, a, $9; mul.rn.bf16x2 $1, a, $5;
shr.u32 b, $4, 8; lop3.b32 a, b, 0x000F000F, 0x43004300, 0xEA;
sub.rn.bf16x2 a, a, $9; mul.rn.bf16x2 $2, a, $5;
shr.u32 b, $4, 12; lop3.b32 a, b, 0x000F000F, 0x43004300, 0xEA;
sub.rn.bf16x2 a, a, $9; mul.rn.bf16x2 $3, a, $5;
}""")
# A half of a word twice.
_HALF = gl.constexpr("prmt.b32 $0, $1, 0, $2;")
# A scale, in a half of a word, times 2 ** 126, and -8 of it times 2 ** -7.
_MIDDLES = gl.constexpr("""{
.reg .b32 a, s, m; prmt.b32 a, $2, 0, $3;
mov.b32 s, 0x7E807E80; mul.rn.bf16x2 $0, a, s; mov.b32 m, 0xBD80BD80; mul.rn.bf16x2 $1, a, m;
}""")
# A byte of a word as two halves of a word, as bfloat16: times 2 ** shift, plus an exponent.
_FACTOR = gl.constexpr("{ .reg .b32 a; prmt.b32 a, $1, 0, $2; mad.lo.u32 $0, a, $3, $4; }")


@gluon.jit
def _scales(raw, coding: gl.constexpr, words: gl.constexpr, shift: gl.constexpr, lift):
    """Scales [2, chunks, words, 2, 4, 2, 1, 1, 1] of two chunks or of both -> those of the even
    steps and of the odd ones, each twice in a word; of integers scales and what is added."""
    spread: gl.constexpr = _spread()
    half = gl.convert_layout(gl.reshape(_two(), (1, 1, 1, 1, 1, 1, 2, 1, 1)), spread)
    pair = gl.convert_layout(gl.reshape(_two(), (1, 1, 1, 1, 1, 1, 1, 2, 1)), spread)
    if coding == INT4:
        raw = gl.convert_layout(gl.permute(raw, (0, 1, 3, 4, 5, 6, 7, 2, 8)), spread)
        even, odd = gl.inline_asm_elementwise(
            _MIDDLES, "=r,=r,r,r", [raw, 0x1010 + 0x2222 * half],
            dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
        )  # fmt: skip
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
