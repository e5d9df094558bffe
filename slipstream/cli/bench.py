"""`slipstream bench`: measure engines and servers."""

import typer

from slipstream.cli.bench_offline import latency, throughput
from slipstream.cli.bench_serve import serve
from slipstream.cli.bench_sweep import sweep
from slipstream.cli.flags import add_command

app = typer.Typer(
    name="bench",
    help="Measure: a server under load, or an engine in this process.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
for _command in (serve, latency, throughput, sweep):
    add_command(app, _command)
