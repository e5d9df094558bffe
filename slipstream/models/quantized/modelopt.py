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
from slipstream.kernels.formats.nvfp4 import Nvfp4Matrix, ToNvfp4
from slipstream.kernels.formats.weight import Rounding, Weight
from slipstream.models.config_reader import ConfigReader
from slipstream.models.quantized.float4 import read_nvfp4
from slipstream.models.quantized.float8 import (
    block_words,
    float8_kind,
    float8_rounding,
    read_float8,
)
from slipstream.models.quantized.module import StoredModule, StoredQuantization
from slipstream.models.quantized.module_lists import (
    ModuleList,
    bare,
    matches,
    read_list,
    require_expressions,
)

_OF_CACHES = ("kv_cache_quant_algo", "kv_cache_scheme")
HARMLESS: Final = {"producer", "quant_method"}
_MIXED = "MIXED_PRECISION"
_ROWS, _BLOCKS = None, (BLOCK, BLOCK)


@dataclass(frozen=True)
class _Algorithm:
    """The format of a module: FP8, maybe with a scale for each block, or NVFP4."""

    block: tuple[int, int] | None = None
    is_nvfp4: bool = False

    @property
    def words(self) -> str:
        return "nvfp4" if self.is_nvfp4 else f"fp8, {block_words(self.block)}"

    @property
    def kind(self) -> type[Weight]:
        return Nvfp4Matrix if self.is_nvfp4 else float8_kind(self.block)

    @property
    def rounding(self) -> Rounding | None:
        return ToNvfp4() if self.is_nvfp4 else float8_rounding(self.block)


_ALGORITHMS: Final = {
    "NVFP4": _Algorithm(is_nvfp4=True),
    "W4A16_NVFP4": _Algorithm(is_nvfp4=True),
    "FP8": _Algorithm(_ROWS),
    "FP8_PER_CHANNEL_PER_TOKEN": _Algorithm(_ROWS),
    "FP8_PB_WO": _Algorithm(_BLOCKS),
    "FP8_BLOCK_SCALES": _Algorithm(_BLOCKS),
}


@dataclass(frozen=True)
class ModelOpt(StoredQuantization):
    """ModelOpt settings of a checkpoint.

    Attributes:
        whole: algorithm of all modules; None for MIXED_PRECISION.
        layers: algorithms by module name or pattern, without `model.`, for MIXED_PRECISION.
        unquantised: modules that are not quantised.
    """

    whole: _Algorithm | None
    layers: Mapping[str, _Algorithm]
    unquantised: ModuleList

    @property
    def description(self) -> str:
        return f"modelopt, {'; '.join(dict.fromkeys(one.words for one in self._all))}"

    @property
    def kinds(self) -> frozenset[type[Weight]]:
        return frozenset(one.kind for one in self._all)

    @property
    def _all(self) -> list[_Algorithm]:
        return [*self.layers.values(), *(() if self.whole is None else (self.whole,))]

    def algorithm(self, module: str) -> _Algorithm | None:
        """The algorithm of a module; None if the table has none for it."""
        own = self.layers.get(bare(module))
        if own is not None or self.whole is not None:
            return own or self.whole
        patterns = (name for name in self.layers if "*" in name)
        return next((self.layers[name] for name in patterns if matches(name, module)), None)

    def bits(self, module: str) -> int:
        found = self.algorithm(module)
        return 4 if found is not None and found.is_nvfp4 else 8

    def kind(self, module: str) -> type[Weight]:
        found = self.algorithm(module)
        return found.kind if found is not None else next(iter(self.kinds))

    def unit(self, module: str, columns: int) -> int:
        found = self.algorithm(module)
        block = None if found is None else found.block
        return super().unit(module, columns) if block is None else block[1]

    def rounding(self, module: str) -> Rounding | None:
        found = self.algorithm(module)
        return None if found is None or self.unquantised.names(module) else found.rounding

    def read(self, module: StoredModule, rows: int, columns: int) -> Weight:
        found = self.algorithm(module.name)
        if found is None:
            raise module.error(
                f"stores {module.name} quantised, but quantized_layers of its quantization config "
                "does not name it"
            )
        module.ignore("input_scale")
        if found.is_nvfp4:
            return read_nvfp4(module, rows, columns, "weight", "weight_scale_2", divides=False)
        return read_float8(module, rows, columns, "weight_scale", found.block)

    def require_modules(self, modules: Collection[str], path: Path) -> None:
        table = ModuleList("quantized_layers", tuple(self.layers))
        for entries in (table, self.unquantised):
            entries.require_named(modules, path)


def read_settings(reader: ConfigReader) -> ModelOpt:
    """Read a quantization_config; CheckpointError for keys that are unknown or unsupported."""
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
    whole = _algorithm(reader, "quant_algo", name)
    _require_group(reader, whole)
    groups = reader.nested("config_groups")
    for key in reader.take("config_groups", dict, {}):
        _require_group(groups.nested(key).nested("weights"), whole)
    return ModelOpt(whole, {}, unquantised)


def _read_layers(reader: ConfigReader) -> dict[str, _Algorithm]:
    for key in ("config_groups", "group_size"):  # the table has the same information
        reader.take_any(key)
    layers, table = {}, reader.nested("quantized_layers")
    named = reader.take("quantized_layers", dict)
    require_expressions(reader, "quantized_layers", named)
    for name in named:
        own = table.nested(name)
        found = _algorithm(own, "quant_algo", own.take("quant_algo", str).upper())
        _require_group(own, found)
        layers[bare(name)] = found
    if not layers:
        raise reader.error("quantized_layers", "names no module, which MIXED_PRECISION asks for")
    return layers


def _algorithm(reader: ConfigReader, key: str, name: str) -> _Algorithm:
    found = _ALGORITHMS.get(name)
    if found is None:
        raise reader.error(
            key,
            f"is {name}, which is not supported; use a checkpoint in {', '.join(_ALGORITHMS)} or "
            "in none of them",
        )
    return found


def _require_group(reader: ConfigReader, found: _Algorithm) -> None:
    if found.is_nvfp4:
        reader.expect("group_size", Nvfp4Matrix.group)
    else:
        reader.take_any("group_size")
