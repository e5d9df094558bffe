"""How rows choose their experts, and which rows each expert then has, all on the device.

Sums over experts are made of integers, so that their bits do not follow from how many rows or warps
a program has. A pair is a row and the place of one of its experts in the order of choice, behind
which a shared expert stands: row * places + place.
"""

import triton
import triton.language as tl

from slipstream.kernels.triton.launch import launch_dependents, wait_for_inputs

_LOWEST = tl.constexpr(-3.0e38)  # above what can no longer be chosen
_GONE = tl.constexpr(-(2**63))
_ONE = tl.constexpr(2.0**40)
_TINY = tl.constexpr(1e-30)
SOFTMAX, CHOSEN_SOFTMAX, SIGMOID = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# Whether all rows pass one more expert, and whether a logit behind the others weighs it.
NOT_SHARED, SHARED, WEIGHED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _first_of_largest(values, index, beyond: tl.constexpr):
    """[R]: the lowest `index` of the largest of each row of `values` [R, E]."""
    largest = tl.max(values, axis=1)
    return tl.min(tl.where(values == largest[:, None], index[None, :], beyond), axis=1)


@triton.jit
def _within_groups(
    preferred, expert, experts: tl.constexpr, groups: tl.constexpr, kept: tl.constexpr
):
    """`preferred` [R, E], lowest outside of the groups whose two largest sums are largest."""
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
def _sum(values):
    """[R]: of values [R, E] that are not negative, in fixed point."""
    largest = tl.maximum(tl.max(values, axis=1), _TINY)
    whole = (values / largest[:, None] * _ONE).to(tl.int64)
    return tl.sum(whole, axis=1).to(tl.float32) / _ONE * largest


@triton.jit
def _scores(logits, inside, kind: tl.constexpr):
    if kind == SIGMOID:
        return 1.0 / (1.0 + tl.exp(-logits))
    if kind == SOFTMAX:
        logits = tl.where(inside, logits, float("-inf"))
        powers = tl.exp(logits - tl.max(logits, axis=1)[:, None])
        return powers / _sum(powers)[:, None]
    return logits


@triton.jit
def _keys(preferred, expert):
    """[R, E]: integers in the order of preference, without equals: lower experts' are larger."""
    bits = tl.where(preferred == 0.0, 0.0, preferred).to(tl.int32, bitcast=True)
    bits ^= (bits >> 31) & 0x7FFFFFFF
    return (bits.to(tl.int64) << 32) - expert[None, :]


@triton.jit
def _choose(
    logits, expert, correction, experts: tl.constexpr, chosen: tl.constexpr, kind: tl.constexpr,
    groups: tl.constexpr, kept: tl.constexpr,
):  # fmt: skip
    """logits [R, E] -> (place of each expert in the order of choice or `chosen`, its score)."""
    inside = (expert < experts)[None, :]
    scores = _scores(logits, inside, kind)
    preferred = scores
    if correction is not None:
        preferred += tl.load(correction + expert, mask=expert < experts, other=0.0)[None, :]
    # What is not a number must still choose an expert that there is.
    preferred = tl.where(preferred > _LOWEST, preferred, _LOWEST)
    preferred = tl.where(inside, preferred, float("-inf"))
    if groups > 1:
        preferred = _within_groups(preferred, expert, experts, groups, kept)
    keys = _keys(preferred, expert)
    place = tl.full(logits.shape, chosen, tl.int32)
    for each in tl.static_range(chosen):
        own = keys == tl.max(keys, axis=1)[:, None]
        place = tl.where(own, each, place)
        keys = tl.where(own, _GONE, keys)
    return place, scores


@triton.jit
def _weights(
    place, scores, gains, expert, experts: tl.constexpr, chosen: tl.constexpr, kind: tl.constexpr,
    normalised: tl.constexpr, scale: tl.constexpr,
):  # fmt: skip
    """[R, E]: of the chosen experts."""
    taken = place < chosen
    weights = scores
    if kind == CHOSEN_SOFTMAX:
        weights = tl.where(taken, scores, float("-inf"))
        weights = tl.exp(weights - tl.max(weights, axis=1)[:, None])
    total = _sum(tl.where(taken, weights, 0.0))
    if kind == CHOSEN_SOFTMAX:
        weights /= total[:, None]
    elif normalised:
        weights /= (total + 1e-20)[:, None]
    weights *= scale
    if gains is not None:
        weights *= tl.load(gains + expert, mask=expert < experts, other=0.0)[None, :]
    return weights


@triton.jit
def _logits(at, inside, part_stride, parts: tl.constexpr):
    """Those at `at`, added up."""
    values = tl.load(at, mask=inside, other=0.0)
    for part in tl.static_range(1, parts):
        values += tl.load(at + part * part_stride, mask=inside, other=0.0)
    return values


