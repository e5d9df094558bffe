"""The compressed-tensors format, which llm-compressor writes.

    pack-quantized     weight_packed [N, K b / 32] int32, packed along K, the first column lowest
                       weight_scale [N, G]; weight_zero_point [N b / 32, G] int32, packed along N
                       weight_shape [2]; weight_g_idx [K] if columns were reordered
    int-quantized      weight [N, K] int8, weight_scale [N, 1] or one number
    float-quantized    weight [N, K] e4m3, weight_scale the same, or of blocks
    nvfp4-pack-quantized, mxfp4-pack-quantized
                       weight_packed [N, K / 2] uint8, weight_scale of groups (`float4.py`); NVFP4
                       also weight_global_scale, one number that weight_scale is divided by

config_groups gives each scheme its targets: module names, regular expressions ("re:...") or the
class Linear.
"""

from dataclasses import dataclass
from typing import Final

import torch

from slipstream.kernels.formats.int4 import unpacked
from slipstream.kernels.formats.int8 import Int8Matrix, ToInt8
from slipstream.kernels.formats.mxfp4 import Mxfp4Matrix
from slipstream.kernels.formats.nvfp4 import Nvfp4Matrix
from slipstream.kernels.formats.weight import Rounding, Weight
from slipstream.models.config_reader import ConfigReader
from slipstream.models.quantized.float4 import Mxfp4Form, Nvfp4Form
from slipstream.models.quantized.float8 import Float8Form, read_block
from slipstream.models.quantized.grouped import IntegerForm, as_bytes, grouped_matrix
from slipstream.models.quantized.module import (
    INDICES,
    StoredForm,
    StoredModule,
    StoredQuantization,
    Tensors,
    row_scale_shapes,
    row_scales,
)
from slipstream.models.quantized.module_lists import ModuleList, matches, read_list

FORMATS: Final = (
    "float-quantized",
    "int-quantized",
    "mxfp4-pack-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "pack-quantized",
)
_PACKED = "pack-quantized"
_SHARED_SCALES: Final = {  # floats: how scales are shared, and by how many columns
    "mxfp4-pack-quantized": ("group", Mxfp4Matrix.group),
    "nvfp4-pack-quantized": ("tensor_group", Nvfp4Matrix.group),
}
_FOUR_BITS: Final[dict[str, StoredForm]] = {
    "mxfp4-pack-quantized": Mxfp4Form("weight_packed", "weight_scale"),
    "nvfp4-pack-quantized": Nvfp4Form("weight_packed", "weight_global_scale", divides=True),
}


