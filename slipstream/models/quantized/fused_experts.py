"""Finds the tensors of a checkpoint that stack all experts of a layer in a quantised format."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from slipstream.core.errors import CheckpointError
from slipstream.layers.parameters import FusedExperts
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.quantized.module import StoredQuantization
from slipstream.models.safetensors_file import TensorEntry

_SCALE = "weight_scale_inv"


def sliced_names(
    checkpoint: Checkpoint, stored: StoredQuantization, fused: FusedExperts
) -> dict[str, str]:
    """The names, by the endings of one expert's, of FP8 experts that are stacked with their scales
    in another tensor; CheckpointError for stacks of another format."""
    entries = checkpoint.entries
    names = {"weight": fused.name, _SCALE: f"{fused.name}_{_SCALE.removeprefix('weight_')}"}
    found = [entries[name] for name in names.values() if name in entries]
    stacks = all(it.shape[:1] == (fused.experts,) for it in found)
    plain = not (fused.alternating or fused.transposed)
    is_float8 = entries[fused.name].dtype == torch.float8_e4m3fn
    if not (is_float8 and stacks and plain and len(found) == len(names)):
        raise unread_experts(checkpoint, stored, fused)
    return names


def slice_of(
    checkpoint: Checkpoint, names: Mapping[str, str], expert: int
) -> dict[str, TensorEntry]:
    """The entries of one expert in `sliced_names`."""
    found = {ending: checkpoint.entries[name] for ending, name in names.items()}
    return {
        ending: replace(entry.row_range(expert, expert + 1), shape=entry.shape[1:])
        for ending, entry in found.items()
    }


def stacked_entries(
    checkpoint: Checkpoint, stored: StoredQuantization, fused: FusedExperts
) -> dict[str, TensorEntry]:
    """The tensors of all experts by their `fused_endings`; empty if there are none."""
    names = {ending: f"{fused.name}_{ending}" for ending in stored.fused_endings}
    entries = checkpoint.entries
    return {ending: entries[name] for ending, name in names.items() if name in entries}


def has_stacks(checkpoint: Checkpoint, fused: FusedExperts) -> bool:
    """Whether the layer has stacks of weights, in whatever format."""
    names = (it for it in checkpoint.entries if it.startswith(fused.name))
    return any(not it.endswith("_bias") for it in names)


def unread_experts(
    checkpoint: Checkpoint, stored: StoredQuantization, fused: FusedExperts
) -> CheckpointError:
    return CheckpointError(
        f"{checkpoint.path}: fused experts ({fused.name}) in {stored.description} are not read; "
        "use a file with one tensor per expert"
    )
