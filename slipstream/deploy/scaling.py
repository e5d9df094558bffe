"""How many replicas there should be, by the time that requests wait in the engines."""

import math
from collections.abc import Mapping
from typing import Any

QUEUE_TIME, BUSY = "queue_time", "busy"
_IDLE = 0.5  # share of places in use below which the rest can do the work of all
_MOST_AT_ONCE = 2.0  # times as many replicas


def wanted_replicas(
    current: int, queue_times: Mapping[Any, float], busy: Mapping[Any, float], target: float
) -> int:
    """How many replicas should run.

    Args:
        current: that run.
        queue_times: seconds that requests wait for a place, by replica.
        busy: share of places in use, by replica.
        target: the longest mean wait in seconds that is left alone.
    """
    if not queue_times or not current:
        return max(current, 1)
    waited = sum(queue_times.values()) / len(queue_times)
    if waited > target:
        return math.ceil(current * min(waited / target, _MOST_AT_ONCE))
    used = sum(busy.values())
    if waited < target / 10 and current > 1 and used < _IDLE * (current - 1):
        return current - 1
    return current


class QueueTimePolicy:
    """Ray Serve's autoscaling policy; Ray applies its bounds and delays.

    Args:
        target: as of `wanted_replicas`.
    """

    def __init__(self, target: float) -> None:
        self._target = target

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """The number of replicas, and no state."""
        seen = context.aggregated_metrics or {}
        number = wanted_replicas(
            context.current_num_replicas, seen.get(QUEUE_TIME, {}), seen.get(BUSY, {}), self._target
        )
        return number, {}
