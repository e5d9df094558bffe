"""metrics.jsonl, one JSON object a line, and its curves (PNG, if matplotlib is installed)."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.train.files import append_line, read_lines, replacing, write_text

logger = logging.getLogger("slipstream")

FILE = "metrics.jsonl"
LOSS, ACCEPTANCE = "loss.png", "acceptance.png"
_PLOT_BYTES = 50_000  # about

Record = Mapping[str, Any]


class MetricsLog:
    """Appends records to metrics.jsonl; each carries the number of steps done."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._file = folder, folder / FILE

    def add(self, step: int, **values: Any) -> None:
        append_line(self._file, json.dumps({"step": step, **values}))

    def rewind(self, step: int) -> None:
        """Drop the records of later steps, which will be repeated."""
        kept = [record for record in self.all() if record["step"] <= step]
        write_text(self._file, "".join(json.dumps(record) + "\n" for record in kept))

    def all(self) -> list[Record]:
        """All lines in order, without an incomplete last one."""
        return list(read_lines(self._file))

    def of_kind(self, kind: str) -> list[Record]:
        """The records of `training` or of `validation`."""
        return [record for record in self.all() if record["kind"] == kind]

    def draw(self) -> None:
        """Draw loss and acceptance over steps; without matplotlib warn and draw nothing."""
        try:
            from matplotlib.figure import Figure
        except ImportError:
            logger.warning(
                "no curves are drawn, because matplotlib is missing: install slipstream[train]; "
                "the numbers are in metrics.jsonl"
            )
            return
        training, validation = self.of_kind("training"), self.of_kind("validation")
        loss, acceptance = (Figure(figsize=(7, 4.5), layout="constrained") for _ in range(2))
        axes = loss.add_subplot(xlabel="step", ylabel="loss", title="Training loss")
        axes.plot(*_curve(training, "loss"))
        axes = acceptance.add_subplot(
            xlabel="step", ylabel="acceptance length", title="Simulated acceptance on held-out text"
        )
        axes.plot(*_curve(validation, "acceptance_length"), "o-", label="greedy")
        axes.plot(*_curve(validation, "acceptance_length_sampled"), "o-", label="temperature 1")
        axes.legend()
        for figure, name in ((loss, LOSS), (acceptance, ACCEPTANCE)):
            with replacing(self._folder / name, _PLOT_BYTES) as temporary:
                figure.savefig(temporary, dpi=120, format="png")


def _curve(records: list[Record], key: str) -> tuple[list[Any], list[Any]]:
    return [record["step"] for record in records], [record[key] for record in records]
