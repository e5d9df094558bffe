"""`slipstream inspect --costs`: what decode steps cost, and which acceptance makes drafts pay."""

import json
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from slipstream.cli.drafter_flags import DrafterFlags
from slipstream.cli.open_llm import open_llm
from slipstream.cli.terminal import QUIET_STYLE, stdout_console
from slipstream.core.config import EngineConfig

if TYPE_CHECKING:
    from slipstream.engine.drafting.costs import CostRow


def show_costs(model: str, drafter: str | None, as_json: bool) -> None:
    """Load the model and its drafter (ngram where there is none), and print what steps cost."""
    flags = DrafterFlags(drafter=drafter)
    options = dict(flags.config(model) or {"method": "ngram"}, num_speculative_tokens="auto")
    config = EngineConfig(model=model, speculative_config=options, skip_tokenizer_init=True)
    engine = open_llm(config, verbose=False)[0].engine
    rows, name = engine.costs, str(options.get("model") or engine.resolved.method)
    lines = {count: list(line) for count, line in groupby(rows, key=lambda row: row.requests)}
    if as_json:
        document = [_document(row, line[0].seconds) for line in lines.values() for row in line]
        print(json.dumps({"model": model, "drafter": name, "costs": document}, indent=2))
        return
    console = stdout_console()
    console.print(f"{model}, drafts of {name}", style="bold", soft_wrap=True)
    _show(console, lines)


def _document(row: "CostRow", plain: float) -> dict[str, Any]:
    return {
        "requests": row.requests,
        "drafts": row.drafts,
        "seconds": row.seconds,
        "least_acceptance": row.least_acceptance(plain) if row.drafts else None,
    }


def _show(console: Console, lines: dict[int, list["CostRow"]]) -> None:
    from slipstream.engine.drafting.kept_costs import LENGTH

    console.print("milliseconds per step, by requests and draft tokens per request", style="bold")
    console.print(f"contexts of {LENGTH} tokens", style=QUIET_STYLE)
    console.print(
        _table(lines, [[f"{it.seconds * 1e3:.2f}" for it in row] for row in lines.values()])
    )
    console.print("acceptance rate from which drafting pays", style="bold")
    console.print("-: it does not pay at any rate", style=QUIET_STYLE)
    least = [
        ["", *(_percent(it.least_acceptance(row[0].seconds)) for it in row[1:])]
        for row in lines.values()
    ]
    console.print(_table(lines, least))


def _percent(chance: float | None) -> str:
    return "-" if chance is None else f"{chance:.0%}"


def _table(lines: dict[int, list["CostRow"]], cells: Sequence[Sequence[str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    drafts = [row.drafts for row in next(iter(lines.values()))]
    for heading in ("requests", *map(str, drafts)):
        table.add_column(heading, justify="right")
    for count, line in zip(lines, cells, strict=True):
        table.add_row(str(count), *line)
    return table
