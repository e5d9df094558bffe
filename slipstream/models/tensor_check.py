"""Compares a config with the headers of a checkpoint's tensors, before any data are read."""

import re
from collections.abc import Sequence

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
from slipstream.models.quantized.module import StoredQuantization
from slipstream.models.quantized.source import is_unneeded, no_quantised_tensor
from slipstream.models.safetensors_file import WEIGHT_DTYPES, TensorEntry, check_fits

_NAMED = 3  # of the missing tensors, how many a message names
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def require_tensors(checkpoint: Checkpoint, config: DecoderConfig) -> None:
    """Raise the CheckpointError that loading would raise for missing or unused tensors and for
    other shapes or dtypes than the config asks for. Of quantised matrices only names are compared.
    """
    stored = read_quantization(checkpoint.config, checkpoint.config_file)
    drafter_tensors = own_drafter_tensors(checkpoint.entries)
    source = _Headers(checkpoint, stored)
    try:
        ops = kernels_for(NOWHERE).network
        Decoder(ops, in_precision(source, None, ops), config, max_positions=1)
        source.finish(ignored=(*drafter_tensors, *config.unread_tensors))
    except CheckpointError as error:
        matches = [_LAYER.match(name) for name in checkpoint.entries.keys() - drafter_tensors]
        number = 1 + max((int(match[1]) for match in matches if match), default=-1)
        if number in (0, len(config.layers)):  # none: layers may have names that are not known
            raise
        raise CheckpointError(
            f"{error}: it has tensors of {counted(number, 'layer')}, where num_hidden_layers asks "
            f"for {len(config.layers)}"
        ) from error


class _Headers(CheckpointSource):
    """Makes tensors without data, and compares their shapes with the headers.

    Args:
        stored: the format of a quantised checkpoint; None: it is unquantised.
    """

    def __init__(self, checkpoint: Checkpoint, stored: StoredQuantization | None) -> None:
        super().__init__(checkpoint, torch.float32, NOWHERE, read=check_fits)
        self._stored = stored
        self._quantised: set[str] = set()  # modules
        self._missing: dict[str, None] = {}  # in their order
        self._first_error: CheckpointError | None = None  # about the first of them
        self._by_module: dict[str, list[str]] = {}
        for name in checkpoint.entries:
            self._by_module.setdefault(name.rpartition(".")[0], []).append(name)
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
        if fused is None or not self._take(fused.name, isinstance(fused, FusedExperts)):
            for part in parts:
                if self._is_float(part.name):
                    super()._fill([part], tail)
                elif not self._take(part.name):
                    self._missing[part.name] = None
                    self._first_error = self._first_error or no_quantised_tensor(
                        self._checkpoint, self._stored, part, tail[0]
                    )
        return self._empty((sum(part.rows for part in parts), *tail))

    def _missing_stack(self, fused: FusedExperts, part: Part) -> str | None:
        """The tensor of all experts that a layer lacks; None: it has it, or it has `part` of one
        expert, or no layer has its experts in one tensor."""
        experts, _, last = fused.name.rpartition(".")
        beside = (name.rpartition(".")[2] for name in self._by_module.get(experts, ()))
        packed = () if self._stored is None else self._stored.fused_endings
        endings = [last, *(f"{last}_{ending}" for ending in packed)]
        names = [it for it in endings if it in self._last_names]
        if part.name.rpartition(".")[0] in self._by_module or not names or {*endings} & {*beside}:
            return None
        return f"{experts}.{names[0]}"

    def _is_float(self, name: str) -> bool:
        entry = self._checkpoint.entries.get(name)
        return entry is not None and entry.dtype in WEIGHT_DTYPES

    def _take(self, name: str, stacks_experts: bool = False) -> bool:
        """Mark the tensors of a quantised matrix as used; False: there are none."""
        module = name.removesuffix(".weight")
        if stacks_experts:  # and their scales, beside them: whether they are read, loading tells
            beside = self._by_module.get(module.rpartition(".")[0], ())
            found = [it for it in beside if it.startswith(name) and not it.endswith("_bias")]
        else:
            found = [it for it in self._by_module.get(module, ()) if not it.endswith(".bias")]
            self._quantised.update([module] if found else [])
        self._unused.difference_update(found)
        return bool(found)

    def _entry(self, name: str, shape: tuple[int, ...]) -> TensorEntry:
        if name in self._checkpoint.entries:
            return super()._entry(name, shape)
        self._missing[name] = None
        self._first_error = self._first_error or self._no_tensor(name, shape)
        return TensorEntry(name, torch.float32, shape, self._checkpoint.path, 0, 0)
