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

from slipstream.kernels.formats.dense import DenseMatrix
from slipstream.kernels.formats.float8 import Float8Matrix
from slipstream.kernels.formats.int4 import unpacked
from slipstream.kernels.formats.int8 import Int8Matrix, ToInt8
from slipstream.kernels.formats.mxfp4 import Mxfp4Matrix, ToMxfp4
from slipstream.kernels.formats.nvfp4 import Nvfp4Matrix, ToNvfp4
from slipstream.kernels.formats.weight import Rounding, Weight
from slipstream.models.config_reader import ConfigReader
from slipstream.models.quantized.float4 import read_mxfp4, read_nvfp4
from slipstream.models.quantized.float8 import float8_kind, float8_rounding, read_block, read_float8
from slipstream.models.quantized.gptq import described
from slipstream.models.quantized.grouped import as_bytes, grouped_matrix, grouped_unit, integer_kind
from slipstream.models.quantized.module import StoredModule, StoredQuantization, row_scale_shapes
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


@dataclass(frozen=True)
class Scheme:
    """The quantization scheme of the modules of one config group.

    Attributes:
        format: one of `FORMATS`.
        group: number of columns that share a scale; None: all columns.
        block: (rows, columns) of a block that shares a scale, for FP8; None: a scale for each row
            or for the matrix.
        ordered: weights have an activation order (g_idx), so a group's columns may be scattered.
        rounds_input: activations are quantised at run time; next to integer weights, per row.
    """

    format: str
    bits: int
    is_float: bool
    symmetric: bool
    group: int | None
    block: tuple[int, int] | None
    ordered: bool
    rounds_input: bool


def read_scheme(group: ConfigReader, format: str) -> Scheme:
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
    return Scheme(format, bits, is_float, symmetric, size, block, ordered, rounds_input)


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
            f"ask for {bits} bits beside weights in {format}, which is not supported",
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


HARMLESS = {"global_compression_ratio", "quant_method", "version"}
_CLASS = "Linear"
_FOUR_BITS: Final[dict[str, tuple[type[Weight], Rounding]]] = {
    "mxfp4-pack-quantized": (Mxfp4Matrix, ToMxfp4()),
    "nvfp4-pack-quantized": (Nvfp4Matrix, ToNvfp4()),
}
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

    groups: tuple[tuple[tuple[str, ...], Scheme], ...]
    unquantised: ModuleList

    @property
    def description(self) -> str:
        words = dict.fromkeys(_words(scheme) for _, scheme in self.groups)
        return f"compressed-tensors, {'; '.join(words)}"

    @property
    def kinds(self) -> frozenset[type[Weight]]:
        return frozenset(_kind(scheme) for _, scheme in self.groups)

    @property
    def rounds_activations(self) -> bool:
        schemes = (scheme for _, scheme in self.groups if _kind(scheme) is Float8Matrix)
        return all(scheme.rounds_input for scheme in schemes)

    def bits(self, module: str) -> int:
        scheme = self.scheme_of(module)
        return 8 if scheme is None else scheme.bits

    def kind(self, module: str) -> type[Weight]:
        scheme = self.scheme_of(module)
        return DenseMatrix if scheme is None else _kind(scheme)

    def unit(self, module: str, columns: int) -> int:
        scheme = self.scheme_of(module)
        if scheme is None or scheme.format in _FOUR_BITS:
            return super().unit(module, columns)
        if scheme.block is not None:
            return scheme.block[1]
        return grouped_unit(_kind(scheme), scheme.group, columns)

    def rounding(self, module: str) -> Rounding | None:
        scheme = self.scheme_of(module)
        if scheme is None or self.unquantised.names(module):
            return None
        return _rounding(scheme) or super().rounding(module)

    def scheme_of(self, module: str) -> Scheme | None:
        """The scheme of a module; targets by name take precedence over targets by class. None: no
        config group matches it."""
        by_class: Scheme | None = None
        for targets, scheme in self.groups:
            if any(matches(target, module) for target in targets):
                return scheme
            if _CLASS in targets and by_class is None:
                by_class = scheme
        return by_class

    def read(self, module: StoredModule, rows: int, columns: int) -> Weight:
        scheme = self.scheme_of(module.name)
        if scheme is None:
            raise module.error(
                f"stores {module.name} quantised, but none of config_groups is about it"
            )
        module.ignore("input_global_scale")
        if scheme.format == "nvfp4-pack-quantized":
            shared = "weight_global_scale"
            return read_nvfp4(module, rows, columns, "weight_packed", shared, divides=True)
        if scheme.format == "mxfp4-pack-quantized":
            return read_mxfp4(module, rows, columns, "weight_packed", "weight_scale")
        if scheme.is_float:
            return read_float8(module, rows, columns, "weight_scale", scheme.block)
        if scheme.format == _PACKED:
            return _read_packed(module, rows, columns, scheme)
        return _read_int8(module, rows, columns, scheme)


