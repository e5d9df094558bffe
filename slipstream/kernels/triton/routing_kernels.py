"""Kernels that choose each row's experts, sort the rows by expert, and add a shared expert.

One program chooses for one row, whatever the number of rows, so that sums over experts always have
the same order. A pair is a row and one of its experts, numbered row * places + place, where place
is the expert's rank in the row's choice. A shared expert has the last place and the last number.
"""

import triton
import triton.language as tl

from slipstream.kernels.triton.launch import launch_dependents, wait_for_inputs

ROWS = tl.constexpr(16)  # rows that a program sorts at once
_LOWEST = tl.constexpr(-3.0e38)  # above minus infinity, which marks experts that may not be chosen
# Whether there is a shared expert, and whether the last logit is that of its gate.
NOT_SHARED, SHARED, WEIGHED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
SOFTMAX, CHOSEN_SOFTMAX, SIGMOID = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _first_of_largest(values, index, beyond: tl.constexpr):
    """[R]: the `index` of the maximum of each row of `values` [R, E]; of equal ones the lowest."""
    largest = tl.max(values, axis=1)
    return tl.min(tl.where(values == largest[:, None], index[None, :], beyond), axis=1)


@triton.jit
def _within_groups(
    preferred, expert, experts: tl.constexpr, groups: tl.constexpr, kept: tl.constexpr
):
    """`preferred` [R, E] with experts masked that are not in the `kept` best groups. A group is
    rated by the sum of its two largest values."""
    width: tl.constexpr = preferred.shape[1]
    group = expert // (experts // groups)
    best = tl.full(preferred.shape, float("-inf"), tl.float32)  # of each expert's group
    for each in tl.static_range(groups):
        own = tl.where((group == each)[None, :], preferred, float("-inf"))
        first = _first_of_largest(own, expert, width)
        others = tl.where(expert[None, :] == first[:, None], float("-inf"), own)
        two = tl.max(own, axis=1) + tl.max(others, axis=1)
        best = tl.where((group == each)[None, :], two[:, None], best)
    keeping = tl.zeros(preferred.shape, tl.int32)
    for _ in tl.static_range(kept):
        first = _first_of_largest(best, group, width)
        own = group[None, :] == first[:, None]
        keeping = tl.where(own, 1, keeping)
        best = tl.where(own, float("-inf"), best)
    inside = (expert < experts)[None, :]
    return tl.where(inside & (keeping == 0), _LOWEST, preferred)


@triton.jit
def _scores(logits, inside, kind: tl.constexpr):
    if kind == SIGMOID:
        return 1.0 / (1.0 + tl.exp(-logits))
    if kind == SOFTMAX:
        logits = tl.where(inside, logits, float("-inf"))
        powers = tl.exp(logits - tl.max(logits, axis=1)[:, None])
        return powers / tl.sum(powers, axis=1)[:, None]
    return logits


@triton.jit
def _places(preferred, expert, chosen: tl.constexpr):
    """[1, E]: the rank of each of the `chosen` largest values of `preferred` [1, E], the lower
    index first among equals; `chosen` for all others.

    One maximum is taken at a time, since comparing all pairs needs too many registers. The values
    are mapped to integers of the same order, whose maximum takes a warp one instruction.
    """
    bits = tl.where(preferred == 0.0, 0.0, preferred).to(tl.int32, bitcast=True)  # zeros are equal
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    place = tl.full(preferred.shape, chosen, tl.int32)
    for each in tl.static_range(chosen):
        first = _first_of_largest(key, expert, preferred.shape[1])
        own = expert[None, :] == first[:, None]
        place = tl.where(own, each, place)
        key = tl.where(own, -2147483648, key)
    return place


@triton.jit
def _choose(
    logits, expert, correction, experts: tl.constexpr, chosen: tl.constexpr, kind: tl.constexpr,
    normalised: tl.constexpr, scale: tl.constexpr, groups: tl.constexpr, kept: tl.constexpr,
):  # fmt: skip
    """logits [1, E], correction [E] or None -> (ranks as in `_places`, weights), both [1, E]."""
    inside = (expert < experts)[None, :]
    scores = _scores(logits, inside, kind)
    preferred = scores
    if correction is not None:
        preferred += correction[None, :]
    # Even if scores are NaN, the chosen experts must exist.
    preferred = tl.where(preferred > _LOWEST, preferred, _LOWEST)
    preferred = tl.where(inside, preferred, float("-inf"))
    if groups > 1:
        preferred = _within_groups(preferred, expert, experts, groups, kept)
    place = _places(preferred, expert, chosen)
    taken = place < chosen
    weights = scores
    if kind == CHOSEN_SOFTMAX:
        weights = tl.where(taken, scores, float("-inf"))
        weights = tl.exp(weights - tl.max(weights, axis=1)[:, None])
    total = tl.sum(tl.where(taken, weights, 0.0), axis=1)
    if kind == CHOSEN_SOFTMAX:
        weights /= total[:, None]
    elif normalised:
        weights /= (total + 1e-20)[:, None]
    return place, weights * scale


