"""How matmuls are cut: what bits depend on follows from the shape, and tiles find room."""

import pytest
import torch

pytest.importorskip("triton", reason="it is there for Linux only")

from slipstream.kernels.triton.matmul_tiles import (
    MEMORY,
    SPLITS,
    TUNED,
    MatmulPlan,
    MatmulTiles,
    StreamTiles,
    few_rows,
    many_rows,
    plan,
)


@pytest.mark.parametrize("shape", [*TUNED, (1, 1), (70, 136), (1000, 999), (5, 70000)])
def test_splits_follow_from_the_shape_alone(shape: tuple[int, int]) -> None:
    width, depth = shape
    plans = [plan(width, depth, rows, torch.bfloat16, True) for rows in (1, 16, 17, 40, 64, 500)]
    assert len({(each.splits, each.part) for each in plans}) == 1
    for each in plans:
        assert each.part * each.splits >= depth > each.part * (each.splits - 1)
        assert isinstance(each.tiles, MatmulTiles)
        assert each.splits == 1 or each.part % each.tiles.depth == 0
        if each.tiles.ahead:
            assert depth % each.tiles.depth == 0
            assert each.part % each.tiles.depth == 0
    assert plan(width, depth, 5, torch.bfloat16, False).splits == 1


SHAPES = [*TUNED, *SPLITS, (4096, 4096), (2048, 6144), (6144, 1024)]


def taken(tiles: StreamTiles) -> int:
    """Bytes of tiles on their way."""
    lines = tiles.blocks * tiles.high + tiles.rows + tiles.more
    return lines * tiles.depth * tiles.stages * 2


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("splitting", [False, True])
def test_the_copy_engine_changes_no_splits(shape: tuple[int, int], splitting: bool) -> None:
    """Up to 64 rows; its steps come out even, and its tiles find room."""
    width, depth = shape
    for rows in (1, 9, 17, 40, 64):
        chosen = plan(width, depth, rows, torch.bfloat16, splitting)
        streamed = few_rows(width, depth, rows, chosen)
        assert (streamed.splits, streamed.part) == (chosen.splits, chosen.part)
        assert isinstance(streamed.tiles, StreamTiles)
        assert streamed.part % streamed.tiles.depth == 0
        assert depth % streamed.tiles.depth == 0
        assert rows <= streamed.tiles.rows + streamed.tiles.more
        assert streamed.tiles.stages > 1
        assert taken(streamed.tiles) <= MEMORY


def test_many_rows_have_tiles_where_the_library_is_slower() -> None:
    served: dict[tuple[int, bool, bool], MatmulPlan | None] = {}
    for rows in (65, 80, 100, 128, 129, 160, 161, 256, 300, 320, 321, 400, 512, 513):
        for splitting, gated in ((False, False), (True, False), (False, True)):
            served[rows, splitting, gated] = many_rows(24576, 12288, rows, splitting, gated)
    assert all(served[rows, False, False] is None for rows in (65, 128, 400))
    assert {rows for rows, splitting, _ in served if splitting and served[rows, True, False]} == {
        65, 80, 100, 128, 129, 160, 161, 256, 300, 320,
    }  # fmt: skip
    assert {rows for rows, _, gated in served if gated and served[rows, False, True]} == {
        65, 80, 400, 512,
    }  # fmt: skip
    for (rows, _, gated), chosen in served.items():
        if chosen is None:
            continue
        assert isinstance(chosen.tiles, StreamTiles)
        assert chosen.part * chosen.splits >= 12288 > chosen.part * (chosen.splits - 1)
        assert chosen.part % chosen.tiles.depth == 0
        assert gated <= (chosen.splits == 1)
        assert taken(chosen.tiles) <= MEMORY
        assert chosen.tiles.more == 0 or rows % chosen.tiles.rows <= chosen.tiles.more


@pytest.mark.parametrize("rows", [65, 72, 96, 128, 160, 192])
def test_small_gated_matrices_get_a_program_for_each_multiprocessor(rows: int) -> None:
    for width, high in ((6144, 64), (12288, 128)):
        plan = many_rows(width, 1024, rows, False, True)
        assert plan is not None
        assert isinstance(plan.tiles, StreamTiles)
        assert (plan.splits, plan.tiles.high) == (1, high)
        assert taken(plan.tiles) <= MEMORY


@pytest.mark.parametrize("depth", [384, 511, 512, 640, 1536])
def test_small_matrices_have_tiles_or_the_library(depth: int) -> None:
    for rows in (65, 100, 129, 160):
        plan = many_rows(1152, depth, rows, True, False)
        assert (plan is None) == (depth < 512)
        if plan is not None:
            assert plan.splits * plan.part >= depth
