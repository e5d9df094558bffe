"""Parses the numbers, texts and lists of a GGUF header (little endian)."""

import struct
from pathlib import Path
from typing import Final, Self

import numpy as np

from slipstream.core.errors import CheckpointError
from slipstream.models.safetensors_file import DAMAGED

Value = bool | int | float | str | list[int] | list[float] | list[str]
"""A value of the metadata; lists of booleans are read as integers."""


_MAX_BYTES = 64 << 20  # maximum size of a header; the largest vocabularies need far less
_STEP = 1 << 20  # number of bytes that are read at a time
_MAX_KEY = 1 << 16
_STRING, _LIST = 8, 9
_LENGTH = struct.Struct("<Q")
# Format letters of `struct` and of numpy by type id.
_SCALARS: Final = {
    **{0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B"},
    **{10: "Q", 11: "q", 12: "d"},
}
_BOOL = 7


class HeaderReader:
    """Reads a header sequentially, without reading much beyond it.

    All methods raise CheckpointError if the file ends too early or violates the format.

    Args:
        size: size of the file in bytes.

    Attributes:
        position: offset of the next byte.
    """

    def __init__(self, file: Path, size: int) -> None:
        self.position = 0
        self._path, self._size = file, size
        self._bytes = bytearray()
        try:
            self._file = file.open("rb", buffering=0)
        except OSError as error:
            raise CheckpointError(f"cannot open {file}: {error.strerror}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def take(self, count: int, what: str) -> bytes:
        start = self._pass(count, what)
        return bytes(self._bytes[start : start + count])

    def integer(self, letter: str, what: str) -> int:
        """Read an integer; `letter` is its format in `struct`."""
        form = struct.Struct("<" + letter)
        start = self._pass(form.size, what)
        return int(form.unpack_from(self._bytes, start)[0])

    def count(self, least: int, what: str) -> int:
        """Read the number of items whose size is at least `least` bytes each; checks that they fit
        into the header."""
        number = self.integer("Q", f"the number of {what}")
        self._require(number * least, f"{number} {what}")
        return number

    def text(self, what: str, most: int = _MAX_BYTES) -> str:
        """Read a text of at most `most` bytes."""
        length = self.integer("Q", what)
        if length > most:
            raise CheckpointError(f"{self._path}: {what} has {length} bytes; {DAMAGED}")
        start = self._pass(length, what)
        return self._decoded(start, start + length, what)

    def metadata(self, count: int) -> dict[str, Value]:
        found: dict[str, Value] = {}
        for _ in range(count):
            key = self.text("a key of its metadata", _MAX_KEY)
            if key in found:
                raise CheckpointError(f"{self._path} has the key {key!r} twice; {DAMAGED}")
            found[key] = self._value(key)
        return found

    def _value(self, key: str) -> Value:
        kind = self.integer("I", key)
        if kind == _STRING:
            return self.text(key)
        if kind == _LIST:
            return self._list(key)
        form = self._scalar(key, kind)
        start = self._pass(form.size, key)
        value = form.unpack_from(self._bytes, start)[0]
        return bool(value) if kind == _BOOL else value

    def _list(self, key: str) -> list[int] | list[float] | list[str]:
        kind = self.integer("I", key)
        if kind == _STRING:
            return self._texts(key)
        form = self._scalar(key, kind)
        count = self.count(form.size, f"values of {key}")
        start = self._pass(count * form.size, key)
        numbers = np.frombuffer(self._bytes, "<" + _SCALARS[kind].replace("B", "u1"), count, start)
        values: list[int] | list[float] = numbers.tolist()
        return values

    def _texts(self, key: str) -> list[str]:
        count = self.count(_LENGTH.size, f"values of {key}")
        texts: list[str] = []
        position, held = self.position, len(self._bytes)
        length_at, header = _LENGTH.unpack_from, self._bytes
        try:
            for _ in range(count):  # hundreds of thousands, so this loop avoids method calls
                start = position + 8
                if start > held:
                    self._require(start - self.position, key)
                    held = len(header)
                position = start + length_at(header, position)[0]
                if position > held:
                    self._require(position - self.position, key)
                    held = len(header)
                texts.append(header[start:position].decode())
        except UnicodeDecodeError as error:
            raise self._no_text(key, error) from error
        self.position = position
        return texts

    def _scalar(self, key: str, kind: int) -> struct.Struct:
        letter = _SCALARS.get(kind)
        if letter is None:
            raise CheckpointError(
                f"{self._path}: {key} has a value of the type {kind}, which is not one that is "
                f"read; {DAMAGED}"
            )
        return struct.Struct("<" + letter)

    def _decoded(self, start: int, stop: int, what: str) -> str:
        try:
            return self._bytes[start:stop].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._no_text(what, error) from error

    def _no_text(self, what: str, error: UnicodeDecodeError) -> CheckpointError:
        return CheckpointError(
            f"{self._path}: {what} is no text in UTF-8 ({error.reason}); {DAMAGED}"
        )

    def _pass(self, count: int, what: str) -> int:
        """Skip the next `count` bytes, and return the index in memory of the first."""
        start = self.position
        self._require(count, what)
        self.position = start + count
        return start

    def _require(self, count: int, what: str) -> None:
        """Read until `count` bytes from `position` on are in memory."""
        end = self.position + count
        if end > self._size:
            raise CheckpointError(
                f"{self._path} is truncated: {what} would end at byte {end}, but the file has "
                f"{self._size}; {DAMAGED}"
            )
        if end > _MAX_BYTES:
            raise CheckpointError(
                f"{self._path} has a header of more than {_MAX_BYTES >> 20} MiB ({what}), which no "
                f"model has; {DAMAGED}"
            )
        while len(self._bytes) < end:
            some = self._file.read(_STEP)
            if not some:
                raise CheckpointError(
                    f"{self._path} ended inside its header; it has changed since it was opened, or "
                    "is on a failing disk"
                )
            self._bytes += some
