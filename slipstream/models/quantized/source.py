"""Sources of quantised matrices: from a quantised checkpoint, or random in its format."""

import logging
from collections.abc import Collection, Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from slipstream.core.errors import CheckpointError
from slipstream.kernels.formats.dense import DenseMatrix
from slipstream.kernels.formats.weight import Rounding, Weight, row_slices, stacked
from slipstream.layers.parameters import ROWS, WHOLE, Fused, FusedExperts, Part, Share
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.parameter_sources import CheckpointSource, Progress, TensorSource
from slipstream.models.quantized.fused_experts import (
    has_stacks,
    slice_of,
    sliced_names,
    stacked_entries,
    unread_experts,
)
from slipstream.models.quantized.module import StackAllocator, StoredModule, StoredQuantization
from slipstream.models.safetensors_file import WEIGHT_DTYPES, TensorEntry, read_into
from slipstream.models.wrappers import stored_name

logger = logging.getLogger("slipstream")

_WEIGHT, _BIAS = ".weight", ".bias"
_VALUES = ("qweight", "weight_packed", "weight", "blocks")
_FUSED_VALUES = ("gate_up_proj", "down_proj")  # of all experts, without an ending
# Scales of an FP8 KV cache and of attention in FP8, which are not used.
_OF_CACHES = (".k_scale", ".v_scale", ".kv_scale", ".q_scale", ".prob_scale")

_WHOLE_SLICE = 1 << 24  # how many numbers are dequantised to float32 at a time


