"""LoRA adapters in the matmul on Hopper: their part of `matmul_stream_kernels.py`.

The first programs of the launch, the makers, compute A times x, each for a share of the columns and
some tiles of A, with the ring buffer that other programs use for weights. The other programs add B
times the result. They wait for the makers only while their own last tiles are loaded, so that this
costs no time. Makers wait for no other program, and GPUs start programs in the order of their
numbers, so there is no deadlock.

B for the first `chunk` ranks of all slots is loaded before a product begins, while its weights are
loaded, and A times x when it is complete. Further ranks are loaded after these.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from slipstream.kernels.triton.matmul_stream_parts import (
    _barrier,
    _fetch,
    _fetch_rows,
    _settled,
    _step,
    _zeros,
    wait_for_inputs,
)

GROUP = gl.constexpr(16)  # rows of A that are loaded at once
END = gl.constexpr(1 << 24)  # after the last tile of A
PATIENCE = gl.constexpr(1 << 23)  # maximum number of polls for the makers, a few seconds


@gluon.jit
def _or(one, other):
    return one | other


@gluon.jit
def _next_tile(slot, after, lane, lanes, width: gl.constexpr, high: gl.constexpr):
    """The next tile of a lane (every `lanes`-th one) with a slot that some row uses, or END; and a
    bit for each of its groups that is used."""
    tile = gl.maximum(slot * width // high, after + 1)
    tile += (lane - tile % lanes + lanes) % lanes
    inside = (slot >= 0) & (tile <= (slot * width + width - 1) // high)
    chosen = gl.min(gl.where(inside, tile, END), 0)
    bits = gl.zeros_like(slot)
    for group in gl.static_range(high // GROUP):
        start = chosen * high + group * GROUP
        inside = (slot >= start // width) & (slot <= (start + GROUP - 1) // width)
        bits |= gl.where(inside, 1 << group, 0)
    return chosen, gl.reduce(bits, 0, _or)


@gluon.jit
def _fetch_groups(down, ring, slot, barrier, first, k, used, more: gl.constexpr, wanted):
    """Load the used groups of `down` from row `first` on; the barrier also expects `more` bytes."""
    groups: gl.constexpr = ring.shape[1] // GROUP
    size: gl.constexpr = GROUP * ring.shape[2] * 2
    count = 0
    for group in gl.static_range(groups):
        count += (used >> group) & 1
    for given in gl.static_range(1, groups + 1):  # bytes to expect are no variable
        mbarrier.expect(barrier, given * size + more, wanted & (count == given))
    for group in gl.static_range(groups):
        place = ring.index(slot).slice(group * GROUP, GROUP)
        own = wanted & (((used >> group) & 1) != 0)
        _fetch(down, [first + group * GROUP, k], barrier, place, own)


@gluon.jit
def _store_inner(inner, adapters, sums, first, line0, maker, rows, total, width: gl.constexpr):
    """Store those of `sums` [rows of A, rows of x] that belong to the slots of the rows of x."""
    row = first + gl.arange(0, sums.shape[0], layout=gl.SliceLayout(1, sums.type.layout))
    line = line0 + gl.arange(0, sums.shape[1], layout=gl.SliceLayout(0, sums.type.layout))
    slot = gl.load(adapters + line, mask=line < rows, other=-1).to(gl.int32)
    mine = (slot[None, :] == (row // width)[:, None]) & (row < total)[:, None]
    place = ((maker * rows + line) * width)[None, :] + (row % width)[:, None]
    gl.store(inner + place, sums, mask=mine)


@gluon.jit
def make_inner(
    x, more_x, down, inner, adapters, counts, maker, share, rows, depth, ring, ring_x, ring_y, full,
    stages: gl.constexpr, pdl: gl.constexpr, warps: gl.constexpr, width: gl.constexpr,
    lanes: gl.constexpr,
):  # fmt: skip
    """The body of a maker: `share` columns of a lane's rows of A times x, to
    inner [shares, rows, width].

    down: TMA descriptor of A [slots * width, depth], in tiles of `GROUP` rows; slots that no row
    names are not read. All tiles of the lane go through the ring in one sequence.
    """
    high: gl.constexpr = ring.shape[1]
    step_k: gl.constexpr = ring.shape[2]
    first_rows: gl.constexpr = x.block_shape[0]
    more_rows: gl.constexpr = 0 if more_x is None else more_x.block_shape[0]
    size: gl.constexpr = (first_rows + more_rows) * step_k * 2
    span: gl.constexpr = 2 * first_rows if more_rows else first_rows
    lane, number = maker % lanes, maker // lanes
    begin, total = number * share, down.shape[0]
    steps = (gl.minimum(begin + share, depth) - begin + step_k - 1) // step_k
    line = gl.arange(0, span, layout=gl.BlockedLayout([1], [32], [warps], [0]))
    named = gl.load(adapters + line, mask=line < rows, other=-1).to(gl.int32)
    start, _ = _next_tile(named, -1, lane, lanes, width, high)
    # `ahead`, `used` and `at`: tile, groups and step that are fetched next.
    ahead, used = _next_tile(named, -1, lane, lanes, width, high)
    at = 0
    for place in range(stages):
        k, wanted = begin + at * step_k, ahead < END
        _fetch_groups(down, ring, place, full.index(place), ahead * high, k, used, size, wanted)
        at += 1
        if at == steps:
            at = 0
            ahead, used = _next_tile(named, ahead, lane, lanes, width, high)
    wait_for_inputs(pdl)
    at, ahead = 0, start
    for place in range(stages):
        k, wanted = begin + at * step_k, ahead < END
        _fetch_rows(x, more_x, 0, k, full.index(place), ring_x, ring_y, place, wanted)
        at += 1
        if at == steps:
            at = 0
            ahead, used = _next_tile(named, ahead, lane, lanes, width, high)
    current = start
    taken = 0
    while current < END:
        sums = _zeros(1, high, first_rows, warps)
        if more_rows:
            sums += _zeros(1, high, more_rows, warps)
        for _ in range(steps):
            place, k, wanted = taken % stages, begin + at * step_k, ahead < END
            barrier = full.index(place)
            mbarrier.wait(barrier, (taken // stages) & 1)
            sums = _settled(_step(ring, place, ring_x, ring_y, sums, 1), 0)
            _barrier()
            _fetch_groups(down, ring, place, barrier, ahead * high, k, used, size, wanted)
            _fetch_rows(x, more_x, 0, k, barrier, ring_x, ring_y, place, wanted)
            taken += 1
            at += 1
            if at == steps:
                at = 0
                ahead, used = _next_tile(named, ahead, lane, lanes, width, high)
        for chain in gl.static_range(len(sums)):
            line0 = chain * first_rows
            _store_inner(
                inner, adapters, sums[chain], current * high, line0, number, rows, total, width
            )
        current, _ = _next_tile(named, current, lane, lanes, width, high)
    _barrier()
    gl.atomic_add(counts, 1, sem="release", scope="gpu")


@gluon.jit
def _seen(count):
    """Read the count with acquire semantics: data written before it was counted is then visible."""
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b64 $0, [$1];",
        "=l,l", [count], dtype=gl.int64, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def taken_before(counts):
    """The number of programs that have ever read the makers' results; read before this one does."""
    return gl.inline_asm_elementwise(
        "ld.relaxed.gpu.global.b64 $0, [$1];",
        "=l,l", [counts + 1], dtype=gl.int64, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def await_inner(counts, taken, makers: gl.constexpr, takers):
    """Wait until all makers of this launch are done.

    The counts are never reset: each launch adds `makers` to the first and `takers` to the second,
    from which the number of earlier launches follows.
    """
    wanted = (taken // takers + 1) * makers
    looks = 0
    while (_seen(counts) < wanted) & (looks < PATIENCE):
        looks += 1
    if looks == PATIENCE:
        gl.inline_asm_elementwise(
            "trap; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
    gl.atomic_add(counts + 1, 1, sem="relaxed", scope="gpu")


@gluon.jit
def _factors(
    up, adapters, begin, block, rows, width, high: gl.constexpr, span: gl.constexpr,
    gated: gl.constexpr, rank: gl.constexpr, padded: gl.constexpr, chunk: gl.constexpr,
    warps: gl.constexpr,
):  # fmt: skip
    """[high, chunk]: rows of B, of the ranks from `begin` on; zeros for slots that no row names."""
    tall: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, warps], [0, 1])
    half: gl.constexpr = high // 2 if gated else high
    group: gl.constexpr = padded if padded < chunk else chunk
    line = gl.arange(0, span, layout=gl.SliceLayout(1, tall))
    slot = gl.load(adapters + line, mask=line < rows, other=-1).to(gl.int32) - begin // padded
    inside = (slot >= 0) & (slot < chunk // group)
    used = gl.reduce(gl.where(inside, 1 << slot, 0), 0, _or)
    at_tile = gl.arange(0, high, layout=gl.SliceLayout(1, tall))
    row = block * half + at_tile % half + at_tile // half * width
    total = width * 2 if gated else width
    number = gl.arange(0, chunk, layout=gl.SliceLayout(0, tall))
    at = begin % padded + number % group
    source = ((begin // padded + number // group) * rank + at).to(gl.int64) * total
    mask = ((used >> (number // group)) & 1 != 0) & (at < rank)
    mask = mask[None, :] & (row < total)[:, None]
    return gl.load(up + source[None, :] + row[:, None], mask=mask, other=0.0)


@gluon.jit
def _slots(
    adapters, begin, m0, rows, count: gl.constexpr, padded: gl.constexpr, warps: gl.constexpr
):
    """[count]: the places in a chunk of the slots of rows from `m0` on."""
    wide: gl.constexpr = gl.BlockedLayout([1, 1, 4], [8, 1, 4], [warps, 1, 1], [2, 1, 0])
    line = m0 + gl.arange(0, count, layout=gl.SliceLayout(1, gl.SliceLayout(1, wide)))
    slot = gl.load(adapters + line, mask=line < rows, other=-1).to(gl.int32)
    return slot - begin // padded


@gluon.jit
def _inner(
    inner, slot, part, begin, m0, rows, rank: gl.constexpr, padded: gl.constexpr,
    chunk: gl.constexpr, splits_k: gl.constexpr, parts: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """[count, ranks of a slot]: A times x of the rows from `m0` on, whose `_slots` these are."""
    count: gl.constexpr = slot.shape[0]
    flat: gl.constexpr = slot.type.layout.parent
    group: gl.constexpr = padded if padded < chunk else chunk
    line = m0 + gl.arange(0, count, layout=slot.type.layout)
    at = begin % padded + gl.arange(0, group, layout=gl.SliceLayout(0, flat))
    mask = ((slot >= 0) & (slot < chunk // group))[:, None] & (at < rank)[None, :]
    value = gl.zeros([count, group], gl.float32, flat)
    for split in gl.static_range(splits_k):
        source = (split * rows + line) * (parts * rank) + part * rank
        value += gl.load(inner + source[:, None] + at[None, :], mask=mask, other=0.0)
    return value.to(dtype)


@gluon.jit
def _parts_of(ends, block, width, high: gl.constexpr, gated: gl.constexpr, parts: gl.constexpr):
    """(first, last) part of which a block of weights has rows."""
    first, last = 0, 0
    top = block * (high // 2 if gated else high)
    bottom = gl.minimum(top + (high // 2 if gated else high), width) - 1
    if gated:
        bottom += width
    for index in gl.static_range(parts - 1):
        end = gl.load(ends + index)
        first += (top >= end).to(gl.int32)
        last += (bottom >= end).to(gl.int32)
    return first, last


@gluon.jit
def as_operand(factors, sums):
    """`factors` in the register layout of the tensor cores' operand."""
    return gl.convert_layout(factors, gl.DotOperandLayout(0, sums.type.layout, 2))


@gluon.jit
def _add_part(
    sums, tile, factors, slot, numbers, part, block, width, ends, gated: gl.constexpr,
    chunk: gl.constexpr, parts: gl.constexpr, warps: gl.constexpr,
):  # fmt: skip
    """`sums` plus the product, for the rows of B that belong to the part."""
    high: gl.constexpr = sums.shape[0]
    count: gl.constexpr = sums.shape[1]
    wide: gl.constexpr = gl.BlockedLayout([1, 1, 4], [8, 1, 4], [warps, 1, 1], [2, 1, 0])
    half: gl.constexpr = high // 2 if gated else high
    group: gl.constexpr = numbers.shape[1]
    held = gl.arange(0, chunk // group, layout=gl.SliceLayout(0, gl.SliceLayout(2, wide)))
    here = slot[:, None][:, None, :] == held[None, :][:, :, None]
    spread = gl.where(here, numbers[:, None, :], 0.0)
    tile.store(gl.reshape(spread, (count, chunk)))
    at_tile = gl.arange(0, high, layout=gl.SliceLayout(1, factors.type.layout))
    row = block * half + at_tile % half + at_tile // half * width
    own = gl.zeros_like(row)
    for index in gl.static_range(parts - 1):
        own += (row >= gl.load(ends + index)).to(gl.int32)
    factors = gl.where((own == part)[:, None], factors, 0.0)
    factors = as_operand(factors, sums)
    fence_async_shared()
    _barrier()
    sums = warpgroup_mma(factors, tile.permute((1, 0)), sums, is_async=True)
    sums = warpgroup_mma_wait(num_outstanding=0, deps=(sums,))
    _barrier()
    return sums


@gluon.jit
def early_factors(
    up, adapters, block, rows, split, width, high: gl.constexpr, span: gl.constexpr,
    gated: gl.constexpr, rank: gl.constexpr, padded: gl.constexpr, chunk: gl.constexpr,
    warps: gl.constexpr,
):  # fmt: skip
    """B of the first chunk; 0 without adapters. Only the first split adds it."""
    made = 0
    if up is not None:
        owned = gl.where(split == 0, rows, 0)
        made = _factors(
            up, adapters, 0, block, owned, width, high, span, gated, rank, padded, chunk, warps
        )
    return made


@gluon.jit
def early_places(
    counts, adapters, ends, block, m0, rows, split, width, high: gl.constexpr, gated: gl.constexpr,
    first_rows: gl.constexpr, more_rows: gl.constexpr, padded: gl.constexpr, parts: gl.constexpr,
    warps: gl.constexpr,
):  # fmt: skip
    """The inputs of `inner_of_rows`: (count, first part, last part, slots of each row tile)."""
    places = ()
    if adapters is not None:
        owned = gl.where(split == 0, rows, 0)
        first, last = _parts_of(ends, block, width, high, gated, parts)
        slot = _slots(adapters, 0, m0, owned, first_rows, padded, warps)
        places += (taken_before(counts), first, last, slot)  # type: ignore[assignment]
        if more_rows:
            slot = _slots(adapters, 0, m0 + first_rows, owned, more_rows, padded, warps)
            places += (slot,)  # type: ignore[assignment]
    return places


@gluon.jit
def inner_of_rows(
    inner, places, m0, rows, rank: gl.constexpr, padded: gl.constexpr, chunk: gl.constexpr,
    splits_k: gl.constexpr, parts: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """A times x of the first chunk: for each tile of rows the places of slots, and the operands for
    the first and the last part of a block."""
    made = ()
    for index in gl.static_range(3, len(places)):
        slot, line = places[index], m0
        if index > 3:
            line = m0 + places[3].shape[0]
        value = _inner(
            inner, slot, places[1], 0, line, rows, rank, padded, chunk, splits_k, parts, dtype
        )
        other = value
        if parts > 1:
            other = _inner(
                inner, slot, places[2], 0, line, rows, rank, padded, chunk, splits_k, parts, dtype
            )
        made += (slot, value, other)  # type: ignore[assignment]
    return made


@gluon.jit
def add_expanded(
    sums, tile, factors, slot, at_first, at_last, block, m0, rows, width, span: gl.constexpr,
    gated: gl.constexpr, inner, up, ends, adapters, rank: gl.constexpr, padded: gl.constexpr,
    chunk: gl.constexpr, chunks: gl.constexpr, splits_k: gl.constexpr, parts: gl.constexpr,
    warps: gl.constexpr,
):  # fmt: skip
    """See `adapters.py`; for rows from `m0` on. `tile`: shared memory, [rows of x, chunk].

    For the first chunk, B and the operands for the first and the last part have been loaded.
    """
    high: gl.constexpr = sums.shape[0]
    count: gl.constexpr = sums.shape[1]
    first, last = _parts_of(ends, block, width, high, gated, parts)
    for part in range(first, last + 1):
        value = gl.where(part == last, at_last, at_first)
        # Triton 3.6 fails on a branch that is never taken if its condition is not a constexpr.
        if parts > 2 and (part > first) & (part < last):
            value = _inner(
                inner, slot, part, 0, m0, rows, rank, padded, chunk, splits_k, parts, tile.dtype
            )
        sums = _add_part(
            sums, tile, factors, slot, value, part, block, width, ends, gated, chunk, parts, warps
        )
    for index in range(1, chunks):
        slot = _slots(adapters, index * chunk, m0, rows, count, padded, warps)
        more_factors = _factors(
            up, adapters, index * chunk, block, rows, width, high, span, gated, rank, padded, chunk,
            warps,
        )  # fmt: skip
        for part in range(first, last + 1):
            value = _inner(
                inner, slot, part, index * chunk, m0, rows, rank, padded, chunk, splits_k, parts,
                tile.dtype,
            )  # fmt: skip
            sums = _add_part(
                sums, tile, more_factors, slot, value, part, block, width, ends, gated, chunk,
                parts, warps,
            )  # fmt: skip
    return sums