@triton.jit
def _weigh_shared(
    logits, weights, line, valid, part_stride, parts: tl.constexpr, experts: tl.constexpr,
    chosen: tl.constexpr, shared: tl.constexpr,
):  # fmt: skip
    """Stores the weight of the rows' shared expert."""
    weight = tl.full(line.shape, 1.0, tl.float32)
    if shared == WEIGHED:
        at = logits + line * (experts + 1) + experts
        weight = 1.0 / (1.0 + tl.exp(-_logits(at, valid, part_stride, parts)))
    tl.store(weights + line * (chosen + 1) + chosen, weight, mask=valid)


@triton.jit
def own_choice(
    logits, correction, gains, choices, weights, part_stride, slot, writes, parts: tl.constexpr,
    experts: tl.constexpr, places: tl.constexpr, kind: tl.constexpr, normalised: tl.constexpr,
    scale: tl.constexpr, groups: tl.constexpr, kept: tl.constexpr, shared: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    """The expert at place `slot` of the only row. The program that `writes` stores all experts of
    the row, and their weights."""
    chosen: tl.constexpr = places - 1 if shared else places
    expert = tl.arange(0, block)
    inside = (expert < experts)[None, :]
    mine = experts + tl.zeros_like(slot)
    if (slot < chosen) | writes:
        values = _logits(logits + expert[None, :], inside, part_stride, parts)
        place, scores = _choose(values, expert, correction, experts, chosen, kind, groups, kept)
        if slot < chosen:
            own = tl.where(place == slot, expert[None, :], 0)
            mine = tl.sum(tl.sum(own, axis=1), axis=0)
        if writes:
            weight = _weights(
                place, scores, gains, expert, experts, chosen, kind, normalised, scale
            )
            taken = inside & (place < chosen)
            tl.store(choices + place, expert[None, :] + tl.zeros_like(place), mask=taken)
            tl.store(weights + place, weight, mask=taken)
            if shared:
                tl.store(choices + chosen, experts)
                one = tl.arange(0, 1)
                _weigh_shared(
                    logits, weights, one, one < 1, part_stride, parts, experts, chosen, shared
                )
    return mine


@triton.jit
def _tile_ends(counts, tile: tl.constexpr):
    """[E]: tiles of so many rows of an expert and of all before it."""
    return tl.cumsum((counts + tile - 1) // tile, 0)


@triton.jit
def _store_starts(
    counts, expert, starts, ends, rows, experts: tl.constexpr, tile: tl.constexpr,
    shared: tl.constexpr,
):  # fmt: skip
    """[E]: where the pairs of each expert start, which are stored with the rest."""
    first = tl.cumsum(counts, 0) - counts
    total = tl.sum(counts, axis=0)
    tl.store(starts + expert, first, mask=expert < experts)
    tl.store(starts + experts, total)
    if shared:
        tl.store(starts + experts + 1, total + rows)
    tl.store(ends + expert, _tile_ends(counts, tile), mask=expert < experts)
    return first


@triton.jit
def _place_pairs(
    choices, ranks, starts, before, pairs, first, rows, span: tl.constexpr, chosen: tl.constexpr,
    shared: tl.constexpr,
):  # fmt: skip
    """Pairs of the `span` rows from `first` on to where their experts' pairs lie."""
    many: tl.constexpr = triton.next_power_of_2(chosen)
    places: tl.constexpr = chosen + 1 if shared else chosen
    line = first + tl.arange(0, span)
    place = tl.arange(0, many)
    pair = line[:, None] * places + place[None, :]
    valid = (line < rows)[:, None] & (place < chosen)[None, :]
    expert = tl.load(choices + pair, mask=valid, other=0)
    at = tl.load(starts + expert, mask=valid, other=0) + tl.load(ranks + pair, mask=valid, other=0)
    if before is not None:
        at += tl.load(before + expert, mask=valid, other=0)
    tl.store(pairs + at, pair, mask=valid)


@triton.jit
def _route(
    logits, correction, gains, choices, weights, ranks, pairs, part_stride, rows, begin, seen,
    expert, parts: tl.constexpr, experts: tl.constexpr, chosen: tl.constexpr, kind: tl.constexpr,
    normalised: tl.constexpr, scale: tl.constexpr, groups: tl.constexpr, kept: tl.constexpr,
    shared: tl.constexpr, lines: tl.constexpr,
):  # fmt: skip
    """Of `lines` rows: their pairs [R, E], which of these there are, and `ranks` of them."""
    pitch: tl.constexpr = experts + 1 if shared == WEIGHED else experts
    places: tl.constexpr = chosen + 1 if shared else chosen
    line = begin + tl.arange(0, lines)
    inside = (line < rows)[:, None] & (expert < experts)[None, :]
    at = logits + line[:, None] * pitch + expert[None, :]
    values = _logits(at, inside, part_stride, parts)
    place, scores = _choose(values, expert, correction, experts, chosen, kind, groups, kept)
    weight = _weights(place, scores, gains, expert, experts, chosen, kind, normalised, scale)
    own = inside & (place < chosen)
    pair = line[:, None] * places + place
    taken = own.to(tl.int32)
    rank = seen[None, :] + tl.cumsum(taken, 0) - taken
    tl.store(weights + pair, weight, mask=own)
    if choices is not None:
        tl.store(choices + pair, expert[None, :] + tl.zeros_like(place), mask=own)
        tl.store(ranks + pair, rank, mask=own)
    if shared:
        valid = line < rows
        _weigh_shared(logits, weights, line, valid, part_stride, parts, experts, chosen, shared)
        tl.store(pairs + rows * chosen + line, line * places + chosen, mask=valid)
    return pair, own, rank


@triton.jit(do_not_specialize=["rows"])
def route_kernel(
    logits, correction, gains, choices, weights, ranks, counts, starts, ends, pairs, part_stride,
    rows,
    parts: tl.constexpr, experts: tl.constexpr, chosen: tl.constexpr, kind: tl.constexpr,
    normalised: tl.constexpr, scale: tl.constexpr, groups: tl.constexpr, kept: tl.constexpr,
    shared: tl.constexpr, block: tl.constexpr, span: tl.constexpr, lines: tl.constexpr,
    tile: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """Programs of `span` rows each, `lines` at a time. logits [parts, rows, experts] float32, or
    one more of each row for a shared expert, to be added up.

    Writes of every pair its weight to `weights`. A program that has all rows also sorts the pairs
    by expert, the shared one's last: `pairs`, `starts` [experts + 1] or one more, `ends` (see
    `_tile_ends`; without the shared expert's). Others, and those that take several turns, write to
    `choices` the expert of every pair that was chosen, and to `ranks` how many pairs of the
    program's rows before it have its expert; others leave `counts` [programs, experts] to
    `sort_kernel` and `place_kernel`.
    """
    launch_dependents(pdl)
    expert = tl.arange(0, block)
    seen = tl.zeros((block,), tl.int32)
    first = tl.program_id(0) * span
    wait_for_inputs(pdl)
    if span == lines:
        pair, own, rank = _route(
            logits, correction, gains, None, weights, None, pairs, part_stride, rows, first, seen,
            expert, parts, experts, chosen, kind, normalised, scale, groups, kept, shared, lines,
        )  # fmt: skip
        seen = tl.sum(own.to(tl.int32), axis=0)
        begins = _store_starts(seen, expert, starts, ends, rows, experts, tile, shared)
        tl.store(pairs + begins[None, :] + rank, pair, mask=own)
    else:
        for begin in range(first, tl.minimum(first + span, rows), lines):
            _, own, _ = _route(
                logits, correction, gains, choices, weights, ranks, pairs, part_stride, rows,
                begin, seen, expert, parts, experts, chosen, kind, normalised, scale, groups, kept,
                shared, lines,
            )  # fmt: skip
            seen += tl.sum(own.to(tl.int32), axis=0)
        if counts is not None:
            tl.store(counts + tl.program_id(0) * experts + expert, seen, mask=expert < experts)
        else:
            _store_starts(seen, expert, starts, ends, rows, experts, tile, shared)
            tl.debug_barrier()  # the program reads what it wrote
            for begin in range(first, rows, lines):
                _place_pairs(
                    choices, ranks, starts, None, pairs, begin, rows, lines, chosen, shared
                )


@triton.jit(do_not_specialize=["programs", "rows"])
def sort_kernel(
    counts, starts, ends, programs, rows, experts: tl.constexpr, block: tl.constexpr,
    span: tl.constexpr, tile: tl.constexpr, shared: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """One program. `counts` [programs, experts] become those of all programs before each."""
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
    _store_starts(seen, expert, starts, ends, rows, experts, tile, shared)


@triton.jit(do_not_specialize=["rows"])
def place_kernel(
    choices, ranks, starts, counts, pairs, rows, experts: tl.constexpr, chosen: tl.constexpr,
    span: tl.constexpr, shared: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """Programs of `span` rows each, as in `route_kernel`, behind `sort_kernel`."""
    launch_dependents(pdl)
    first = tl.program_id(0) * span
    wait_for_inputs(pdl)
    before = counts + tl.program_id(0) * experts
    _place_pairs(choices, ranks, starts, before, pairs, first, rows, span, chosen, shared)


@triton.jit
def sum_kernel(
    outputs, shared, gate, x, out, row_stride, part_stride, x_stride, width, parts: tl.constexpr,
    block: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """One program per row: `outputs` [parts, rows, width] float32 in their order, then `shared`
    [rows, width] float32, times sigmoid(x . gate) where there is a gate [width]."""
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
