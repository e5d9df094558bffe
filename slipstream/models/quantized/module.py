"""The tensors that a quantised matrix is stored as, and the protocol of the formats."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor

from slipstream.core.errors import CheckpointError, UsageError
from slipstream.kernels.formats.weight import Rounding, Weight
from slipstream.models.safetensors_file import WEIGHT_DTYPES, TensorEntry, read_into


class Room:
    """Memory for tensors of modules that become one matrix, so that they lie in a row in it.

    Args:
        count: of modules, whose tensors of one ending have one shape; 1 where shapes may differ.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self.device = device
        self._count = count
        self._tensors: dict[str, Tensor] = {}
        self._given: dict[str, int] = {}

    def place(self, ending: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The next module's place for its tensor of this ending."""
        if self._count == 1:
            return torch.empty(shape, dtype=dtype, device=self.device)
        whole = self._tensors.get(ending)
        if whole is None or whole.dtype != dtype:
            whole = torch.empty((self._count, *shape), dtype=dtype, device=self.device)
            self._tensors[ending], self._given[ending] = whole, 0
        index = self._given[ending]
        self._given[ending] = index + 1
        return whole[index]


class StoredModule:
    """The tensors of one quantised matrix, each to be taken once.

    Args:
        name: the module's name in the checkpoint.
        path: the checkpoint's directory.
        entries: the module's tensors, by the last part of their names.
        taken: called with each entry that is read, behind its name in the checkpoint's entries.
        room: where tensors are read to.
        separator: what stands between the module's name and an ending.
    """

    def __init__(
        self,
        name: str,
        path: Path,
        entries: Mapping[str, TensorEntry],
        taken: Callable[[str, TensorEntry], None],
        room: Room,
        separator: str = ".",
    ) -> None:
        self.name = name
        self._separator = separator
        self._path, self._entries, self._taken = path, entries, taken
        self._room = room

    def __contains__(self, ending: str) -> bool:
        return ending in self._entries

    def full_name(self, ending: str) -> str:
        """What the checkpoint calls the tensor of this ending."""
        return f"{self.name}{self._separator}{ending}"

    def take(
        self,
        ending: str,
        dtypes: Collection[torch.dtype],
        *shapes: tuple[int, ...],
        stays: bool = False,
    ) -> Tensor:
        """A tensor as it is stored.

        Args:
            stays: it becomes a part of the matrix as it is.

        Raises:
            CheckpointError: it is not there, or of no dtype or shape that the format has.
        """
        entry = self._entry(ending, dtypes, shapes)
        if stays:
            tensor = self._room.place(ending, entry.shape, entry.dtype)
        else:
            tensor = torch.empty(entry.shape, dtype=entry.dtype, device=self._room.device)
        read_into(entry, tensor, raw=True)
        self._taken(self.full_name(ending), entry)
        return tensor

    def take_in_turns(
        self, ending: str, dtypes: Collection[torch.dtype], shape: tuple[int, ...], turns: int
    ) -> Tensor:
        """A tensor [E, turns * R, ...] whose rows belong to so many matrices in turn, as
        [E * turns * R, ...]: for each of E all rows of the first matrix, then of the next.

        Raises:
            CheckpointError: as `take`.
        """
        if turns == 1:
            return self.take(ending, dtypes, shape).flatten(0, 1)
        entry = self._entry(ending, dtypes, (shape,))
        count, rows, *rest = shape
        tensor = torch.empty(
            (count, turns, rows // turns, *rest), dtype=entry.dtype, device=self._room.device
        )
        some = torch.empty((1, rows, *rest), dtype=entry.dtype, device=self._room.device)
        for index in range(count):
            read_into(entry.row_range(index, index + 1), some, raw=True)
            tensor[index].copy_(some.view(rows // turns, turns, *rest).transpose(0, 1))
        self._taken(self.full_name(ending), entry)
        return tensor.flatten(0, 2)

    def _entry(
        self, ending: str, dtypes: Collection[torch.dtype], shapes: Collection[tuple[int, ...]]
    ) -> TensorEntry:
        entry = self._entries.get(ending)
        if entry is None:
            raise self.error(
                f"has no tensor {self.full_name(ending)}, which its quantization_config asks for"
            )
        if entry.shape not in shapes or entry.dtype not in dtypes:
            raise self.error(
                f"holds {entry.name} as {list(entry.shape)} of {_word(entry.dtype)}, where its "
                f"config.json asks for {' or '.join(str(list(shape)) for shape in shapes)} of "
                f"{' or '.join(_word(dtype) for dtype in dtypes)}"
            )
        return entry

    def take_scales(
        self, ending: str, *shapes: tuple[int, ...], dtypes: Collection[torch.dtype] = WEIGHT_DTYPES
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
            raise self.error(f"holds {self.full_name(ending)} beyond its {num_groups} groups")
        return group_of

    def pass_over(self, *endings: str) -> None:
        """Accept tensors that may be there and do not change the matrix."""
        for ending in endings:
            if ending in self._entries:
                self._taken(self.full_name(ending), self._entries[ending])

    def require_groups(self, columns: int, group: int) -> None:
        """Raise CheckpointError unless so many columns are whole groups."""
        if columns % group:
            raise self.error(
                f"has {columns} columns in {self.name}, which are no whole groups of {group}; use "
                "a checkpoint that leaves this module unquantised"
            )

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


class StoredQuantization(ABC):
    """How a checkpoint stores its matrices, from its quantization_config.

    Attributes:
        fused_endings: of the tensors that hold the matrices of all experts of a layer: each has the
            name of the unquantised one, `_` and an ending. Empty: experts are stored one by one.
        becomes_floats: any matrices that a device has no kernels for become floats there;
            otherwise those that have a class of their own are refused on a GPU.
    """

    fused_endings: tuple[str, ...] = ()
    becomes_floats: bool = False

    @property
    @abstractmethod
    def description(self) -> str:
        """The format and its bits, in words."""

    @property
    def kinds(self) -> frozenset[type[Weight]]:
        """The classes of what `read` gives, over all modules."""
        return frozenset({self.kind("")})

    @property
    def rounds_activations(self) -> bool:
        """Whether products of matrices of e4m3 with a scale a row are meant to round the other
        factor too."""
        return True

    @abstractmethod
    def read(self, module: StoredModule, rows: int, columns: int) -> Weight:
        """The matrix [rows, columns] with the numbers that are stored.

        Numbers that no format of fewer bits can have are a float32 matrix.
        """

    def read_fused(
        self, module: StoredModule, experts: int, rows: int, columns: int, turns: int
    ) -> Weight:
        """[experts * rows, columns], of a module with the `fused_endings`.

        Args:
            turns: an expert's rows belong in turn to so many matrices, of which one is to be above
                the other.
        """
        raise AssertionError(f"{module.name}: {type(self).__name__} has no fused experts")

    @abstractmethod
    def bits(self, module: str) -> int:
        """Bits of a stored number in a module of this name."""

    def count(self, module: str, nbytes: int) -> int:
        """Numbers that so many bytes of values hold, in a module of this name."""
        return nbytes * 8 // self.bits(module)

    @abstractmethod
    def kind(self, module: str) -> type[Weight]:
        """The class of what `read` gives for a module of this name."""

    def rounding(self, module: str) -> Rounding | None:
        """What makes random weights into what a module of this name is stored as; None: it is not
        quantised.

        Raises:
            UsageError: nothing does, for this format.
        """
        raise UsageError(
            f"random weights cannot be rounded to {self.description}, which the "
            f"quantization_config asks for ({module}); leave that out, and give quantization to "
            "round them"
        )

    def unit(self, module: str, columns: int) -> int:
        """Columns of a matrix of this name that cannot be parted; 1: it can be cut anywhere."""
        del columns
        return int(getattr(self.kind(module), "group", 1))

    def require_modules(self, modules: Collection[str], path: Path) -> None:
        """Raise CheckpointError where the settings do not fit modules of these names at all."""
        del modules, path


def row_scale_shapes(rows: int) -> tuple[tuple[int, ...], ...]:
    """Shapes in which checkpoints store one number for a matrix, or one for each row."""
    return (), (1,), (1, 1), (rows,), (rows, 1)


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