class QuantizedSource(CheckpointSource):
    """Reads quantised matrices in their format, and other tensors like `CheckpointSource`.

    Args:
        kept: weight classes that are kept; matrices of other classes are dequantised.
        whole_dtype: dtype of dequantised matrices.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        stored: StoredQuantization,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress,
        kept: Collection[type[Weight]],
        whole_dtype: torch.dtype,
        share: Share = WHOLE,
    ) -> None:
        super().__init__(checkpoint, dtype, device, progress, share=share)
        self._stored, self._kept, self._whole_dtype = stored, kept, whole_dtype
        self._modules: set[str] = set()  # modules whose quantised matrix has been read

    def floats(self, parts: Sequence[Part], columns: int) -> DenseMatrix:
        """[sum of rows, columns], dequantised if necessary."""
        weight = self.weight(parts, columns)
        return DenseMatrix(whole_numbers(weight, self._dtype, self._device))

    def embedding(self, parts: Sequence[Part], columns: int) -> Weight:
        """[sum of rows, columns], an embedding table: kept as stored if rows of its class can be
        looked up, else dequantised."""
        found = self.weight(parts, columns)
        table = found.as_table(self._dtype)
        return table or DenseMatrix(whole_numbers(found, self._dtype, self._device))

    def weight(self, parts: Sequence[Part], columns: int) -> Weight:
        """[sum of rows, columns], the weight of a linear layer, in the stored format if it is kept.

        Parts whose formats cannot be stacked are all dequantised.
        """
        fused = parts[0].fused
        whole: Weight | None = None
        if isinstance(fused, FusedExperts):
            whole = self._read_experts(fused, parts, columns)
        elif fused is not None:
            whole = self._read_stacked(fused, parts, columns)
        if whole is not None:
            return whole
        if not any(self._is_quantised(part.name) for part in parts):
            return DenseMatrix(self.matrix(parts, columns))
        same = len({part.tensor_rows for part in parts}) == 1
        allocator = StackAllocator(len(parts) if same else 1, self._device)
        return self._joined([self._read_weight(part, columns, allocator) for part in parts], parts)

    def alike(self, parts: Sequence[Part]) -> bool:
        return len({self._form(part.name) for part in parts}) == 1

    def _form(self, name: str) -> object:
        if not self._is_quantised(name):
            return None
        form = self._stored.form_of(name.removesuffix(_WEIGHT))
        return None if form is None else (form.kind, form.bits)

    def finish(self, ignored: Sequence[str] = ()) -> None:
        """See `CheckpointSource`. Some exporters give every quantised module a bias of zeros."""
        unneeded = [
            name
            for name in self._unused
            if is_unneeded(name, self._modules)
            and (not name.endswith(_BIAS) or self._is_zero(name))
        ]
        super().finish((*ignored, *unneeded))

    def _joined(self, weights: Sequence[Weight], parts: Sequence[Part]) -> Weight:
        joined = stacked(weights)
        if joined is None:
            logger.info(
                "%s and the matrices stacked with it are stored in several ways and become %s",
                parts[0].name,
                self._whole_dtype,
            )
            joined = stacked([self._whole(weight) for weight in weights])
        assert joined is not None, "floats can be stacked"
        return joined

    def _read_stacked(self, fused: Fused, parts: Sequence[Part], columns: int) -> Weight | None:
        """Read a matrix from the fused module; None if the checkpoint has separate parts."""
        if fused.name.removesuffix(_WEIGHT) not in self._by_module:
            return None
        if not self._is_quantised(fused.name):
            return DenseMatrix(self.matrix(parts, columns))
        part = Part(fused.name, sum(part.rows for part in parts))
        return self._shared_out(
            self._read_weight(part, columns, StackAllocator(1, self._device)), parts
        )

    def _read_experts(
        self, fused: FusedExperts, parts: Sequence[Part], columns: int
    ) -> Weight | None:
        """Read all experts of a layer from stacked tensors; None if the checkpoint has separate
        experts."""
        if fused.name in self._checkpoint.entries:
            if not self._is_quantised(fused.name):
                return DenseMatrix(self.matrix(parts, columns))
            return self._as_kept(self._shared_out(self._sliced(fused, parts, columns), parts))
        entries = stacked_entries(self._checkpoint, self._stored, fused)
        if not entries:
            return None
        module = self._module(fused.name, entries, StackAllocator(1, self._device), "_")
        rows = sum(part.rows for part in parts) // fused.experts
        turns = len(parts) // fused.experts if fused.alternating else 1
        whole = self._stored.read_fused(module, fused.experts, rows, columns, turns)
        return self._as_kept(self._shared_out(whole, parts))

    def _sliced(self, fused: FusedExperts, parts: Sequence[Part], columns: int) -> Weight:
        """Read FP8 experts, which transformers stacks with their scales in another tensor."""
        names = sliced_names(self._checkpoint, self._stored, fused)
        rows = sum(part.rows for part in parts) // fused.experts
        allocator = StackAllocator(fused.experts, self._device)
        experts = []
        for index in range(fused.experts):
            module = StoredModule(
                fused.name,
                self._checkpoint.path,
                slice_of(self._checkpoint, names, index),
                lambda _, entry: self._progress(entry.nbytes),
                allocator,
            )
            experts.append(self._stored.read(module, rows, columns))
        self._unused.difference_update(names.values())
        return self._joined(experts, parts)

    def _is_quantised(self, name: str) -> bool:
        entry = self._checkpoint.entries.get(name)
        return entry is None or entry.dtype not in WEIGHT_DTYPES

    def _read_weight(self, part: Part, columns: int, allocator: StackAllocator) -> Weight:
        if not self._is_quantised(part.name):
            return DenseMatrix(self.matrix([part], columns).to(self._whole_dtype))
        name = part.name.removesuffix(_WEIGHT)
        entries = self._by_module.get(name, {})
        if not entries:
            raise no_quantised_tensor(self._checkpoint, self._stored, part, columns)
        module = self._module(name, entries, allocator)
        weight = self._stored.read(module, part.tensor_rows, columns)
        self._modules.add(name)
        if part.within is not None:
            picked = stacked([weight.rows(*span) for span in part.spans])
            assert picked is not None, "rows of one matrix can be stacked"
            weight = picked
        return self._as_kept(self._cut(weight, part))

    def _module(
        self,
        name: str,
        entries: dict[str, TensorEntry],
        allocator: StackAllocator,
        separator: str = ".",
    ) -> StoredModule:
        return StoredModule(name, self._checkpoint.path, entries, self._take, allocator, separator)

    def _shared_out(self, whole: Weight, parts: Sequence[Part]) -> Weight:
        """This rank's shares of the parts of a full matrix, stacked."""
        if self._share.size == 1:
            return whole
        starts = [sum(part.rows for part in parts[:index]) for index in range(len(parts))]
        own = [
            self._cut(whole.rows(start, start + part.rows), part)
            for start, part in zip(starts, parts, strict=True)
        ]
        return self._joined(own, parts)

    def _cut(self, weight: Weight, part: Part) -> Weight:
        """This rank's share of the full matrix of a part."""
        if self._share.size == 1 or part.split is None:
            return weight
        count = weight.shape[part.split]
        start, stop = self._share.span_of(part, count)
        if part.split == ROWS and stop > count:  # outputs of padded rows meet zero columns
            index = torch.arange(start, stop, device=self._device)
            return weight.select(index.clamp_max(count - 1))
        if part.split == ROWS:
            return weight.rows(start, stop)
        own = weight.columns(start, min(stop, count))
        return own if stop <= count else own.widened(stop - start)

    def _as_kept(self, weight: Weight) -> Weight:
        return weight if type(weight) in self._kept else self._whole(weight)

    def _whole(self, weight: Weight) -> DenseMatrix:
        return DenseMatrix(whole_numbers(weight, self._whole_dtype, self._device))

    def _take(self, name: str, entry: TensorEntry) -> None:
        self._unused.discard(name)
        self._progress(entry.nbytes)

    def _is_zero(self, name: str) -> bool:
        entry = self._checkpoint.entries[name]
        values = torch.empty(entry.shape, dtype=entry.dtype)
        read_into(entry, values, raw=True)
        return not bool(values.any())


