"""Counts of a request, and copies of them."""

from dataclasses import fields

from slipstream.core.outputs import RequestMetrics


def test_a_snapshot_holds_every_count_and_stays_as_it_was() -> None:
    metrics = RequestMetrics()
    for value, field in enumerate(fields(metrics), start=1):
        is_list = field.name in ("num_accepted_tokens_per_pos", "num_steps_by_draft_tokens")
        setattr(metrics, field.name, [value] if is_list else value)
    taken = metrics.snapshot()
    assert taken == metrics
    metrics.count_draft(2, 2)
    assert taken.num_accepted_tokens_per_pos == [4]
    assert metrics.num_accepted_tokens_per_pos == [5, 1]
    assert (taken.num_steps_by_draft_tokens, metrics.num_steps_by_draft_tokens) == (
        [11],
        [11, 0, 1],
    )
    assert taken.num_drafts == metrics.num_drafts - 1


def test_what_was_added_can_be_taken_away() -> None:
    metrics, other = RequestMetrics(), RequestMetrics(decode_seconds=4, plain_seconds=6)
    metrics.count_draft(1, 1)
    other.count_draft(3, 2)
    other.count_draft(0, 0)
    metrics.add(other)
    assert metrics.num_steps_by_draft_tokens == [1, 1, 0, 1]
    assert metrics.num_accepted_tokens_per_pos == [2, 1, 0]
    assert (metrics.num_drafts, metrics.mean_draft_tokens) == (2, 4 / 3)
    assert metrics.estimated_speedup == 1.5
    metrics.add(other, sign=-1)
    assert metrics.num_steps_by_draft_tokens == [0, 1, 0, 0]
    assert metrics.num_draft_tokens == metrics.num_accepted_tokens == 1
    assert metrics.estimated_speedup is None


def test_a_tree_has_as_many_positions_as_it_is_deep() -> None:
    metrics = RequestMetrics()
    metrics.count_draft(16, 2, num_positions=4)
    metrics.count_draft(3, 1, num_positions=3)
    assert metrics.num_draft_tokens == 19
    assert metrics.num_accepted_tokens_per_pos == [2, 1, 0, 0]