def _words(scheme: Scheme) -> str:
    if scheme.format in _FOUR_BITS:
        return scheme.format.partition("-")[0]
    if scheme.is_float:
        return "fp8" if scheme.block is None else "fp8 in blocks"
    activations = ", activations too" if scheme.rounds_input else ""
    return f"{described(scheme.bits, scheme.group, scheme.symmetric)}{activations}"


def _kind(scheme: Scheme) -> type[Weight]:
    if scheme.format in _FOUR_BITS:
        return _FOUR_BITS[scheme.format][0]
    if scheme.is_float:
        return float8_kind(scheme.block)
    if scheme.format != _PACKED:
        return Int8Matrix
    return integer_kind(scheme.bits, scheme.group, scheme.ordered, scheme.symmetric)


def _rounding(scheme: Scheme) -> Rounding | None:
    if scheme.format in _FOUR_BITS:
        return _FOUR_BITS[scheme.format][1]
    if scheme.is_float:
        return float8_rounding(scheme.block)
    return None if scheme.format == _PACKED else ToInt8(scheme.rounds_input)


def _read_packed(module: StoredModule, rows: int, columns: int, scheme: Scheme) -> Weight:
    in_word, group = 32 // scheme.bits, scheme.group or columns
    groups = -(-columns // group)
    module.require_words(columns, in_word, "columns")
    words = module.take("weight_packed", (torch.int32,), (rows, columns // in_word))
    if "weight_shape" in module:
        shape = module.take("weight_shape", (torch.int32, torch.int64), (2,)).tolist()
        if shape != [rows, columns]:
            raise module.error(
                f"says in {module.name}.weight_shape {shape}, where its config.json asks for "
                f"{[rows, columns]}"
            )
    scales = module.take_scales("weight_scale", (rows, groups))
    zeros = None
    if not scheme.symmetric:
        stored = module.take("weight_zero_point", (torch.int32,), (-(-rows // in_word), groups))
        zeros = as_bytes(stored.T)
        zeros = (unpacked(zeros) if scheme.bits == 4 else zeros)[:, :rows].T.contiguous()
    group_of = None
    if scheme.ordered:
        group_of = module.take_groups("weight_g_idx", columns, groups)
    return grouped_matrix(as_bytes(words), scheme.bits, scales, zeros, group, group_of)


def _read_int8(module: StoredModule, rows: int, columns: int, scheme: Scheme) -> Weight:
    values = module.take("weight", (torch.int8,), (rows, columns), stays=True)
    scales = module.take_row_scales("weight_scale", rows)
    if "weight_zero_point" in module:
        zeros = module.take("weight_zero_point", (torch.int8, torch.int32), *row_scale_shapes(rows))
        if bool(zeros.any()):
            raise module.error(
                f"holds {module.name}.weight_zero_point other than 0 for symmetric weights"
            )
    return Int8Matrix(values, scales, scheme.rounds_input)


def read_settings(reader: ConfigReader) -> CompressedTensors:
    """Read a quantization_config; CheckpointError for keys that are unknown or unsupported."""
    status = reader.take("quantization_status", str, "compressed")
    if status not in ("compressed", "frozen"):
        raise reader.error("quantization_status", f"is {status!r}; finish the quantization first")
    for key in ("kv_cache_scheme", "transform_config"):
        if reader.take_optional(key, dict):
            raise reader.error(key, "is not supported; use a checkpoint without it")
    sparsity = reader.nested("sparsity_config")
    sparsity.expect("format", "dense")
    for key in _OF_SPARSITY:  # how many zeros there are among weights that are stored all
        sparsity.take_any(key)
    sparsity.finish()
    own_format = reader.take("format", str, "")
    groups = reader.nested("config_groups")
    found = []
    for name in reader.take("config_groups", dict):
        group = groups.nested(name)
        format = group.take("format", str, "") or own_format
        if format not in FORMATS:
            raise reader.error("format", f"is {format!r}; supported are {', '.join(FORMATS)}")
        targets = read_list(group, "targets").entries
        if not targets:
            raise group.error("targets", "names nothing; name modules, or their class")
        found.append((targets, read_scheme(group, format)))
        group.finish()
    groups.finish()
    if not found:
        raise reader.error("config_groups", "has no group")
    return CompressedTensors(tuple(found), read_list(reader, "ignore"))
