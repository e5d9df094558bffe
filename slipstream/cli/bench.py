"""`slipstream bench`: measure drafters."""

import os
import platform
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from slipstream import __version__
from slipstream.cli.drafter_flags import DEMO, read_object
from slipstream.cli.engine_flags import EngineFlags, ModelArgument
from slipstream.cli.open_llm import open_llm
from slipstream.cli.run_flags import RunFlags
from slipstream.cli.terminal import stderr_console, stdout_console
from slipstream.core.errors import UsageError
from slipstream.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from slipstream.bench.sweep import Point, Sweep
    from slipstream.bench.workload import Workload
    from slipstream.engine.llm import LLM

_WITHOUT_MODEL = ("ngram", "suffix")
_PANEL = "Workload"
_PICTURES = (".png", ".svg", ".pdf")


@dataclass(frozen=True, kw_only=True)
class WorkloadFlags:
    """What the engine is asked."""

    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="<file>",
            help='JSON lines with "prompt" or "messages". [the demo\'s held-out prompts]',
            rich_help_panel=_PANEL,
        ),
    ] = None
    num_prompts: Annotated[
        int | None,
        typer.Option(min=1, help="So many of them. [all]", rich_help_panel=_PANEL),
    ] = None
    max_tokens: Annotated[
        int, typer.Option(min=2, help="Output tokens of each.", rich_help_panel=_PANEL)
    ] = 128
    temperature: Annotated[float, typer.Option(help="0 is greedy.", rich_help_panel=_PANEL)] = 0.0
    seed: Annotated[int, typer.Option(help="Of sampled output.", rich_help_panel=_PANEL)] = 0

    def read(self, model: str) -> "Workload":
        """Raises UsageError where there are no prompts for this model."""
        from slipstream.bench.workload import read_workload

        params = SamplingParams(
            temperature=self.temperature, max_tokens=self.max_tokens, seed=self.seed
        )
        return read_workload(_prompt_file(self.prompts, model), self.num_prompts, params)


def sweep(
    *,
    model: ModelArgument = DEMO,
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="<drafter>",
            help="A checkpoint, ngram, suffix, or NAME=<json> with a speculative_config "
            "(repeatable). [for the demo: all that are bundled, ngram and suffix]",
        ),
    ] = None,
    num_speculative_tokens: Annotated[
        str,
        typer.Option(
            "--num-speculative-tokens", "-k", metavar="<list>", help="Such as 1,2,4 or 1-8."
        ),
    ] = "1-8",
    batch_sizes: Annotated[
        str, typer.Option(metavar="<list>", help="Requests that run at once, such as 1,8.")
    ] = "1",
    workload: WorkloadFlags,
    plot: Annotated[
        Path | None, typer.Option(metavar="<file>", help="Draw a picture (png, svg or pdf).")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="<file>", help="Write all figures as JSON.")
    ] = None,
    engine: EngineFlags,
    run: RunFlags,
) -> None:
    """All drafters against K: acceptance length, tokens/s, time of an iteration.

    Plain decoding is measured first and last at each batch size; ratios are to the first.
    """
    from slipstream.bench.report import require_plots
    from slipstream.bench.sweep import Sweep

    _require_writable("--output", output)
    if plot is not None:
        _require_writable("--plot", plot)
        if plot.suffix not in _PICTURES:
            raise UsageError(f"--plot {plot} must end in one of {', '.join(_PICTURES)}")
        require_plots()
    plan = Sweep(
        _drafters(drafter, model),
        _numbers("-k", num_speculative_tokens, least=1),
        _numbers("--batch-sizes", batch_sizes, least=1),
    )
    asked = workload.read(model)
    config = engine.config(model, None)

    def open_engine(speculative_config: dict[str, Any] | None, batch: int) -> "LLM":
        own = replace(config, speculative_config=speculative_config, max_num_seqs=batch)
        return open_llm(own, run.verbose)[0]

    points = []
    for point in plan.run(open_engine, asked):
        points.append(point)
        _tell(point, len(points), plan)
    _report(points, f"{model}, {asked.title}", output, plot)


