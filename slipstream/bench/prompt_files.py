"""Files of data sets: JSON lines, JSON and parquet, read as rows."""

import gzip
import importlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.core.errors import UsageError


@dataclass(frozen=True)
class Row:
    """One entry of a file.

    Attributes:
        place: its file and line for error messages, such as `questions.jsonl, line 3`.
    """

    content: Mapping[str, Any]
    place: str

    def text(self, key: str) -> str:
        """The non-empty text of a key; raises UsageError for anything else."""
        value = self.content.get(key)
        if not isinstance(value, str) or not value:
            raise UsageError(f'{self.place} has no "{key}" (a text)')
        return value

    def listed(self, *keys: str) -> list[Any]:
        """The first non-empty list of these keys; raises UsageError if there is none."""
        for key in keys:
            value = self.content.get(key)
            if isinstance(value, list) and value:
                return value
        raise UsageError(f'{self.place} has no "{keys[0]}" (a list)')


def read_rows(file: Path) -> list[Row]:
    """Read all entries of a `.jsonl`, `.json` (both also with `.gz`) or `.parquet` file.

    Raises:
        UsageError: the file cannot be read, is of another kind, or holds no entries.
    """
    if file.suffix == ".parquet":
        rows = list(_parquet(file))
    else:
        text = _text(file)
        rows = list(_document(file, text) if text.lstrip().startswith("[") else _lines(file, text))
    if not rows:
        raise UsageError(f"{file} holds no prompts")
    return rows


def _text(file: Path) -> str:
    try:
        data = file.read_bytes()
        if file.suffix == ".gz":
            data = gzip.decompress(data)
        return data.decode("utf-8-sig")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the prompts in {file}: {error}") from None


def _lines(file: Path, text: str) -> Iterator[Row]:
    """JSON lines."""
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            place = f"{file}, line {number}"
            try:
                entry = json.loads(line)
            except ValueError as error:
                raise UsageError(f"{place} is not JSON: {error}") from None
            yield _row(entry, place)


def _document(file: Path, text: str) -> Iterator[Row]:
    """A JSON list of objects."""
    try:
        entries = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{file} is not JSON: {error}") from None
    for number, entry in enumerate(entries, start=1):
        yield _row(entry, f"{file}, entry {number}")


def _parquet(file: Path) -> Iterator[Row]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise UsageError(
            f"reading {file} needs pyarrow: pip install 'slipstream[bench]', or export it as JSON "
            "lines"
        ) from None
    try:
        entries = parquet.read_table(file).to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
        raise UsageError(f"cannot read the prompts in {file}: {error}") from None
    for number, entry in enumerate(entries, start=1):
        yield _row(entry, f"{file}, row {number}")


def _row(entry: Any, place: str) -> Row:
    if not isinstance(entry, dict):
        raise UsageError(f"{place} is not an object")
    return Row(entry, place)
