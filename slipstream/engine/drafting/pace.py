"""Chooses the steps that costs are learnt from: few while times are stable, to save time."""

from collections.abc import Callable
from functools import lru_cache
from math import log2

from slipstream.core.batch import StepReport

_BURST = 8  # steps that are learnt from after a change, and steps between two otherwise
_CHANGE = 0.15  # relative difference of a step's time from the usual one
_MEMORY = 0.3
_MOST_KINDS = 256
_MANY, _LONG_AGO = 64, 128  # steps


class Pace:
    """Decides which steps to learn from.

    Steps with similar numbers of requests and rows are of one kind. The first steps of a kind that
    is new or was not run for long are learnt from, and then every eighth of its steps, or the next
    one if the latest of them is many steps back, since rare kinds are compared with frequent ones.
    If the time of the target's pass differs from the usual time twice in a row, the next few steps
    are learnt from again. A step is never chosen because of its own time, since disturbed steps
    would then count too much. A plain step right after one with drafts is not typical, since the
    target's weights have left the caches.
    """

    def __init__(self) -> None:
        # By kind: a countdown (learn while it is at least 0), the usual time, whether the time of
        # the previous step differed (0 or 1), the numbers of the previous step and of the latest
        # one that was learnt from.
        self._kinds: dict[tuple[int, int], list[float]] = {}
        self._num_steps = 0
        self._has_drafted = False  # in the previous step

    def is_due(self, report: StepReport) -> bool:
        """Whether to learn from this step; called once for every step."""
        requests, seconds = len(report.batch.requests), report.times.target
        kind = _kind(requests, report.num_rows)
        self._num_steps += 1
        drafts, drafted = report.num_rows > requests, self._has_drafted
        self._has_drafted = drafts
        if drafted and not drafts:
            return False
        known = self._kinds.get(kind)
        if known is None or self._num_steps - known[3] > _LONG_AGO:
            if len(self._kinds) >= _MOST_KINDS:
                self._kinds.clear()
            known = self._kinds[kind] = [_BURST, seconds, 0, 0, 0]
        known[0] -= 1
        known[3] = self._num_steps
        if known[0] <= -_BURST or self._num_steps - known[4] >= _MANY:
            known[0] = max(0, known[0])
        if known[0] >= 0:
            known[4] = self._num_steps
            known[1] += _MEMORY * (seconds - known[1])
            return True
        changed = abs(seconds - known[1]) > _CHANGE * known[1]
        if changed and known[2]:
            known[0] = _BURST
        known[2] = changed
        return False


def paced(learn: Callable[[StepReport], None]) -> Callable[[StepReport], None]:
    """A function to be called with every step, which calls `learn` with some of them."""
    pace = Pace()

    def observe(report: StepReport) -> None:
        if pace.is_due(report):
            learn(report)

    return observe


@lru_cache(4096)
def _kind(requests: int, rows: int) -> tuple[int, int]:
    return int(4 * log2(requests + 1)), int(8 * log2(rows + 1))
