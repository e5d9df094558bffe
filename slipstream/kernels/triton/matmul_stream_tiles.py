"""How the matmul by tiles that the copy engine brings is cut.

The figures behind the rules are an H200's. For up to 64 rows the splits of the sum, which bits
depend on, come from `matmul_tiles.py`; with more rows they are free.
"""

import triton

from slipstream.kernels.triton.matmul_tiles import MULTIPROCESSORS, Plan, Stream

STEP = 128  # columns: every part is a multiple of it
SHORTEST = 512  # columns of a part, where the sum may be split at will
MEMORY = 221 * 1024  # bytes of a multiprocessor, for tiles on their way
DEEPEST = {64: 12, 128: 6, 256: 4}  # stages: more gain nothing, by a tile's columns

# With more rows than these of x the library is as fast: for sums that the next norm adds up, and
# for gated products of so many programs that one multiprocessor gets several.
SPLIT_MANY = 320
GATED_MANY = 80
GATED_MOST = range(289, 513)  # but not for these


def few_rows(width: int, depth: int, rows: int, chosen: Plan) -> Plan:
    """`chosen`, of up to 64 rows of x, by other tiles.

    A multiprocessor takes one program that fills its memory, or several that are in each other's
    way less when one ends and the next begins.
    """
    height, more = cover(rows)
    lines = height + more
    waves = triton.cdiv(width, 64) * chosen.splits / MULTIPROCESSORS
    together = 2
    if lines > 32 or waves <= 1:
        together = 1
    elif lines <= 16 and 2 < waves <= 3:
        together = 3
    deep = lines <= 32 and waves <= 2 and depth % 256 == chosen.part % 256 == 0
    columns = 256 if deep else STEP
    stages = _stages(64 + lines, columns, together)
    return Plan(chosen.splits, chosen.part, Stream(height, more, depth=columns, stages=stages))


def cover(rows: int) -> tuple[int, int]:
    """(rows of a tile, more that it goes on by) for so many rows of x, with few to spare."""
    whole = max(8, triton.next_power_of_2(rows))
    more = max(8, triton.next_power_of_2(rows - whole // 2))
    return (whole // 2, more) if more <= whole // 4 else (whole, 0)


def many_rows(width: int, depth: int, rows: int, splitting: bool, gated: bool) -> Plan | None:
    """For more than 64 rows of x; None where the library is as fast."""
    if gated:
        return _many_gated(width, depth, rows)
    if not splitting or rows > SPLIT_MANY or depth < SHORTEST:
        return None
    height, more = _tall(rows)
    blocks, splits = _filling(width, depth, _row_tiles(rows))
    stages = _stages(64 * blocks + height + more, 64, 1)
    part = triton.cdiv(triton.cdiv(depth, splits), STEP) * STEP
    tiles = Stream(height, more, blocks, depth=64, stages=stages)
    return Plan(triton.cdiv(depth, part), part, tiles)


def _many_gated(width: int, depth: int, rows: int) -> Plan | None:
    height, more = _tall(rows)
    for high in (64, 128):
        if triton.cdiv(width, high) * _row_tiles(rows) <= MULTIPROCESSORS:
            stages = _stages(high + height + more, 64, 1)
            return Plan(1, depth, Stream(height, more, high=high, depth=64, stages=stages))
    if rows > GATED_MANY and rows not in GATED_MOST:
        return None
    if rows > 128 and (more > 16 or 0 < rows % 128 - more < 96):
        return None  # too slow with so many more, or too much of a tile would be in vain
    stages = _stages(128 + height + more, 64, 2)
    return Plan(1, depth, Stream(height, more, blocks=2, depth=64, stages=stages))


def _tall(rows: int) -> tuple[int, int]:
    """`cover`, by several tiles of 128 where there are more rows."""
    if rows <= 128:
        return cover(rows)
    rest = rows % 128
    return 128, max(8, triton.next_power_of_2(rest)) if 0 < rest <= 64 else 0


def _row_tiles(rows: int) -> int:
    height, more = _tall(rows)
    return max(1, -(-(rows - more) // height))


def _filling(width: int, depth: int, row_tiles: int) -> tuple[int, int]:
    """(blocks, splits) that give each multiprocessor one program, or nearly."""

    def programs(choice: tuple[int, int]) -> tuple[int, int]:
        blocks, splits = choice
        count = triton.cdiv(width, 64 * blocks) * splits * row_tiles
        return (count if count <= MULTIPROCESSORS else -count), -blocks

    choices = [(blocks, splits) for blocks in (1, 2) for splits in (1, 2, 3, 4)]
    return max((each for each in choices if depth >= SHORTEST * each[1]), key=programs)


def _stages(lines: int, columns: int, together: int) -> int:
    """As many tiles as a multiprocessor holds for so many programs at once."""
    return min(DEEPEST[columns], MEMORY // together // (lines * columns * 2))
