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

# What the library is slower at: sums for the next norm up to so many rows, and gated products for
# these.
SPLIT_MANY = 160
GATED_MANY = (range(65, 113), range(257, 513))


def few_rows(width: int, depth: int, rows: int, chosen: Plan) -> Plan:
    """`chosen`, of up to 64 rows of x, by other tiles.

    A multiprocessor takes one program that fills its memory, or several that are in each other's
    way less when one ends and the next begins.
    """
    height = max(8, triton.next_power_of_2(rows))
    waves = triton.cdiv(width, 64) * chosen.splits / MULTIPROCESSORS
    together = 2
    if height == 64 or waves <= 1:
        together = 1
    elif height <= 16 and 2 < waves <= 3:
        together = 3
    deep = height < 64 and waves <= 2 and depth % 256 == chosen.part % 256 == 0
    columns = 256 if deep else STEP
    stages = _stages(64 + height, columns, together)
    return Plan(chosen.splits, chosen.part, Stream(height, depth=columns, stages=stages))


def many_rows(width: int, depth: int, rows: int, splitting: bool, gated: bool) -> Plan | None:
    """For more rows of x; None where the library is as fast."""
    if gated:
        return _many_gated(depth, rows)
    if not splitting or rows > SPLIT_MANY:
        return None
    more = 32 if rows > 128 else 0
    if depth < SHORTEST:
        return None
    blocks, splits = _filling(width, depth)
    stages = _stages(64 * blocks + 128 + more, 64, 1)
    part = triton.cdiv(triton.cdiv(depth, splits), STEP) * STEP
    return Plan(triton.cdiv(depth, part), part, Stream(128, more, blocks, depth=64, stages=stages))


def _many_gated(depth: int, rows: int) -> Plan | None:
    if not any(rows in each for each in GATED_MANY):
        return None
    if rows <= 128:
        return Plan(1, depth, Stream(128, high=128, depth=64, stages=_stages(256, 64, 1)))
    more = 16 if 0 < rows % 128 <= 16 else 0
    if not more and 0 < rows % 128 < 96:
        return None  # too much of the last tile would be in vain
    stages = _stages(256 + more, 64, 2)
    return Plan(1, depth, Stream(128, more, blocks=2, depth=64, stages=stages))


def _filling(width: int, depth: int) -> tuple[int, int]:
    """(blocks, splits) that give each multiprocessor one program, or nearly."""

    def programs(choice: tuple[int, int]) -> tuple[int, int]:
        blocks, splits = choice
        count = triton.cdiv(width, 64 * blocks) * splits
        return (count if count <= MULTIPROCESSORS else -count), -blocks

    choices = [(blocks, splits) for blocks in (1, 2) for splits in (1, 2, 3, 4)]
    return max((each for each in choices if depth >= SHORTEST * each[1]), key=programs)


def _stages(lines: int, columns: int, together: int) -> int:
    """As many tiles as a multiprocessor holds for so many programs at once."""
    return min(DEEPEST[columns], MEMORY // together // (lines * columns * 2))