def is_unneeded(name: str, modules: Collection[str]) -> bool:
    """Whether a tensor may be left unread: a scale of a cache, or a bias of one of these quantised
    modules, if it is zero."""
    return name.endswith(_OF_CACHES) or (
        name.endswith(_BIAS) and name.removesuffix(_BIAS) in modules
    )


def no_quantised_tensor(
    checkpoint: Checkpoint, stored: StoredQuantization, part: Part, columns: int
) -> CheckpointError:
    """The error for a part of a matrix that has no tensors."""
    if isinstance(part.fused, FusedExperts) and has_stacks(checkpoint, part.fused):
        return unread_experts(checkpoint, stored, part.fused)
    stored_names = [it.name for it in checkpoint.entries.values()]
    also = "" if part.fused is None else f", nor {stored_name(part.fused.name, stored_names)}"
    name = stored_name(part.name, stored_names)
    return CheckpointError(
        f"{checkpoint.path} has no tensor {name}, nor one of its quantised form{also}, which "
        f"its config.json asks for with shape {[part.rows, columns]}"
    )


def whole_numbers(weight: Weight, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Dequantise a weight to [N, K] in `dtype`, some rows in float32 at a time."""
    if weight.floats is not None:
        return weight.floats.to(device=device, dtype=dtype)
    out = torch.empty(weight.shape, dtype=dtype, device=device)
    for part in row_slices(len(out), out.shape[1], _WHOLE_SLICE):
        out[part] = weight.rows(part.start, part.stop).dequantised()
    return out


def stored_bytes(
    entries: Mapping[str, TensorEntry],
    stored: StoredQuantization,
    itemsize: int,
    kept: Collection[type[Weight]],
) -> int:
    """Memory in bytes of these tensors of a quantised checkpoint after loading.

    Args:
        itemsize: bytes of an unquantised or dequantised number.
        kept: weight classes that are not dequantised.
    """
    total = 0
    for name, entry in entries.items():
        module, _, last = name.rpartition(".")
        ending = last.rpartition("_")[2] if last.endswith(stored.fused_endings or "/") else last
        count = prod(entry.shape)
        if "scale" not in ending and entry.dtype in WEIGHT_DTYPES:
            total += count * itemsize
        elif stored.kind(module) in kept:  # with its scales, most in float32, and zeros
            widened = "scale" in ending and entry.dtype.itemsize > 1
            total += count * torch.float32.itemsize if widened else entry.nbytes
        elif ending in (*_VALUES, *_FUSED_VALUES):
            total += stored.count(module, entry.nbytes) * itemsize
    return total


def stored_unit(
    entries: Mapping[str, TensorEntry], stored: StoredQuantization, part: Part, columns: int
) -> int:
    """Number of adjacent columns of a part's matrix that must stay on one rank. The `entries` of
    random weights are empty."""
    names = [part.name] if part.fused is None else [part.name, part.fused.name]
    found = (entries.get(name) for name in names)
    if any(entry is not None and entry.dtype in WEIGHT_DTYPES for entry in found):
        return 1
    if not entries and stored_rounding(stored, part.name, columns) is None:
        return 1
    return stored.unit(_module(part.name), columns)


class RandomQuantizedSource:
    """A `TensorSource` of random weights in the formats of a quantised checkpoint.

    Args:
        tensors: source of the random floats.
        kept: weight classes that are kept; matrices of other classes are dequantised again.
    """

    def __init__(
        self, tensors: TensorSource, stored: StoredQuantization, kept: Collection[type[Weight]]
    ) -> None:
        self._tensors, self._stored, self._kept = tensors, stored, kept

    def matrix(self, parts: Sequence[Part], columns: int) -> Tensor:
        return self._tensors.matrix(parts, columns)

    def vector(self, parts: Sequence[Part]) -> Tensor:
        return self._tensors.vector(parts)

    def weight(self, parts: Sequence[Part], columns: int) -> Weight:
        """[sum of rows, columns], the weight of a linear layer."""
        numbers = self._tensors.matrix(parts, columns)
        form = stored_rounding(self._stored, parts[0].name, numbers.shape[1])
        if form is None:
            return DenseMatrix(numbers)
        rounded = form.round(numbers)
        if type(rounded) in self._kept:
            return rounded
        return DenseMatrix(whole_numbers(rounded, numbers.dtype, numbers.device))

    def alike(self, parts: Sequence[Part]) -> bool:
        return len({self._stored.rounding(_module(part.name)) for part in parts}) == 1


def stored_rounding(stored: StoredQuantization, tensor: str, columns: int) -> Rounding | None:
    """The rounding of random weights to this tensor's stored format; None: none."""
    form = stored.rounding(_module(tensor))
    return None if form is None else form.for_columns(columns)


def _module(tensor: str) -> str:
    return tensor.removesuffix(".weight")
