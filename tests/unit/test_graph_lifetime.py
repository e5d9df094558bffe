"""CUDA graphs are reset before the group of ranks whose exchanges they contain ends."""

import gc
import weakref
from typing import Any

import pytest

from slipstream.runner.collectives import _end
from slipstream.runner.graphs import keep_until_reset


class Graph:
    def __init__(self, resets: set[int], number: int) -> None:
        self._resets, self._number = resets, number

    def reset(self) -> None:
        self._resets.add(self._number)


class Group:
    """Stands in for an NCCL group, whose end waits for graphs that are not reset."""

    def __init__(self, resets: set[int]) -> None:
        self._resets = resets
        self.reset_before: set[int] | None = None

    def abort(self) -> None:
        self.reset_before = set(self._resets)


class Node:
    """Something that can be part of a cycle."""

    def __init__(self, *parts: Any) -> None:
        self.parts = [*parts, self]


@pytest.mark.parametrize("graphs_first", [False, True])
def test_an_engine_in_a_cycle_resets_its_graphs_before_its_group_ends(graphs_first: bool) -> None:
    resets, kept = set[int](), set[Any]()
    graphs: Any = [Graph(resets, 0), Graph(resets, 1)]
    group, replay, collectives = Group(resets), Node(*graphs), Node()
    if graphs_first:
        keep_until_reset(graphs, replay, kept)
    weakref.finalize(collectives, _end, group, [kept])
    if not graphs_first:
        keep_until_reset(graphs, replay, kept)
    replay.parts.append(collectives)
    collectives.parts.append(replay)
    del graphs, replay, collectives
    gc.collect()
    assert group.reset_before == {0, 1}


def test_a_graph_that_is_dropped_is_reset_and_forgotten() -> None:
    resets, kept = set[int](), set[Any]()
    graphs: Any = [Graph(resets, 0)]
    owner = Node()
    keep_until_reset(graphs, owner, kept)
    gc.collect()
    assert len(kept) == 1
    assert not resets
    del owner
    gc.collect()
    assert not kept
    assert resets == {0}
