"""How the matmul of few rows is cut, by the shape of its weights.

What bits depend on, the number of splits, follows from the shape alone; the rest may also follow
from the number of rows.
"""

from dataclasses import dataclass, replace

import torch
import triton

# Enough programs to keep the memory of a large GPU busy, and the least work worth a program.
PROGRAMS = 128
SMALLEST_PART = 256
FEW = 16  # rows of the narrow tiles


@dataclass(frozen=True)
class Tiles:
    """Sizes of a tile, how a kernel is built for it, and what it loads before its inputs are there.

    Attributes:
        rows, width, depth: of a tile: of x, of weights (64 at least: the tensor cores take as many
            at once), and of both.
        warps, stages: of a program; tiles on their way, the one at work included.
        ahead: columns of each row of weights brought into the L2 cache beforehand.
        peeled: whether the first tile of weights is loaded beforehand.
    """

    rows: int
    width: int = 64
    depth: int = 128
    warps: int = 4
    stages: int = 4
    ahead: int = 0
    peeled: bool = False


@dataclass(frozen=True)
class Plan:
    """Splits of the sum, the columns of each, and the tiles."""

    splits: int
    part: int
    tiles: Tiles


# What an H200 does best, by (rows of weights, columns): for up to 16 rows, and for more.
TUNED: dict[tuple[int, int], tuple[Tiles, Tiles]] = {
    # Qwen3-0.6B: qkv, output, gate and up, down
    (4096, 1024): (
        Tiles(16, depth=256, stages=3, ahead=512, peeled=True),
        Tiles(64, depth=256, stages=3),
    ),
    (1024, 2048): (Tiles(16, ahead=256, peeled=True), Tiles(64, ahead=256)),
    (6144, 1024): (Tiles(16, depth=256, stages=3, ahead=512), Tiles(64)),
    (1024, 3072): (Tiles(16, ahead=128), Tiles(64, ahead=128)),
    # Qwen3-8B: qkv, output, gate and up, down
    (6144, 4096): (Tiles(16, depth=256, stages=3, ahead=256, peeled=True), Tiles(64)),
    (4096, 4096): (Tiles(16, stages=6), Tiles(64)),
    (24576, 4096): (Tiles(16), Tiles(64, width=128, warps=8)),
    (4096, 12288): (Tiles(16, stages=6), Tiles(64)),
    # The heads of both
    (151936, 1024): (Tiles(16), Tiles(64, width=128, warps=8)),
    (151936, 4096): (Tiles(16), Tiles(64, width=128, warps=8)),
}
WIDE = 16384  # from so many rows of weights on, tiles of 128 leave no part of the machine idle


def plan(width: int, depth: int, rows: int, dtype: torch.dtype, splitting: bool) -> Plan:
    """Of weights [width, depth] in `dtype` for so many rows."""
    splits = _splits(width, depth) if splitting else 1
    tiles = _tiles(width, depth, rows, dtype)
    part = depth
    if splits > 1:
        # A multiple of every tile's depth, whatever the dtype and the number of rows.
        part = triton.cdiv(triton.cdiv(depth, splits), SMALLEST_PART // 2) * (SMALLEST_PART // 2)
        splits = triton.cdiv(depth, part)
    return Plan(splits, part, _fitting(tiles, depth, part))


def _splits(width: int, depth: int) -> int:
    splits = 1
    while splits * triton.cdiv(width, 64) < PROGRAMS and 2 * splits * SMALLEST_PART <= depth:
        splits *= 2
    return splits


def _tiles(width: int, depth: int, rows: int, dtype: torch.dtype) -> Tiles:
    if dtype == torch.float32:
        return Tiles(16, depth=32, stages=1)
    few, more = TUNED.get((width, depth), (Tiles(16), Tiles(64)))
    if (width, depth) not in TUNED and width >= WIDE:
        more = replace(more, width=128, warps=8)
    if rows <= FEW:
        return few
    return replace(more, rows=32) if rows <= 2 * FEW else more


def _fitting(tiles: Tiles, depth: int, part: int) -> Tiles:
    """Tiles that start in the middle of a line of the cache cannot be asked for beforehand."""
    if depth % tiles.depth or part % tiles.depth:
        tiles = replace(tiles, depth=min(tiles.depth, 128), ahead=0, peeled=False)
    if tiles.ahead and (part % tiles.ahead or depth % part):
        tiles = replace(tiles, ahead=0)
    return tiles
