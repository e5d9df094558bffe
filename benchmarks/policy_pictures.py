"""Charts of what draft policies reach and choose."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.policy_engines import AUTO, PLAIN


def never_slower_figure(document: Mapping[str, Any]) -> Any:
    """A panel for each drafter and traffic: speeds over plain decoding by concurrency.

    Args:
        document: what `never_slower` writes.
    """
    panels: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for cell in document["cells"]:
        panels.setdefault((cell["drafter"], cell["traffic"]), []).append(cell)
    figure, axes = _grid(len(panels), "speed over plain decoding")
    for axis, ((drafter, traffic), cells) in zip(axes, panels.items(), strict=False):
        _bars(axis, cells)
        axis.set_title(f"{drafter}, {traffic}", fontsize=10)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=8, frameon=False)
    return figure


def changes_figure(document: Mapping[str, Sequence[Mapping[str, Any]]]) -> Any:
    """A panel for each change of acceptance: choices by step, and those that are right.

    Args:
        document: what `changing_traffic` writes.
    """
    changes = [(name, change) for name, found in document.items() for change in found]
    figure, axes = _grid(len(changes), "verified draft tokens per request, by step")
    for axis, (name, change) in zip(axes, changes, strict=False):
        axis.axhspan(change["low"], change["high"], color="#cfe3f2")
        axis.plot(change["choices"], color=_AUTO_COLOUR, linewidth=1)
        axis.axvline(30, color="#7f7f7f", linewidth=1, linestyle=":")
        axis.set_title(f"{name}: to {change['chance']}", fontsize=10)
    return figure


def _grid(number: int, title: str) -> tuple[Any, Any]:
    """A figure, and so many axes of it in reading order."""
    from matplotlib.figure import Figure

    columns = min(3, number)
    rows = -(-number // columns)
    figure = Figure(figsize=(4.4 * columns, 0.7 + 2.7 * rows), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for unused in axes[number:]:
        unused.set_visible(False)
    return figure, axes


def _bars(axis: Any, cells: Sequence[Mapping[str, Any]]) -> None:
    """Groups of bars by concurrency, one bar a setting."""
    settings = [name for name in cells[0]["tokens_per_s"] if name != PLAIN]
    width = 0.8 / len(settings)
    for place, name in enumerate(settings):
        speeds = [it["tokens_per_s"][name] / it["tokens_per_s"][PLAIN] for it in cells]
        offset = (place - (len(settings) - 1) / 2) * width
        colour = _AUTO_COLOUR if name == AUTO else _FIXED_COLOURS[place % len(_FIXED_COLOURS)]
        label = name if name == AUTO else f"K = {name}"
        axis.bar([x + offset for x in range(len(cells))], speeds, width, color=colour, label=label)
    axis.axhline(1.0, color="#7f7f7f", linewidth=1)
    axis.set_xticks(range(len(cells)), [str(it["concurrency"]) for it in cells])
    axis.set_xlabel("concurrent requests")


_AUTO_COLOUR = "#d55e00"
_FIXED_COLOURS = ("#cfe3f2", "#93c1e0", "#4f97c8", "#0072b2", "#00486f")
