"""Reads checkpoints of drafting heads, from safetensors or pickles, under canonical names.

Trainers (SafeAILab, SpecForge, speculators, NeMo) name the same tensors differently: `midlayer.` or
`layers.0.` for the first layer, with or without the prefix `model.`. The canonical names are:

    fc  norm  lm_head  embed_tokens  d2t  input_norm  fc_norm.{i}     without a prefix
    layers of the head                                               model.layers.{i}.*

Vectors that are stored as [1, 1, N] or [1, N] are read as [N].
"""

import pickle
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.core.errors import CheckpointError
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.safetensors_file import (
    TensorEntry,
    read_entries,
    read_into,
    require_content,
    require_finite,
)
from slipstream.speculative.catalogue import METHODS

_PICKLED = "pytorch_model*.bin"
# Files that only one kind of head has; they take precedence over others.
_OWN_NAMES = [name for method in METHODS.values() for name in method.weight_files]
# Tensors that only training uses, and copies of the target's weights by speculators.
_NOT_READ = ("t2d", "verifier_lm_head.", "verifier_norm.")
_FIRST_LAYER = ("midlayer.", "transformer.")

MASK_HIDDEN = "mask_hidden"
"""The learned vector that replaces the features of a token that is not known yet."""


@dataclass(frozen=True)
class PickledEntry(TensorEntry):
    """A tensor of a pickled file, which has been loaded already."""

    tensor: Tensor

    def __hash__(self) -> int:
        return id(self)


class HeadCheckpoint(Checkpoint):
    """The directory of a drafting head. Heads with other tensor names have subclasses."""

    @cached_property
    def config(self) -> dict[str, Any]:
        """The content of config.json; may be empty if the weights' file name tells their kind."""
        if self._own_files and not self.config_file.is_file():
            return {}
        return super().config

    @cached_property
    def stored(self) -> dict[str, TensorEntry]:
        """The tensors by their stored names, from the first kind of file that exists."""
        if self._own_files:
            file = self._own_files[0]
            return read_entries(file) if file.suffix == ".safetensors" else read_pickled(file)
        if super().has_weights or not self._pickled_files:
            return Checkpoint(self.path).entries
        stored: dict[str, TensorEntry] = {}
        for file in self._pickled_files:
            stored |= read_pickled(file)
        return stored

    @cached_property
    def entries(self) -> dict[str, TensorEntry]:
        """The tensors by their canonical names."""
        entries: dict[str, TensorEntry] = {}
        for name, entry in self.stored.items():
            short = self.canonical(name)
            if short is None:
                continue
            if short in entries:
                raise CheckpointError(
                    f"{self.path} holds {name} and {entries[short].name}, which are the same "
                    "tensor under two names; remove one"
                )
            entries[short] = _flat(entry) if short == MASK_HIDDEN else entry
        return entries

    def canonical(self, name: str) -> str | None:
        """The canonical name of a stored tensor; None if it is never read."""
        short = canonical_name(name)
        return None if short.startswith(_NOT_READ) else short

    @property
    def has_weights(self) -> bool:
        return super().has_weights or bool(self._own_files or self._pickled_files)

    @property
    def may_be_head(self) -> bool:
        """Whether this may be a head in spite of a language model's config: it has no weights."""
        return not self.has_weights

    @property
    def tensor_names(self) -> frozenset[str]:
        """The tensors' canonical names; empty without weights."""
        return frozenset(self.entries) if self.has_weights else frozenset()

    def holds_copy(self, name: str, other: str) -> bool:
        """Whether both tensors exist and are equal."""
        entries = [self.entries[it] for it in (name, other) if it in self.entries]
        if len(entries) < 2 or entries[0].shape != entries[1].shape:
            return False
        tensors = [torch.empty(entry.shape, dtype=torch.float32) for entry in entries]
        for entry, tensor in zip(entries, tensors, strict=True):
            fill(entry, tensor)
        return torch.equal(*tensors)

    def integers(self, name: str) -> Tensor:
        """Read a one-dimensional tensor of integers, [n] int64."""
        entry = self.entries[name]
        if entry.dtype.is_floating_point or len(entry.shape) != 1:
            raise CheckpointError(
                f"tensor {name} in {self.path} must be a list of integers, not "
                f"{list(entry.shape)} of {entry.dtype}"
            )
        table = torch.empty(entry.shape, dtype=entry.dtype)
        fill(entry, table)
        return table.long()

    @cached_property
    def _own_files(self) -> list[Path]:
        return [file for file in (self.path / name for name in _OWN_NAMES) if file.is_file()]

    @cached_property
    def _pickled_files(self) -> list[Path]:
        return sorted(self.path.glob(_PICKLED))


def canonical_name(name: str) -> str:
    """The canonical name of a head's tensor."""
    name = name.removeprefix("model.")
    name = name.replace("fusion_fc.", "fc.", 1) if name.startswith("fusion_fc.") else name
    for prefix in _FIRST_LAYER:
        if name.startswith(prefix):
            name = f"layers.0.{name.removeprefix(prefix)}"
    return f"model.{name}" if name.startswith("layers.") else name


def _flat(entry: TensorEntry) -> TensorEntry:
    """Drop leading dimensions of size 1 of a vector."""
    shape = (prod(entry.shape),)
    if isinstance(entry, PickledEntry):
        return replace(entry, shape=shape, tensor=entry.tensor.view(-1))
    return replace(entry, shape=shape)


def read_pickled(file: Path) -> dict[str, TensorEntry]:
    """Read the tensors of a torch.save file safely, without running code that it contains."""
    try:
        content = _loaded(file)
    except OSError as error:
        raise CheckpointError(f"cannot open {file}: {error.strerror}") from error
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        require_content(file)
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"{file} cannot be read as a file of tensors alone ({reason}); download it again, or "
            "convert it to safetensors"
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} holds a {type(content).__name__}, not tensors by name")
    return {str(name): _entry(file, str(name), value) for name, value in content.items()}


def _loaded(file: Path) -> Any:
    """Load a file, memory-mapped if its format allows it; files of old torch versions do not."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError:
        return torch.load(file, map_location="cpu", weights_only=True)


def _entry(file: Path, name: str, value: Any) -> PickledEntry:
    if not isinstance(value, Tensor):
        raise CheckpointError(
            f"{name} in {file} is a {type(value).__name__} and no tensor; convert the file to "
            "safetensors"
        )
    tensor = value.detach().contiguous()
    return PickledEntry(
        name, tensor.dtype, tuple(tensor.shape), file, 0, tensor.nbytes, tensor=tensor
    )


def fill(entry: TensorEntry, destination: Tensor) -> None:
    """Copy a tensor of either kind of file to `destination`; integers are not converted."""
    raw = not entry.dtype.is_floating_point
    if not isinstance(entry, PickledEntry):
        read_into(entry, destination, raw=raw)
        return
    if raw != (not destination.dtype.is_floating_point):
        raise CheckpointError(f"tensor {entry.name} in {entry.file} is stored as {entry.dtype}")
    destination.copy_(entry.tensor)
    require_finite(entry, destination)
