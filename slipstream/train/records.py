"""The log of a run: one JSON object a line, for curves and for whoever wants to plot them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.train.files import append_line, write_text

FILE = "metrics.jsonl"


class Records:
    """Appends to metrics.jsonl; every record carries the step that it was made behind."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / FILE

    def add(self, step: int, **values: Any) -> None:
        """One record; what a killed run has told stays told."""
        append_line(self._file, json.dumps({"step": step, **values}))

    def rewind(self, step: int) -> None:
        """Drop what was told of later steps: they will be done again."""
        kept = [record for record in self.all() if record["step"] <= step]
        lines = "".join(json.dumps(record) + "\n" for record in kept)
        write_text(self._file, lines)

    def all(self) -> list[Mapping[str, Any]]:
        """In order; a last line that was cut short is left out."""
        if not self._file.is_file():
            return []
        records = []
        for line in self._file.read_text("utf-8").splitlines():
            try:
                records.append(json.loads(line))
            except ValueError:
                break
        return records
