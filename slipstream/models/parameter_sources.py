"""Sources of parameters: a checkpoint's files, or random numbers for benchmarks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from slipstream.core.errors import CheckpointError
from slipstream.layers.parameters import ROWS, WHOLE, Fused, FusedExperts, Part, Share
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.safetensors_file import TensorEntry, read_into
from slipstream.models.wrappers import stored_name

Progress = Callable[[int], None]  # called with the number of bytes just read

# buffers that some exporters write, and that follow from the config
_DERIVED = ("rotary_emb.inv_freq", "masked_bias", "attn.bias")


def no_progress(_: int) -> None:
    """Report no progress."""


class TensorSource(Protocol):
    """Makes filled tensors of stacked parts, with the dtype and device of the source. If parts are
    split over ranks, tensors have this rank's share."""

    def matrix(self, parts: Sequence[Part], columns: int) -> Tensor:
        """[sum of rows, columns]"""

    def vector(self, parts: Sequence[Part]) -> Tensor:
        """[sum of rows]"""


class CheckpointSource:
    """Reads parameters from files directly into their tensors, converted to `dtype`.

    Raises CheckpointError for a missing tensor (naming it), a wrong shape (naming both shapes) and,
    in `finish`, for tensors that no layer asked for.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress = no_progress,
        read: Callable[[TensorEntry, Tensor], None] | None = None,
        share: Share = WHOLE,
    ) -> None:
        self._checkpoint, self._dtype, self._device = checkpoint, dtype, device
        self._share = share
        self._progress, self._read = progress, read or read_into
        self._unused = set(checkpoint.entries)

    @cached_property
    def _by_module(self) -> Mapping[str, dict[str, TensorEntry]]:
        """The tensors of each module by the endings of their names."""
        found: dict[str, dict[str, TensorEntry]] = {}
        for name, entry in self._checkpoint.entries.items():
            module, _, ending = name.rpartition(".")
            found.setdefault(module, {})[ending] = entry
        return found

    def matrix(self, parts: Sequence[Part], columns: int) -> Tensor:
        return self._fill(parts, (columns,))

    def vector(self, parts: Sequence[Part]) -> Tensor:
        vector = self._fill(parts, ())
        return vector.add_(parts[0].offset) if parts[0].offset else vector

    def finish(self, ignored: Sequence[str] = ()) -> None:
        """Refuse a checkpoint with tensors that were not read, since the model would differ, unless
        they are `ignored`, such as a tied head."""
        surplus = sorted(
            self._checkpoint.entries[name].name
            for name in self._unused
            if name not in ignored and not name.endswith(_DERIVED)
        )
        if surplus:
            more = f" and {len(surplus) - 3} more" if len(surplus) > 3 else ""
            raise CheckpointError(
                f"{self._checkpoint.path} holds tensors that this architecture does not use "
                f"({', '.join(surplus[:3])}{more}); its config.json names another model"
            )

    def _fill(self, parts: Sequence[Part], tail: tuple[int, ...]) -> Tensor:
        fused = parts[0].fused
        if fused is not None and fused.name in self._checkpoint.entries:
            return self._share.cut(self._fused(fused, parts, tail), parts)
        entries = [self._entry(part.name, (part.tensor_rows, *tail)) for part in parts]
        if self._share.size > 1:
            return torch.cat([self._own(*pair) for pair in zip(parts, entries, strict=True)])
        rows = sum(part.rows for part in parts)
        parameter = self._empty((rows, *tail), parts[0].dtype)
        start = 0
        for part, entry in zip(parts, entries, strict=True):
            self._read_part(part, entry, parameter[start : start + part.rows])
            start += part.rows
        return parameter

    def _fused(self, fused: Fused, parts: Sequence[Part], tail: tuple[int, ...]) -> Tensor:
        """Read [sum of rows, *tail] from a fused tensor; experts are stacked one by one."""
        rows = sum(part.rows for part in parts)
        if not isinstance(fused, FusedExperts):
            return self._fill([Part(fused.name, rows, dtype=parts[0].dtype)], tail)
        rows //= fused.experts
        shape = (fused.experts, rows, *tail)
        swapped = fused.transposed and bool(tail)
        if fused.transposed is None:
            swapped = tuple(self._checkpoint.entries[fused.name].shape) != shape
        if swapped:
            shape = (fused.experts, *tail, rows)
        entry = self._entry(fused.name, shape)
        stacked = self._empty(shape)
        self._read(entry, stacked)
        self._progress(entry.nbytes)
        if swapped:
            stacked = stacked.transpose(1, 2)
        if fused.alternating:
            names = len(parts) // fused.experts
            stacked = stacked.view(fused.experts, rows // names, names, *tail).transpose(1, 2)
        return stacked.reshape(-1, *tail)

    def _own(self, part: Part, entry: TensorEntry) -> Tensor:
        """Read this rank's share of a part; if rows are split, only these are read."""
        is_own = part.split == ROWS and part.within is None
        if is_own:
            start, stop = self._share.span_of(part, part.rows)
            is_own = stop <= part.rows
        if is_own:
            entry = entry.row_range(start, stop)
            part = replace(part, rows=entry.shape[0])
        block = self._empty((part.rows, *entry.shape[1:]), part.dtype)
        self._read_part(part, entry, block)
        return block if is_own else self._share.cut(block, [part])

    def _read_part(self, part: Part, entry: TensorEntry, destination: Tensor) -> None:
        spans = part.spans
        if len(spans) == 1:
            self._read(entry.row_range(*spans[0]), destination)
        else:
            whole = self._empty(entry.shape, destination.dtype)
            self._read(entry, whole)
            destination.copy_(torch.cat([whole[slice(*span)] for span in spans]))
        self._progress(entry.nbytes * part.rows // part.tensor_rows)

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self._dtype, device=self._device)

    def _entry(self, name: str, shape: tuple[int, ...]) -> TensorEntry:
        entry = self._checkpoint.entries.get(name)
        if entry is None:
            raise self._no_tensor(name, shape)
        if len(shape) == 2 and len(entry.shape) == 3 and entry.shape[1] == 1:  # a convolution's
            entry = replace(entry, shape=(entry.shape[0], entry.shape[2]))
        if tuple(entry.shape) != shape:
            raise CheckpointError(
                f"tensor {entry.name} in {self._checkpoint.path} has shape {list(entry.shape)}, "
                f"but its config.json asks for {list(shape)}"
            )
        self._unused.discard(name)
        return entry

    def _no_tensor(self, name: str, shape: tuple[int, ...]) -> CheckpointError:
        return CheckpointError(
            f"{self._checkpoint.path} has no tensor {self._stored_name(name)}, which its "
            f"config.json asks for with shape {list(shape)}"
        )

    def _stored_name(self, name: str) -> str:
        return stored_name(name, [it.name for it in self._checkpoint.entries.values()])


# endings of the names of scales
FACTORS = ("norm.weight", "norm_1.weight", "norm_2.weight", "scale", "_scalar")


class DummySource:
    """Random weights from a fixed seed, for benchmarks of a config without weights."""

    def __init__(
        self, dtype: torch.dtype, device: torch.device, seed: int = 0, share: Share = WHOLE
    ) -> None:
        self._dtype, self._device, self._share = dtype, device, share
        self._generator = torch.Generator(device).manual_seed(seed)

    def matrix(self, parts: Sequence[Part], columns: int) -> Tensor:
        rows = sum(part.rows for part in parts)
        parameter = torch.empty((rows, columns), dtype=self._dtype, device=self._device)
        return self._share.cut(parameter.normal_(std=0.02, generator=self._generator), parts)

    def vector(self, parts: Sequence[Part]) -> Tensor:
        rows = sum(part.rows for part in parts)
        value = 1.0 if parts[0].name.endswith(FACTORS) else 0.0
        vector = torch.full((rows,), value, dtype=self._dtype, device=self._device)
        return self._share.cut(vector, parts)
