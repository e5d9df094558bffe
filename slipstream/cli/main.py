"""The `slipstream` command.

The modules of the commands import the engine (and so torch) only when a command runs.
"""

import shlex
import sys
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from slipstream import __version__
from slipstream.cli.bench_offline import latency, throughput
from slipstream.cli.bench_serve import serve as bench_serve
from slipstream.cli.bench_sweep import advise, sweep
from slipstream.cli.cached_models import list_models
from slipstream.cli.chat import chat
from slipstream.cli.deploy import deploy
from slipstream.cli.doctor import doctor
from slipstream.cli.errors import run
from slipstream.cli.flags import DebugFlag, GroupedHelp, VllmCommand, add_commands, flattened
from slipstream.cli.generate import generate
from slipstream.cli.inspect import inspect
from slipstream.cli.serve import serve
from slipstream.cli.terminal import drop_what_stderr_does_not_take, fill_closed_stdin
from slipstream.cli.train import app as train_app
from slipstream.core.errors import UsageError


class Commands(TyperGroup):
    """The commands; for `run`, which other programs have, the error names ours."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] == "run":
            meant = shlex.join(["slipstream", "chat", *args[1:]])
            raise UsageError(f"no such command: run; did you mean {meant}?")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="slipstream",
    cls=Commands,
    help="LLM inference built around speculative decoding: the same output, faster.",
    # Flags may have underscores, as on other engines' command lines. The parser applies this to
    # names of flags and commands alone, never to their values.
    context_settings={
        "token_normalize_func": lambda name: name.replace("_", "-"),
        "help_option_names": ["-h", "--help"],
    },
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
add_commands(app, generate, chat)
add_commands(app, serve, deploy, kind=VllmCommand)
add_commands(app, inspect)
app.command("list", cls=GroupedHelp)(flattened(list_models))
add_commands(app, doctor)
bench_app = typer.Typer(
    name="bench",
    help="Measure a server under load, or an engine in this process.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
add_commands(bench_app, bench_serve, latency, throughput, sweep, advise)
app.add_typer(bench_app)
app.add_typer(train_app)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"slipstream {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and leave."
        ),
    ] = False,
    debug: DebugFlag = False,
) -> None:
    del version, debug  # their callbacks did the work
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command line and leave with its exit code."""
    fill_closed_stdin()
    drop_what_stderr_does_not_take()
    sys.exit(run(app, sys.argv[1:] if arguments is None else arguments))