@triton.jit
def _tile_ends(counts, tile: tl.constexpr):
    """[E]: number of tiles of `tile` rows that each expert and all experts before it need."""
    return tl.cumsum((counts + tile - 1) // tile, 0)


@triton.jit
def _store_starts(counts, expert, starts, ends, experts: tl.constexpr, tile: tl.constexpr):
    after = tl.cumsum(counts, 0)
    tl.store(starts + expert, after - counts, mask=expert < experts)
    tl.store(starts + experts, tl.sum(counts, axis=0))
    tl.store(ends + expert, _tile_ends(counts, tile), mask=expert < experts)


@triton.jit
def _place_pairs(
    choices, ranks, starts, before, pairs, first, rows, span: tl.constexpr, chosen: tl.constexpr
):
    """Store the pairs of `span` rows, from row `first` on, at their places in the sorted order."""
    many: tl.constexpr = triton.next_power_of_2(chosen)
    line = first + tl.arange(0, span)
    place = tl.arange(0, many)
    pair = line[:, None] * chosen + place[None, :]
    valid = (line < rows)[:, None] & (place < chosen)[None, :]
    expert = tl.load(choices + pair, mask=valid, other=0)
    at = tl.load(starts + expert, mask=valid, other=0) + tl.load(ranks + pair, mask=valid, other=0)
    if before is not None:
        at += tl.load(before + expert, mask=valid, other=0)
    tl.store(pairs + at, pair, mask=valid)


@triton.jit
def _logits(at, inside, part_stride, parts: tl.constexpr):
    """Load the logits at `at` and add up their parts."""
    values = tl.load(at, mask=inside, other=0.0)
    for part in tl.static_range(1, parts):
        values += tl.load(at + part * part_stride, mask=inside, other=0.0)
    return values


@triton.jit
def choose_kernel(
    logits, correction, gains, choices, weights, part_stride, parts: tl.constexpr,
    experts: tl.constexpr, chosen: tl.constexpr, kind: tl.constexpr, normalised: tl.constexpr,
    scale: tl.constexpr, groups: tl.constexpr, kept: tl.constexpr, shared: tl.constexpr,
    block: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """Programs (row). logits [parts, rows, experts] float32, partial sums; [parts, rows,
    experts + 1] with the gate of a shared expert.

    Writes the expert of each pair to `choices`, and its weight to `weights`.
    """
    launch_dependents(pdl)
    places: tl.constexpr = chosen if shared == NOT_SHARED else chosen + 1
    row = tl.program_id(0)
    expert = tl.arange(0, block)
    inside = (expert < experts)[None, :]
    added = None
    if correction is not None:
        added = tl.load(correction + expert, mask=expert < experts, other=0.0)
    if gains is not None:
        gain = tl.load(gains + expert, mask=expert < experts, other=0.0)[None, :]
    wait_for_inputs(pdl)
    at = logits + row * (experts + 1 if shared == WEIGHED else experts)
    values = _logits(at + expert[None, :], inside, part_stride, parts)
    place, weight = _choose(
        values, expert, added, experts, chosen, kind, normalised, scale, groups, kept
    )
    if gains is not None:
        weight *= gain
    own = inside & (place < chosen)
    pair = row * places + place
    tl.store(choices + pair, expert[None, :], mask=own)
    tl.store(weights + pair, weight, mask=own)
    if shared != NOT_SHARED:
        one = tl.arange(0, 1)
        by = tl.full((1,), 1.0, tl.float32)
        if shared == WEIGHED:
            by /= 1.0 + tl.exp(-_logits(at + experts + one, one < 1, part_stride, parts))
        tl.store(choices + row * places + chosen + one, one + experts)
        tl.store(weights + row * places + chosen + one, by)


@triton.jit(do_not_specialize=["rows"])
def rank_kernel(
    choices, ranks, counts, starts, ends, pairs, rows, experts: tl.constexpr,
    chosen: tl.constexpr, block: tl.constexpr, span: tl.constexpr, tile: tl.constexpr,
    pdl: tl.constexpr,
):  # fmt: skip
    """Programs (`span` rows each); runs after `choose_kernel`.

    Writes to `ranks`, for each pair, how many earlier pairs of the program's rows have the same
    expert. If one program has all rows, it also sorts the pairs by expert (`pairs`, `starts`
    [experts + 1], `ends` as in `_tile_ends`). Otherwise it writes `counts` [programs, experts], and
    `sort_kernel` and `place_kernel` do the rest.
    """
    launch_dependents(pdl)
    expert = tl.arange(0, block)
    seen = tl.zeros((block,), tl.int32)
    first = tl.program_id(0) * span
    wait_for_inputs(pdl)
    for begin in range(first, tl.minimum(first + span, rows), ROWS):
        line = begin + tl.arange(0, ROWS)
        place = tl.full((ROWS, block), chosen, tl.int32)
        for each in tl.static_range(chosen):
            own = tl.load(choices + line * chosen + each, mask=line < rows, other=experts)
            place = tl.where(expert[None, :] == own[:, None], each, place)
        own = (line < rows)[:, None] & (expert < experts)[None, :] & (place < chosen)
        taken = own.to(tl.int32)
        rank = seen[None, :] + tl.cumsum(taken, 0) - taken
        tl.store(ranks + line[:, None] * chosen + place, rank, mask=own)
        seen += tl.sum(taken, axis=0)
    if counts is not None:
        tl.store(counts + tl.program_id(0) * experts + expert, seen, mask=expert < experts)
    else:
        _store_starts(seen, expert, starts, ends, experts, tile)
        tl.debug_barrier()  # other threads of this program read `starts` next
        for begin in range(first, rows, ROWS):
            _place_pairs(choices, ranks, starts, None, pairs, begin, rows, ROWS, chosen)


@triton.jit(do_not_specialize=["programs"])
def sort_kernel(
    counts, starts, ends, programs, experts: tl.constexpr, block: tl.constexpr,
    span: tl.constexpr, tile: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """One program. Replaces `counts` [programs, experts] by their exclusive sums over programs, and
    writes `starts` and `ends`."""
    launch_dependents(pdl)
    expert = tl.arange(0, block)
    seen = tl.zeros((block,), tl.int32)
    wait_for_inputs(pdl)
    for begin in range(0, programs, span):
        line = begin + tl.arange(0, span)
        inside = (line < programs)[:, None] & (expert < experts)[None, :]
        at = counts + line[:, None] * experts + expert[None, :]
        own = tl.load(at, mask=inside, other=0)
        tl.store(at, seen[None, :] + tl.cumsum(own, 0) - own, mask=inside)
        seen += tl.sum(own, axis=0)
    _store_starts(seen, expert, starts, ends, experts, tile)


@triton.jit(do_not_specialize=["rows"])
def place_kernel(
    choices, ranks, starts, counts, pairs, rows, experts: tl.constexpr, chosen: tl.constexpr,
    span: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """Programs (`span` rows each, as in `rank_kernel`); writes `pairs`, after `sort_kernel`."""
    launch_dependents(pdl)
    first = tl.program_id(0) * span
    wait_for_inputs(pdl)
    before = counts + tl.program_id(0) * experts
    _place_pairs(choices, ranks, starts, before, pairs, first, rows, span, chosen)


@triton.jit
def sum_kernel(
    outputs, shared, gate, x, out, row_stride, part_stride, x_stride, width, parts: tl.constexpr,
    block: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """Programs (row). Adds up `outputs` [parts, rows, width] float32 in order, then `shared`
    [rows, width] float32, which is multiplied by sigmoid(x . gate) if there is a gate [width]."""
    launch_dependents(pdl)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < width
    wait_for_inputs(pdl)
    at = outputs + row * row_stride + column
    total = tl.zeros((block,), tl.float32)
    for part in tl.static_range(parts):
        total += tl.load(at + part * part_stride, mask=inside, other=0.0)
    added = tl.load(shared + row * width + column, mask=inside, other=0.0)
    if gate is not None:
        of_gate = tl.load(gate + column, mask=inside, other=0.0).to(tl.float32)
        own = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        added *= 1.0 / (1.0 + tl.exp(-tl.sum(own * of_gate, axis=0)))
    total += added
    tl.store(out + row * width + column, total.to(out.dtype.element_ty), mask=inside)
