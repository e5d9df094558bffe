"""LoRA adapters in the layout of PEFT: adapter_config.json and adapter_model.safetensors.

The config is read as strictly as a model's: a key that would change the computation and is not
supported is refused by name.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from math import isfinite, sqrt
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from slipstream.core.errors import CheckpointError
from slipstream.layers.adapters import AdapterSlots, Factors
from slipstream.models.checkpoint import read_json_object
from slipstream.models.config_reader import ConfigReader
from slipstream.models.safetensors_file import MOST_WEIGHT, TensorEntry, read_entries, read_into
from slipstream.models.wrappers import text_names

MOST_RANK: Final = 256
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_LONGEST_PATH: Final = 200  # characters of a path in a message about it
_PREFIX: Final = "base_model.model."
_NAME: Final = re.compile(r"(.+)\.lora_(A|B)(?:\.default)?\.weight")

# Keys that describe how an adapter was made, or that only PEFT uses.
_HARMLESS: Final = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "corda_config", "eva_config"),
        *("exclude_modules", "inference_mode", "layers_pattern", "layers_to_transform"),
        *("loftq_config", "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core"),
        *("peft_version", "qalora_group_size", "revision", "runtime_config"),
        *("ensure_weight_tying", "arrow_config", "monteclora_config"),
    }
)
# Initialisations that change the base model's weights.
_CHANGES_MODEL: Final = ("pissa", "olora", "corda", "loftq", "lora_ga")
# Keys that must be off, and the remedy if they are not.
_OFF: Final[Mapping[str, str]] = {
    "use_dora": "DoRA also scales the model's own weights; merge it (peft: merge_and_unload)",
    "modules_to_save": "whole modules of an adapter are not loaded; merge it into the model",
    "fan_in_fan_out": "transposed matrices are not read; save it for a model of linear layers",
    "lora_bias": "biases of adapters are not applied; train it without, or merge it",
    "rank_pattern": "all modules have one rank here; train it so, or merge it",
    "alpha_pattern": "all modules have one lora_alpha here; train it so, or merge it",
    "target_parameters": "experts and other stacked parameters are not adapted; merge it",
    "layer_replication": "layers are not repeated; merge it",
    "trainable_token_indices": "embeddings are not adapted; merge it",
    "alora_invocation_tokens": "an adapter applies to all tokens of a request; merge it",
    "use_qalora": "QA-LoRA pools its inputs, which is not applied; merge it",
    "use_bdlora": "block-diagonal adapters are not applied; merge it",
}


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter in memory.

    Attributes:
        factors: (A, scale * B) by module name in the base model's checkpoint, in the model's dtype.
        nbytes: size of all factors.
    """

    factors: Factors

    @property
    def nbytes(self) -> int:
        return sum(first.nbytes + second.nbytes for first, second in self.factors.values())


def read_adapter(folder: Path, slots: AdapterSlots) -> Adapter:
    """Read an adapter for the model that has these slots; CheckpointError if it is broken, does not
    fit the model, or needs an unsupported feature."""
    file = folder / CONFIG
    rank, scale, targets = _read_config(folder)
    if rank > slots.rank:
        raise CheckpointError(
            f"{file}: rank {rank} is above the maximum ({slots.rank}); start "
            f"with --max-lora-rank {rank}"
        )
    pairs = _paired(read_entries(folder / WEIGHTS), folder / WEIGHTS, slots.canonical)
    factors: dict[str, tuple[Tensor, Tensor]] = {}
    for name, (first, second) in pairs.items():
        stored = first.name.removeprefix(_PREFIX).rpartition(".lora_")[0]
        if not _is_target(targets, (name, stored)):
            raise CheckpointError(
                f"{folder / WEIGHTS} holds {name}, which target_modules in {CONFIG} does not name"
            )
        module = slots.modules.get(name)
        if module is None:
            raise CheckpointError(f"{folder / WEIGHTS}: {_not_adapted(name)}")
        _check_shape(first, (rank, module.columns))
        _check_shape(second, (module.rows, rank))
        factors[name] = _read(first, second, scale, slots.dtype)
    if not factors:
        raise CheckpointError(
            f"{folder / WEIGHTS} holds no adapter of any module of this model; give another one"
        )
    return Adapter(factors)


def adapter_rank(folder: Path) -> int:
    """The rank of the adapter in a directory, from its config; raises as `read_adapter` does."""
    return _read_config(folder)[0]


