"""Compares a config with the headers of a checkpoint's tensors, before any data are read."""

import re
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from slipstream.core.errors import CheckpointError, counted
from slipstream.kernels.registry import kernels_for
from slipstream.layers.parameters import FusedExperts, Part
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.decoder import Decoder
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.own_drafter import own_drafter_tensors
from slipstream.models.parameter_sources import CheckpointSource
from slipstream.models.precision import NOWHERE, in_precision
from slipstream.models.quantized.catalogue import read_quantization
from slipstream.models.quantized.fused_experts import (
    has_stacks,
    slice_of,
    sliced_names,
    stacked_entries,
    unread_experts,
)
from slipstream.models.quantized.module import StackAllocator, StoredModule, StoredQuantization
from slipstream.models.quantized.source import is_unneeded, no_quantised_tensor
from slipstream.models.safetensors_file import WEIGHT_DTYPES, TensorEntry, check_fits

_NAMED = 3  # of the missing tensors, how many a message names
_QUANTISED = (".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv", "_proj_blocks")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def require_tensors(checkpoint: Checkpoint, config: DecoderConfig) -> None:
    """Raise the CheckpointError that loading would raise for missing or unused tensors, for other
    shapes or dtypes than the config asks for, and for modules that the config does not name.
    """
    stored = read_quantization(checkpoint.config, checkpoint.config_file)
    if stored is not None:
        stored.require_modules(checkpoint.module_names, checkpoint.path)
    drafter_tensors = own_drafter_tensors(checkpoint.entries)
    source = _Headers(checkpoint, stored)
    try:
        ops = kernels_for(NOWHERE).network
        Decoder(ops, in_precision(source, None, ops), config, max_positions=1)
        source.finish(ignored=(*drafter_tensors, *config.unread_tensors))
    except CheckpointError as error:
        matches = [_LAYER.match(name) for name in checkpoint.entries.keys() - drafter_tensors]
        number = 1 + max((int(match[1]) for match in matches if match), default=-1)
        if stored is None and (packed := _quantised_names(checkpoint)):
            raise CheckpointError(
                f"{error}: tensors such as {packed[0]} are quantised, but its config.json has no "
                "quantization_config; download it again, or copy the settings there from another "
                'file (quantize_config.json, quant_config.json), with a "quant_method"'
            ) from error
        if number in (0, len(config.layers)):  # none: layers may have names that are not known
            raise
        raise CheckpointError(
            f"{error}: it has tensors of {counted(number, 'layer')}, where num_hidden_layers asks "
            f"for {len(config.layers)}"
        ) from error


def _quantised_names(checkpoint: Checkpoint) -> list[str]:
    """Names of tensors that only quantised checkpoints have."""
    return sorted(it.name for it in checkpoint.entries.values() if it.name.endswith(_QUANTISED))


class _HeaderModule(StoredModule):
    """Compares names, dtypes and shapes alone; its tensors are empty."""

    def take(
        self,
        ending: str,
        dtypes: Collection[torch.dtype],
        *shapes: tuple[int, ...],
        stays: bool = False,
    ) -> Tensor:
        self._on_read(self.full_name(ending), self._entry(ending, dtypes, shapes))
        return torch.empty(0)

    def take_interleaved(
        self, ending: str, dtypes: Collection[torch.dtype], shape: tuple[int, ...], turns: int
    ) -> Tensor:
        return self.take(ending, dtypes, shape)


