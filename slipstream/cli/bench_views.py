"""How the commands of `slipstream bench` show what they do and what came of it."""

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

if TYPE_CHECKING:
    from slipstream.bench.tables import ReportTable


def show_tables(console: Console, tables: "Iterable[ReportTable]") -> None:
    """One after another, each below its heading."""
    for table in tables:
        console.print()
        console.print(table.heading, style="bold", soft_wrap=True)
        if table.note:
            console.print(table.note, style=QUIET_STYLE)
        console.print(as_rich(table))


def about() -> dict[str, str]:
    """Version and machine, for the files of a report."""
    return {"slipstream": __version__, "machine": machine()}


def show_report(title: str, tables: "Iterable[ReportTable]") -> None:
    """Results of an engine in this process on stdout."""
    console = stdout_console()
    console.print(f"{title}; slipstream {__version__}, {machine()}", soft_wrap=True)
    show_tables(console, tables)


def as_rich(table: "ReportTable") -> Table:
    """The first column to the left, figures to the right, the best rows in bold."""
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


class Watch:
    """A bar for a person who waits; nothing where nobody does.

    It is there between `begin` and `end` only: loading a model shows bars of its own.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=None, told="")

    def begin(self, name: str, size: int) -> None:
        """Something else is measured now."""
        self._progress.reset(self._task, total=size, description=name, told="")
        self._progress.start()

    def end(self) -> None:
        """It was measured."""
        self._progress.stop()

    def move(self, done: int, told: str) -> None:
        """So much of it is done."""
        self._progress.update(self._task, completed=done, told=told)


@contextmanager
def watching() -> Iterator[Watch]:
    """A bar on stderr, which leaves no trace."""
    console = stderr_console()
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[told]}"),
        TimeRemainingColumn(compact=True),
        console=console,
        transient=True,
        expand=True,
        disable=not console.is_terminal,
    )
    watch = Watch(progress)
    try:
        yield watch
    finally:
        watch.end()


def tell(line: str) -> None:
    """A line of progress that stays."""
    stderr_console().print(line, style=QUIET_STYLE, soft_wrap=True)


def machine() -> str:
    """What this process runs on."""
    import torch

    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
