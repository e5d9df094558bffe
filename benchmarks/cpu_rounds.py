"""Engines side by side: every one does the same work in every round, one after another.

A machine's memory is not equally fast from one minute to the next, so engines that are compared
take turns, and medians are over rounds. Of decoding the time of a short run is taken from that of
a long one over the same prompts, which leaves the steps between them.
"""

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers.process import Entry, Peer, PeerError, Run, prepare
from benchmarks.prompt_ids import PromptText

SHORT = 8  # output tokens of a short run
WARM_UP = 12
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The measurements to make.

    Attributes:
        prompt: tokens of the prompts that are decoded.
        decode: new tokens between the short and the long run, by batch size.
        prefill: tokens of a prompt that is read for one output token; 0 leaves that out.
        rounds: how often.
    """

    prompt: int
    decode: dict[int, int]
    prefill: int
    rounds: int

    @property
    def measures(self) -> tuple[str, ...]:
        batches = tuple(batch_measure(batch) for batch in self.decode)
        return (*batches, *((PREFILL,) if self.prefill else ()))

    @property
    def max_tokens(self) -> int:
        """Most tokens of a prompt and its output, with room for drafts after it."""
        return (
            max(self.prompt + SHORT + max(self.decode.values(), default=0), self.prefill + WARM_UP)
            + 24
        )


PREFILL = "prefill"


def batch_measure(batch: int) -> str:
    """The name of decoding so many prompts at once."""
    return f"batch {batch}"


@dataclass(kw_only=True)
class Values:
    """One measure of one engine: seconds a token of each request, or of a whole prompt."""

    seconds: list[float] = field(default_factory=list)
    als: list[float] = field(default_factory=list)
    error: str | None = None

    @property
    def median(self) -> float | None:
        return statistics.median(self.seconds) if self.seconds else None

    @property
    def al(self) -> float | None:
        return statistics.median(self.als) if self.als else None

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "median_s": self.median,
            "al": self.al,
            "seconds": self.seconds,
            "error": self.error,
        }


@dataclass(kw_only=True)
class Result:
    """One engine's figures.

    Attributes:
        error: why there are none.
        ready: seconds from the start of its process until it could be asked.
        tokens: what it gave for the prompts of each measure in the last round.
    """

    name: str
    values: dict[str, Values] = field(default_factory=dict)
    error: str | None = None
    ready: float | None = None
    peak_bytes: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    tokens: dict[str, list[list[int]]] = field(default_factory=dict)

    def median(self, measure: str) -> float | None:
        """Seconds; None where there are none."""
        return self.values[measure].median if measure in self.values else None

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "name": self.name,
            "error": self.error,
            "ready_s": self.ready,
            "peak_bytes": self.peak_bytes,
            "facts": self.facts,
            "measures": {name: values.document() for name, values in self.values.items()},
        }


def compare(
    entries: Sequence[Entry], plan: Plan, text: PromptText, logs: Path, timeout: float, say: Say
) -> list[Result]:
    """Load all engines, measure them in rounds, end them; results in the order of `entries`."""
    results = {entry.name: Result(name=entry.name) for entry in entries}
    with ExitStack() as stack:
        peers = []
        for entry in entries:
            result, log = results[entry.name], logs / f"{_file_name(entry)}.log"
            say(f"loading {entry.name}")
            try:
                if entry.converts:
                    prepare(entry, log, timeout)
                peer = Peer(entry, log, timeout)
            except PeerError as error:
                result.error = f"{error} (see {log})"
                say(f"{entry.name}: {result.error}")
                continue
            stack.callback(peer.close)
            result.ready, result.facts = peer.ready, peer.facts
            peers.append(peer)
        measuring = _Measuring(plan, text, results, say)
        measuring.warm_up(peers)
        for number in range(plan.rounds):
            say(f"round {number + 1} of {plan.rounds}")
            # Nobody always follows the same one.
            turn = number % max(1, len(peers))
            measuring.round([*peers[turn:], *peers[:turn]])
    return list(results.values())


def _file_name(entry: Entry) -> str:
    drafting = "plain" if entry.job.draft is None else "draft"
    return f"{entry.name} {entry.job.form} {drafting}".replace(" ", "-")


class _Measuring:
    """Runs of a plan, whose figures go into results."""

    def __init__(self, plan: Plan, text: PromptText, results: dict[str, Result], say: Say) -> None:
        self._plan, self._text, self._results, self._say = plan, text, results, say
        for result in results.values():
            result.values = {measure: Values() for measure in plan.measures}

    def warm_up(self, peers: Sequence[Peer]) -> None:
        """Run each batch size once, so that measurements compile and allocate nothing."""
        batches = [(batch, self._plan.prompt) for batch in self._plan.decode]
        prefill = [(1, self._plan.prefill)] if self._plan.prefill else []
        for measure, (number, length) in zip(
            self._plan.measures, [*batches, *prefill], strict=True
        ):
            prompts = self._text.take(number, length)
            for peer in peers:
                self._run(peer, measure, prompts, WARM_UP)

    def round(self, peers: Sequence[Peer]) -> None:
        """Measure each engine once in every way, with the same prompts."""
        for batch, count in self._plan.decode.items():
            prompts = self._text.take(batch, self._plan.prompt)
            for peer in peers:
                self._decode(peer, batch, count, prompts)
        if self._plan.prefill:
            prompts = self._text.take(1, self._plan.prefill)
            for peer in peers:
                if run := self._run(peer, PREFILL, prompts, 1):
                    self._results[peer.entry.name].values[PREFILL].seconds.append(run.seconds)

    def _decode(self, peer: Peer, batch: int, count: int, prompts: list[list[int]]) -> None:
        measure, result = batch_measure(batch), self._results[peer.entry.name]
        short = self._run(peer, measure, prompts, SHORT)
        long = self._run(peer, measure, prompts, SHORT + count)
        if short is None or long is None:
            return
        values = result.values[measure]
        values.seconds.append((long.seconds - short.seconds) / count)
        if long.al is not None:
            values.als.append(long.al)
        result.tokens[measure] = long.tokens

    def _run(
        self, peer: Peer, measure: str, prompts: list[list[int]], num_tokens: int
    ) -> Run | None:
        """The result; None if the engine cannot do it, which is then not tried again."""
        result = self._results[peer.entry.name]
        values = result.values[measure]
        if values.error is not None:
            return None
        try:
            run = peer.run(prompts, num_tokens)
        except PeerError as error:
            values.error = str(error)
            self._say(f"{peer.entry.name}, {measure}: {error}")
            return None
        result.peak_bytes = max(result.peak_bytes, run.peak_bytes)
        return run
