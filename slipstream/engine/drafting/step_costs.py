"""Steps that were measured when the engine started, and predictions for others."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

_MOST_OVER = 1.25


@dataclass(frozen=True)
class MeasuredStep:
    """A measured decode step: `draft` seconds of drafting, `target` seconds of the target's pass
    and verification, `rest` and `host` as `StepTimes` has them. `prompt`: seconds for each token
    that the drafter computed late, before it (0: none). For the other fields see
    `CostModel.seconds`."""

    requests: int
    width: int
    rows: int
    context: int
    draft: float
    target: float
    rest: float = 0.0
    host: float = 0.0
    prompt: float = 0.0

    def divided(self, by: float) -> "MeasuredStep":
        """The step on a machine so many times as fast."""
        times = self.draft / by, self.target / by, self.rest / by, self.host / by, self.prompt / by
        return MeasuredStep(self.requests, self.width, self.rows, self.context, *times)


@dataclass(frozen=True)
class CostRow:
    """Predicted seconds of a step in which each of `requests` requests drafts `drafts` tokens."""

    requests: int
    drafts: int
    seconds: float

    def least_acceptance(self, plain: float) -> float | None:
        """The acceptance rate of each draft token from which on this is faster than plain steps of
        `plain` seconds; None if it never is."""
        if self.seconds > plain * (self.drafts + 1):
            return None
        low, high = 0.0, 1.0
        for _ in range(30):
            chance = (low + high) / 2
            tokens = sum(chance**place for place in range(self.drafts + 1))
            low, high = (low, chance) if tokens * plain >= self.seconds else (chance, high)
        return high


def least(points: Sequence[MeasuredStep]) -> MeasuredStep:
    """The minimum of all parts, since disturbances only make a step longer."""
    draft, target = min(it.draft for it in points), min(it.target for it in points)
    rest, host = min(it.rest for it in points), min(it.host for it in points)
    prompt = min((it.prompt for it in points if it.prompt), default=0.0)
    return replace(points[0], draft=draft, target=target, rest=rest, host=host, prompt=prompt)


def plausible(points: Sequence[MeasuredStep]) -> list[MeasuredStep]:
    """The points without evident disturbances: no step takes much longer than one that does more of
    everything. (Because of tiles and experts it may take a little longer.)"""
    found = []
    for point in points:
        larger = [it for it in points if _does_more(it, point)]
        draft = min([point.draft, *(_MOST_OVER * it.draft for it in larger)])
        target = min([point.target, *(_MOST_OVER * it.target for it in larger)])
        rest = point.rest
        if not point.host:  # else it may be time in which the device waited for the host
            rest = min([rest, *(_MOST_OVER * it.rest for it in larger)])
        found.append(replace(point, draft=draft, target=target, rest=rest))
    return found


def _does_more(one: MeasuredStep, other: MeasuredStep) -> bool:
    requests, width = one.requests >= other.requests, one.width >= other.width
    return requests and width and one.rows >= other.rows and one.context * 2 >= other.context


def fitted_slopes(
    points: Sequence[MeasuredStep], short: Mapping[tuple[int, int], MeasuredStep]
) -> dict[str, float]:
    """The values of the slopes of `CostModel` that follow from pairs of points.

    Args:
        short: by requests and width the point with the shortest context.
    """
    # For each slope its values by pairs of points, with the differences of amounts as weights.
    found = defaultdict[str, list[tuple[float, float]]](list)
    for point in sorted(points, key=lambda it: it.width):
        base = short[point.requests, point.width]
        longer = point.context - base.context
        if longer < base.context:
            continue
        slope = (point.target - base.target) / longer
        if not point.width:
            found["context"].append((slope, longer))
            continue
        if found["context"]:
            more = point.rows / point.requests - 1
            plain = fmean(*zip(*found["context"], strict=True))
            found["attention"].append(((slope - plain) / more, longer * more))
        slope = (point.draft - base.draft) / longer / point.width
        found["draft_context"].append((slope, longer * point.width))
    found["draft_prompt"] = [(point.prompt, 1.0) for point in points if point.prompt]
    by_rows: dict[int, MeasuredStep] = {}
    for point in short.values():
        other = by_rows.setdefault(point.rows, point)
        apart = point.requests - other.requests
        if apart:
            slope = (point.target - other.target) / apart
            found["requests"].append((slope, abs(apart)))
    items = found.items()
    return {name: max(0.0, fmean(*zip(*it, strict=True))) for name, it in items if it}
