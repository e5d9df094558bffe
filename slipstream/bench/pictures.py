"""Charts, as picture files and as SVG for HTML pages."""

import importlib.util
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slipstream.bench.sweep import AUTO, PLAIN, CellResult
from slipstream.core.errors import UsageError

PICTURES = (".png", ".svg", ".pdf")
PAGES = (".html", ".htm")

# Distinct on white and on black, also for colour-blind readers (Okabe and Ito).
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f")
_MARKERS = "osD^vP*X<>"
_LEAST_MS = 0.1  # the axis is logarithmic: shorter times (chunks of one packet) are drawn here
_INK = "#010203"  # replaced by the text colour of the page
_STYLE: Any = {
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "svg.fonttype": "none",
    "svg.hashsalt": "slipstream",
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
}

SWEEP_PANELS: Mapping[str, str] = {
    "acceptance_length": "acceptance length",
    "tpot_ms": "TPOT, ms",
    "times_plain": "speed-up over plain",
    "median_iteration_ms": "median iteration, ms",
}
Draw = Callable[[], Any]


def require_plots() -> None:
    """Raise UsageError if matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(
            "plots need matplotlib: pip install 'slipstream[bench]', or leave out --plot"
        )


def save(draw: Draw, file: Path) -> None:
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        draw().savefig(file, dpi=120, facecolor="white")


def as_svg(draw: Draw) -> str:
    """A figure as SVG for a page, without background and in the page's text colour."""
    import matplotlib

    out = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context(_STYLE):
        draw().savefig(out, format="svg", transparent=True, metadata=nothing)
    text = out.getvalue()
    return text[text.index("<svg") :].replace(_INK, "currentColor")


def sweep_figure(points: Sequence[CellResult], title: str | None) -> Any:
    """Draw a row of panels for each batch size, with a line for each drafter over K, and one for
    its first measurement of plain decoding."""
    batches = sorted({point.batch for point in points})
    figure = _figure((13.5, 0.5 + 3.2 * len(batches)), title)
    grid = figure.subplots(len(batches), len(SWEEP_PANELS), squeeze=False)
    names = list(dict.fromkeys(it.drafter for it in points if it.drafter != PLAIN))
    for row, batch in zip(grid, batches, strict=True):
        for axes, (field, label) in zip(row, SWEEP_PANELS.items(), strict=True):
            _against_k(axes, [it for it in points if it.batch == batch], names, field)
            axes.set_title(f"{label}, batch {batch}", fontsize=10)
    lines = grid[0][0].get_lines()
    labelled = [line for line in lines if not line.get_label().startswith("_")]
    figure.legend(handles=labelled, loc="outside lower center", ncols=8, frameon=False)
    return figure


def load_figure(
    times: Mapping[str, Sequence[float]],
    seconds: Mapping[str, Sequence[float]],
    shares: Sequence[float],
    title: str | None,
) -> Any:
    """Draw a load: distributions of times, tokens and requests per second, acceptance.

    Args:
        times: milliseconds by the name to show.
        seconds: output tokens and concurrent requests, by second.
        shares: of drafts whose i-th token was accepted; empty where unknown.
    """
    figure = _figure((11.0, 6.6), title)
    grid = figure.subplots(2, 2)
    _spread(grid[0][0], times)
    _per_second(grid[0][1], seconds["output_tokens"], "output tokens per second", 0)
    _per_second(grid[1][0], seconds["requests"], "concurrent requests", 1)
    _by_position(grid[1][1], shares)
    return figure


def _figure(size: tuple[float, float], title: str | None) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    if title is not None:
        figure.suptitle(title)
    return figure


def _against_k(axes: Any, points: Sequence[CellResult], names: Sequence[str], field: str) -> None:
    for index, name in enumerate(names):
        known = [it for it in points if it.drafter == name and getattr(it, field) is not None]
        values = sorted((it.k, getattr(it, field)) for it in known if isinstance(it.k, int))
        for point in known:
            if point.k == AUTO:
                level, colour = getattr(point, field), _COLOURS[index % len(_COLOURS)]
                axes.axhline(level, color=colour, linestyle=":", linewidth=1.4, label="_")
        axes.plot(
            [k for k, _ in values],
            [value for _, value in values],
            marker=_MARKERS[index % len(_MARKERS)],
            markersize=5,
            linewidth=1.4,
            color=_COLOURS[index % len(_COLOURS)],
            label=name,
        )
    measured = (getattr(it, field) for it in points if it.drafter == PLAIN)
    levels = [level for level in measured if level is not None]
    if levels:  # the first, which ratios are relative to
        axes.axhline(levels[0], color="#808080", linestyle="--", linewidth=1, label=PLAIN)
    axes.set_ylim(bottom=1 if field == "acceptance_length" else 0)
    axes.set_xlabel("K, draft tokens per step (dotted: auto)")
    fixed = {it.k for it in points if it.drafter != PLAIN and isinstance(it.k, int)}
    axes.set_xticks(sorted(fixed))
    axes.grid(alpha=0.25)


def _spread(axes: Any, times: Mapping[str, Sequence[float]]) -> None:
    for index, (name, own) in enumerate(times.items()):
        if not own:
            continue
        ordered = sorted(max(time, _LEAST_MS) for time in own)
        shares = [(place + 1) / len(ordered) for place in range(len(ordered))]
        axes.step(
            ordered,
            shares,
            where="post",
            label=name,
            color=_COLOURS[index % len(_COLOURS)],
            linestyle=("-", "--", "-.", ":")[index % 4],
        )
    axes.set_xscale("log")
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("ms")
    axes.set_title("cumulative distribution of times", fontsize=10)
    axes.grid(alpha=0.25)
    if axes.get_lines():
        axes.legend(fontsize=8, frameon=False)


def _per_second(axes: Any, values: Sequence[float], title: str, colour: int) -> None:
    edges = list(range(len(values) + 1))
    axes.stairs(values, edges, fill=True, color=_COLOURS[colour], alpha=0.75)
    axes.set_xlabel("s")
    axes.set_ylim(bottom=0)
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.25)


def _by_position(axes: Any, shares: Sequence[float]) -> None:
    axes.set_title("share of drafts accepted, by position", fontsize=10)
    if not shares:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "speculation: not reported", ha="center", va="center")
        return
    places = list(range(1, len(shares) + 1))
    bars = axes.bar(places, shares, color=_COLOURS[2], alpha=0.8)
    if len(shares) <= 12:
        axes.bar_label(bars, labels=[f"{share:.2f}" for share in shares], fontsize=8)
        axes.set_xticks(places)
    axes.set_ylim(0, 1.05)
    axes.set_xlabel("position in the draft")
