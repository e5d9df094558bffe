"""Which requests of a step share the blocks that are worth reading once for all of them."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from slipstream.core.batch import Batch, ScheduledRequest
from slipstream.kernels.pass_inputs import SharedBlocks
from slipstream.runner import prefix_groups
from slipstream.runner.device_batch import DeviceBatch, PackedBatch
from slipstream.runner.prefix_groups import PrefixGroup, PrefixGroups

BLOCK_SIZE = 16


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_groups, "LEAST_SAVED", 6 * BLOCK_SIZE)
    monkeypatch.setattr(prefix_groups, "PIECE", 2 * BLOCK_SIZE)
    monkeypatch.setattr(prefix_groups, "LEAST_MEMBERS", 2)


class Scheduled:
    """What the rule reads of a request's share of a step."""

    def __init__(self, request: object, table: Sequence[int], admitted: bool = False) -> None:
        self.request, self.block_table, self.admitted = request, table, admitted
        self.num_new_tokens, self.reaches_end = 1, True


def step(*items: Any) -> Batch:
    given: tuple[ScheduledRequest, ...] = items
    return Batch(given)


def found(*tables: Sequence[int]) -> tuple[int, tuple[int, ...]] | None:
    """(shared blocks, members) of the group."""
    group = PrefixGroups(BLOCK_SIZE).of(step(*(Scheduled(object(), it) for it in tables)))
    return None if group is None else (group.tokens // BLOCK_SIZE, group.members)


def test_the_group_that_saves_most() -> None:
    long, short = [1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 9]
    assert found(long, [8], [*long, 10]) == (7, (0, 2))
    assert found(long, short, [*long, 10]) == (7, (0, 2))  # three pieces once, not one twice
    assert found(short, long, [1, 2, 3, 11], [*long, 10]) == (3, (0, 1, 2, 3))
    assert found([8, 1, 2], [1, 2], [8, 1, 3], [1, 3], [8, 1, 2], [8, 1]) == (2, (0, 2, 4, 5))


@pytest.mark.parametrize(
    "tables",
    [
        [],
        [[1, 2, 3, 4, 5, 6, 7]],
        [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5]],  # too few tokens for two requests
        [[1, index] for index in range(10, 20)],  # a single block
        [[index, 2, 3, 4, 5, 6, 7] for index in range(10, 20)],  # the first one differs
    ],
)
def test_no_group_that_saves_little(tables: Sequence[Sequence[int]]) -> None:
    assert found(*tables) is None


def test_no_group_of_few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = [[*range(100)]] * 3
    assert found(*tables) == (100, (0, 1, 2))
    monkeypatch.setattr(prefix_groups, "LEAST_MEMBERS", 4)
    assert found(*tables) is None
    assert found(*tables, tables[0]) == (100, (0, 1, 2, 3))


def test_the_best_of_all_groups() -> None:
    """They are compared by whole pieces, of two blocks, but all that is shared is named."""
    random, worth = Random(0), 0
    for _ in range(300):
        tables = [[random.randrange(2) for _ in range(random.randrange(9))] for _ in range(9)]
        saved = [0]
        for first in tables:
            for blocks in range(2, len(first) + 1, 2):
                members = [it for it in tables if it[:blocks] == first[:blocks]]
                saved.append((len(members) - 1) * blocks)
        group = found(*tables)
        if group is None:
            assert max(saved) < 6
            continue
        worth += 1
        blocks, indices = group
        assert (len(indices) - 1) * (blocks // 2 * 2) == max(saved)
        shared = [tables[index][:blocks] for index in indices]
        assert shared == [shared[0]] * len(indices)
        longer = {tuple(tables[index][: blocks + 1]) for index in indices}
        assert len(longer) > 1 or blocks == min(len(tables[index]) for index in indices)
        assert indices == tuple(sorted(indices))
    assert 50 < worth < 300


def test_old_beginnings_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_groups, "MOST_KNOWN", 4)
    groups = PrefixGroups(BLOCK_SIZE)
    for start in range(0, 70, 7):
        table = [*range(start, start + 7)]
        group = groups.of(step(Scheduled(object(), table), Scheduled(object(), table)))
        assert group == PrefixGroup(7 * BLOCK_SIZE, (0, 1))
        assert len(groups._numbers) <= 4 + 3


def test_groups_are_looked_for_when_requests_change() -> None:
    groups, table = PrefixGroups(BLOCK_SIZE), [1, 2, 3, 4, 5, 6]
    one, other, third = object(), object(), object()
    first = groups.of(step(Scheduled(one, table), Scheduled(other, [*table, 7])))
    assert first == PrefixGroup(6 * BLOCK_SIZE, (0, 1))
    grown = step(Scheduled(one, [*table, 8]), Scheduled(other, [*table, 7, 9]))
    assert groups.of(grown) is first
    assert groups.of(step(Scheduled(third, [9]), *grown.requests)) == replaced(first, (1, 2))
    # A request that was preempted comes back with other blocks, in a step that admits it.
    assert groups.of(step(Scheduled(one, table, admitted=True), grown.requests[1])) is None
    assert groups.of(step(Scheduled(one, [9, *table]), grown.requests[1])) is None


def replaced(group: PrefixGroup | None, members: tuple[int, ...]) -> PrefixGroup:
    assert group is not None
    return group._replace(members=members)


@pytest.mark.parametrize("guesses", [None, [[5], None, []]])
def test_groups_on_the_device(guesses: list[list[int] | None] | None) -> None:
    packed = PackedBatch([4, 5, 6], [1] * 3, [2] * 3, [True] * 3, 2, frozenset(), guesses)
    shared = PrefixGroup(64, (0, 2))
    batch = replace(packed, shared=shared).on(torch.device("cpu"))
    assert isinstance(batch.shared, SharedBlocks)
    assert batch.shared.tokens.tolist() == [64, 0, 64]
    assert batch.shared.members.tolist() == [1, 3, 0]
    without = packed.on(torch.device("cpu"))
    assert without.shared is None
    assert torch.equal(batch.guesses, without.guesses)
    assert torch.equal(batch.slots, without.slots)
    rows: DeviceBatch = replace(batch, exact=False)
    assert rows.rows(rows.slots, rows.ones.long(), 1).shared is batch.shared
    assert rows.target_rows(rows.slots, rows.num_draft_tokens, 2, None).shared is batch.shared
