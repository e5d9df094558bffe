"""Drafters against K on one workload: AL, tokens per second and the time of an iteration.

Every point has an engine of its own, and plain decoding is measured before and after the drafters
of each batch size: a machine whose speed drifts shows in the difference.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from slipstream.bench.workload import OfflineRun, Workload, run_offline, warm_up
from slipstream.core.errors import DraftTooLongError, SlipstreamError, UsageError
from slipstream.core.wording import counted

if TYPE_CHECKING:
    from slipstream.engine.llm import LLM

PLAIN = "plain"
Open = Callable[[dict[str, Any] | None, int], "LLM"]  # speculative_config, batch -> an engine
Inspect = Callable[["LLM", "Cell"], None]
"""Looks at the engine of a cell once that is measured."""


@dataclass(frozen=True)
class Cell:
    """One drafter, K and batch size."""

    drafter: str
    k: int
    batch: int

    @property
    def title(self) -> str:
        return f"{self.drafter} K={self.k} batch {self.batch}"


@dataclass(frozen=True, kw_only=True)
class Point(Cell):
    """What was measured of it.

    Attributes:
        acceptance_length: 1 + accepted draft tokens per draft.
        per_position: of all drafts, the share whose i-th token was accepted.
        without_drafts: of the steps in which a request gained tokens, those that drafted nothing.
        tokens_per_second: output tokens over the wall time of the whole workload.
        iteration_ms: mean time of a step, prompt chunks included.
        median_iteration_ms: of the same steps.
        tpot_ms: mean over the requests of the time per output token behind the first.
        shares: of the steps' time: draft, target, rest.
        times_plain: tokens per second over those of plain decoding at this batch size.
        partial: it was interrupted within the workload.
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
    partial: bool = False


@dataclass(frozen=True, kw_only=True)
class Failure(Cell):
    """A cell that could not be measured, and why."""

    reason: str


@dataclass(frozen=True)
class Sweep:
    """What to measure.

    Attributes:
        drafters: a `speculative_config` without K, by the name to show.
        counts: the Ks.
        batches: most requests that run at once.
        limits: the largest K of drafters that cannot guess as many as the others.
    """

    drafters: Mapping[str, Mapping[str, Any]]
    counts: Sequence[int]
    batches: Sequence[int]
    limits: Mapping[str, int] = field(default_factory=dict)

    @property
    def num_points(self) -> int:
        return len(self.batches) * (2 + sum(len(self._counts(name)) for name in self.drafters))

    def fit(self, open_llm: Open) -> "Sweep":
        """Load every drafter once at its largest K, before hours are spent.

        Returns:
            The sweep without the Ks that are more than a drafter guesses.

        Raises:
            SlipstreamError: one of them cannot be run at all.
        """
        limits = {}
        for name, config in self.drafters.items():
            try:
                self._load(name, config, max(self.counts), open_llm)
            except DraftTooLongError as error:
                fitting = [count for count in self.counts if count <= error.most]
                if not fitting:
                    raise UsageError(
                        f"{name} guesses at most {counted(error.most, 'token')} a step; give -k "
                        "smaller numbers"
                    ) from None
                limits[name] = error.most
                self._load(name, config, max(fitting), open_llm)
        return replace(self, limits=limits)

    @staticmethod
    def _load(name: str, config: Mapping[str, Any], count: int, open_llm: Open) -> None:
        try:
            open_llm({**config, "num_speculative_tokens": count}, 1)
        except DraftTooLongError:
            raise
        except UsageError as error:
            raise UsageError(f"{name} at K={count}: {error}") from None
        finally:
            gc.collect()  # the next engine wants the memory

    def _counts(self, name: str) -> list[int]:
        most = self.limits.get(name)
        return [count for count in self.counts if most is None or count <= most]

    def run(
        self,
        open_llm: Open,
        workload: Workload,
        stopped: Callable[[], bool] = lambda: False,
        inspect: Inspect = lambda llm, cell: None,
        advance: Callable[[int, int], None] = lambda requests, tokens: None,
    ) -> Iterator[Point | Failure]:
        """Points as they are measured; the second plain one of a batch size comes last.

        Ratios are to the first plain point. Once `stopped` is true the point under way comes, as
        far as it was measured, and no more.
        """
        for batch in self.batches:
            plain: Point | None = None
            for cell, config in self._cells(batch):
                if stopped():
                    return
                reason = ""
                try:
                    point = _measure(
                        cell, config, open_llm, workload, plain, stopped, inspect, advance
                    )
                except Exception as error:  # of whatever kind: the other cells are still wanted
                    reason = _reason(error)
                if reason:
                    gc.collect()  # the engine that failed hung on the error
                    yield Failure(cell.drafter, cell.k, cell.batch, reason=reason)
                    continue
                if point is None:
                    return
                if cell.drafter == PLAIN and plain is None:
                    plain = point
                yield point

    def _cells(self, batch: int) -> Iterator[tuple[Cell, dict[str, Any] | None]]:
        yield Cell(PLAIN, 0, batch), None
        for name, config in self.drafters.items():
            for k in self._counts(name):
                yield Cell(name, k, batch), {**config, "num_speculative_tokens": k}
        yield Cell(PLAIN, 0, batch), None


def best(points: Sequence[Point]) -> list[Point]:
    """Of each batch size the point with the most tokens a second, of those measured to the end."""
    whole = [point for point in points if not point.partial]
    batches = dict.fromkeys(point.batch for point in whole)
    return [
        max((it for it in whole if it.batch == batch), key=lambda it: it.tokens_per_second)
        for batch in batches
    ]


def _reason(error: Exception) -> str:
    """One line."""
    text = " ".join(str(error).split())
    return text if isinstance(error, SlipstreamError) else f"{type(error).__name__}: {text}"


def _measure(
    cell: Cell,
    config: dict[str, Any] | None,
    open_llm: Open,
    workload: Workload,
    plain: Point | None,
    stopped: Callable[[], bool],
    inspect: Inspect,
    advance: Callable[[int, int], None],
) -> Point | None:
    """None where it was interrupted before there was anything to tell."""
    llm = open_llm(config, cell.batch)
    warm_up(llm)
    run = run_offline(llm, workload, stopped, advance)
    if not run.num_tokens:
        return None
    if not run.stopped:
        inspect(llm, cell)
    point = _point(cell, run, plain)
    del llm, run
    gc.collect()  # the next engine wants the memory
    return point


def _point(cell: Cell, run: OfflineRun, plain: Point | None) -> Point:
    speculation, tpots = run.speculation, run.tpots_ms()
    rate = run.tokens_per_second
    return Point(
        cell.drafter,
        cell.k,
        cell.batch,
        acceptance_length=speculation.acceptance_length,
        per_position=speculation.shares,
        without_drafts=speculation.without_drafts,
        tokens_per_second=rate,
        iteration_ms=run.iteration_ms,
        median_iteration_ms=run.median_iteration_ms,
        tpot_ms=fmean(tpots) if tpots else None,
        shares=run.shares,
        times_plain=1.0 if plain is None else rate / plain.tokens_per_second,
        partial=run.stopped,
    )
