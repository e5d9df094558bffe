"""Keys and values in e4m3 become the operands of attention over few rows.

The conversion that the hardware offers goes through float16 and float32. For bfloat16 on Hopper the
bits of four numbers are moved instead: e4m3's exponent has a bias of 7 and bfloat16's of 127, so
sign, exponent and mantissa in their places are the number divided by 2 ** 120, exactly, subnormal
numbers included. The other operand is multiplied by `LIFT`, and the sums by `LEFT`: together that
is 2 ** 120, and neither leaves the range of its dtype.
"""

import triton
import triton.language as tl

from slipstream.kernels.triton.attention_parts import scales_at

LIFT, LEFT = tl.constexpr(2.0**100), tl.constexpr(2.0**20)


@triton.jit
def _every_other(first, second, begin: tl.constexpr, head_dim: tl.constexpr):
    """[L, C]: every other number, from `begin` on, of heads whose halves are [L, C], padded."""
    half: tl.constexpr = head_dim // 2
    number = tl.arange(0, first.shape[1])[None, :] * 2 + begin + tl.zeros(first.shape, tl.int32)
    source = tl.where(number < half, number, tl.minimum(number, head_dim - 1) - half)
    return tl.where(number < half, tl.gather(first, source, 1), tl.gather(second, source, 1))


@triton.jit
def even_and_odd(first, second, head_dim: tl.constexpr):
    """Even and odd numbers of heads, [L, C] each, from both halves; padding is arbitrary.

    A join would be shorter; but the compiler would mistake it for the unpacking of smaller numbers,
    and load the other operand of the product in smaller pieces.
    """
    even = _every_other(first, second, 0, head_dim)
    return even, _every_other(first, second, 1, head_dim)


@triton.jit
def _low_bytes(x, dtype: tl.constexpr, hopper: tl.constexpr):
    if hopper and dtype == tl.bfloat16:
        x = tl.inline_asm_elementwise(
            "{ .reg .b32 a, b; shl.b32 a, $1, 8; shl.b32 b, $1, 4; and.b32 b, b, 0x07f007f0; "
            "lop3.b32 $0, a, 0x80008000, b, 0xEA; }",
            "=r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        x = (x & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    return x.to(dtype)


@triton.jit
def _high_bytes(x, dtype: tl.constexpr, hopper: tl.constexpr):
    if hopper and dtype == tl.bfloat16:
        x = tl.inline_asm_elementwise(
            "{ .reg .b32 b; shr.b32 b, $1, 4; and.b32 b, b, 0x07f007f0; "
            "lop3.b32 $0, $1, 0x80008000, b, 0xEA; }",
            "=r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        x = (x >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    return x.to(dtype)


@triton.jit
def _even_and_odd_at(
    pages, places, inside, dtype: tl.constexpr, hopper: tl.constexpr, head_dim: tl.constexpr,
    block_d: tl.constexpr,
):  # fmt: skip
    pair = tl.arange(0, block_d // 2)
    words = pages.to(tl.pointer_type(tl.uint16), bitcast=True)
    loaded = inside[:, None] & (pair < head_dim // 2)[None, :]
    both = tl.load(words + (places // 2)[:, None] + pair[None, :], mask=loaded, other=0)
    return _low_bytes(both, dtype, hopper), _high_bytes(both, dtype, hopper)


@triton.jit
def eight_bit_tile(
    keys, values, key_scales, value_scales, places, inside, dtype: tl.constexpr,
    hopper: tl.constexpr, head_dim: tl.constexpr, block_d: tl.constexpr,
):  # fmt: skip
    """Keys, then values, of one head for the tokens at `places`, and the factors [block_n] of their
    scores and weights. Even and odd numbers of a head are tiles [block_n, block_d / 2] each.

    They are loaded in pairs, since operands of tensor cores come from shared memory in 16 bits, and
    are transposed on the way; bytes would be read one by one, or with conflicts between banks.
    """
    key_one, key_two = _even_and_odd_at(keys, places, inside, dtype, hopper, head_dim, block_d)
    value_one, value_two = _even_and_odd_at(
        values, places, inside, dtype, hopper, head_dim, block_d
    )
    key_scale = scales_at(key_scales, places, inside)
    value_scale = scales_at(value_scales, places, inside)
    if hopper and dtype == tl.bfloat16:
        key_scale, value_scale = key_scale * LEFT, value_scale * LIFT
    return key_one, key_two, value_one, value_two, key_scale, value_scale
