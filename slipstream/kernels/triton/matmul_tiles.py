"""How the matmul of few rows is cut, by the shape of its weights.

What bits depend on, the number of splits, follows from the shape alone; the rest may also follow
from the number of rows.

Where the copy engine brings the tiles (`Stream`), the figures behind the rules are an H200's. For
up to 64 rows the splits of the sum are those of the other matmul; with more rows they are free.
"""

from dataclasses import dataclass, replace

import torch
import triton

# Enough programs to keep the memory of a large GPU busy, and the least work worth a program.
PROGRAMS = 128
SMALLEST_PART = 256
MULTIPROCESSORS = 132  # of an H200
FEW = 16  # rows of the narrow tiles


@dataclass(frozen=True)
class Tiles:
    """Sizes of a tile, how a kernel is built for it, and what it reads before its inputs are there.

    Attributes:
        rows, width, depth: of a tile: of x, of weights (64 at least: the tensor cores take as many
            at once), and of both.
        warps, stages: of a program; tiles on their way, the one at work included.
        ahead: columns of each row of weights brought into the L2 cache beforehand.
    """

    rows: int
    width: int = 64
    depth: int = 128
    warps: int = 4
    stages: int = 4
    ahead: int = 0


@dataclass(frozen=True)
class Stream:
    """Tiles that the copy engine brings (`matmul_stream_kernels.py`).

    Attributes:
        rows: of a tile of x.
        more: what the last tile of x goes on by, so that a small remainder needs no tile.
        blocks, high: blocks of weights that share a tile of x, and rows of a block.
        depth: columns of a tile.
        stages: tiles on their way, the one at work included.
    """

    rows: int
    more: int = 0
    blocks: int = 1
    high: int = 64
    depth: int = 128
    stages: int = 6

    @property
    def warps(self) -> int:
        """Four for 64 rows of weights: the tensor cores take 16 from each."""
        return self.high // 16


@dataclass(frozen=True)
class Plan:
    """Splits of the sum, the columns of each, and the tiles."""

    splits: int
    part: int
    tiles: Tiles | Stream


# Where the rule for splits falls short, by (rows of weights, columns).
SPLITS: dict[tuple[int, int], int] = {
    (1024, 2048): 4,  # Qwen3-0.6B: output, down
    (1024, 3072): 4,
    (5120, 8192): 3,  # Qwen3-32B: output, down
    (5120, 25600): 3,
}

# What an H200 does best where the rule falls short, by (rows of weights, columns): for up to 16
# rows of x, and for more.
TUNED: dict[tuple[int, int], tuple[Tiles, Tiles]] = {
    # Qwen3-8B: down
    (4096, 12288): (Tiles(16, stages=6, ahead=256), Tiles(64, ahead=256)),
    # Qwen3-32B: qkv, output, gate and up, down
    (10240, 5120): (
        Tiles(16, width=128, warps=8, ahead=512),
        Tiles(64, width=128, warps=8, ahead=512),
    ),
    (5120, 8192): (Tiles(16), Tiles(64, depth=64, stages=6, ahead=256)),
    (51200, 5120): (Tiles(16), Tiles(64, width=128, depth=64, warps=8)),
    (5120, 25600): (Tiles(16), Tiles(64, width=128, depth=64, stages=6)),
}


def plan(width: int, depth: int, rows: int, dtype: torch.dtype, splitting: bool) -> Plan:
    """The plan for weights [width, depth] in `dtype` and so many rows."""
    splits = _splits(width, depth) if splitting else 1
    tiles = _tiles(width, depth, rows, dtype, splits)
    part = depth
    if splits > 1:
        # A multiple of every tile's depth, whatever the dtype and the number of rows.
        part = triton.cdiv(triton.cdiv(depth, splits), SMALLEST_PART) * SMALLEST_PART
        splits = triton.cdiv(depth, part)
    return Plan(splits, part, _fitting(tiles, depth, part))


def _splits(width: int, depth: int) -> int:
    if (width, depth) in SPLITS:
        return SPLITS[width, depth]
    splits = 1
    while splits * triton.cdiv(width, 64) < PROGRAMS and 2 * splits * SMALLEST_PART <= depth:
        splits *= 2
    return splits


def _tiles(width: int, depth: int, rows: int, dtype: torch.dtype, splits: int) -> Tiles:
    if dtype == torch.float32:
        return Tiles(16, depth=32, stages=1)
    few, more = TUNED.get((width, depth)) or _by_rule(width, splits)
    if rows <= FEW:
        return few
    return replace(more, rows=32) if rows <= 2 * FEW else more


def _by_rule(width: int, splits: int) -> tuple[Tiles, Tiles]:
    """As many programs as a multiprocessor gets share its memory for tiles on their way."""
    programs = triton.cdiv(width, 64) * splits
    if programs <= MULTIPROCESSORS:
        few = Tiles(16, stages=6, ahead=256)
    elif programs <= 3 * MULTIPROCESSORS:
        few = Tiles(16, stages=3, ahead=256 if programs <= 2 * MULTIPROCESSORS else 0)
    else:
        few = Tiles(16)
    if programs <= 2 * MULTIPROCESSORS:
        return few, replace(few, rows=64)
    if programs <= 8 * MULTIPROCESSORS:
        return few, Tiles(64, width=128, depth=64, warps=8)
    return few, Tiles(64, width=128, warps=8)


def _fitting(tiles: Tiles, depth: int, part: int) -> Tiles:
    """Tiles that start in the middle of a line of the cache cannot be asked for beforehand."""
    if depth % tiles.depth or part % tiles.depth:
        tiles = replace(tiles, depth=min(tiles.depth, 128), ahead=0)
    if tiles.ahead and (part % tiles.ahead or depth % part):
        tiles = replace(tiles, ahead=0)
    return tiles


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
