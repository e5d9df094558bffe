"""`slipstream train`: train a drafter for a target."""

import shlex
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from slipstream.cli.errors import say
from slipstream.cli.flags import add_commands
from slipstream.cli.open_llm import loading_bars
from slipstream.cli.terminal import interrupt_noted, stderr_console, stdout_console
from slipstream.train.settings import RECIPES, DataSettings, TrainSettings

if TYPE_CHECKING:
    from slipstream.train.losses import ChainAcceptance
    from slipstream.train.trainer import Report

app = typer.Typer(
    name="train",
    help="Train a drafter for a target.",
    rich_markup_mode=None,
    no_args_is_help=True,
)


def _command(kind: str) -> Callable[..., None]:
    def command(*, settings: Annotated[TrainSettings, {"kind": kind}]) -> None:
        from slipstream.train.run import run_training
        from slipstream.train.trainer import RunStoppedError

        console, line = stderr_console(), shlex.join(["slipstream", *sys.argv[1:]])
        try:
            with loading_bars(console) as bar, _TrainingBar(kind) as watch:
                trained = run_training(settings, line, watch, bar, interrupt_noted)
        except RunStoppedError as stopped:
            say(f"{stopped}, which is kept; run the same command again to continue")
            raise KeyboardInterrupt from stopped
        except KeyboardInterrupt:
            say("interrupted; run the same command again to continue from the last checkpoint")
            raise
        count = trained.recipe.trained.num_parameters
        stdout_console().print(
            f"{trained.folder}: simulated AL {_describe(trained.acceptance)}, "
            f"{count:,} parameters, {trained.seconds / 60:.1f} minutes",
            soft_wrap=True,
        )

    command.__name__, command.__doc__ = kind, f"Train {RECIPES[kind][1]}"
    return command


def data(*, settings: DataSettings) -> None:
    """Prepare training sequences for several drafters.

    With --generate the target's own answers are included, so that they are made only once.
    """
    from slipstream.train.data import pack_data

    try:
        with loading_bars(stderr_console()) as bar:
            sequences = pack_data(settings, bar)
    except KeyboardInterrupt:
        say("interrupted; run the same command again to continue after the last saved answer")
        raise
    stdout_console().print(
        f"{settings.out}: {len(sequences):,} sequences of {sequences.length} tokens", soft_wrap=True
    )


add_commands(app, *map(_command, RECIPES), data)


class _TrainingBar:
    """A progress bar with loss and acceptance; on a pipe, a line for every validation."""

    def __init__(self, kind: str) -> None:
        console = stderr_console()
        self._console, self._live = console, console.is_terminal
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:.0f}%"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[text]}"),
            console=console,
            disable=not self._live,
        )
        self._task = self._progress.add_task(f"training {kind}", total=1.0, text="")
        self._acceptance, self._loss = "", ""

    def __enter__(self) -> "_TrainingBar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, report: "Report") -> None:
        if report.resumed:
            self._console.print(f"continuing after step {report.step}", soft_wrap=True)
        elif report.acceptance is not None:
            self._acceptance = f"AL {_describe(report.acceptance)}"
            if not self._live:
                line = f"step {report.step}: {self._loss}{self._acceptance}"
                self._console.print(line, soft_wrap=True)
        else:
            self._loss = f"loss {report.loss:.3f}, {report.tokens_per_second:,.0f} tokens/s, "
        self._progress.update(
            self._task, completed=report.done, text=f"{self._loss}{self._acceptance}"
        )


def _describe(acceptance: "ChainAcceptance") -> str:
    return f"{acceptance.greedy_length:.2f} greedy, {acceptance.sampled_length:.2f} sampled"
