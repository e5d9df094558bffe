"""Counts of a request, and copies of them."""

from dataclasses import fields

from slipstream.core.outputs import RequestMetrics


def test_a_snapshot_holds_every_count_and_stays_as_it_was() -> None:
    metrics = RequestMetrics()
    for value, field in enumerate(fields(metrics), start=1):
        is_list = field.name == "num_accepted_tokens_per_pos"
        setattr(metrics, field.name, [value] if is_list else value)
    taken = metrics.snapshot()
    assert taken == metrics
    metrics.count_draft(2, 2)
    assert taken.num_accepted_tokens_per_pos == [4]
    assert metrics.num_accepted_tokens_per_pos == [5, 1]
    assert taken.num_drafts == metrics.num_drafts - 1


def test_a_tree_has_as_many_positions_as_it_is_deep() -> None:
    metrics = RequestMetrics()
    metrics.count_draft(16, 2, num_positions=4)
    metrics.count_draft(3, 1, num_positions=3)
    assert metrics.num_draft_tokens == 19
    assert metrics.num_accepted_tokens_per_pos == [2, 1, 0, 0]
