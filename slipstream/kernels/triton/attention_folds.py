"""Online softmax over tiles of cached tokens, for one or more tiles of lines at a time.

Several tiles of lines are needed where there are more than 32: tensor cores add in another order
from 64 lines on, so a line's bits would depend on the number of lines. Keys and values are loaded
once for all tiles of a program.

Weights are relative to 2 ** exponent, where the exponent is the largest score so far, in units of
log 2, rounded up to an integer. Rescaling to another exponent is then exact, so the bits of a sum
depend on the order of its terms, but not on where the exponent changed. A tile of which a row sees
no token leaves that row's sums unchanged, so they do not depend on the other rows.
"""

import triton
import triton.language as tl

from slipstream.kernels.triton.attention_float8 import LEFT, LIFT, eight_bit_tile, even_and_odd
from slipstream.kernels.triton.attention_parts import (
    capped,
    entries_of,
    finite,
    halves,
    hidden,
    places_of,
    power_of_two,
    split_start,
)

SUM_COLUMNS = tl.constexpr(16)  # the fewest columns that `tl.dot` takes


@triton.jit
def store_halves(
    pages, place, inside, first, second, head_dim: tl.constexpr, interleaved: tl.constexpr
):  # fmt: skip
    """Store both halves of heads [L, C], or their even and odd numbers, at `place` [L]."""
    half: tl.constexpr = head_dim // 2
    pair = tl.arange(0, first.shape[1])
    stored = inside[:, None] & (pair < half)[None, :]
    target = pages + place[:, None] + pair[None, :] * (2 if interleaved else 1)
    tl.store(target, first, mask=stored)
    tl.store(target + (1 if interleaved else half), second, mask=stored)


@triton.jit
def _fold(
    query_one, query_two, key_one, key_two, value_one, value_two, key_scale, value_scale, exponent,
    total, one, two, token, row_begins, row_ends, row, rows, ancestors, tree_start, scale, softcap,
    window, first_seen: tl.constexpr,
):  # fmt: skip
    """Add one tile of tokens by online softmax.

    Queries and sums of values are halves of heads, [block_m, block_d / 2]; keys and values are
    [block_n, block_d / 2]. Returns (exponent [block_m], sums of weights [block_m, SUM_COLUMNS] with
    equal columns, sums of weighted values of the first half, of the second half).
    """
    # Halves are not joined: the compiler would mistake the join for unpacking of smaller numbers,
    # and load the operands of the product in smaller pieces.
    score = tl.dot(query_one, tl.trans(key_one), input_precision="ieee")
    score = tl.dot(query_two, tl.trans(key_two), score, input_precision="ieee")
    if key_scale is not None:
        score *= key_scale[None, :]
    score, factor = capped(score, scale, softcap)
    score = hidden(
        score, token, row_begins, row_ends, row, rows, ancestors, tree_start, window, first_seen
    )
    highest = tl.maximum(exponent, tl.ceil(tl.max(score, axis=1) * factor))
    base = finite(highest)
    negative = tl.zeros_like(score) - base[:, None]
    # An explicit fma: otherwise the compiler might fuse in one variant of the kernel only.
    exact = tl.exp2(tl.fma(score, tl.zeros_like(score) + factor, negative))
    weight = exact.to(value_one.dtype)
    kept = power_of_two(exponent - base)[:, None]
    # Tensor cores add in the same order for any number of warps; `tl.sum` would not.
    ones = tl.full((value_one.shape[0], SUM_COLUMNS), 1.0, value_one.dtype)
    total = tl.dot(weight, ones, total * kept, input_precision="ieee")
    if value_scale is not None:
        weight = (exact * value_scale[None, :]).to(value_one.dtype)
    one = tl.dot(weight, value_one, one * kept, input_precision="ieee")
    two = tl.dot(weight, value_two, two * kept, input_precision="ieee")
    return highest, total, one, two


@triton.jit
def _added(exponent, total, one, two, more_exponent, more_total, more_one, more_two):
    """Add the partial sums of two ranges of tokens: (exponent, total, first half, second half)."""
    highest = tl.maximum(exponent, more_exponent)
    kept = power_of_two(exponent - finite(highest))[:, None]
    moved = power_of_two(more_exponent - finite(highest))[:, None]
    total = total * kept + more_total * moved
    return highest, total, one * kept + more_one * moved, two * kept + more_two * moved


@triton.jit
def _nothing(queries):
    """For each tile of lines the sums of no tokens: (exponent, sums of weights, both halves of
    weighted values)."""
    sums = ()
    for index in tl.static_range(len(queries)):
        half = queries[index][0]
        exponent = tl.full((half.shape[0],), float("-inf"), tl.float32)
        total = tl.zeros((half.shape[0], SUM_COLUMNS), tl.float32)
        values = tl.zeros(half.shape, tl.float32)
        sums += ((exponent, total, values, values),)  # type: ignore[assignment]
    return sums


@triton.jit
def _loaded_tokens(
    keys, values, key_scales, value_scales, places, inside, dtype: tl.constexpr,
    hopper: tl.constexpr, head_dim: tl.constexpr, block_d: tl.constexpr,
):  # fmt: skip
    """Both halves of keys, then of values; with `key_scales` what `eight_bit_tile` returns."""
    if key_scales is None:
        key_one, key_two = halves(keys, places, inside, head_dim, block_d)
        value_one, value_two = halves(values, places, inside, head_dim, block_d)
        tile = key_one, key_two, value_one, value_two
    else:
        tile = eight_bit_tile(
            keys, values, key_scales, value_scales, places, inside, dtype, hopper, head_dim, block_d
        )
    return tile