class _Headers(CheckpointSource):
    """Makes tensors without data, and compares their shapes with the headers."""

    def __init__(self, checkpoint: Checkpoint, stored: StoredQuantization | None) -> None:
        super().__init__(checkpoint, torch.float32, NOWHERE, read=check_fits)
        self._stored = stored
        self._quantised: set[str] = set()  # modules
        self._missing: dict[str, None] = {}  # in their order
        self._first_error: CheckpointError | None = None  # about the first of them
        self._nowhere = StackAllocator(1, NOWHERE)
        # What modules with equal forms, sizes and tensors read: few differ.
        self._read_by: dict[object, list[str]] = {}
        self._last_names = {name.rpartition(".")[2] for name in checkpoint.entries}

    def finish(self, ignored: Sequence[str] = ()) -> None:
        if self._first_error is not None:
            count, others = len(self._missing) - 1, [*self._missing][1:_NAMED]
            named = ", ".join(self._stored_name(name) for name in others)
            more = ", ..." if len(self._missing) > _NAMED else ""
            rest = f"; {count} more are missing ({named}{more})" if count else ""
            raise CheckpointError(f"{self._first_error}{rest}")
        unneeded = [name for name in self._unused if is_unneeded(name, self._quantised)]
        super().finish((*ignored, *unneeded))

    def _fill(self, parts: Sequence[Part], tail: tuple[int, ...]) -> Tensor:
        fused = parts[0].fused
        if isinstance(fused, FusedExperts) and (stack := self._missing_stack(fused, parts[0])):
            self._entry(
                stack, (fused.experts, sum(it.rows for it in parts) // fused.experts, *tail)
            )
            return self._empty((sum(part.rows for part in parts), *tail))
        if self._stored is None or not tail or (fused is not None and self._is_float(fused.name)):
            return super()._fill(parts, tail)
        rows, columns = sum(part.rows for part in parts), tail[0]
        if isinstance(fused, FusedExperts):
            is_whole = self._take_experts(self._stored, fused, parts, columns)
        else:
            is_whole = fused is not None and self._take(self._stored, fused.name, rows, columns)
        for part in () if is_whole else parts:
            if self._is_float(part.name):
                super()._fill([part], tail)
            elif not self._take(self._stored, part.name, part.tensor_rows, columns):
                error = no_quantised_tensor(self._checkpoint, self._stored, part, columns)
                self._missing[part.name] = None
                self._first_error = self._first_error or error
        return self._empty((rows, *tail))

    def _missing_stack(self, fused: FusedExperts, part: Part) -> str | None:
        """The tensor of all experts that a layer lacks; None: it has it, or it has `part` of one
        expert, or no layer has its experts in one tensor."""
        experts, _, last = fused.name.rpartition(".")
        beside = self._by_module.get(experts, ())
        packed = () if self._stored is None else self._stored.fused_endings
        endings = [last, *(f"{last}_{ending}" for ending in packed)]
        names = [it for it in endings if it in self._last_names]
        if part.name.rpartition(".")[0] in self._by_module or not names or {*endings} & {*beside}:
            return None
        return f"{experts}.{names[0]}"

    def _is_float(self, name: str) -> bool:
        entry = self._checkpoint.entries.get(name)
        return entry is not None and entry.dtype in WEIGHT_DTYPES

    def _take(self, stored: StoredQuantization, name: str, rows: int, columns: int) -> bool:
        """Read a quantised matrix without its data; False: it has no tensors."""
        module = name.removesuffix(".weight")
        entries = self._by_module.get(module, {})
        if not entries.keys() - {"bias"}:
            return False
        tensors = frozenset((ending, it.dtype, it.shape) for ending, it in entries.items())
        alike = stored.form_of(module), rows, columns, tensors
        if alike not in self._read_by:
            taken: list[str] = []
            tensors_of = self._module(module, entries, taken)
            stored.form_in(tensors_of).tensors(tensors_of, rows, columns)
            self._read_by[alike] = [it.rpartition(".")[2] for it in taken]
        self._unused.difference_update(f"{module}.{ending}" for ending in self._read_by[alike])
        self._quantised.add(module)
        return True

    def _take_experts(
        self, stored: StoredQuantization, fused: FusedExperts, parts: Sequence[Part], columns: int
    ) -> bool:
        """Read tensors of all experts of a layer without their data; False: it has none."""
        rows, taken = sum(part.rows for part in parts) // fused.experts, list[str]()
        if fused.name in self._checkpoint.entries:
            names = sliced_names(self._checkpoint, stored, fused)
            one = self._module(fused.name, slice_of(self._checkpoint, names, 0), taken)
            stored.form_in(one).tensors(one, rows, columns)
            self._unused.difference_update(names.values())
            return True
        entries = stacked_entries(self._checkpoint, stored, fused)
        if entries:
            turns = len(parts) // fused.experts if fused.alternating else 1
            stack = self._module(fused.name, entries, taken, "_")
            stored.fused_tensors(stack, fused.experts, rows, columns, turns)
            self._unused.difference_update(taken)
        elif has_stacks(self._checkpoint, fused):
            raise unread_experts(self._checkpoint, stored, fused)
        return bool(entries)

    def _module(
        self, name: str, entries: dict[str, TensorEntry], taken: list[str], separator: str = "."
    ) -> _HeaderModule:
        """A module of these tensors. `taken` gets the names of those that are read."""
        path = self._checkpoint.path
        return _HeaderModule(
            name, path, entries, lambda it, _: taken.append(it), self._nowhere, separator
        )

    def _entry(self, name: str, shape: tuple[int, ...]) -> TensorEntry:
        if name in self._checkpoint.entries:
            return super()._entry(name, shape)
        self._missing[name] = None
        self._first_error = self._first_error or self._no_tensor(name, shape)
        return TensorEntry(name, torch.float32, shape, self._checkpoint.path, 0, 0)
