"""The tensors that a quantised matrix is stored as, and the protocol of the formats."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from slipstream.core.errors import CheckpointError
from slipstream.kernels.formats.weight import Weight
from slipstream.models.safetensors_file import WEIGHT_DTYPES, TensorEntry, read_into


class StoredModule:
    """The tensors of one quantised matrix, each to be taken once.

    Args:
        name: the module's name in the checkpoint.
        path: the checkpoint's directory.
        entries: the module's tensors, by the last part of their names.
        taken: called with each entry that is read.
    """

    def __init__(
        self,
        name: str,
        path: Path,
        entries: Mapping[str, TensorEntry],
        taken: Callable[[TensorEntry], None],
    ) -> None:
        self.name = name
        self._path, self._entries, self._taken = path, entries, taken

    def __contains__(self, ending: str) -> bool:
        return ending in self._entries

    def take(
        self, ending: str, dtypes: Collection[torch.dtype], *shapes: tuple[int, ...]
    ) -> Tensor:
        """A tensor as it is stored.

        Raises:
            CheckpointError: it is not there, or of no dtype or shape that the format has.
        """
        entry = self._entries.get(ending)
        if entry is None:
            raise self.error(
                f"has no tensor {self.name}.{ending}, which its quantization_config asks for"
            )
        if entry.shape not in shapes or entry.dtype not in dtypes:
            raise self.error(
                f"holds {entry.name} as {list(entry.shape)} of {_word(entry.dtype)}, where its "
                f"config.json asks for {' or '.join(str(list(shape)) for shape in shapes)} of "
                f"{' or '.join(_word(dtype) for dtype in dtypes)}"
            )
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        read_into(entry, tensor, raw=True)
        self._taken(entry)
        return tensor

    def take_scales(
        self,
        ending: str,
        *shapes: tuple[int, ...],
        dtypes: Collection[torch.dtype] = WEIGHT_DTYPES,
    ) -> Tensor:
        """Scales in float32, in one of these shapes; errors as `take`."""
        return self.take(ending, dtypes, *shapes).float()

    def take_row_scales(
        self, ending: str, rows: int, dtypes: Collection[torch.dtype] = WEIGHT_DTYPES
    ) -> Tensor:
        """[rows] float32, stored for each row or once for all of them; errors as `take`."""
        scales = self.take_scales(ending, *row_scale_shapes(rows), dtypes=dtypes)
        return scales.flatten().expand(rows).contiguous()

    def take_groups(self, ending: str, columns: int, num_groups: int) -> Tensor:
        """[columns] int64, the group of each column.

        Raises:
            CheckpointError: as `take`, and where there is no such group.
        """
        group_of = self.take(ending, (torch.int32, torch.int64), (columns,)).long()
        if bool((group_of < 0).any()) or bool((group_of >= num_groups).any()):
            raise self.error(f"holds {self.name}.{ending} beyond its {num_groups} groups")
        return group_of

    def pass_over(self, *endings: str) -> None:
        """Accept tensors that may be there and do not change the matrix."""
        for ending in endings:
            if ending in self._entries:
                self._taken(self._entries[ending])

    def require_words(self, size: int, in_word: int, what: str) -> None:
        """Raise CheckpointError unless so many rows or columns fill whole words."""
        if size % in_word:
            raise self.error(
                f"has {size} {what} in {self.name}, which do not fill words of {in_word}; use a "
                "checkpoint that leaves this module unquantised"
            )

    def error(self, what: str) -> CheckpointError:
        """An error about the checkpoint: its path, then `what`."""
        return CheckpointError(f"{self._path} {what}")


class StoredQuantization(Protocol):
    """How a checkpoint stores its matrices, from its quantization_config."""

    @property
    def description(self) -> str:
        """The format and its bits, in words."""

    @property
    def float8_rows(self) -> bool:
        """Whether all of them are exactly what `Float8Matrix` is."""

    def read(self, module: StoredModule, rows: int, columns: int) -> Weight:
        """The matrix [rows, columns] with the numbers that are stored.

        Numbers that no format of fewer bits can have are a float32 matrix.
        """

    def bits(self, module: str) -> int:
        """Bits of a stored number in a module of this name."""

    def keeps(self, module: str) -> bool:
        """Whether `read` finds a form with as few bits for a module of this name."""


def row_scale_shapes(rows: int) -> tuple[tuple[int, ...], ...]:
    """Shapes in which checkpoints store one number for a matrix, or one for each row."""
    return (), (1,), (1, 1), (rows,), (rows, 1)


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