@triton.jit
def _fold_all(
    queries, views, sums, tile, token, rows, ancestors, tree_start, scale, softcap, window,
    scaled: tl.constexpr, first_seen: tl.constexpr,
):  # fmt: skip
    """The sums of each tile of lines with one tile of tokens added. `views` has for each tile of
    lines the first token that each line sees, the end of these, and its row."""
    if scaled:
        key_one, key_two, value_one, value_two, key_scale, value_scale = tile
    else:
        key_one, key_two, value_one, value_two = tile
        key_scale = None
        value_scale = None
    folded = ()
    for index in tl.static_range(len(queries)):
        one, two = queries[index]
        begins, ends, row = views[index]
        exponent, total, value, more = sums[index]
        with_tokens = _fold(
            one, two, key_one, key_two, value_one, value_two, key_scale, value_scale, exponent,
            total, value, more, token, begins, ends, row, rows, ancestors, tree_start, scale,
            softcap, window, first_seen,
        )  # fmt: skip
        folded += (with_tokens,)  # type: ignore[assignment]
    return folded


@triton.jit
def _added_all(sums, others, moved: tl.constexpr):
    """The sums of each tile of lines over two ranges of tokens; see `_store_all` for `moved`."""
    joined = ()
    for index in tl.static_range(len(sums)):
        exponent, total, one, two = sums[index]
        other_exponent, other_total, other_one, other_two = others[index]
        if moved:
            other_one, other_two = other_one * LEFT, other_two * LEFT
        both = _added(
            exponent, total, one, two, other_exponent, other_total, other_one, other_two
        )  # fmt: skip
        joined += (both,)  # type: ignore[assignment]
    return joined


@triton.jit
def _store_all(
    part, part_exponent, part_total, lines, sums, split, moved: tl.constexpr,
    interleaved: tl.constexpr, head_dim: tl.constexpr,
):  # fmt: skip
    """Store the sums of one split.

    Args:
        lines: for each tile of lines, (index of the first split of each line, whether it is one).
        moved: values have a factor, which is taken out.
        interleaved: halves are the even and the odd numbers of a head.
    """
    for index in tl.static_range(len(sums)):
        exponent, total, one, two = sums[index]
        if moved:
            one, two = one * LEFT, two * LEFT
        place, inside = lines[index]
        place += split
        tl.store(part_exponent + place, exponent, mask=inside)
        tl.store(part_total + place, tl.max(total, axis=1), mask=inside)
        store_halves(part, place * head_dim, inside, one, two, head_dim, interleaved)


@triton.jit
def _as_stored(queries, moved: tl.constexpr, head_dim: tl.constexpr):
    """The even and the odd numbers of queries, as keys of 8 bits are loaded; if `moved`, times the
    factor that `_store_all` takes out of the values."""
    parted = ()
    for index in tl.static_range(len(queries)):
        one, two = even_and_odd(queries[index][0], queries[index][1], head_dim)
        if moved:
            one, two = one * LIFT, two * LIFT
        parted += ((one, two),)  # type: ignore[assignment]
    return parted


@triton.jit
def fold_splits(
    queries, views, lines, keys, values, key_scales, value_scales, table, entries, begin, end, rows,
    ancestors, tree_start, scale, softcap, window, part, part_exponent, part_total, split,
    first_seen: tl.constexpr, place_stride: tl.constexpr, block_size: tl.constexpr,
    head_dim: tl.constexpr, block_n: tl.constexpr, hopper: tl.constexpr,
):  # fmt: skip
    """Reduce the tokens [begin, end), split by split from `split` on, and return the sums of each
    tile of lines. `entries` are those of the first tile of tokens.

    If `part` is not None, the partial sums of each split are stored there instead. Sums are those
    of both halves of heads, or with `key_scales` of their even and odd numbers.
    """
    block_d: tl.constexpr = 2 * queries[0][0].shape[1]
    dtype: tl.constexpr = queries[0][0].dtype
    scaled: tl.constexpr = key_scales is not None
    moved: tl.constexpr = hopper and scaled and dtype == tl.bfloat16
    if scaled:
        queries = _as_stored(queries, moved, head_dim)
    sums = _nothing(queries)
    joined = sums
    until = split_start(split + 1)
    for start in range(begin, end, block_n):
        token = start + tl.arange(0, block_n)
        places = places_of(entries, start, place_stride, block_size, block_n)
        tile = _loaded_tokens(
            keys, values, key_scales, value_scales, places, token < end, dtype, hopper, head_dim,
            block_d,
        )  # fmt: skip
        entries = entries_of(table, start + block_n, end, block_size, block_n)
        sums = _fold_all(
            queries, views, sums, tile, token, rows, ancestors, tree_start, scale, softcap, window,
            scaled, first_seen,
        )  # fmt: skip
        if start + block_n >= tl.minimum(until, end):
            if part is None:
                joined = _added_all(joined, sums, moved)
            else:
                _store_all(
                    part, part_exponent, part_total, lines, sums, split, moved, scaled, head_dim
                )
            sums = _nothing(queries)
            split += 1
            until = split_start(split + 1)
    return joined
