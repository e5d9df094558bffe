"""Acceptance during a load, summed from answers or from a server's counters."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

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


@dataclass(frozen=True, kw_only=True)
class SpeculationCounts:
    """Counts over a load.

    Attributes:
        steps: steps of all requests, with or without drafts; None where unknown.
        source: where the counts come from, in words.
    """

    drafts: int
    draft_tokens: int
    accepted: int
    per_position: tuple[int, ...]
    steps: int | None
    source: str

    @property
    def acceptance_length(self) -> float:
        """1 + accepted draft tokens per draft; 1 where nothing was drafted."""
        return 1.0 + self.accepted / max(1, self.drafts)

    @property
    def acceptance_rate(self) -> float:
        """The share of draft tokens that were accepted."""
        return self.accepted / max(1, self.draft_tokens)

    @property
    def shares(self) -> tuple[float, ...]:
        """For each position i, the share of drafts whose i-th token was accepted."""
        return tuple(count / max(1, self.drafts) for count in self.per_position)

    @property
    def without_drafts(self) -> float | None:
        """The share of steps without a draft."""
        return None if not self.steps else max(0.0, 1.0 - self.drafts / self.steps)

    def since(self, before: "SpeculationCounts") -> "SpeculationCounts":
        """The difference to an earlier reading."""
        pairs = zip_longest(self.per_position, before.per_position, fillvalue=0)
        return SpeculationCounts(
            drafts=self.drafts - before.drafts,
            draft_tokens=self.draft_tokens - before.draft_tokens,
            accepted=self.accepted - before.accepted,
            per_position=tuple(now - old for now, old in pairs),
            steps=None,
            source=self.source,
        )


def from_usage(records: Iterable[Record]) -> SpeculationCounts | None:
    """Sum over the answers that report speculation; None where none does."""
    usages = (record.usage.get("speculation") for record in records)
    reports = [usage for usage in usages if isinstance(usage, dict)]
    if not reports:
        return None
    return SpeculationCounts(
        drafts=_sum(reports, "drafts"),
        draft_tokens=_sum(reports, "draft_tokens"),
        accepted=_sum(reports, "accepted_tokens"),
        per_position=_by_place(one.get("accepted_per_position") or [] for one in reports),
        steps=_sum(reports, "steps"),
        source=FROM_USAGE,
    )


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
                drafts=int(counters[prefix + _DRAFTS]),
                draft_tokens=int(counters.get(prefix + _DRAFT_TOKENS, 0)),
                accepted=int(counters.get(prefix + _ACCEPTED, 0)),
                per_position=tuple(
                    int(per_position.get(place, 0))
                    for place in range(max(per_position, default=-1) + 1)
                ),
                steps=None,
                source=f"the server's counters {prefix}{_DRAFTS} and others, before and after",
            )
    return None


def from_outputs(metrics: Sequence[RequestMetrics]) -> SpeculationCounts:
    """Sum over the outputs of an engine in this process."""
    return SpeculationCounts(
        drafts=sum(one.num_drafts for one in metrics),
        draft_tokens=sum(one.num_draft_tokens for one in metrics),
        accepted=sum(one.num_accepted_tokens for one in metrics),
        per_position=_by_place(one.num_accepted_tokens_per_pos for one in metrics),
        steps=sum(one.num_steps for one in metrics),
        source="the engine",
    )


def _by_place(rows: Iterable[Iterable[int]]) -> tuple[int, ...]:
    return tuple(sum(column) for column in zip_longest(*rows, fillvalue=0))


def _sum(reports: Sequence[Mapping[str, Any]], key: str) -> int:
    return sum(int(one.get(key) or 0) for one in reports)


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if abs(value) < 1e300 else 0.0  # nan and infinities count as 0
