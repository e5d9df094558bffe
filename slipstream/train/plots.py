"""Curves of a run as PNG; matplotlib is an option (`slipstream[train]`)."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slipstream.train.files import replacing

logger = logging.getLogger("slipstream")

LOSS, ACCEPTANCE = "loss.png", "acceptance.png"
_PLOT_BYTES = 50_000  # about


def draw_curves(records: Sequence[Mapping[str, Any]], folder: Path) -> tuple[Path, ...]:
    """Loss and acceptance over steps; nothing, and a word about it, without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        logger.warning(
            "no curves are drawn, because matplotlib is missing: install slipstream[train]; the "
            "numbers are in metrics.jsonl"
        )
        return ()
    training = [record for record in records if record["kind"] == "training"]
    validation = [record for record in records if record["kind"] == "validation"]
    loss = Figure(figsize=(7, 4.5), layout="constrained")
    axes = loss.add_subplot(xlabel="step", ylabel="loss", title="Training loss")
    axes.plot(_steps(training), [record["loss"] for record in training])
    acceptance = Figure(figsize=(7, 4.5), layout="constrained")
    axes = acceptance.add_subplot(
        xlabel="step", ylabel="acceptance length", title="Simulated acceptance on held-out text"
    )
    for key, label in (
        ("acceptance_length", "greedy"),
        ("acceptance_length_sampled", "temperature 1"),
    ):
        axes.plot(_steps(validation), [record[key] for record in validation], "o-", label=label)
    axes.legend()
    paths = folder / LOSS, folder / ACCEPTANCE
    for figure, path in zip((loss, acceptance), paths, strict=True):
        with replacing(path, _PLOT_BYTES) as beside:
            figure.savefig(beside, dpi=120, format="png")
    return paths


def _steps(records: Sequence[Mapping[str, Any]]) -> list[int]:
    return [record["step"] for record in records]