def _config_of(folder: Path) -> ConfigReader:
    for name in (CONFIG, WEIGHTS):
        try:
            is_there = (folder / name).is_file()
        except OSError as error:  # the path is too long, or may not be read
            raise CheckpointError(
                f"cannot read {str(folder)[:_LONGEST_PATH]!r}: {error.strerror}; give the "
                "directory of a LoRA adapter"
            ) from error
        if not is_there:
            raise CheckpointError(f"{folder} has no {name}; give the directory of a LoRA adapter")
    file = folder / CONFIG
    return ConfigReader(read_json_object(file), file, harmless=_HARMLESS)


def _read_config(folder: Path) -> tuple[int, float, object]:
    """(rank, scale, target_modules)"""
    reader = _config_of(folder)
    reader.expect("peft_type", "LORA")
    reader.expect("task_type", "CAUSAL_LM")
    reader.expect("bias", "none")
    for key, why in _OFF.items():
        if reader.take_any(key):
            raise reader.error(key, f"is not supported: {why}")
    start = reader.take_any("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_MODEL):
        raise reader.error(
            "init_lora_weights",
            f"is {start!r}, which changes the model below the adapter; convert it to a plain one "
            "(peft: save_pretrained with path_initial_model_for_weight_conversion)",
        )
    rank = reader.take("r", int)
    if not 1 <= rank <= MOST_RANK:
        raise reader.error("r", f"must be from 1 to {MOST_RANK}, not {rank}")
    alpha = reader.take("lora_alpha", float, 8.0)
    if not isfinite(alpha):
        raise reader.error("lora_alpha", "must be a finite number")
    by_root = reader.take("use_rslora", bool, False)
    targets = reader.take_any("target_modules")
    if isinstance(targets, str) and targets != "all-linear":
        try:
            re.compile(targets)
        except (re.error, RecursionError, OverflowError) as error:
            raise reader.error("target_modules", f"is no regular expression: {error}") from None
    elif not isinstance(targets, str | list):
        raise reader.error("target_modules", "must be a list of names or a regular expression")
    reader.finish()
    return rank, alpha / (sqrt(rank) if by_root else rank), targets


def _paired(
    entries: Mapping[str, TensorEntry], file: Path, canonical: Callable[[str], str | None]
) -> dict[str, tuple[TensorEntry, TensorEntry]]:
    """The two tensors of each module, by the module's name in the base model's checkpoint."""
    found: dict[str, dict[str, TensorEntry]] = {}
    own = {name.removeprefix(_PREFIX): entry for name, entry in entries.items()}
    plain = text_names(own)
    for name, entry in own.items():
        match = _NAME.fullmatch(canonical(plain.get(name, name)) or name)
        if match is None:
            raise CheckpointError(
                f"{file} holds {entry.name}, which is no factor of an adapter of linear layers; "
                "merge the adapter into its model (peft: merge_and_unload)"
            )
        found.setdefault(match[1], {})[match[2]] = entry
    for module, pair in found.items():
        if len(pair) < 2:
            missing = "B" if "A" in pair else "A"
            raise CheckpointError(f"{file} has no lora_{missing} of {module}; it is not complete")
    return {module: (pair["A"], pair["B"]) for module, pair in found.items()}


def _is_target(targets: object, names: Collection[str]) -> bool:
    """Whether `target_modules` names a module, by PEFT's rule, under any of its names.

    A regular expression is not applied: it may take for ever, and the file's tensors decide anyway.
    """
    if isinstance(targets, str):
        return True
    assert isinstance(targets, Collection)
    return any(name == it or name.endswith(f".{it}") for it in targets for name in names)


def _not_adapted(module: str) -> str:
    """The reason why a module takes no adapter."""
    if ".experts." in module or module.endswith(".experts"):
        return f"{module} belongs to an expert, and experts are not adapted; merge the adapter"
    return (
        f"{module} is no module of this model that is adapted (those are the projections of "
        "attention and of feed-forward layers without experts); merge the adapter, or use its model"
    )


def _check_shape(entry: TensorEntry, shape: tuple[int, int]) -> None:
    if tuple(entry.shape) != shape:
        raise CheckpointError(
            f"tensor {entry.name} in {entry.file} has shape {list(entry.shape)}, but this model "
            f"and {CONFIG} ask for {list(shape)}"
        )


def _read(
    first: TensorEntry, second: TensorEntry, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """A and scale * B, rounded once."""
    down, up = torch.empty(first.shape, dtype=dtype), torch.empty(second.shape)
    read_into(first, down)
    read_into(second, up)
    scaled = (up * scale).to(dtype)
    if not float(scaled.abs().max()) <= MOST_WEIGHT:
        raise CheckpointError(
            f"tensor {second.name} in {second.file} is too large for {dtype} once it is scaled by "
            f"{scale:.3g} (lora_alpha and r in {CONFIG}); train it again, or fix its {CONFIG}"
        )
    return down, scaled
