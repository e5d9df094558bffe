"""`slipstream inspect`: describe a checkpoint, and check it as a drafter for a target."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from slipstream.cli.checkpoint_facts import BLOCK_SIZE, read_facts
from slipstream.cli.drafter_fit import Fit, check_fit
from slipstream.cli.drafter_flags import AUTO, DrafterFlags, is_method
from slipstream.cli.errors import FAILED
from slipstream.cli.open_llm import open_llm
from slipstream.cli.terminal import QUIET_STYLE, stdout_console
from slipstream.core.config import EngineConfig
from slipstream.core.errors import UsageError, counted
from slipstream.core.flags import REQUIRED, flag, given_flags
from slipstream.speculative.catalogue import LOOKUPS

if TYPE_CHECKING:
    from slipstream.engine.drafting.step_costs import CostRow


def show_costs(engine: EngineConfig, flags: DrafterFlags, as_json: bool) -> None:
    """Load the model and its drafter (a lookup if none is given), and print what steps cost."""
    model = engine.model
    if flags.no_speculation:
        raise UsageError("--costs compares plain steps with drafts; leave out --no-speculation")
    given = {"num_speculative_tokens": AUTO, **(flags.config(model) or {"method": LOOKUPS[0]})}
    options = {**given, "num_speculative_tokens": AUTO}  # with a fixed number none are measured
    config = replace(engine, speculative_config=options, skip_tokenizer_init=True)
    loaded = open_llm(config, verbose=False)[0].engine
    rows = _rows_up_to(given["num_speculative_tokens"], loaded.costs)
    parts = options.get("drafters") or [options]
    name = " + ".join(str(it.get("model") or it.get("method")) for it in parts)
    lines = {count: list(line) for count, line in groupby(rows, key=lambda row: row.requests)}
    if as_json:
        document = [
            {
                "requests": row.requests,
                "drafts": row.drafts,
                "seconds": row.seconds,
                "least_acceptance": row.least_acceptance(line[0].seconds) if row.drafts else None,
            }
            for line in lines.values()
            for row in line
        ]
        print(json.dumps({"model": model, "drafter": name, "costs": document}, indent=2))
        return
    console = stdout_console()
    console.print(f"{model}, drafts of {name}", style="bold", soft_wrap=True)
    _show_costs(console, lines)


def _rows_up_to(most: object, rows: "Sequence[CostRow]") -> "Sequence[CostRow]":
    """The rows with at most `most` draft tokens; all for AUTO."""
    largest = max(row.drafts for row in rows)
    if most == AUTO:
        return rows
    if not isinstance(most, int) or not 0 < most <= largest:
        raise UsageError(
            f"--costs tells the costs of 1 to {largest} draft tokens with this drafter, not of "
            f"{most!r}; give -k one of these, or leave it out"
        )
    return [row for row in rows if row.drafts <= most]


def _show_costs(console: Console, lines: dict[int, list["CostRow"]]) -> None:
    from slipstream.engine.drafting.kept_costs import LENGTH

    console.print("milliseconds per step, by requests and draft tokens per request", style="bold")
    console.print(f"contexts of {LENGTH} tokens", style=QUIET_STYLE)
    drafts = [row.drafts for row in next(iter(lines.values()))]
    times = [[f"{it.seconds * 1e3:.2f}" for it in row] for row in lines.values()]
    console.print(_table(lines, drafts, times))
    console.print("acceptance rate from which drafting pays", style="bold")
    shares = [[it.least_acceptance(row[0].seconds) for it in row[1:]] for row in lines.values()]
    if any(None in row for row in shares):
        console.print("-: it does not pay at any rate", style=QUIET_STYLE)
    least = [["-" if it is None else f"{it:.0%}" for it in row] for row in shares]
    console.print(_table(lines, drafts[1:], least))


def _table(requests: Iterable[int], drafts: Sequence[int], cells: Sequence[Sequence[str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for heading in ("requests", *map(str, drafts)):
        table.add_column(heading, justify="right")
    for count, line in zip(requests, cells, strict=True):
        table.add_row(str(count), *line)
    return table


@dataclass(frozen=True, kw_only=True)
class InspectFlags:
    """What to look at."""

    path: str = flag(
        REQUIRED, "A local directory, a GGUF file, a hub name or a bundled demo.", argument=True
    )
    target: str | None = flag(None, "Check whether PATH can draft for this model.")
    json: bool = flag(False, "Print one JSON document.")
    costs: bool = flag(
        False, "Load the model, and tell what steps cost and which acceptance makes drafts pay."
    )


def inspect(
    *,
    flags: InspectFlags,
    drafter: DrafterFlags,
    engine: Annotated[EngineConfig, {"model": EngineConfig.model}],
) -> None:
    """Describe a checkpoint, or tell whether a drafter fits.

    Weights are loaded only if --costs asks for times: of the drafter (look-ups where none is given,
    demo/draft for the demo) and the engine that the other flags describe, for up to -k draft
    tokens. The exit code is 1 if tensors of a language model do not fit its config.json, or, with
    --target, if it does not fit as a drafter.
    """
    path, target = flags.path, flags.target
    if flags.costs and target is not None:
        raise UsageError("give --costs for a model, or --target for a drafter, not both")
    for name in () if flags.costs else (*given_flags(drafter), *given_flags(engine)):
        raise UsageError(f"{name} goes with --costs; add that, or leave it out")
    if is_method(path) and not Path(path).exists():
        raise UsageError(
            f"{path} is a drafting method without a checkpoint, so there is nothing to inspect; "
            "give a model or a drafter's checkpoint"
        )
    if flags.costs:
        show_costs(replace(engine, model=path), drafter, flags.json)
        return
    facts = read_facts(path)
    fit = None if target is None else check_fit(facts, read_facts(target))
    document = facts.document()
    if flags.json:
        if fit is not None:
            document["drafter"] = {"target": target, **fit.document()}
        print(json.dumps(document, ensure_ascii=False, indent=2))
    else:
        _show(stdout_console(), document, fit, str(target))
    if document["problem"] is not None or (fit is not None and not fit.fits):
        raise typer.Exit(FAILED)


def _show(console: Console, facts: dict[str, Any], fit: Fit | None, target: str) -> None:
    for name, value in _rows(facts).items():
        console.print(Text.assemble((f"{name:17}", QUIET_STYLE), value), soft_wrap=True)
    if fit is None:
        return
    console.print(f"\n{'fits' if fit.fits else 'does not fit'} {target} as a drafter", style="bold")
    for line in (*fit.problems, *fit.notes):
        console.print(f"- {line}", soft_wrap=True)


def _rows(facts: dict[str, Any]) -> dict[str, str]:
    """The document of `--json` in words, without what is absent."""
    number, size, kind = facts["num_parameters"], facts["num_bytes"], facts["kind"]
    weights = "no weights" if number is None else f"{_short(number)} ({_bytes(size)})"
    rows = {
        "path": facts["path"],
        "architecture": facts["architecture"],
        "kind": "language model" if kind == "language_model" else f"drafter, method {kind}",
        "target features": facts["features"],
        "drafts": facts["num_speculative_tokens"]
        and f"{counted(facts['num_speculative_tokens'], 'token')} per step by default",
        "trained for": facts["trained_tokens"]
        and f"{counted(facts['trained_tokens'], 'draft token')} per step, all in one pass",
        "target": facts["target"],
        "target adapter": facts["target_adapter"],
        "own drafter": facts["own_drafter"],
        "parameters": weights,
        **_expert_rows(facts["experts"]),
        "quantised": facts["quantization"],
        **_type_rows(facts["types"]),
        "dtype": "; ".join(filter(None, (facts["dtype"], facts["dtype_note"]))) or None,
        **_shape_rows(facts),
        "kernels": facts["kernels"],
        "does not load": facts["problem"],
    }
    return {name: row for name, row in rows.items() if row is not None}


def _type_rows(types: list[dict[str, Any]]) -> dict[str, str]:
    """The types of a GGUF file by the form in which they are multiplied."""
    rows: dict[str, list[str]] = {}
    for each in types:
        becomes = each["becomes"]
        name = "as stored" if becomes is None else f"as {becomes}"
        note = ", rounded" if each["rounded"] else ""
        rows.setdefault(name, []).append(f"{each['type']} ({_bytes(each['num_bytes'])}{note})")
    return {name: ", ".join(parts) for name, parts in rows.items()}


def _expert_rows(experts: dict[str, Any] | None) -> dict[str, str]:
    """The active parameters of a mixture of experts, and the bytes that passes read."""
    if experts is None:
        return {}
    shared = experts["shared_expert_size"]
    shared_expert = "" if shared is None else f", and a shared one of width {shared}"
    rows = {
        "active": f"{_short(experts['num_active_parameters'])} parameters, passed by a token",
        "experts": f"{experts['num_experts']} of width {experts['expert_size']} a layer, "
        f"{experts['num_experts_per_token']} for a token{shared_expert}",
    }
    for touched in experts["touched"]:
        name = f"read for {counted(touched['rows'], 'row')}"
        size = "" if touched["num_bytes"] is None else f"{_bytes(touched['num_bytes'])}, "
        rows[name] = f"{size}{touched['experts']:g} experts of a layer"
    return rows


def _shape_rows(facts: dict[str, Any]) -> dict[str, str]:
    """Sizes; drafting heads without transformer layers have only a few."""
    rows = {}
    if facts["num_layers"] is None:
        if facts["hidden_size"] is not None:
            rows["hidden size"] = str(facts["hidden_size"])
        if facts["vocab_size"] is not None:
            rows["vocabulary"] = f"{facts['vocab_size']} tokens"
        return {**rows, "KV cache": "none"}
    yes_no = {True: "yes", False: "no"}
    kept = f"{facts['num_kv_heads']} key-value heads"
    if facts["latent_size"] is not None:
        kept = f"which share a latent row of {facts['latent_size']} numbers a token"
    per_token, per_block = facts["kv_bytes_per_token"], facts["kv_bytes_per_block"]
    cache = f"{_bytes(per_token)} per token, {_bytes(per_block)} per block of {BLOCK_SIZE}"
    if facts["window"]:
        within = _bytes(facts["kv_bytes_in_windows"])
        cache += f"; {within} per token are kept for the last {facts['window']} tokens only"
    states = {}
    if facts["state_bytes_per_request"]:
        state, drafted = facts["state_bytes_per_request"], facts["state_bytes_per_draft_token"]
        states["recurrent states"] = (
            f"{_bytes(state)} per request and per checkpoint of a prefix, {_bytes(drafted)} per "
            "draft token of a request"
        )
    return {
        "layers": str(facts["num_layers"]),
        "hidden size": f"{facts['hidden_size']}, feed-forward {facts['intermediate_size']}",
        "heads": f"{facts['num_heads']} of dimension {facts['head_dim']}, {kept}",
        "vocabulary": f"{facts['vocab_size']} tokens",
        "context": f"{facts['max_position_embeddings']} tokens",
        "tied embeddings": yes_no[facts["tie_word_embeddings"]],
        "EOS ids": ", ".join(map(str, facts["eos_token_ids"])) or "none",
        "chat template": yes_no[facts["has_chat_template"]],
        "KV cache": cache,
        **states,
    }


def _short(number: int) -> str:
    return _scaled(number, {"B": 10**9, "M": 10**6, "K": 10**3}) or str(number)


def _bytes(number: int) -> str:
    return _scaled(number, {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10}) or f"{number} bytes"


def _scaled(number: int, units: dict[str, int]) -> str | None:
    found = (f"{number / size:.2f} {unit}" for unit, size in units.items() if number >= size)
    return next(found, None)
