"""ModelOpt's checkpoints, with settings in config.json or in hf_quant_config.json.

    NVFP4, W4A16_NVFP4   weight [N, K / 2] uint8, weight_scale [N, K / 16] e4m3, weight_scale_2, one
                         number: weight = stored * weight_scale * weight_scale_2
    FP8                  weight [N, K] e4m3, weight_scale, one number
    FP8_PER_CHANNEL_...  the same with a scale for each row
    FP8_PB_WO            the same with a scale for blocks of 128 x 128
    MIXED_PRECISION      a table that gives each module one of these

Static scales of activations (input_scale) and of KV caches are ignored: activations and caches keep
their dtype, or are quantised per row.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from slipstream.kernels.formats.float8_blocks import BLOCK
from slipstream.kernels.formats.nvfp4 import Nvfp4Matrix
from slipstream.models.config_reader import ConfigReader
from slipstream.models.quantized.float4 import Nvfp4Form
from slipstream.models.quantized.float8 import Float8Form
from slipstream.models.quantized.module import StoredForm, StoredQuantization
from slipstream.models.quantized.module_lists import (
    ModuleList,
    bare,
    matches,
    read_list,
    require_expressions,
)

_OF_CACHES = ("kv_cache_quant_algo", "kv_cache_scheme")
HARMLESS: Final = {"producer", "quant_method"}
_GROUPS = "config_groups"
"""Groups of compressed-tensors' scheme, which repeat what the algorithms say."""
_MIXED = "MIXED_PRECISION"
_FLOATS: Final = {Nvfp4Form.bits: [2, 1], Float8Form.bits: [4, 3]}
_NVFP4 = Nvfp4Form("weight", "weight_scale_2", divides=False)
_ROWS, _BLOCKS = Float8Form(), Float8Form((BLOCK, BLOCK))
_ALGORITHMS: Final[dict[str, StoredForm]] = {
    "NVFP4": _NVFP4,
    "W4A16_NVFP4": _NVFP4,
    "FP8": _ROWS,
    "FP8_PER_CHANNEL_PER_TOKEN": _ROWS,
    "FP8_PB_WO": _BLOCKS,
    "FP8_BLOCK_SCALES": _BLOCKS,
}


@dataclass(frozen=True)
class ModelOpt(StoredQuantization):
    """ModelOpt settings of a checkpoint.

    Attributes:
        whole: form of all modules; None for MIXED_PRECISION.
        layers: forms by module name or pattern, without `model.`, for MIXED_PRECISION.
        unquantised: modules that are not quantised.
    """

    whole: StoredForm | None
    layers: Mapping[str, StoredForm]
    unquantised: ModuleList

    name = "modelopt"

    @property
    def forms(self) -> list[StoredForm]:
        return [*self.layers.values(), *(() if self.whole is None else (self.whole,))]

    def form_of(self, module: str) -> StoredForm | None:
        own = self.layers.get(bare(module))
        if own is not None or self.whole is not None:
            return own or self.whole
        patterns = (name for name in self.layers if "*" in name)
        return next((self.layers[name] for name in patterns if matches(name, module)), None)

    def require_modules(self, modules: Collection[str], path: Path) -> None:
        table = ModuleList("quantized_layers", tuple(self.layers))
        for entries in (table, self.unquantised):
            entries.require_named(modules, path)


def read_settings(reader: ConfigReader) -> ModelOpt:
    if reader.take_optional("quantization", dict):  # the layout of hf_quant_config.json
        reader = reader.nested("quantization")
        settings = read_settings(reader)
        reader.finish()
        return settings
    for key in _OF_CACHES:
        reader.take_any(key)
    lists = [read_list(reader, key) for key in ("exclude_modules", "ignore")]
    unquantised = next((one for one in lists if one.entries), lists[0])
    for key in ("has_zero_point", "pre_quant_scale"):
        reader.expect(key, False)
    name = reader.take("quant_algo", str).upper()
    if name == _MIXED:
        return ModelOpt(None, _read_layers(reader), unquantised)
    whole = _algorithm(reader, name)
    _require_group(reader, whole)
    for group in reader.each(_GROUPS):
        weights = group.nested("weights")
        _require_group(weights, whole)
        _require_bits(weights, whole, f'"quant_algo" is {name}')
    return ModelOpt(whole, {}, unquantised)


def _require_bits(weights: ConfigReader, found: StoredForm, source: str) -> None:
    """Raise CheckpointError if a group's settings contradict the algorithm that `source` gives."""
    for key, value in (("num_bits", found.bits), ("type", "float")):
        given = weights.take_any(key)
        if isinstance(given, list):  # bits of exponent and mantissa
            given = next((bits for bits, own in _FLOATS.items() if own == given), given)
        if given is not None and given != value:
            raise weights.error(
                key,
                f"is {given!r}, but {source}, which means {value!r}; they contradict each other: "
                "correct the one that does not describe the tensors",
            )


def _read_layers(reader: ConfigReader) -> dict[str, StoredForm]:
    reader.take_any("group_size")  # the table has it too
    layers, algorithms, table = {}, {}, reader.nested("quantized_layers")
    named = reader.take("quantized_layers", dict)
    require_expressions(reader, "quantized_layers", named)
    for name in named:
        own = table.nested(name)
        algorithm = own.take("quant_algo", str).upper()
        found = _algorithm(own, algorithm)
        _require_group(own, found)
        layers[bare(name)], algorithms[bare(name)] = found, algorithm
    if not layers:
        raise reader.error("quantized_layers", "names no module, which MIXED_PRECISION asks for")
    for group in reader.each(_GROUPS):
        for name in read_list(group, "targets").entries:
            if bare(name) in layers:
                source = f'"quantized_layers" gives {name} {algorithms[bare(name)]}'
                _require_bits(group.nested("weights"), layers[bare(name)], source)
    return layers


def _algorithm(reader: ConfigReader, name: str) -> StoredForm:
    found = _ALGORITHMS.get(name)
    if found is None:
        raise reader.error(
            "quant_algo",
            f"is {name}, which is not supported; use a checkpoint in {', '.join(_ALGORITHMS)} or "
            "in none of them",
        )
    return found


def _require_group(reader: ConfigReader, found: StoredForm) -> None:
    if found is _NVFP4:
        reader.expect("group_size", Nvfp4Matrix.group)
    else:
        reader.take_any("group_size")
