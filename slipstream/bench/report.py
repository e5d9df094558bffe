"""Results as files: JSON, texts, pictures and pages."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slipstream.bench.datasets import BenchPrompt
from slipstream.bench.load import LoadRun
from slipstream.bench.page import PageChart, write_page
from slipstream.bench.pictures import (
    PAGES,
    as_svg,
    load_figure,
    save,
    sweep_figure,
)
from slipstream.bench.summary import E2EL, ITL, TPOT, TTFT, series, timeline
from slipstream.bench.sweep import Failure, Point
from slipstream.bench.tables import ReportTable, failures_table, sweep_table
from slipstream.core.errors import UsageError


def write_json(document: Mapping[str, Any], file: Path) -> None:
    """Write JSON with one figure per line."""
    file.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def text_entry(prompt: BenchPrompt, text: str) -> dict[str, Any]:
    """A prompt and its answer, for a file of texts."""
    return {"id": prompt.id, "prompt": prompt.shown(), "text": text}


def write_texts(entries: Iterable[Mapping[str, Any]], file: Path) -> None:
    """Write a JSON list of text entries."""
    file.write_text(
        json.dumps(list(entries), indent=1, ensure_ascii=False) + "\n",
        encoding="utf-8",
        errors="surrogatepass",
    )


def read_texts(file: Path) -> dict[str, str]:
    """Read the texts of a file of `write_texts`, by id.

    Raises:
        UsageError: it is not such a file.
    """
    try:
        entries = json.loads(file.read_text(encoding="utf-8", errors="surrogatepass"))
        return {str(entry["id"]): str(entry["text"]) for entry in entries}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UsageError(
            f"{file} is not a file of --save-texts ({error}); write one with that flag"
        ) from None


def differing(texts: Mapping[str, str], expected: Mapping[str, str]) -> list[str]:
    """The ids of texts that differ from the expected ones, or that have none."""
    return [name for name, text in texts.items() if expected.get(name) != text]


def sweep_document(
    points: Sequence[Point], failures: Sequence[Failure], about: Mapping[str, Any]
) -> dict[str, Any]:
    """A sweep as JSON; `about` names what was measured, and where."""
    return {
        **about,
        "points": [asdict(point) for point in points],
        "failures": [asdict(failure) for failure in failures],
    }


def draw_sweep(
    points: Sequence[Point],
    failures: Sequence[Failure],
    title: str,
    about: Mapping[str, str],
    files: Sequence[Path],
) -> None:
    """Write the pictures and pages of a sweep."""
    for file in files:
        if file.suffix not in PAGES:
            save(lambda: sweep_figure(points, title), file)
            continue
        parts: list[ReportTable | PageChart] = [
            sweep_table(points),
            PageChart(
                "Against K",
                as_svg(lambda: sweep_figure(points, None)),
                "Acceptance length, TPOT, speed-up and median iteration against K",
            ),
        ]
        if failures:
            parts.append(failures_table(failures))
        write_page(file, title, about, parts)


def draw_load(
    run: LoadRun,
    shares: Sequence[float],
    title: str,
    about: Mapping[str, str],
    tables: Sequence[ReportTable],
    files: Sequence[Path],
) -> None:
    """Write the pictures and pages of a load on a server."""
    measured = series([record for record in run.records if not record.failed])
    names = {TTFT: "TTFT", TPOT: "TPOT", ITL: "ITL, per chunk", E2EL: "end to end"}
    times = {shown: measured[metric] for metric, shown in names.items()}
    per_second = timeline(run)
    for file in files:
        if file.suffix not in PAGES:
            save(lambda: load_figure(times, per_second, shares, title), file)
            continue
        chart = PageChart(
            "Over time",
            as_svg(lambda: load_figure(times, per_second, shares, None)),
            "Distributions of times, tokens and requests per second, acceptance by position",
        )
        write_page(file, title, about, [*tables, chart])
