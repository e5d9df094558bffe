"""Tile sizes and numbers of splits of the matmul for few rows, by the shape of the weights.

The number of splits, which determines a sum's bits, depends only on the shape. Everything else may
also depend on the number of rows.

The rules for `StreamTiles` were measured on an H200. Up to 64 rows it has the splits of the other
kernel, so that the bits agree; with more rows it chooses its own.
"""

import functools
from dataclasses import dataclass, replace

import torch

from slipstream.kernels.triton.launch import cdiv, next_power_of_2

# Programs that saturate the memory bandwidth of a large GPU; fewest columns of a split.
PROGRAMS = 128
SMALLEST_PART = 256
MULTIPROCESSORS = 132  # of an H200
FEW = 16  # rows of the narrow tiles

# A prompt asks for hundreds of plans, of few different shapes.
remembered = functools.lru_cache(maxsize=4096)


@dataclass(frozen=True)
class MatmulTiles:
    """Tile sizes and compiler options of `matmul_kernel`.

    Attributes:
        rows: rows of x in a tile.
        width: rows of weights in a tile, at least 64, which the tensor cores take at once.
        depth: columns of both.
        warps: number of warps of a program.
        stages: number of tiles in flight, with the one that is multiplied.
        ahead: columns of each row of weights that are prefetched into the L2 cache.
    """

    rows: int
    width: int = 64
    depth: int = 128
    warps: int = 4
    stages: int = 4
    ahead: int = 0


@dataclass(frozen=True)
class StreamTiles:
    """Tile sizes of `stream_kernel`, whose tiles are loaded by TMA (`matmul_stream_kernels.py`).

    Attributes:
        rows: rows of x in a tile.
        more: rows that the last tile of x has in addition, so that a small remainder does not need
            a tile of its own.
        blocks: blocks of weights that share a tile of x.
        high: rows of weights in a block.
        depth: columns of a tile.
        stages: number of tiles in flight, with the one that is multiplied.
    """

    rows: int
    more: int = 0
    blocks: int = 1
    high: int = 64
    depth: int = 128
    stages: int = 6

    @property
    def warps(self) -> int:
        """Number of warps: each of them multiplies 16 rows of weights."""
        return self.high // 16


@dataclass(frozen=True)
class MatmulPlan:
    """Number of splits of the sum over K, columns of each split (`part`), and tile sizes."""

    splits: int
    part: int
    tiles: MatmulTiles | StreamTiles


# Numbers of splits for shapes where the rule is slow, by (rows of weights, columns).
SPLITS: dict[tuple[int, int], int] = {
    (1024, 2048): 4,  # Qwen3-0.6B: output, down
    (1024, 3072): 4,
    (5120, 8192): 3,  # Qwen3-32B: output, down
    (5120, 25600): 3,
    (5120, 4096): 3,  # half of both
    (5120, 12800): 4,
    (5120, 6400): 4,  # a quarter of down
}

# Programs that share a multiprocessor, for up to 64 rows of x, where `few_rows` is slow.
TOGETHER = {(5120, 12800): 2, (5120, 6400): 2}

# The fastest tiles on an H200 for shapes where the rule is slow, by (rows of weights, columns):
# for up to 16 rows of x, and for more.
TUNED: dict[tuple[int, int], tuple[MatmulTiles, MatmulTiles]] = {
    # Qwen3-8B: down
    (4096, 12288): (MatmulTiles(16, stages=6, ahead=256), MatmulTiles(64, ahead=256)),
    # Qwen3-32B: qkv, output, gate and up, down
    (10240, 5120): (
        MatmulTiles(16, width=128, warps=8, ahead=512),
        MatmulTiles(64, width=128, warps=8, ahead=512),
    ),
    (5120, 8192): (MatmulTiles(16), MatmulTiles(64, depth=64, stages=6, ahead=256)),
    (51200, 5120): (MatmulTiles(16), MatmulTiles(64, width=128, depth=64, warps=8)),
    (5120, 25600): (MatmulTiles(16), MatmulTiles(64, width=128, depth=64, stages=6)),
}


