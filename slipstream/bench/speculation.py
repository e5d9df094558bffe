"""Acceptance during a load, summed from answers or from a server's counters."""

import re
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass

from slipstream.bench.record import Record
from slipstream.core.outputs import RequestMetrics

FROM_USAGE = "the usage of each answer"
NOT_REPORTED = "not reported"

_SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)")
_POSITION = re.compile(r'\bposition="(\d+)"')
# Names end in _total in the text format of newer client libraries.
_PREFIXES = ("slipstream:", "slipstream_", "vllm:", "llamacpp:")
_DRAFTS = "spec_decode_num_drafts"
_DRAFT_TOKENS = "spec_decode_num_draft_tokens"
_ACCEPTED = "spec_decode_num_accepted_tokens"
_PER_POSITION = "spec_decode_num_accepted_tokens_per_pos"
_IN_USAGE = ("drafts", "draft_tokens", "accepted_tokens", "steps")


@dataclass
class SpeculationCounts(RequestMetrics):
    """Counts over a load; steps are summed over requests, 0 where unknown.

    Attributes:
        source: where the counts come from, in words.
    """

    source: str = ""

    @property
    def acceptance_rate(self) -> float:
        """The share of draft tokens that were accepted."""
        return self.num_accepted_tokens / max(1, self.num_draft_tokens)

    @property
    def without_drafts(self) -> float | None:
        """The share of steps without a draft; None where steps are unknown."""
        return None if not self.num_steps else max(0.0, 1.0 - self.num_drafts / self.num_steps)

    def since(self, before: "SpeculationCounts") -> "SpeculationCounts":
        """The difference to an earlier reading."""
        gained = deepcopy(self)
        gained.add(before, sign=-1)
        return gained


def from_usage(records: Iterable[Record]) -> SpeculationCounts | None:
    """Sum over the answers that report speculation; None where none does."""
    usages = (record.usage.get("speculation") for record in records)
    reports = [usage for usage in usages if isinstance(usage, dict)]
    if not reports:
        return None
    total = SpeculationCounts(source=FROM_USAGE)
    for one in reports:
        drafts, drafted, accepted, steps = (int(one.get(name) or 0) for name in _IN_USAGE)
        places = [*(one.get("accepted_per_position") or ())]
        total.add(RequestMetrics(drafts, drafted, accepted, places, steps))
    return total


def from_metrics(text: str) -> SpeculationCounts | None:
    """Read a page of Prometheus metrics; None where it has no counters of speculation."""
    counters: dict[str, float] = {}
    positions: dict[str, dict[int, float]] = {}
    for line in text.splitlines():
        found = _SAMPLE.match(line)
        if found is None:
            continue
        name = found["name"].removesuffix("_total")
        value = _number(found["value"])
        place = _POSITION.search(found["labels"] or "")
        if place is None:
            counters[name] = counters.get(name, 0.0) + value
        else:
            own = positions.setdefault(name, {})
            own[int(place[1])] = own.get(int(place[1]), 0.0) + value
    for prefix in _PREFIXES:
        if prefix + _DRAFTS in counters:
            per_position = positions.get(prefix + _PER_POSITION, {})
            return SpeculationCounts(
                int(counters[prefix + _DRAFTS]),
                int(counters.get(prefix + _DRAFT_TOKENS, 0)),
                int(counters.get(prefix + _ACCEPTED, 0)),
                [
                    int(per_position.get(place, 0))
                    for place in range(max(per_position, default=-1) + 1)
                ],
                source=f"the server's counters {prefix}{_DRAFTS} and others, before and after",
            )
    return None


def from_outputs(metrics: Iterable[RequestMetrics]) -> SpeculationCounts:
    """Sum over the outputs of an engine in this process."""
    total = SpeculationCounts(source="the engine")
    for one in metrics:
        total.add(one)
    return total


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if abs(value) < 1e300 else 0.0  # nan and infinities count as 0
