"""Which steps are learnt from: once they are as usual, only some are, since learning takes time."""

from math import log2

from slipstream.core.batch import StepReport

_BURST = 8  # steps that are learnt from after a change, and steps between two otherwise
_CHANGE = 0.15  # relative difference of a step's time from the usual one
_MEMORY = 0.3
_MOST_KINDS = 256


class Pace:
    """Tells of which steps the times are worth learning from.

    Steps of about as many requests and rows are a kind. Of a new kind, and of one whose target pass
    took another time than usual twice in a row, the following steps are learnt from, and then every
    eighth. A step is never chosen for its own time: those that were disturbed would count too much.
    """

    def __init__(self) -> None:
        # By kind: how many more steps are learnt from (falling below 0: not), the usual time, and
        # whether the step before took another (0 or 1).
        self._kinds: dict[tuple[int, int], list[float]] = {}

    def is_due(self, report: StepReport) -> bool:
        """Whether to learn from this step; called once for every step."""
        requests, rows, times = len(report.batch.requests), report.num_rows, report.times
        kind, seconds = (int(4 * log2(requests + 1)), int(8 * log2(rows + 1))), times.target
        known = self._kinds.get(kind)
        if known is None:
            if len(self._kinds) >= _MOST_KINDS:
                self._kinds.clear()
            known = self._kinds[kind] = [_BURST, seconds, 0]
        known[0] -= 1
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
