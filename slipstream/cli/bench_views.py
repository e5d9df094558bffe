"""Progress and results of the commands of `slipstream bench`."""

import platform
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from slipstream import __version__
from slipstream.cli.terminal import QUIET_STYLE, stderr_console, stdout_console
from slipstream.core.errors import counted

if TYPE_CHECKING:
    from slipstream.bench.tables import ReportTable


def show_tables(console: Console, tables: "Iterable[ReportTable]") -> None:
    for table in tables:
        console.print()
        console.print(table.heading, style="bold", soft_wrap=True)
        if table.note:
            console.print(table.note, style=QUIET_STYLE)
        console.print(as_rich(table))


def about() -> dict[str, str]:
    """The version and the machine that a report is from."""
    return {"slipstream": __version__, "machine": machine()}


def show_report(title: str, tables: "Iterable[ReportTable]") -> None:
    """Print the results of an engine in this process."""
    console = stdout_console()
    console.print(f"{title}; slipstream {__version__}, {machine()}", soft_wrap=True)
    show_tables(console, tables)


def as_rich(table: "ReportTable") -> Table:
    """A table with the first column left-aligned, figures right-aligned, the best rows bold."""
    are_pairs = not any(table.columns)
    shown = Table(
        box=None if are_pairs else box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 2 if are_pairs else 1, 0, 0),
        show_edge=False,
        show_header=not are_pairs,
        header_style="bold",
    )
    for place, name in enumerate(table.columns):
        if place == 0:
            shown.add_column(name, overflow="fold")
        else:
            shown.add_column(name, justify="left" if are_pairs else "right", overflow="fold")
    for place, row in enumerate(table.rows):
        shown.add_row(*row, style="bold" if place in table.best else None)
    return shown


class Bar:
    """The progress bar of a measurement.

    It is shown between `start` and `stop` only: loading a model shows bars of its own.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=None, text="")

    def start(self, name: str, total: int) -> None:
        self._progress.reset(self._task, total=total, description=name, text="")
        self._progress.start()

    def stop(self) -> None:
        self._progress.stop()

    def update(self, done: int, text: str) -> None:
        self._progress.update(self._task, completed=done, text=text)


@contextmanager
def progress_bar() -> Iterator[Bar]:
    """A bar on stderr, which is removed at the end; nothing where stderr is not a terminal."""
    console = stderr_console()
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[text]}"),
        TimeRemainingColumn(compact=True),
        console=console,
        transient=True,
        expand=True,
        disable=not console.is_terminal,
    )
    bar = Bar(progress)
    try:
        yield bar
    finally:
        bar.stop()


def note(line: str) -> None:
    """Print a line about the progress on stderr; it stays."""
    stderr_console().print(line, style=QUIET_STYLE, soft_wrap=True)


def machine() -> str:
    """The GPU, or the CPU and its threads, that this process uses."""
    import torch

    from slipstream.kernels.registry import threads_in_use

    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    return f"{platform.machine()} CPU, {counted(threads_in_use(), 'thread')}"