def _require_writable(flag: str, file: Path | None) -> None:
    """Before anything is measured, for a sweep may take hours."""
    if file is None:
        return
    if file.is_dir():
        raise UsageError(f"{flag} {file} is a directory; name a file")
    if not file.parent.is_dir():
        raise UsageError(f"{flag} {file}: there is no directory {file.parent}; make it first")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise UsageError(f"{flag} {file} cannot be written; name another file")


def _report(points: "list[Point]", title: str, output: Path | None, plot: Path | None) -> None:
    from slipstream.bench.report import draw, write_json

    console = stdout_console()
    console.print(f"{title}; slipstream {__version__}, {_machine()}", soft_wrap=True)
    console.print(table(points))
    if output is not None:
        write_json(points, {"title": title, "machine": _machine()}, output)
    if plot is not None:
        draw(points, title, plot)


def table(points: "list[Point]") -> Table:
    """A line for each point."""
    shown = Table(box=None, pad_edge=False, header_style="bold")
    shown.add_column("drafter", no_wrap=True)
    for heading in ("batch", "K", "AL", "tokens/s", "x plain", "iteration", "draft"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for point in points:
        shown.add_row(
            point.drafter,
            str(point.batch),
            str(point.k),
            f"{point.acceptance_length:.2f}",
            f"{point.tokens_per_second:.1f}",
            f"{point.times_plain:.2f}",
            f"{point.iteration_ms:.2f} ms",
            f"{point.shares['draft']:.0%}",
        )
    return shown


def _tell(point: "Point", number: int, plan: "Sweep") -> None:
    """Progress, for a person who waits."""
    console: Console = stderr_console()
    console.print(
        f"{number}/{plan.num_points} {point.drafter} K={point.k} batch {point.batch}: "
        f"AL {point.acceptance_length:.2f}, {point.tokens_per_second:.0f} tokens/s",
        style="dim",
        highlight=False,
        soft_wrap=True,
    )


def _drafters(given: list[str] | None, model: str) -> dict[str, dict[str, Any]]:
    if not given:
        if model != DEMO:
            raise UsageError("nothing to sweep; add --drafter, as often as there are drafters")
        given = [*_bundled(), *_WITHOUT_MODEL]
    drafters: dict[str, dict[str, Any]] = {}
    for text in given:
        name, equals, config = text.partition("=")
        if equals and config.lstrip().startswith("{"):
            drafters[name] = read_object(f"--drafter {name}", config) or {}
        else:
            drafters[text] = {"method": text} if text in _WITHOUT_MODEL else {"model": text}
        if "num_speculative_tokens" in drafters.get(name, {}):
            raise UsageError(f"--drafter {name} has its own num_speculative_tokens; -k says it")
    return drafters


def _bundled() -> list[str]:
    from slipstream.models.checkpoint import bundled_names

    return [name for name in bundled_names() if name != DEMO]


def _prompt_file(given: Path | None, model: str) -> Path:
    if given is not None:
        return given
    if model != DEMO:
        raise UsageError("there are held-out prompts for the demo only; name a file with --prompts")
    import slipstream

    return Path(slipstream.__file__).parent / "demo" / "prompts" / "held_out.jsonl"


def _numbers(flag: str, text: str, least: int) -> list[int]:
    """ "1,2,4" or "1-8", or both mixed."""
    numbers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UsageError(f"{flag} must be a list such as 1,2,4 or 1-8, not {text!r}")
        numbers.extend(range(int(first), int(last or first) + 1))
    if not numbers or min(numbers) < least:
        raise UsageError(f"{flag} must be numbers from {least} on, not {text!r}")
    return list(dict.fromkeys(numbers))


def _machine() -> str:
    import torch

    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
