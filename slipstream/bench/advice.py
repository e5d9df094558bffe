"""Which drafter and setting is best for a load on this machine, from a sweep."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.bench.sweep import AUTO, PLAIN, Point

_LEAST_DRIFT = 0.02  # two runs of the same thing differ by so much anyway


@dataclass(frozen=True)
class Advice:
    """What is best for one batch size.

    Attributes:
        best: the point with the most tokens per second.
        auto: the best one whose K the engine chose; None where none was measured.
        plain: tokens per second without drafts, the mean of both measurements.
        drift: how far apart these were, as a share of that; at least 2 percent.
    """

    batch: int
    best: Point
    auto: Point | None
    plain: float
    drift: float

    @property
    def gain(self) -> float:
        """Tokens per second of the best, relative to plain decoding."""
        return self.best.tokens_per_second / self.plain

    @property
    def choice(self) -> Point:
        """What to serve: auto where it is as good as the best within the drift."""
        auto = self.auto
        if auto is None or self.best.tokens_per_second > (1 + self.drift) * auto.tokens_per_second:
            return self.best
        return auto


def advise(points: Sequence[Point]) -> list[Advice]:
    """Advice for each batch size with a plain point."""
    found = []
    for batch in sorted({point.batch for point in points}):
        own = [it for it in points if it.batch == batch and not it.partial]
        plain = [it.tokens_per_second for it in own if it.drafter == PLAIN]
        if not plain:
            continue
        mean = sum(plain) / len(plain)
        autos = [it for it in own if it.k == AUTO]
        found.append(
            Advice(
                batch,
                max(own, key=_speed),
                max(autos, key=_speed, default=None),
                mean,
                max(_LEAST_DRIFT, (max(plain) - min(plain)) / mean),
            )
        )
    return found


def paragraph(advice: Advice, model: str, drafters: Mapping[str, Mapping[str, Any]]) -> str:
    """The advice in words, with the command that serves it."""
    one, choice = advice, advice.choice
    head = f"{one.batch} at once: plain decoding gives {one.plain:.1f} tokens/s."
    if one.gain <= 1 + one.drift:
        return f"{head} No drafter is faster by more than the machine drifts ({one.drift:.0%})."
    times = choice.tokens_per_second / one.plain
    text = f"{head} {_title(choice)} gives {times:.2f} times as much"
    if choice is not one.best:
        text += f", as good as the best that was measured ({_title(one.best)}, {one.gain:.2f})"
    elif one.auto is not None:
        text += f"; auto {one.auto.tokens_per_second / one.plain:.2f} ({one.auto.drafter})"
    return f"{text}.\n    {command(choice, model, drafters)}"


def command(point: Point, model: str, drafters: Mapping[str, Mapping[str, Any]]) -> str:
    """A command line that serves a point of the sweep."""
    if point.drafter == PLAIN:
        return f"slipstream serve {shlex.quote(model)}"
    config = json.dumps({**drafters[point.drafter], "num_speculative_tokens": point.k})
    return f"slipstream serve {shlex.quote(model)} --speculative-config {shlex.quote(config)}"


def _title(point: Point) -> str:
    return "plain decoding" if point.drafter == PLAIN else f"{point.drafter} with K = {point.k}"


def _speed(point: Point) -> float:
    return point.tokens_per_second