class PackedForm(IntegerForm):
    """pack-quantized."""

    def tensors(self, module: StoredModule, rows: int, columns: int) -> Tensors:
        in_word, groups, words = 32 // self.bits, self.num_groups(columns), (torch.int32,)
        module.require_words(columns, in_word, "columns")
        found = {
            "weight_packed": module.take("weight_packed", words, (rows, columns // in_word)),
            "weight_scale": module.take_scales("weight_scale", (rows, groups)),
        }
        if "weight_shape" in module:
            found["weight_shape"] = module.take("weight_shape", INDICES, (2,))
        if not self.symmetric:
            shape = -(-rows // in_word), groups
            found["weight_zero_point"] = module.take("weight_zero_point", words, shape)
        if self.ordered:
            found["weight_g_idx"] = module.take("weight_g_idx", INDICES, (columns,))
        return found

    def matrix(self, module: StoredModule, found: Tensors, rows: int, columns: int) -> Weight:
        if "weight_shape" in found and (shape := found["weight_shape"].tolist()) != [rows, columns]:
            raise module.error(
                f"says in {module.name}.weight_shape {shape}, where its config.json asks for "
                f"{[rows, columns]}"
            )
        zeros = group_of = None
        if not self.symmetric:
            zeros = as_bytes(found["weight_zero_point"].T)
            zeros = (unpacked(zeros) if self.bits == 4 else zeros)[:, :rows].T.contiguous()
        if self.ordered:
            group_of = module.groups("weight_g_idx", found, self.num_groups(columns))
        values, group = as_bytes(found["weight_packed"]), self.group or columns
        return grouped_matrix(values, self.bits, found["weight_scale"], zeros, group, group_of)


@dataclass(frozen=True, kw_only=True)
class Int8Form(IntegerForm):
    """int-quantized."""

    rounds_input: bool

    @property
    def words(self) -> str:
        return f"{super().words}{', activations too' if self.rounds_input else ''}"

    @property
    def rounding(self) -> Rounding:
        return ToInt8(self.rounds_input)

    def tensors(self, module: StoredModule, rows: int, columns: int) -> Tensors:
        shapes = row_scale_shapes(rows)
        found = {
            "weight": module.take("weight", (torch.int8,), (rows, columns), stays=True),
            "weight_scale": module.take_scales("weight_scale", *shapes),
        }
        if "weight_zero_point" in module:
            zeros = module.take("weight_zero_point", (torch.int8, torch.int32), *shapes)
            found["weight_zero_point"] = zeros
        return found

    def matrix(self, module: StoredModule, found: Tensors, rows: int, columns: int) -> Weight:
        if "weight_zero_point" in found and bool(found["weight_zero_point"].any()):
            raise module.error(
                f"holds {module.name}.weight_zero_point other than 0 for symmetric weights"
            )
        scales = row_scales(found["weight_scale"], rows)
        return Int8Matrix(found["weight"], scales, self.rounds_input)


def read_scheme(group: ConfigReader, format: str) -> StoredForm:
    """Read one config group; CheckpointError names a key that is not supported."""
    weights = group.nested("weights")
    is_float, bits = _is_float(weights), weights.take("num_bits", int, 8)
    _require_kind(weights, format, is_float, bits)
    symmetric = weights.take("symmetric", bool, True)
    if not symmetric and format != _PACKED:
        raise weights.error("symmetric", f"is false, which {format} is not supported with")
    weights.expect("dynamic", False)
    size, block = _read_strategy(weights, format, is_float)
    ordered = _read_order(weights)
    _pass_over_search(weights)
    weights.finish()
    rounds_input = _read_activations(group, format, is_float)
    if group.take_optional("output_activations", dict):
        raise group.error("output_activations", "is not supported; use a checkpoint without it")
    if format in _FOUR_BITS:
        return _FOUR_BITS[format]
    if is_float:
        return Float8Form(block, rounds_input)
    if format == _PACKED:
        return PackedForm(bits=bits, group=size, ordered=ordered, symmetric=symmetric)
    return Int8Form(bits=bits, rounds_input=rounds_input)


def _is_float(settings: ConfigReader) -> bool:
    kind = settings.take("type", str, "int").lower()
    if kind not in ("int", "float"):
        raise settings.error("type", f"is {kind!r}, but must be int or float")
    return kind == "float"


def _require_kind(weights: ConfigReader, format: str, is_float: bool, bits: int) -> None:
    known = (4, 8) if format == _PACKED else (4,) if format in _SHARED_SCALES else (8,)
    if bits not in known:
        raise weights.error("num_bits", f"is {bits}, which {format} is not supported with")
    floats = format == "float-quantized" or format in _SHARED_SCALES
    if is_float != floats and format != "naive-quantized":
        raise weights.error("type", f"does not go with the format {format}")


def _read_strategy(
    weights: ConfigReader, format: str, is_float: bool
) -> tuple[int | None, tuple[int, int] | None]:
    """(columns of a group, block); both None for a scale for each row or for the matrix."""
    size = weights.take_optional("group_size", int)
    block = weights.take_optional("block_structure", list)
    implied = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = weights.take("strategy", str, implied).lower()
    if format in _SHARED_SCALES:
        if (strategy, size) != _SHARED_SCALES[format]:
            shared, columns = _SHARED_SCALES[format]
            raise weights.error(
                "group_size", f"must be {columns}, and strategy {shared}, for {format}"
            )
        return size, None
    if format == _PACKED and strategy == "group" and size is not None and size > 0:
        return size, None
    if strategy == "channel" or (strategy == "tensor" and format != _PACKED):
        return None, None
    if strategy == "block" and is_float and block is not None:
        return None, read_block(weights, "block_structure", block)
    raise weights.error("strategy", f"is {strategy!r}, which {format} is not supported with")


def _read_order(weights: ConfigReader) -> bool:
    """Whether weights need g_idx; other values of `actorder` do not affect how they are read."""
    order = weights.take_any("actorder")
    if order not in (None, True, False, "group", "dynamic", "weight", "static"):
        raise weights.error("actorder", f"is {order!r}, but must be group, weight or null")
    return order in (True, "group", "dynamic")


def _read_activations(group: ConfigReader, format: str, is_float: bool) -> bool:
    """Whether activations are quantised at run time.

    Static scales and groups of FP8 activations are not applied: such checkpoints run with their
    quantised weights and unquantised activations.
    """
    if not group.take("input_activations", dict, {}) or format in _SHARED_SCALES:
        return False  # activations keep their dtype next to MXFP4 and NVFP4 weights
    inputs = group.nested("input_activations")
    floats, bits = _is_float(inputs), inputs.take("num_bits", int, 8)
    if format == _PACKED or floats != is_float or bits != 8:
        raise group.error(
            "input_activations",
            f"ask for {bits} bits with weights in {format}, which is not supported",
        )
    inputs.expect("symmetric", True)
    dynamic = inputs.take("dynamic", bool, False)
    strategy = inputs.take("strategy", str, "tensor").lower()
    for key in ("group_size", "block_structure", "actorder"):
        inputs.take_any(key)
    _pass_over_search(inputs)
    inputs.finish()
    if not is_float and not (dynamic and strategy == "token"):
        raise inputs.error(
            "dynamic" if not dynamic else "strategy",
            "must be dynamic and by token for integers; use such a checkpoint (W8A8 dynamic)",
        )
    return True


def _pass_over_search(settings: ConfigReader) -> None:
    """Accept keys about how scales were calibrated and stored."""
    for key in ("observer", "observer_kwargs", "scale_dtype", "zp_dtype"):
        settings.take_any(key)


HARMLESS = {
    "global_compression_ratio",
    "kv_cache_scheme",  # caches have the dtype that users choose
    "quant_method",
    "version",
}
_CLASS = "Linear"
_OF_SPARSITY = (
    "global_sparsity",
    "ignore",
    "registry_requires_subclass",
    "sparsity_structure",
    "targets",
)


@dataclass(frozen=True)
class CompressedTensors(StoredQuantization):
    """Compressed-tensors settings of a checkpoint.

    Attributes:
        groups: (targets, scheme) of each config group.
        unquantised: modules that are not quantised.
    """

    groups: tuple[tuple[tuple[str, ...], StoredForm], ...]
    unquantised: ModuleList

    name = "compressed-tensors"

    @property
    def forms(self) -> list[StoredForm]:
        return [form for _, form in self.groups]

    def form_of(self, module: str) -> StoredForm | None:
        """See `StoredQuantization`; targets by name take precedence over targets by class."""
        by_class: StoredForm | None = None
        for targets, form in self.groups:
            if any(matches(target, module) for target in targets):
                return form
            if _CLASS in targets and by_class is None:
                by_class = form
        return by_class


def read_settings(reader: ConfigReader) -> CompressedTensors:
    status = reader.take("quantization_status", str, "compressed")
    if status not in ("compressed", "frozen"):
        raise reader.error("quantization_status", f"is {status!r}; finish the quantization first")
    if reader.take_optional("transform_config", dict):
        raise reader.error("transform_config", "is not supported; use a checkpoint without it")
    sparsity = reader.nested("sparsity_config")
    sparsity.expect("format", "dense")
    for key in _OF_SPARSITY:  # statistics: weights are stored densely
        sparsity.take_any(key)
    sparsity.finish()
    own_format = reader.take("format", str, "")
    found = []
    for group in reader.each("config_groups"):
        if not group.take("weights", dict, {}):  # about activations alone, which keep their dtype
            continue
        format = group.take("format", str, "") or own_format
        if format not in FORMATS:
            raise reader.error("format", f"is {format!r}; supported are {', '.join(FORMATS)}")
        targets = read_list(group, "targets").entries
        if not targets:
            raise group.error("targets", "names nothing; name modules, or their class")
        found.append((targets, read_scheme(group, format)))
        group.finish()
    if not found:
        raise reader.error("config_groups", "has no group")
    return CompressedTensors(tuple(found), read_list(reader, "ignore"))
