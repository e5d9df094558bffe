"""Steps that were measured when the engine started."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

_MOST_OVER = 1.25


@dataclass(frozen=True)
class Point:
    """A measured decode step: `draft` seconds of drafting, `target` seconds of the target's pass
    and verification, `rest` and `host` as `StepTimes` has them. For the other fields see
    `CostModel.seconds`."""

    requests: int
    width: int
    rows: int
    context: int
    draft: float
    target: float
    rest: float = 0.0
    host: float = 0.0


def least(points: Sequence[Point]) -> Point:
    """The minimum of all parts, since disturbances only make a step longer."""
    draft, target = min(it.draft for it in points), min(it.target for it in points)
    rest, host = min(it.rest for it in points), min(it.host for it in points)
    return replace(points[0], draft=draft, target=target, rest=rest, host=host)


def plausible(points: Sequence[Point]) -> list[Point]:
    """The points without evident disturbances: no step takes much longer than one that does more of
    everything. (Because of tiles and experts it may take a little longer.)"""
    found = []
    for point in points:
        larger = [it for it in points if _does_more(it, point)]
        draft = min([point.draft, *(_MOST_OVER * it.draft for it in larger)])
        target = min([point.target, *(_MOST_OVER * it.target for it in larger)])
        found.append(replace(point, draft=draft, target=target))
    return found


def _does_more(one: Point, other: Point) -> bool:
    requests, width = one.requests >= other.requests, one.width >= other.width
    return requests and width and one.rows >= other.rows and one.context * 2 >= other.context
