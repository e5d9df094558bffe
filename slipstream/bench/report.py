"""A sweep as JSON and as a picture."""

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slipstream.bench.sweep import PLAIN, Point
from slipstream.core.errors import UsageError

PANELS = {
    "acceptance_length": "acceptance length",
    "tokens_per_second": "tokens/s",
    "iteration_ms": "iteration, ms",
}
_MARKERS = "osD^vP*X<>"


def require_plots() -> None:
    """Raise UsageError where pictures cannot be drawn, before any time is spent."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(
            "plots need matplotlib: pip install 'slipstream[bench]', or leave out --plot"
        )


def write_json(points: Sequence[Point], about: dict[str, Any], file: Path) -> None:
    """`about` says what was measured, and where."""
    document = {**about, "points": [asdict(point) for point in points]}
    file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def draw(points: Sequence[Point], title: str, file: Path) -> None:
    """A PNG: a row of panels for each batch size, a line for each drafter, K along the axis."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    batches = sorted({point.batch for point in points})
    figure = Figure(figsize=(13.5, 0.6 + 3.9 * len(batches)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(batches), len(PANELS), squeeze=False)
    names = list(dict.fromkeys(it.drafter for it in points if it.drafter != PLAIN))
    for row, batch in zip(grid, batches, strict=True):
        for axes, (field, label) in zip(row, PANELS.items(), strict=True):
            _panel(axes, [it for it in points if it.batch == batch], names, field)
            axes.set_title(f"{label}, batch {batch}")
    grid[0][0].legend(fontsize="small")
    figure.suptitle(title)
    figure.savefig(file, dpi=110)


def _panel(axes: Any, points: Sequence[Point], names: Sequence[str], field: str) -> None:
    for index, name in enumerate(names):
        own = sorted((it for it in points if it.drafter == name), key=lambda it: it.k)
        axes.plot(
            [it.k for it in own],
            [getattr(it, field) for it in own],
            marker=_MARKERS[index % len(_MARKERS)],
            label=name,
        )
    for level in (getattr(it, field) for it in points if it.drafter == PLAIN):
        axes.axhline(level, color="grey", linestyle="--", linewidth=1)
    if field != "acceptance_length":
        axes.set_ylim(bottom=0)
    axes.set_xlabel("K, draft tokens a step")
    axes.set_xticks(sorted({it.k for it in points if it.drafter != PLAIN}))
    axes.grid(alpha=0.3)
