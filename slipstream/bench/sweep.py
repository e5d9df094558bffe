"""A sweep over drafters, K and batch sizes: acceptance length, tokens/s and step times.

Every cell has an engine of its own. Plain decoding is measured before and after the drafters of
each batch size; a difference between the two shows that the machine's speed drifts.
"""

import gc
import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from slipstream.bench.workload import OfflineRun
from slipstream.core.errors import DraftTooLongError, SlipstreamError, UsageError, counted

if TYPE_CHECKING:
    from slipstream.engine.llm import LLM


PLAIN = "plain"
AUTO = "auto"  # as K: the engine chooses
Open = Callable[[dict[str, Any] | None, int], "LLM"]  # speculative_config, batch -> an engine
Measure = Callable[["LLM", "Cell"], OfflineRun]  # runs the workload on an engine


@dataclass(frozen=True)
class Cell:
    """One drafter, K (draft tokens per step, or AUTO) and batch size."""

    drafter: str
    k: int | str
    batch: int

    @property
    def title(self) -> str:
        return f"{self.drafter} K={self.k} batch {self.batch}"


@dataclass(frozen=True, kw_only=True)
class CellResult(Cell):
    """The results of a cell.

    Attributes:
        acceptance_length: 1 + accepted draft tokens per draft.
        per_position: for each position i, the share of drafts whose i-th token was accepted.
        steps_by_draft_tokens: how many steps of requests had 0, 1, ... draft tokens.
        estimated_speedup: over plain decoding, by the engine; None where it drafts nothing.
        tokens_per_second: output tokens over the wall time of the whole workload.
        iteration_ms: mean time of a step, prompt chunks included.
        tpot_ms: mean over the requests of the time per output token after the first.
        shares: shares of the steps' time by part.
        times_plain: tokens per second relative to plain decoding at this batch size.
        partial: it was interrupted.
    """

    acceptance_length: float
    per_position: tuple[float, ...]
    without_drafts: float | None
    tokens_per_second: float
    iteration_ms: float
    median_iteration_ms: float
    tpot_ms: float | None
    shares: Mapping[str, float]
    times_plain: float = 1.0
    steps_by_draft_tokens: tuple[int, ...] = ()
    estimated_speedup: float | None = None
    refused_drafting_seconds: float = 0.0
    partial: bool = False


@dataclass(frozen=True, kw_only=True)
class Failure(Cell):
    """A cell that could not be measured, and why."""

    reason: str


@dataclass(frozen=True)
class Sweep:
    """Settings of the measurement.

    Attributes:
        drafters: a `speculative_config` without K, by the name to show.
        counts: values of K; AUTO may be among them.
        batches: batch sizes, the maximum numbers of running requests.
        limits: the largest K of drafters that support fewer than the largest of `counts`.
    """

    drafters: Mapping[str, Mapping[str, Any]]
    counts: Sequence[int | str]
    batches: Sequence[int]
    limits: Mapping[str, int] = field(default_factory=dict)

    @property
    def num_points(self) -> int:
        return len(self.batches) * (2 + sum(len(self._counts(name)) for name in self.drafters))

    def fit(self, open_llm: Open) -> "Sweep":
        """Load every drafter once at its largest K, so that errors show before the measurement.

        Returns:
            The sweep without the values of K that a drafter does not support.

        Raises:
            SlipstreamError: a drafter cannot be run at all.
        """
        limits = {}
        fixed = [count for count in self.counts if isinstance(count, int)]
        for name, config in self.drafters.items():
            try:
                self._load(name, config, max(fixed, default=AUTO), open_llm)
            except DraftTooLongError as error:
                fitting = [count for count in fixed if count <= error.most]
                if not fitting:
                    raise UsageError(
                        f"{name} drafts at most {counted(error.most, 'token')} per step; give "
                        "smaller numbers to -k"
                    ) from None
                limits[name] = error.most
                self._load(name, config, max(fitting), open_llm)
        return replace(self, limits=limits)

    @staticmethod
    def _load(name: str, config: Mapping[str, Any], count: int | str, open_llm: Open) -> None:
        try:
            open_llm({**config, "num_speculative_tokens": count}, 1)
        except DraftTooLongError:
            raise
        except UsageError as error:
            raise UsageError(f"{name} at K={count}: {error}") from None
        finally:
            gc.collect()  # frees the engine's memory for the next one

    def _counts(self, name: str) -> list[int | str]:
        most = self.limits.get(name)
        return [it for it in self.counts if most is None or isinstance(it, str) or it <= most]

    def run(
        self, open_llm: Open, measure: Measure, stopped: Callable[[], bool]
    ) -> Iterator[CellResult | Failure]:
        """Yield results as they are measured.

        Ratios are relative to the first plain point of the batch size. When `stopped` returns true,
        the current point is yielded as far as it was measured, and the sweep ends.

        Raises:
            UsageError: the first cell, plain decoding, cannot be run as asked, so no other can.
        """
        begun = False
        for batch in self.batches:
            plain: CellResult | None = None
            for cell, config in self._cells(batch):
                if stopped():
                    return
                result = _result(cell, config, open_llm, measure, plain, begun)
                gc.collect()  # frees the engine's memory for the next one
                if result is None:
                    return
                begun = True
                if plain is None and cell.drafter == PLAIN and isinstance(result, CellResult):
                    plain = result
                yield result

    def _cells(self, batch: int) -> Iterator[tuple[Cell, dict[str, Any] | None]]:
        yield Cell(PLAIN, 0, batch), None
        for name, config in self.drafters.items():
            for k in self._counts(name):
                yield Cell(name, k, batch), {**config, "num_speculative_tokens": k}
        yield Cell(PLAIN, 0, batch), None