@remembered
def plan(width: int, depth: int, rows: int, dtype: torch.dtype, splitting: bool) -> MatmulPlan:
    """The plan of `matmul_kernel` for weights [width, depth] in `dtype` and `rows` rows of x."""
    splits = _splits(width, depth) if splitting else 1
    tiles = _tiles(width, depth, rows, dtype, splits)
    part = depth
    if splits > 1:
        # A multiple of every tile's depth, whatever the dtype and the number of rows.
        part = cdiv(cdiv(depth, splits), SMALLEST_PART) * SMALLEST_PART
        splits = cdiv(depth, part)
    return MatmulPlan(splits, part, _fitting(tiles, depth, part))


def _splits(width: int, depth: int) -> int:
    if (width, depth) in SPLITS:
        return SPLITS[width, depth]
    splits = 1
    while splits * cdiv(width, 64) < PROGRAMS and 2 * splits * SMALLEST_PART <= depth:
        splits *= 2
    return splits


def _tiles(width: int, depth: int, rows: int, dtype: torch.dtype, splits: int) -> MatmulTiles:
    if dtype == torch.float32:
        return MatmulTiles(16, depth=32, stages=1)
    few, more = TUNED.get((width, depth)) or _by_rule(width, splits)
    if rows <= FEW:
        return few
    return replace(more, rows=32) if rows <= 2 * FEW else more


def _by_rule(width: int, splits: int) -> tuple[MatmulTiles, MatmulTiles]:
    """(tiles for up to 16 rows of x, for more), by the number of programs a multiprocessor gets:
    these share its memory for tiles in flight."""
    programs = cdiv(width, 64) * splits
    if programs <= MULTIPROCESSORS:
        few = MatmulTiles(16, stages=6, ahead=256)
    elif programs <= 3 * MULTIPROCESSORS:
        few = MatmulTiles(16, stages=3, ahead=256 if programs <= 2 * MULTIPROCESSORS else 0)
    else:
        few = MatmulTiles(16)
    if programs <= 2 * MULTIPROCESSORS:
        return few, replace(few, rows=64)
    if programs <= 8 * MULTIPROCESSORS:
        return few, MatmulTiles(64, width=128, depth=64, warps=8)
    return few, MatmulTiles(64, width=128, warps=8)


def _fitting(tiles: MatmulTiles, depth: int, part: int) -> MatmulTiles:
    """`tiles`, less deep or without prefetching where a part's columns are no multiple of what a
    tile or a prefetch takes."""
    if depth % tiles.depth or part % tiles.depth:
        tiles = replace(tiles, depth=min(tiles.depth, 128), ahead=0)
    if tiles.ahead and (part % tiles.ahead or depth % part):
        tiles = replace(tiles, ahead=0)
    return tiles


STEP = 128  # columns: every part but the last is a multiple of it
NARROWEST = 64  # columns: the last part is a multiple of it
SHORTEST = 512  # fewest columns of a part where the splits may be chosen freely
MEMORY = 221 * 1024  # bytes of shared memory of a multiprocessor, for tiles in flight
DEEPEST = {64: 12, 128: 6, 256: 4}  # most stages that are of use, by a tile's columns

# With more rows of x than these, the library is as fast: for products whose splits the next norm
# adds up, and for gated products with several programs for each multiprocessor.
SPLIT_MANY = 320
GATED_MANY = 80
GATED_MOST = range(289, 513)  # numbers of rows beyond `GATED_MANY` for which ours is faster


