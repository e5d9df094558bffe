"""Functions that the attention kernels share: loads of queries and cached tokens, and masks.

Scores are in units of log 2, so that softmax weights are computed with exp2.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
MOST_LEVELS = tl.constexpr(10)  # of `tree_sum` over half a head


@triton.jit
def finite(largest):
    """`largest`, with 0 for minus infinity (no token seen yet), so that differences are no NaN."""
    return tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit
def power_of_two(exponent):
    """2 ** exponent, exact, for integers up to 0; zero below the normal float32 numbers."""
    bounded = tl.maximum(exponent, -127.0).to(tl.int32)
    return ((bounded + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def columns(head_dim: tl.constexpr, block_d: tl.constexpr):
    """[block_d]: the index within a head that each column of a tile holds, -1 for padding.

    Each half of the head has half of the columns.
    """
    column = tl.arange(0, block_d)
    if head_dim != block_d:
        half: tl.constexpr = head_dim // 2
        block_half: tl.constexpr = block_d // 2
        number = tl.where(column < block_half, column, column - block_half + half)
        column = tl.where(column % block_half < half, number, -1)
    return column


@triton.jit
def tree_sum(value):
    """Sum over columns, [L, C] -> [L], C a power of two. It adds neighbours first, so that the bits
    do not depend on the layout."""
    lines: tl.constexpr = value.shape[0]
    for _ in tl.static_range(MOST_LEVELS):
        if value.shape[1] > 1:
            value = tl.sum(tl.reshape(value, (lines, value.shape[1] // 2, 2)), axis=2)
    return tl.reshape(value, (lines,))


@triton.jit
def _partner(number, rotary_dim: tl.constexpr):
    """The index that each index of a head is rotated with; itself where it is not rotated."""
    half: tl.constexpr = rotary_dim // 2
    partner = tl.where(number < half, number + half, number - half)
    return tl.where(number < rotary_dim, partner, number)


@triton.jit
def _turns_of(cos_sin, position, inside, number, rotary_dim: tl.constexpr):
    """(cosines, signed sines) [L, C]: the factors of the elements at indices `number` [C] and of
    their partners."""
    half: tl.constexpr = rotary_dim // 2
    turn = cos_sin + position[:, None] * rotary_dim + (number % half)[None, :]
    loaded = inside[:, None] & (number < rotary_dim)[None, :]
    cos = tl.load(turn, mask=loaded, other=1.0)
    sin = tl.load(turn + half, mask=loaded, other=0.0)
    return cos, tl.where((number < half)[None, :], -sin, sin)


@triton.jit
def turns(
    cos_sin, position, inside, rotary_dim: tl.constexpr, head_dim: tl.constexpr,
    block_d: tl.constexpr,
):  # fmt: skip
    """The `turn` argument of `rotated` for rows at `position` [L]: (cosines, sines) of the first
    half of a head, then of the second, each [L, block_d / 2]."""
    half: tl.constexpr = head_dim // 2
    pair = tl.arange(0, block_d // 2)
    if rotary_dim == head_dim:
        loaded = inside[:, None] & (pair < half)[None, :]
        turn = cos_sin + position[:, None] * head_dim + pair[None, :]
        cos = tl.load(turn, mask=loaded, other=0.0)
        sin = tl.load(turn + half, mask=loaded, other=0.0)
        more_cos, more_sin = cos, sin
    else:
        cos, sin = _turns_of(cos_sin, position, inside, pair, rotary_dim)
        more_cos, more_sin = _turns_of(cos_sin, position, inside, pair + half, rotary_dim)
    return cos, sin, more_cos, more_sin


@triton.jit
def halves(source, place, inside, head_dim: tl.constexpr, block_d: tl.constexpr):
    """Both halves [L, block_d / 2] of the heads at `place` [L] of `source`."""
    half: tl.constexpr = head_dim // 2
    pair = tl.arange(0, block_d // 2)
    loaded = inside[:, None]
    if head_dim != block_d:
        loaded = loaded & (pair < half)[None, :]
    start = source + place[:, None] + pair[None, :]
    return tl.load(start, mask=loaded, other=0.0), tl.load(start + half, mask=loaded, other=0.0)


@triton.jit
def gains_of(weight, rotary_dim: tl.constexpr, head_dim: tl.constexpr, block_d: tl.constexpr):
    """The `gains` argument of `rotated`: a norm's weights of the first half of a head and of the
    second, and those of their partners, each [1, block_d / 2]."""
    pair = tl.arange(0, block_d // 2)
    more, inside = pair + head_dim // 2, pair < head_dim // 2
    first, second = _weights_at(weight, pair, inside), _weights_at(weight, more, inside)
    of_first = _weights_at(weight, _partner(pair, rotary_dim), inside)
    return first, second, of_first, _weights_at(weight, _partner(more, rotary_dim), inside)


@triton.jit
def _weights_at(weight, number, inside):
    return tl.load(weight + number, mask=inside, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _rotated(first, second, cos, sin, gains, eps, head_dim: tl.constexpr):
    """`rotated` where rotary_dim is head_dim."""
    dtype: tl.constexpr = first.dtype
    first, second = first.to(tl.float32), second.to(tl.float32)
    if gains is not None:
        scale = tl.rsqrt(tree_sum(first * first + second * second) / head_dim + eps)[:, None]
        # Rounded to the model's dtype, as between two layers.
        first = (first * scale * gains[0]).to(dtype).to(tl.float32)
        second = (second * scale * gains[1]).to(dtype).to(tl.float32)
    return (first * cos - second * sin).to(dtype), (second * cos + first * sin).to(dtype)


@triton.jit
def _normed(x, scale, gain):
    """x [L, C] times `scale` and the norm's weights, in x's dtype."""
    return (x.to(tl.float32) * scale * gain).to(x.dtype)


@triton.jit
def _partly_rotated(
    source, place, inside, first, second, turn, gains, eps, rotary_dim: tl.constexpr,
    head_dim: tl.constexpr,
):  # fmt: skip
    """`rotated` where rotary_dim is less than head_dim: partners are read from `source`."""
    cos, sin, more_cos, more_sin = turn
    dtype: tl.constexpr = first.dtype
    half: tl.constexpr = head_dim // 2
    pair = tl.arange(0, first.shape[1])
    one, two = _partner(pair, rotary_dim), _partner(pair + half, rotary_dim)
    start, loaded = source + place[:, None], inside[:, None] & (pair < half)[None, :]
    other = tl.load(start + one[None, :], mask=loaded, other=0.0)
    more = tl.load(start + two[None, :], mask=loaded, other=0.0)
    if gains is not None:
        wide, wider = first.to(tl.float32), second.to(tl.float32)
        scale = tl.rsqrt(tree_sum(wide * wide + wider * wider) / head_dim + eps)[:, None]
        first, second = _normed(first, scale, gains[0]), _normed(second, scale, gains[1])
        other, more = _normed(other, scale, gains[2]), _normed(more, scale, gains[3])
    first = first.to(tl.float32) * cos + other.to(tl.float32) * sin
    second = second.to(tl.float32) * more_cos + more.to(tl.float32) * more_sin
    return first.to(dtype), second.to(dtype)


@triton.jit
def rotated(
    source, place, inside, first, second, turn, gains, eps, rotary_dim: tl.constexpr,
    head_dim: tl.constexpr,
):  # fmt: skip
    """RMS norm (if `gains` is not None) and rotary embedding of both halves of heads.

    `first` and `second` [L, block_d / 2] are the halves of the heads at `place` [L] of `source`,
    `turn` comes from `turns`, and `gains` from `gains_of`. Returns both halves in their dtype.
    """
    if rotary_dim == head_dim:
        first, second = _rotated(first, second, turn[0], turn[1], gains, eps, head_dim)
    else:
        first, second = _partly_rotated(
            source, place, inside, first, second, turn, gains, eps, rotary_dim, head_dim
        )
    return first, second


@triton.jit
def store_heads(target, scale_at, inside, first, second, head_dim: tl.constexpr):
    """Store both halves of heads [L, C] at `target` [L]. With `scale_at` they are quantized to e4m3
    (maximum 448), with a float32 scale for each head, stored at `scale_at` [L]."""
    half: tl.constexpr = head_dim // 2
    pair = tl.arange(0, first.shape[1])
    stored = inside[:, None] & (pair < half)[None, :]
    if scale_at is not None:
        first, second = first.to(tl.float32), second.to(tl.float32)
        magnitude = tl.where(stored, tl.maximum(tl.abs(first), tl.abs(second)), 0.0)
        scale = tl.math.div_rn(tl.max(magnitude, axis=1), 448.0)
        tl.store(scale_at, scale, mask=inside)
        by = tl.where(scale > 0.0, scale, 1.0)[:, None] + tl.zeros_like(first)
        first, second = tl.math.div_rn(first, by), tl.math.div_rn(second, by)
    at = target[:, None] + pair[None, :]
    tl.store(at, first.to(target.dtype.element_ty), mask=stored)
    tl.store(at + half, second.to(target.dtype.element_ty), mask=stored)


@triton.jit
def scales_at(scales, places, inside):
    """[block_n] float32: the scales of one head for the tokens whose bytes begin at `places`."""
    return tl.load(scales + places // 4, mask=inside, other=0.0)


@triton.jit
def queries(source, place, inside, head_dim: tl.constexpr, block_d: tl.constexpr):
    """[L, block_d]: load the heads at `place` [L] of `source`, zero in padding columns."""
    number = columns(head_dim, block_d)
    loaded = inside[:, None] & (number >= 0)[None, :]
    return tl.load(source + place[:, None] + number[None, :], mask=loaded, other=0.0)


@triton.jit
def sight(
    positions, places, tokens, last_seen, first, rows, context, tile, kv_head, window,
    causal: tl.constexpr, groups: tl.constexpr, block_m: tl.constexpr,
):  # fmt: skip
    """(row, query head, position, first token seen, end of the tokens seen) of a tile's lines.

    Line m of a request and KV head is row m // groups and query head m % groups. A row's index in
    the context is its position, unless `tokens` or `places` gives another. A row of an image also
    sees later tokens, up to `last_seen`.
    """
    line = tile * block_m + tl.arange(0, block_m)
    row = line // groups
    position = tl.load(positions + first + row, mask=row < rows, other=0)
    place = position
    if places is not None:
        place = tl.load(places + first + row, mask=row < rows, other=0)
    own = tl.maximum(place.to(tl.int32), context - rows)  # a padding row may have less
    token = own
    if tokens is not None:
        token = tl.load(tokens + first + row, mask=row < rows, other=0).to(tl.int32)
    if last_seen is not None:
        last = tl.load(last_seen + first + row, mask=row < rows, other=0)
        token = tl.maximum(token, last.to(tl.int32))
    ends = tl.minimum(token + 1, context) if causal else tl.zeros_like(own) + context
    begins = tl.zeros_like(own)
    if window is not None:
        begins = tl.maximum(own - window + 1, 0)
    return row, kv_head * groups + line % groups, position, begins, ends


@triton.jit
def oldest_token(context, rows, window):
    """The first token that any row of the request sees."""
    oldest = context * 0
    if window is not None:
        oldest = tl.maximum(context - rows - window + 1, 0)
    return oldest


@triton.jit
def entries_of(table, start, end, block_size: tl.constexpr, block_n: tl.constexpr):
    """[block_n]: block table entries of tokens from `start`, a multiple of block_n, up to `end`."""
    token = tl.arange(0, block_n)
    if block_n % block_size == 0:  # token // block_size is the same for all tiles
        place = start // block_size + token // block_size
    else:
        place = (start + token) // block_size
    return tl.load(table + place, mask=start + token < end, other=0)


@triton.jit
def places_of(
    entries, start, place_stride: tl.constexpr, block_size: tl.constexpr, block_n: tl.constexpr
):
    """[block_n] int64: offsets in the cache of the tokens from `start` on."""
    token = tl.arange(0, block_n)
    within = token % block_size if block_n % block_size == 0 else (start + token) % block_size
    return entries.to(tl.int64) * (block_size * place_stride) + within * place_stride


@triton.jit
def tokens_at(
    pages, places, inside, head_dim: tl.constexpr, block_d: tl.constexpr, masked: tl.constexpr
):
    """[block_n, block_d]: keys or values of one head; zero where not `inside`."""
    number = columns(head_dim, block_d)
    source = pages + places[:, None] + number[None, :]
    if head_dim != block_d:
        value = tl.load(source, mask=inside[:, None] & (number >= 0)[None, :], other=0.0)
    elif masked:
        value = tl.load(source, mask=inside[:, None], other=0.0)
    else:
        value = tl.load(source)
    return value


@triton.jit
def capped(score, scale, softcap):
    """(scores after the softcap, the factor that turns them into units of log 2)."""
    factor = scale * LOG2_E
    if softcap is not None:
        # tanh from exp2, which may overflow to infinity: the result is then 1, as it should be.
        power = tl.exp2(score * (scale * 2.0 * LOG2_E / softcap))
        score = 1.0 - 2.0 / (power + 1.0)
        factor = softcap * LOG2_E
    return score, factor


@triton.jit
def hidden(
    score, token, row_begins, row_ends, row, rows, ancestors, tree_start, window,
    first_seen: tl.constexpr,
):  # fmt: skip
    """Mask scores [L, N] with minus infinity where a row does not see a token.

    A row sees the tokens [row_begins, row_ends), but none before `first_seen`. With `ancestors`, it
    sees a token from `tree_start` on only if the token's bit in the row's word is set.
    """
    seen = token[None, :] < row_ends[:, None]
    if window is not None:
        seen &= token[None, :] >= row_begins[:, None]
    if first_seen > 0:
        seen &= (token >= first_seen)[None, :]
    if ancestors is not None:
        word = tl.load(ancestors + row, mask=row < rows, other=0)[:, None]
        behind = (token - tree_start)[None, :]
        bit = tl.minimum(tl.maximum(behind, 0), 63).to(tl.int64)
        seen &= (behind < 0) | (((word >> bit) & 1) != 0)
    return tl.where(seen, score, float("-inf"))


# A context is split so that several programs can read it at once. Splits begin at fixed tokens,
# whatever the batch, so that a row's sums always have the same order. They grow with the context:
# short contexts still fill the device, and long ones do not have too many partial sums to combine.
# 8 splits have 128 tokens, 8 have 256, 16 have 512, all others 1024.
SMALLEST = 128  # tokens; every split begins at a multiple


@triton.jit
def split_start(split: tl.tensor) -> tl.tensor:
    """The first token of a split: the maximum of four linear functions, one for each length."""
    return max(max(split * 128, split * 256 - 1024), max(split * 512 - 5120, split * 1024 - 21504))


@triton.jit
def split_of(token: tl.tensor) -> tl.tensor:
    """The split that contains a token: the inverse of `split_start`."""
    return min(
        min(token // 128, (token + 1024) // 256),
        min((token + 5120) // 512, (token + 21504) // 1024),
    )


@triton.jit
def split_of_each(token):
    """`split_of` for a tensor of tokens."""
    short = tl.minimum(token // 128, (token + 1024) // 256)
    return tl.minimum(short, tl.minimum((token + 5120) // 512, (token + 21504) // 1024))


@triton.jit
def split_of_lane(lane, lanes, begin, end):
    """The first split of a lane: the first that begins in the lane's share of [begin, end)."""
    token = begin + tl.cdiv(lane * (end - begin), lanes)
    return tl.where(token == 0, 0, split_of(tl.maximum(token, 1) - 1) + 1)


def most_splits(tokens: int) -> int:
    """The number of splits of a context of `tokens` tokens, at least 1."""
    last: int = split_of.fn(max(tokens, 1) - 1)
    return last + 1
