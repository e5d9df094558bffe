"""What the time of a step depends on, from its report."""

from bisect import bisect_left
from collections.abc import Callable
from operator import attrgetter

from slipstream.core.batch import StepReport

_START, _NUM_DRAFTS = attrgetter("start"), attrgetter("num_draft_tokens")
_STOPS = attrgetter("stops")


def context_of(report: StepReport) -> int:
    """The lengths of all requests together."""
    starts: list[int] = list(map(_START, report.batch.requests))
    return sum(starts) + len(starts)


def drafting_counts(
    report: StepReport, padded: Callable[[int], int] | None, at_once: bool, looks_up: bool = False
) -> tuple[int, ...]:
    """How many requests drafted a token at each position, from the first.

    Args:
        padded, at_once, looks_up: see `CostModel`.
    """
    items = report.batch.requests
    if padded is not None:
        most: int = max(map(_NUM_DRAFTS, items))
        return (padded(len(items)),) * most
    drafted: list[int] = list(map(_NUM_DRAFTS, items if at_once else report.committed))
    if looks_up:
        pairs = zip(drafted, report.committed, strict=True)
        drafted = [0 if gain.looked_up else count for count, gain in pairs]
    drafted.sort()
    size = len(drafted)
    return tuple([size - bisect_left(drafted, place) for place in range(1, drafted[-1] + 1)])


def has_ended_early(report: StepReport) -> bool:
    """Whether a chain ended before its plan, so that its number of passes is not known."""
    if not any(map(_STOPS, report.batch.requests)):
        return False
    for item, gain in zip(report.batch.requests, report.committed, strict=True):
        if item.stops is not None and gain.num_draft_tokens < item.num_draft_tokens:
            return True
    return False