def best(points: Sequence[CellResult]) -> frozenset[int]:
    """The index of the fastest point of each batch size, without partial ones."""
    fastest: dict[int, int] = {}
    for index, point in enumerate(points):
        old = fastest.get(point.batch)
        if not point.partial and (old is None or _speed(point) > _speed(points[old])):
            fastest[point.batch] = index
    return frozenset(fastest.values())


def _result(
    cell: Cell,
    config: dict[str, Any] | None,
    open_llm: Open,
    measure: Measure,
    plain: CellResult | None,
    begun: bool,
) -> CellResult | Failure | None:
    """The result; None if it was interrupted before the first token.

    Args:
        begun: other cells were tried before; if not, a UsageError is raised.
    """
    try:
        run = measure(open_llm(config, cell.batch), cell)
    except Exception as error:  # any error: the other cells are still measured
        if isinstance(error, UsageError) and not begun:
            raise
        reason = " ".join(str(error).split())
        if not isinstance(error, SlipstreamError):
            reason = f"{type(error).__name__}: {reason}"
        return Failure(cell.drafter, cell.k, cell.batch, reason=reason)
    return _point(cell, run, plain) if run.num_tokens else None


def _point(cell: Cell, run: OfflineRun, plain: CellResult | None) -> CellResult:
    speculation, tpots = run.speculation, run.tpots_ms()
    rate = run.tokens_per_second
    return CellResult(
        cell.drafter,
        cell.k,
        cell.batch,
        acceptance_length=speculation.acceptance_length,
        per_position=tuple(speculation.acceptance_per_position),
        without_drafts=speculation.without_drafts,
        tokens_per_second=rate,
        iteration_ms=run.iteration_ms,
        median_iteration_ms=run.median_iteration_ms,
        tpot_ms=fmean(tpots) if tpots else None,
        shares=run.shares,
        times_plain=1.0 if plain is None else rate / plain.tokens_per_second,
        steps_by_draft_tokens=tuple(speculation.num_steps_by_draft_tokens),
        estimated_speedup=speculation.estimated_speedup,
        refused_drafting_seconds=speculation.refused_drafting_seconds,
        partial=run.stopped,
    )


_LEAST_DRIFT = 0.02  # two runs of the same cell differ by this much
_LARGE_DRIFT = 0.1  # from here on it may hide what a drafter gains


@dataclass(frozen=True)
class Advice:
    """The best drafter for one batch size.

    Attributes:
        best: the point with the most tokens per second.
        auto: the best one whose K the engine chose; None where none was measured.
        plain: tokens per second without drafts, the mean of both measurements.
        drift: how far apart these were, as a share of that; at least 2 percent.
    """

    batch: int
    best: CellResult
    auto: CellResult | None
    plain: float
    drift: float

    @property
    def gain(self) -> float:
        """Tokens per second of the best, relative to plain decoding."""
        return self.best.tokens_per_second / self.plain

    @property
    def choice(self) -> CellResult:
        """The K to serve with: auto, if it is as good as the best one within the drift, and faster
        than plain decoding by more than that."""
        auto = self.auto
        # Where runs differ much, auto may be within the drift of the best and of plain decoding.
        least = max(self.best.tokens_per_second / (1 + self.drift), self.plain * (1 + self.drift))
        return self.best if auto is None or auto.tokens_per_second < least else auto


def advise(points: Sequence[CellResult]) -> list[Advice]:
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
        text = f"{head} No drafter is faster by more than the machine drifts ({one.drift:.0%})"
        remedy = "; measure more prompts, or on an idle machine"
        return f"{text}{remedy if one.drift >= _LARGE_DRIFT else ''}."
    times = choice.tokens_per_second / one.plain
    text = f"{head} {_title(choice)} gives {times:.2f} times as much"
    if choice is not one.best:
        text += f", as good as the best that was measured ({_title(one.best)}, {one.gain:.2f})"
    elif one.auto is not None:
        text += f"; auto {one.auto.tokens_per_second / one.plain:.2f} ({one.auto.drafter})"
    return f"{text}.\n    {command(choice, model, drafters)}"


def command(point: CellResult, model: str, drafters: Mapping[str, Mapping[str, Any]]) -> str:
    if point.drafter == PLAIN:
        return f"slipstream serve {shlex.quote(model)}"
    config = json.dumps({**drafters[point.drafter], "num_speculative_tokens": point.k})
    return f"slipstream serve {shlex.quote(model)} --speculative-config {shlex.quote(config)}"


def _title(point: CellResult) -> str:
    return "plain decoding" if point.drafter == PLAIN else f"{point.drafter} with K = {point.k}"


def _speed(point: CellResult) -> float:
    return point.tokens_per_second
