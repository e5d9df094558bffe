"""Reads the tensors of a quantised module, and defines the interface of quantised formats."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from slipstream.core.errors import CheckpointError, UsageError
from slipstream.kernels.formats.dense import DenseMatrix
from slipstream.kernels.formats.float8 import Float8Matrix
from slipstream.kernels.formats.weight import Rounding, Weight
from slipstream.models.quantized.module_lists import NO_MODULES, ModuleList
from slipstream.models.safetensors_file import WEIGHT_DTYPES, TensorEntry, dtype_name, read_into

INDICES = (torch.int32, torch.int64)
Tensors = dict[str, Tensor]  # of one matrix
_STATIC_SCALES = ("input_scale", "input_global_scale", "activation_scale", "output_scale")


class StackAllocator:
    """Allocates tensors of modules that are stacked into one matrix next to each other.

    Args:
        count: number of modules, if their tensors have equal shapes; 1 if shapes may differ.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self.device = device
        self._count = count
        self._tensors: dict[str, Tensor] = {}
        self._num_placed: dict[str, int] = {}

    def place(self, ending: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory for the next module's tensor with this name ending."""
        if self._count == 1:
            return torch.empty(shape, dtype=dtype, device=self.device)
        whole = self._tensors.get(ending)
        if whole is None or whole.dtype != dtype:
            whole = torch.empty((self._count, *shape), dtype=dtype, device=self.device)
            self._tensors[ending], self._num_placed[ending] = whole, 0
        index = self._num_placed[ending]
        self._num_placed[ending] = index + 1
        return whole[index]


class StoredModule:
    """The tensors of one quantised matrix; each can be taken once.

    Args:
        path: the checkpoint's directory.
        entries: the module's tensors by the endings of their names.
        on_read: called with (tensor name, entry) for each tensor that is read.
        allocator: memory that tensors are read into.
        separator: text between the module's name and an ending.
    """

    def __init__(
        self,
        name: str,
        path: Path,
        entries: Mapping[str, TensorEntry],
        on_read: Callable[[str, TensorEntry], None],
        allocator: StackAllocator,
        separator: str = ".",
    ) -> None:
        self.name = name
        self._separator = separator
        self._path, self._entries, self._on_read = path, entries, on_read
        self._allocator = allocator

    def __contains__(self, ending: str) -> bool:
        return ending in self._entries

    def full_name(self, ending: str) -> str:
        """The checkpoint's full name of the tensor with this ending."""
        return f"{self.name}{self._separator}{ending}"

    def take(
        self,
        ending: str,
        dtypes: Collection[torch.dtype],
        *shapes: tuple[int, ...],
        stays: bool = False,
    ) -> Tensor:
        """Read a tensor as stored.

        Args:
            dtypes, shapes: the dtypes and shapes that the format allows.
            stays: the matrix uses the tensor's memory, so it is read into `allocator`.

        Raises:
            CheckpointError: the tensor is missing, or has another dtype or shape.
        """
        entry = self._entry(ending, dtypes, shapes)
        if stays:
            tensor = self._allocator.place(ending, entry.shape, entry.dtype)
        else:
            tensor = torch.empty(entry.shape, dtype=entry.dtype, device=self._allocator.device)
        read_into(entry, tensor, raw=True)
        self._on_read(self.full_name(ending), entry)
        return tensor

    def take_interleaved(
        self, ending: str, dtypes: Collection[torch.dtype], shape: tuple[int, ...], turns: int
    ) -> Tensor:
        """Read a tensor [E, turns * R, ...] that interleaves the rows of `turns` matrices, and
        stack these matrices for each of E, [E * turns * R, ...]; errors as `take`."""
        if turns == 1:
            return self.take(ending, dtypes, shape).flatten(0, 1)
        entry = self._entry(ending, dtypes, (shape,))
        count, rows, *rest = shape
        tensor = torch.empty(
            (count, turns, rows // turns, *rest), dtype=entry.dtype, device=self._allocator.device
        )
        some = torch.empty((1, rows, *rest), dtype=entry.dtype, device=self._allocator.device)
        for index in range(count):
            read_into(entry.row_range(index, index + 1), some, raw=True)
            tensor[index].copy_(some.view(rows // turns, turns, *rest).transpose(0, 1))
        self._on_read(self.full_name(ending), entry)
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
                f"holds {entry.name} as {list(entry.shape)} of {dtype_name(entry.dtype)}, where "
                f"its config.json asks for {' or '.join(str(list(shape)) for shape in shapes)} of "
                f"{' or '.join(dtype_name(dtype) for dtype in dtypes)}"
            )
        return entry

    def take_scales(
        self, ending: str, *shapes: tuple[int, ...], dtypes: Collection[torch.dtype] = WEIGHT_DTYPES
    ) -> Tensor:
        """Read scales of one of these shapes as float32; errors as `take`."""
        return self.take(ending, dtypes, *shapes).float()

    def groups(self, ending: str, found: Tensors, num_groups: int) -> Tensor:
        """[columns] int64, the group of each column, of the tensor with this ending. Raises
        CheckpointError for a group out of range."""
        group_of = found[ending].long()
        if bool((group_of < 0).any()) or bool((group_of >= num_groups).any()):
            raise self.error(f"holds {self.full_name(ending)} beyond its {num_groups} groups")
        return group_of

    def ignore(self, *endings: str) -> None:
        """Ignore tensors, if present, that do not affect the matrix."""
        for ending in endings:
            if ending in self._entries:
                self._on_read(self.full_name(ending), self._entries[ending])

    def require_groups(self, columns: int, group: int) -> None:
        """Raise CheckpointError unless `columns` is a multiple of `group`."""
        if columns % group:
            raise self.error(
                f"has {columns} columns in {self.name}, which are no whole groups of {group}; use "
                "a checkpoint that leaves this module unquantised"
            )

    def require_words(self, size: int, in_word: int, what: str) -> None:
        """Raise CheckpointError unless `size` rows or columns fill whole words."""
        if size % in_word:
            raise self.error(
                f"has {size} {what} in {self.name}, which do not fill words of {in_word}; use a "
                "checkpoint that leaves this module unquantised"
            )

    def error(self, what: str) -> CheckpointError:
        """An error whose message is the checkpoint's path, then `what`."""
        return CheckpointError(f"{self._path} {what}")


class StoredForm(ABC):
    """How a matrix of a checkpoint is stored.

    Attributes:
        bits: bits of a stored number.
        rounds_input: activations are to be quantised next to it.
    """

    bits: int
    rounds_input: bool = True

    @property
    @abstractmethod
    def words(self) -> str:
        """A description for the log."""

    @property
    @abstractmethod
    def kind(self) -> type[Weight]:
        """The class of `matrix`."""

    @property
    def rounding(self) -> Rounding | None:
        """The rounding of random weights to this form; None: that is not supported."""
        return None

    def count(self, nbytes: int) -> int:
        """How many numbers `nbytes` of values hold."""
        return nbytes * 8 // self.bits

    def unit(self, columns: int) -> int:
        """Number of adjacent columns that must stay on one rank; 1: it can be split anywhere."""
        return int(getattr(self.kind, "group", 1))

    @abstractmethod
    def tensors(self, module: StoredModule, rows: int, columns: int) -> Tensors:
        """Take the tensors of the matrix [rows, columns]; CheckpointError if one is missing, or has
        another dtype or shape."""

    @abstractmethod
    def matrix(self, module: StoredModule, found: Tensors, rows: int, columns: int) -> Weight:
        """Make the matrix [rows, columns] of its tensors without changing its values.

        A layout that no quantised weight class supports is dequantised to float32.
        """


class StoredQuantization(ABC):
    """The quantised format of a checkpoint, from its quantization_config.

    Attributes:
        name: name of the format; empty if the `words` of its forms name it.
        unquantised: modules that are not quantised.
        fused_endings: name endings of tensors that stack all experts of a layer; such a tensor is
            named as the unquantised one, `_` and the ending. Empty: experts are stored separately.
        becomes_floats: matrices without a kernel on the device are dequantised; if False, a GPU
            refuses formats that have a weight class but no kernel there.
    """

    name: str
    unquantised: ModuleList = NO_MODULES
    fused_endings: tuple[str, ...] = ()
    becomes_floats: bool = False

    @property
    @abstractmethod
    def forms(self) -> Collection[StoredForm]:
        """The forms of all modules."""

    @abstractmethod
    def form_of(self, module: str) -> StoredForm | None:
        """The form of a module's matrix; None if the settings do not tell."""

    @property
    def description(self) -> str:
        """The format and its bits, in words."""
        words = "; ".join(dict.fromkeys(form.words for form in self.forms))
        return f"{self.name}, {words}" if self.name else words

    @property
    def kinds(self) -> frozenset[type[Weight]]:
        """All classes that `read` may return."""
        return frozenset(form.kind for form in self.forms)

    @property
    def rounds_activations(self) -> bool:
        """Whether activations are to be quantised next to e4m3 matrices with row scales."""
        return all(form.rounds_input for form in self.forms if form.kind is Float8Matrix)

    def read(self, module: StoredModule, rows: int, columns: int) -> Weight:
        """Read the matrix [rows, columns]; see `StoredForm`."""
        form = self.form_in(module)
        return form.matrix(module, form.tensors(module, rows, columns), rows, columns)

    def form_in(self, module: StoredModule) -> StoredForm:
        """The form of the module's matrix. Static scales of activations are not used."""
        form = self.form_of(module.name)
        if form is None:
            raise module.error(
                f"stores {module.name} quantised, but nothing in its quantization_config is about "
                "it"
            )
        module.ignore(*_STATIC_SCALES)
        return form

    def fused_tensors(
        self, module: StoredModule, experts: int, rows: int, columns: int, turns: int
    ) -> Tensors:
        """Take the tensors of `read_fused`."""
        raise AssertionError(f"{module.name}: {type(self).__name__} has no fused experts")

    def read_fused(
        self, module: StoredModule, experts: int, rows: int, columns: int, turns: int
    ) -> Weight:
        """Read all experts of a layer, [experts * rows, columns], from `fused_endings` tensors.

        Args:
            turns: number of matrices whose rows are interleaved in an expert; they are returned
                stacked.
        """
        raise AssertionError(f"{module.name}: {type(self).__name__} has no fused experts")

    def count(self, module: str, nbytes: int) -> int:
        """How many numbers `nbytes` of this module's values hold."""
        form = self.form_of(module)
        return nbytes if form is None else form.count(nbytes)

    def kind(self, module: str) -> type[Weight]:
        """The class that `read` returns for this module."""
        form = self.form_of(module)
        return DenseMatrix if form is None else form.kind

    def rounding(self, module: str) -> Rounding | None:
        """The rounding of random weights to this module's format; None: it is not quantised;
        UsageError if the format does not support that."""
        form = self.form_of(module)
        if form is None or self.unquantised.names(module):
            return None
        if form.rounding is None:
            raise UsageError(
                f"random weights cannot be rounded to {self.description}, which the "
                f"quantization_config asks for ({module}); leave that out, and give quantization "
                "to round them"
            )
        return form.rounding

    def unit(self, module: str, columns: int) -> int:
        form = self.form_of(module)
        return 1 if form is None else form.unit(columns)

    def require_modules(self, modules: Collection[str], path: Path) -> None:
        """Compare the settings with these module names.

        By default a list that names none of them is only warned about: many are written for a
        model with a vision tower. CheckpointError if the settings must match them and do not.
        """
        self.unquantised.warn_unless_named(modules, path)


@dataclass(frozen=True)
class OneForm(StoredQuantization):
    """A format in which all quantised matrices have one form."""

    name: str
    form: StoredForm
    unquantised: ModuleList = NO_MODULES

    @property
    def forms(self) -> tuple[StoredForm]:
        return (self.form,)

    def form_of(self, module: str) -> StoredForm:
        return self.form


def row_scale_shapes(rows: int) -> tuple[tuple[int, ...], ...]:
    """Shapes in which checkpoints store a scale for the matrix or for each row."""
    return (), (1,), (1, 1), (rows,), (rows, 1)


def row_scales(scales: Tensor, rows: int) -> Tensor:
    """Scales [rows] from one of `row_scale_shapes`."""
    return scales.flatten().expand(rows).contiguous()
