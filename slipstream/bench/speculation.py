"""Acceptance during a load, summed from answers or from a server's counters."""

import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass

from slipstream.bench.record import Record
from slipstream.core.outputs import RequestMetrics

FROM_USAGE = "the usage of each answer"
NOT_REPORTED = "not reported"
LEAST_DRAFTED = 3
"""Output tokens of the shortest answer that can have a draft: the first follows the prompt, and the
last is the target's own."""

_SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)")
_PLACE = re.compile(r'\b(?:position|k)="(\d+)"')
# Names end in _total in the text format of newer client libraries.
_PREFIXES = ("slipstream:", "slipstream_", "vllm:", "llamacpp:")
_DRAFTS = "spec_decode_num_drafts"
_DRAFT_TOKENS = "spec_decode_num_draft_tokens"
_ACCEPTED = "spec_decode_num_accepted_tokens"
_PER_POSITION = "spec_decode_num_accepted_tokens_per_pos"
_CHOSEN = "spec_decode_num_draft_tokens_chosen"
_REFUSED = "spec_decode_refused_drafting_seconds"
_IN_USAGE = ("drafts", "draft_tokens", "accepted_tokens", "steps")


@dataclass
class SpeculationCounts(RequestMetrics):
    """Counts over a load; steps are summed over requests, 0 where unknown.

    Attributes:
        source: where the counts come from, in words.
        adaptive: whether the engine chose in each step how much to draft (K auto), and an answer
            was long enough to have a draft.
    """

    source: str = ""
    adaptive: bool = False

    @property
    def note(self) -> str | None:
        """Why an engine with a drafter drafted nothing; None where it did, or has a fixed K."""
        if self.num_drafts or not self.adaptive:
            return None
        return "none: K is auto, and no draft was expected to save time"

    @property
    def acceptance_rate(self) -> float:
        """The share of draft tokens that were accepted."""
        return self.num_accepted_tokens / max(1, self.num_draft_tokens)

    @property
    def without_drafts(self) -> float | None:
        """The share of steps without a draft; None where steps are unknown."""
        return None if not self.num_steps else max(0.0, 1.0 - self.num_drafts / self.num_steps)

    @property
    def steps_by_draft_tokens(self) -> list[int] | None:
        """How many steps had 0, 1, ... draft tokens; None where the source does not report it."""
        return self.num_steps_by_draft_tokens or None

    @property
    def seconds_refused(self) -> float | None:
        """Time spent drafting refused tokens; None where the source does not report it."""
        return self.refused_drafting_seconds if self.num_steps_by_draft_tokens else None

    def since(self, before: "SpeculationCounts") -> "SpeculationCounts":
        """The difference to an earlier reading."""
        gained = deepcopy(self)
        gained.add(before, sign=-1)
        return gained


def from_usage(records: Iterable[Record]) -> SpeculationCounts | None:
    """Sum over the answers that report speculation; None where none does.

    The estimated speed-up of the load is the time that plain decoding would have taken for all
    requests, divided by the time that they took. This is the mean of the requests' speed-ups,
    weighted by their decoding time; unweighted, a request of a few tokens would count as much as a
    long one. Requests without an estimate are in neither time. A step that several requests shared
    counts for each of them, since each waited for it.
    """
    usages = (record.usage.get("speculation") for record in records)
    reports = [usage for usage in usages if isinstance(usage, dict)]
    if not reports:
        return None
    total = SpeculationCounts(source=FROM_USAGE)
    for one in reports:
        drafts, drafted, accepted, steps = (int(one.get(name) or 0) for name in _IN_USAGE)
        places = [*(one.get("accepted_per_position") or ())]
        counts = RequestMetrics(drafts, drafted, accepted, places, steps)
        counts.num_steps_by_draft_tokens = [*(one.get("steps_by_draft_tokens") or ())]
        counts.refused_drafting_seconds = float(one.get("refused_drafting_seconds") or 0)
        counts.decode_seconds = float(one.get("decode_seconds") or 0)
        counts.plain_seconds = counts.decode_seconds * float(one.get("estimated_speedup") or 0)
        total.add(counts)
    return total


def from_metrics(text: str) -> SpeculationCounts | None:
    """Read a page of Prometheus metrics; None where it has no counters of speculation.

    The estimated speed-up is not read: it is a gauge over everything since the server started.
    """
    counters: dict[str, float] = {}
    lists: dict[str, dict[int, float]] = {}
    for line in text.splitlines():
        found = _SAMPLE.match(line)
        if found is None:
            continue
        name = found["name"].removesuffix("_total")
        value = _number(found["value"])
        place = _PLACE.search(found["labels"] or "")
        if place is None:
            counters[name] = counters.get(name, 0.0) + value
        else:
            own = lists.setdefault(name, {})
            own[int(place[1])] = own.get(int(place[1]), 0.0) + value
    for prefix in _PREFIXES:
        if prefix + _DRAFTS in counters:
            return SpeculationCounts(
                int(counters[prefix + _DRAFTS]),
                int(counters.get(prefix + _DRAFT_TOKENS, 0)),
                int(counters.get(prefix + _ACCEPTED, 0)),
                _as_list(lists.get(prefix + _PER_POSITION, {})),
                num_steps_by_draft_tokens=_as_list(lists.get(prefix + _CHOSEN, {})),
                refused_drafting_seconds=counters.get(prefix + _REFUSED, 0.0),
                source=f"the server's counters {prefix}{_DRAFTS} and others, before and after",
            )
    return None


def from_outputs(metrics: Iterable[RequestMetrics], adaptive: bool) -> SpeculationCounts:
    """Sum over the outputs of an engine in this process; `adaptive` as in `SpeculationCounts`."""
    total = SpeculationCounts(source="the engine", adaptive=adaptive)
    for one in metrics:
        total.add(one)
    return total


def _as_list(counts: Mapping[int, float]) -> list[int]:
    return [int(counts.get(place, 0)) for place in range(max(counts, default=-1) + 1)]


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if abs(value) < 1e300 else 0.0  # nan and infinities count as 0
