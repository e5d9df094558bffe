"""Autoscaling: the number of replicas, from the time that requests wait in the engines."""

import math
from collections.abc import Mapping
from typing import Any

QUEUE_TIME, BUSY = "queue_time", "busy"
_IDLE = 0.5  # a replica is removed if the others would be less utilised than this
_MOST_AT_ONCE = 2.0  # the largest factor of a single scale-up


def wanted_replicas(
    current: int, queue_times: Mapping[Any, float], busy: Mapping[Any, float], target: float
) -> int:
    """How many replicas should run.

    Args:
        current: number of running replicas.
        queue_times: seconds that requests wait for a place in the engine, per replica.
        busy: fraction of places in use, per replica.
        target: mean wait in seconds above which replicas are added.
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
    """Ray Serve's autoscaling policy; Ray applies its bounds and delays."""

    def __init__(self, target: float) -> None:
        self._target = target

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return the wanted number of replicas, and an empty policy state."""
        seen = context.aggregated_metrics or {}
        number = wanted_replicas(
            context.current_num_replicas, seen.get(QUEUE_TIME, {}), seen.get(BUSY, {}), self._target
        )
        return number, {}
