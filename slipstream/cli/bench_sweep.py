"""`slipstream bench sweep`: drafters at several K and batch sizes; `bench advise`: the best one."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import typer

from slipstream.cli.bench_flags import (
    BenchSamplingFlags,
    DatasetFlags,
    ProfileFlags,
    ReportFlags,
    read_workload,
    refuse_num_seqs,
)
from slipstream.cli.bench_views import Bar, about, note, progress_bar, show_report
from slipstream.cli.drafter_flags import DEMO, DEMO_DRAFTERS, is_method
from slipstream.cli.errors import FAILED, INTERRUPTED, say
from slipstream.cli.flags import RunFlags
from slipstream.cli.open_llm import open_llm
from slipstream.cli.terminal import interrupt_noted
from slipstream.core.config import EngineConfig
from slipstream.core.config_values import MOST_DRAFTS
from slipstream.core.errors import UsageError, counted
from slipstream.core.flags import flag, like, parse_object
from slipstream.speculative.catalogue import LOOKUPS

if TYPE_CHECKING:
    from slipstream.bench.sweep import Cell, CellResult, Failure, Open, Sweep
    from slipstream.bench.tables import ReportTable
    from slipstream.bench.workload import OfflineRun, Workload
    from slipstream.engine.llm import LLM


_LARGEST = 1 << 16  # largest batch size
_DIGITS = 9  # most digits of a number


@dataclass(frozen=True, kw_only=True)
class SweepFlags:
    """What to sweep over."""

    drafter: tuple[str, ...] = flag(
        (),
        f"A checkpoint, {', '.join(LOOKUPS)}, or NAME=<json> with a speculative_config "
        f"(repeatable). [for the demo: all that are bundled, {' and '.join(LOOKUPS)}]",
        metavar="<drafter>",
    )
    num_speculative_tokens: str = flag(
        "1-8",
        "Numbers of draft tokens per step (K), such as 1,2,4 or 1-8; auto may be among them.",
        also=("-k",),
        metavar="<list>",
    )
    batch_sizes: str = flag(
        "1",
        "Numbers of requests running at once, such as 1,8.",
        also=("--concurrency",),
        metavar="<list>",
    )


def sweep(
    *,
    over: SweepFlags,
    dataset: DatasetFlags,
    sampling: BenchSamplingFlags,
    report: ReportFlags,
    profile: ProfileFlags,
    engine: EngineConfig,
    run: RunFlags,
) -> None:
    """Measure drafters at several K and batch sizes.

    Reports acceptance length, tokens/s and the time of a step. Decoding without a drafter is
    measured first and last at each batch size; speed-ups are relative to the first. Ctrl-C ends the
    sweep and reports what was measured so far.
    """
    _swept(over, dataset, sampling, report, profile, engine, run).finish()


def _swept(
    over: SweepFlags,
    dataset: DatasetFlags,
    sampling: BenchSamplingFlags,
    report: ReportFlags,
    profile: ProfileFlags,
    engine: EngineConfig,
    run: RunFlags,
) -> "_Cells":
    from slipstream.bench.sweep import Sweep

    refuse_num_seqs("--batch-sizes", engine.max_num_seqs)
    files = report.files()
    profile.prepare()
    plan = Sweep(
        read_drafters(over.drafter, engine.model),
        _counts(over.num_speculative_tokens),
        _numbers("--batch-sizes", over.batch_sizes, _LARGEST),
    )
    workload = read_workload(dataset, sampling, engine)
    plan = _fit(plan, engine)

    def open_engine(speculative_config: dict[str, Any] | None, batch: int) -> "LLM":
        own = replace(engine, speculative_config=speculative_config, max_num_seqs=batch)
        return open_llm(own.warmed_up(), run.verbose)[0]

    cells = _Cells(plan, workload, profile)
    cells.measure(open_engine)
    cells.report(f"{engine.model}, {workload.title}", report.output, files)
    return cells


class _Cells:
    """A sweep and its results so far; a cell is one drafter, K and batch size."""

    def __init__(self, plan: "Sweep", workload: "Workload", profile: ProfileFlags) -> None:
        self._plan, self._workload, self._profile = plan, workload, profile
        self._points: list[CellResult] = []
        self._failures: list[Failure] = []
        self._profiles: list[ReportTable] = []
        self._stopped, self._unwritten, self._began = False, False, perf_counter()

    def measure(self, open_engine: "Open") -> None:
        """Measure all cells, or until Ctrl-C; a second Ctrl-C interrupts at once."""
        cells, names = counted(self._plan.num_points, "cell"), ", ".join(self._plan.drafters)
        note(f"{cells} to measure (plain, {names}); the first tells how long")
        self._began = perf_counter()
        with interrupt_noted() as pressed, progress_bar() as bar:
            try:
                self._measure(open_engine, pressed, bar)
            except KeyboardInterrupt:
                self._stopped = True
            self._stopped |= pressed()

    def report(self, title: str, output: Path | None, files: Sequence[Path]) -> None:
        """Write and show the figures, if there are any."""
        from slipstream.bench.report import draw_sweep, sweep_document, write_json
        from slipstream.bench.tables import drafting_tables, failures_table, sweep_table

        if self._points:
            try:
                if output is not None:
                    parts = self._points, self._failures
                    document = sweep_document(*parts, {"title": title, **about()})
                    write_json(document | {"interrupted": self._stopped}, output)
                draw_sweep(self._points, self._failures, title, about(), files)
            except OSError as error:  # what took an hour to measure is shown all the same
                say(f"the figures could not be written to a file, and are below only: {error}")
                self._unwritten = True
            failures = [failures_table(self._failures)] if self._failures else []
            # Last, because writing to a closed pipe ends the command.
            tables = [sweep_table(self._points), *drafting_tables(self._points)]
            show_report(title, [*tables, *failures, *self._profiles])

    def conclude(self, model: str) -> None:
        """Print the advice on what to serve, unless the measurement was interrupted."""
        from slipstream.bench.sweep import advise, paragraph

        if self._points and not self._stopped:
            found = [paragraph(it, model, self._plan.drafters) for it in advise(self._points)]
            print("\n" + "\n".join(found), flush=True)

    def finish(self) -> None:
        """Raise typer.Exit unless everything was measured and written."""
        if self._stopped:
            say(f"interrupted after {len(self._points)} of {self._plan.num_points} cells")
            raise typer.Exit(INTERRUPTED)
        if self._failures:
            say(f"{len(self._failures)} of {self._plan.num_points} cells could not be measured")
        if self._failures or self._unwritten:
            raise typer.Exit(FAILED)

    def _measure(self, open_engine: "Open", pressed: Callable[[], bool], bar: Bar) -> None:
        from slipstream.bench.workload import run_offline, warm_up

        def measure(llm: "LLM", cell: "Cell") -> "OfflineRun":
            bar.start(f"cell {self._number} of {self._plan.num_points}", len(workload.prompts))
            warm_up(llm)
            run = run_offline(
                llm, workload, pressed, lambda done, tokens: bar.update(done, f"{tokens:,} tokens")
            )
            bar.stop()
            if not run.stopped:
                self._profiles += self._profile.tables(llm, workload, cell.title)
            return run

        workload = self._workload
        for point in self._plan.run(open_engine, measure, pressed):
            bar.stop()
            self._take(point)

    @property
    def _number(self) -> int:
        """The number of the current cell, from 1."""
        return len(self._points) + len(self._failures) + 1

    def _take(self, point: "CellResult | Failure") -> None:
        from slipstream.bench.sweep import Failure

        number = f"{self._number}/{self._plan.num_points}"
        if isinstance(point, Failure):
            self._failures.append(point)
            note(f"{number} {point.title}: not measured: {point.reason}{self._left()}")
            return
        self._points.append(point)
        note(
            f"{number} {point.title}: AL {point.acceptance_length:.2f}, "
            f"{point.tokens_per_second:.0f} tokens/s{self._left()}"
        )

    def _left(self) -> str:
        """About how long the other cells take, as the average of those so far."""
        done = len(self._points) + len(self._failures)
        left = self._plan.num_points - done
        seconds = left * (perf_counter() - self._began) / done
        return f"; about {duration(seconds)} left" if left else ""


def duration(seconds: float) -> str:
    """`40 s`, `3 min`, `1 h 20 min`."""
    if seconds < 90:
        return f"{math.ceil(seconds)} s"
    minutes = math.ceil(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _fit(plan: "Sweep", config: EngineConfig) -> "Sweep":
    """Load every drafter at its largest K, and leave out the K that it does not support."""
    small = replace(config, max_num_seqs=1, enforce_eager=True)
    fitting = plan.fit(
        lambda speculation, batch: open_llm(
            replace(small, speculative_config=speculation), verbose=False
        )[0]
    )
    for name, most in fitting.limits.items():
        note(f"{name} drafts at most {counted(most, 'token')} per step; larger K are left out")
    return fitting


def read_drafters(given: Sequence[str], model: str) -> dict[str, dict[str, Any]]:
    from slipstream.bench.sweep import PLAIN

    if not given:
        if model != DEMO:
            raise UsageError("no drafter is given; add --drafter for each drafter")
        given = [*DEMO_DRAFTERS, *LOOKUPS]
    drafters: dict[str, dict[str, Any]] = {}
    for text in given:
        name, equals, config = text.partition("=")
        if equals and config.lstrip().startswith("{"):
            found = parse_object(f"--drafter {name}", config) or {}
        else:
            name, found = text, {"method": text} if is_method(text) else {"model": text}
        if name in ("", PLAIN) or drafters.setdefault(name, found) != found:
            raise UsageError(
                f"--drafter {text}: {name!r} cannot name this drafter in the tables, where each "
                "has its own name, and plain is decoding without one; give another before the ="
            )
        if "num_speculative_tokens" in found:
            raise UsageError(
                f"--drafter {name} has its own num_speculative_tokens; give -k instead"
            )
    return drafters


def _counts(text: str) -> list[int | str]:
    """Values of K: numbers, then "auto" if it is among them."""
    from slipstream.bench.sweep import AUTO

    parts = [part.strip() for part in text.split(",")]
    numbers = ",".join(part for part in parts if part != AUTO)
    auto: list[int | str] = [AUTO] * (AUTO in parts)
    return auto if auto and not numbers else [*_numbers("-k", numbers, MOST_DRAFTS), *auto]


def _numbers(flag: str, text: str, most: int) -> list[int]:
    """ "1,2,4" or "1-8", or both mixed, each from 1 to `most`."""
    numbers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        found = range(0)
        if first.isdecimal() and (last.isdecimal() or not dash):
            end = min(int((last or first)[:_DIGITS]), most + 1)
            found = range(min(int(first[:_DIGITS]), most + 1), end + 1)
        if not found:
            raise UsageError(f"{flag} must be a list such as 1,2,4 or 1-8, not {text[:80]!r}")
        numbers.extend(found)
    if min(numbers) < 1 or max(numbers) > most:
        raise UsageError(f"{flag} must be numbers from 1 to {most}, not {text[:80]!r}")
    return list(dict.fromkeys(numbers))


@dataclass(frozen=True, kw_only=True)
class AdviseFlags(SweepFlags):
    """What to choose from."""

    num_speculative_tokens: str = like(SweepFlags, "num_speculative_tokens", "1,2,4,7,auto")
    batch_sizes: str = like(SweepFlags, "batch_sizes", "1,8")


def advise(
    *,
    over: AdviseFlags,
    dataset: DatasetFlags,
    sampling: BenchSamplingFlags,
    report: ReportFlags,
    engine: EngineConfig,
    run: RunFlags,
) -> None:
    """Find the best drafter and K for your traffic.

    Says how much faster it is on this machine than plain decoding. Measures as
    `bench sweep` does, with K chosen by the engine among the settings, and ends with the command
    that serves the best one. What is faster by less than two runs of plain decoding differ is not
    recommended.
    """
    cells = _swept(over, dataset, sampling, report, ProfileFlags(), engine, run)
    cells.conclude(engine.model)
    cells.finish()