@remembered
def few_rows(
    width: int, depth: int, rows: int, chosen: MatmulPlan, itemsize: int = 2
) -> MatmulPlan:
    """`chosen` with tiles for `stream_kernel` instead, for up to 64 rows of x in numbers of
    `itemsize` bytes.

    A multiprocessor runs one program that fills its shared memory, or several smaller ones, with
    which less time is lost when one ends and the next begins.
    """
    height, more = cover(rows)
    lines = height + more
    waves = cdiv(width, 64) * chosen.splits / MULTIPROCESSORS
    together = 2
    if lines > 32 or waves <= 1:
        together = 1
    elif lines <= 16 and 2 < waves <= 3:
        together = TOGETHER.get((width, depth), 3)
    # The steps of a sum of e4m3 determine its bits, so they must not depend on the number of rows.
    deep = lines <= 32 and waves <= 2 and depth % 256 == chosen.part % 256 == 0 and itemsize == 2
    columns = 256 if deep else STEP
    stages = _stages(64 + lines, columns, together)
    tiles = StreamTiles(height, more, depth=columns * 2 // itemsize, stages=stages)
    return MatmulPlan(chosen.splits, chosen.part, tiles)


def cover(rows: int) -> tuple[int, int]:
    """(`StreamTiles.rows`, `StreamTiles.more`) of a tile for `rows` rows with little padding."""
    whole = max(8, next_power_of_2(rows))
    more = max(8, next_power_of_2(rows - whole // 2))
    return (whole // 2, more) if more <= whole // 4 else (whole, 0)


@remembered
def many_rows(width: int, depth: int, rows: int, splitting: bool, gated: bool) -> MatmulPlan | None:
    """The plan of `stream_kernel` for more than 64 rows of x; None if the library is as fast."""
    if gated:
        return _many_gated(width, depth, rows)
    if not splitting or rows > SPLIT_MANY or depth < SHORTEST:
        return None
    height, more = _tall(rows)
    blocks, splits = _filling(width, depth, _row_tiles(rows))
    stages = _stages(64 * blocks + height + more, 64, 1)
    part = cdiv(cdiv(depth, splits), STEP) * STEP
    tiles = StreamTiles(height, more, blocks, depth=64, stages=stages)
    return MatmulPlan(cdiv(depth, part), part, tiles)


def _many_gated(width: int, depth: int, rows: int) -> MatmulPlan | None:
    height, more = _tall(rows)
    for high in (64, 128):
        if cdiv(width, high) * _row_tiles(rows) <= MULTIPROCESSORS:
            stages = _stages(high + height + more, 64, 1)
            return MatmulPlan(
                1, depth, StreamTiles(height, more, high=high, depth=64, stages=stages)
            )
    if rows > GATED_MANY and rows not in GATED_MOST:
        return None
    if rows > 128 and (more > 16 or 0 < rows % 128 - more < 96):
        return None  # slow with more than 16 rows added, or the last tile is mostly padding
    stages = _stages(128 + height + more, 64, 2)
    return MatmulPlan(1, depth, StreamTiles(height, more, blocks=2, depth=64, stages=stages))


def _tall(rows: int) -> tuple[int, int]:
    """Like `cover`; more than 128 rows of x have several tiles of 128."""
    if rows <= 128:
        return cover(rows)
    rest = rows % 128
    return 128, max(8, next_power_of_2(rest)) if 0 < rest <= 64 else 0


def _row_tiles(rows: int) -> int:
    height, more = _tall(rows)
    return max(1, -(-(rows - more) // height))


def _filling(width: int, depth: int, row_tiles: int) -> tuple[int, int]:
    """(blocks, splits) for which the number of programs is closest below the multiprocessors'."""

    def programs(choice: tuple[int, int]) -> tuple[int, int]:
        blocks, splits = choice
        count = cdiv(width, 64 * blocks) * splits * row_tiles
        return (count if count <= MULTIPROCESSORS else -count), -blocks

    choices = [(blocks, splits) for blocks in (1, 2) for splits in (1, 2, 3, 4)]
    return max((each for each in choices if depth >= SHORTEST * each[1]), key=programs)


def _stages(lines: int, columns: int, together: int) -> int:
    """The number of stages for which `together` programs fit into a multiprocessor's memory."""
    return min(DEEPEST[columns], MEMORY // together // (lines * columns * 2))
