"""Chooses the steps that costs are learnt from: few while times are stable, to save time."""

from functools import lru_cache
from math import log2

from slipstream.core.batch import StepReport

_BURST = 8  # steps that are learnt from after a change, and steps between two otherwise
_CHANGE = 0.15  # relative difference of a step's time from the usual one
_MEMORY = 0.3
_MOST_KINDS = 256
_LONG_AGO = 128  # steps


class Pace:
    """Decides which steps to learn from.

    Steps with similar numbers of requests and rows are of one kind. The first steps of a kind that
    is new or was not run for long are learnt from, and then every eighth. If the time of the
    target's pass differs from the usual time twice in a row, the next few steps are learnt from
    again. A step is never chosen because of its own time, since disturbed steps would then count
    too much.
    """

    def __init__(self) -> None:
        # By kind: a countdown (learn while it is at least 0), the usual time, whether the time of
        # the previous step differed (0 or 1), and the number of the previous step.
        self._kinds: dict[tuple[int, int], list[float]] = {}
        self._num_steps = 0

    def is_due(self, report: StepReport) -> bool:
        """Whether to learn from this step; called once for every step."""
        kind, seconds = _kind(len(report.batch.requests), report.num_rows), report.times.target
        self._num_steps += 1
        known = self._kinds.get(kind)
        if known is None or self._num_steps - known[3] > _LONG_AGO:
            if len(self._kinds) >= _MOST_KINDS:
                self._kinds.clear()
            known = self._kinds[kind] = [_BURST, seconds, 0, 0]
        known[0] -= 1
        known[3] = self._num_steps
        if known[0] <= -_BURST:
            known[0] = 0
        if known[0] >= 0:
            known[1] += _MEMORY * (seconds - known[1])
            return True
        changed = abs(seconds - known[1]) > _CHANGE * known[1]
        if changed and known[2]:
            known[0] = _BURST
        known[2] = changed
        return False


@lru_cache(4096)
def _kind(requests: int, rows: int) -> tuple[int, int]:
    return int(4 * log2(requests + 1)), int(8 * log2(rows + 1))
