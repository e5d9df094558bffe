"""The curves, the figures and the card of a run."""

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.real_heads.evaluate import read_results, summary
from scripts.real_heads.plan import HEADS, OTHERS
from scripts.real_heads.prompts import CATEGORIES

_CARD = """\
# Heads for {model}

Trained with `scripts/real_heads` on {device} from the model's own answers to prompts of ShareGPT:
{answers:,} answers, {tokens:,} tokens, {minutes:.1f} minutes in all. Weights are not part of the
repository; the command makes them again.

    {command}

| kind | parameters | steps of {step_tokens:,} tokens | minutes | simulated AL | temperature 1 |
|---|---|---|---|---|---|
{trained}

Acceptance length at K = {k} on {prompts} held-out prompts, answers of at most {answer_tokens}
tokens ({ended:.0%} of the greedy ones end by themselves). Heads draft in every step. Lookups draft
where they find something: the first figure is over those steps alone, the second is tokens per pass
over all steps.

{measured}

{curves}
"""


def write_report(out: Path, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Write curves.csv, curves.png, report.json and CARD.md; give what is in report.json.

    Args:
        out: holds heads/KIND and results/NAME.jsonl.
        facts: of the run, which the card names.
    """
    curves = {kind: _metrics(out / "heads" / kind / "metrics.jsonl") for kind in HEADS}
    _write_csv(out / "curves.csv", curves)
    _draw(out / "curves.png", curves)
    measured = {name: read_results(out / "results" / f"{name}.jsonl") for name in (*OTHERS, *HEADS)}
    document = {
        **facts,
        "trained": {kind: _trained(out / "heads" / kind, it) for kind, it in curves.items() if it},
        "measured": _figures(measured),
    }
    (out / "report.json").write_text(json.dumps(document, indent=1) + "\n")
    (out / "CARD.md").write_text(_card(document))
    return document


def _metrics(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def _trained(folder: Path, metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    steps = [it for it in metrics if it["kind"] == "training"]
    checks = [it for it in metrics if it["kind"] == "validation"]
    weights = folder / "model.safetensors"
    return {
        "steps": steps[-1]["step"] if steps else 0,
        "seconds": steps[-1]["seconds"] if steps else 0,
        "simulated": checks[-1]["acceptance_length"],
        "simulated_sampled": checks[-1]["acceptance_length_sampled"],
        "bytes": weights.stat().st_size if weights.is_file() else None,
    }


def _figures(measured: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """The figures by drafter and temperature, of all prompts and of each category; at temperature 0
    also how many texts equal those of plain decoding."""
    figures: list[dict[str, Any]] = []
    for name, results in measured.items():
        for result in results:
            rows, temperature = result["rows"], result["temperature"]
            plain = [it for it in measured["none"] if it["temperature"] == temperature]
            entry = {"drafter": name, "temperature": temperature, "k": result["k"]}
            entry["all"] = summary(rows)
            for category in CATEGORIES:
                entry[category] = summary([row for row in rows if row["category"] == category])
            if temperature == 0:
                pairs = zip(rows, plain[0]["rows"] if plain else (), strict=False)
                entry["equal_to_plain"] = sum(a["digest"] == b["digest"] for a, b in pairs)
            figures.append(entry)
    return figures


def _write_csv(file: Path, curves: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    with file.open("w", newline="") as opened:
        writer = csv.writer(opened)
        writer.writerow(("kind", "step", "seconds", "loss", "al_greedy", "al_sampled"))
        for kind, metrics in curves.items():
            for it in metrics:
                values = (it.get(key) for key in ("seconds", "loss"))
                lengths = (it.get(f"acceptance_length{end}") for end in ("", "_sampled"))
                writer.writerow((kind, it["step"], *values, *lengths))


def _draw(file: Path, curves: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    loss = figure.add_subplot(1, 2, 1, xlabel="step", ylabel="loss", title="Training loss")
    length = figure.add_subplot(
        1, 2, 2, xlabel="step", ylabel="acceptance length", title="Simulated, greedy"
    )
    for kind, metrics in curves.items():
        for axes, key in ((loss, "loss"), (length, "acceptance_length")):
            points = [(it["step"], it[key]) for it in metrics if key in it]
            if points:
                axes.plot(*zip(*points, strict=True), label=kind, linewidth=1)
    loss.set_yscale("log")
    length.legend()
    figure.savefig(file, dpi=90)


def _card(document: Mapping[str, Any]) -> str:
    trained = [
        f"| `{kind}` | {it['parameters']} | {it['steps']:,} | {it['seconds'] / 60:.1f} "
        f"| {it['simulated']:.2f} | {it['simulated_sampled']:.2f} |"
        for kind, it in _with_parameters(document["trained"]).items()
    ]
    plain = [it for it in document["measured"] if it["drafter"] == "none"]
    found = [it for it in document["measured"] if it["drafter"] != "none"]
    return _CARD.format(
        **{key: document[key] for key in ("model", "device", "answers", "tokens", "command")},
        minutes=document["minutes"],
        step_tokens=document["step_tokens"],
        trained="\n".join(trained),
        k=found[0]["k"] if found else "-",
        prompts=found[0]["all"]["prompts"] if found else 0,
        answer_tokens=document["answer_tokens"],
        ended=plain[0]["all"]["ended"] if plain else 0,
        measured=table(found),
        curves="![Curves](curves.png)",
    )


def _with_parameters(trained: Mapping[str, Any]) -> dict[str, Any]:
    """Millions of parameters, of two bytes each."""
    return {
        kind: {**it, "parameters": f"{it['bytes'] / 2e6:.1f}M" if it["bytes"] else "-"}
        for kind, it in trained.items()
    }


def table(figures: Sequence[Mapping[str, Any]]) -> str:
    """AL, with tokens per pass where those are fewer, by category."""
    head = ("drafter", "temperature", "all", *CATEGORIES)
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for entry in figures:
        cells = [f"`{entry['drafter']}`", f"{entry['temperature']:g}"]
        for group in ("all", *CATEGORIES):
            found = entry[group]
            overall = f" ({found['tokens_per_pass']:.2f})"
            is_lookup = entry["drafter"] in OTHERS
            cells.append(f"{found['AL']:.2f}{overall if is_lookup else ''}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
