"""The settings of one group of compressed-tensors modules."""

from dataclasses import dataclass
from typing import Final

from slipstream.kernels.formats.mxfp4 import Mxfp4Matrix
from slipstream.kernels.formats.nvfp4 import Nvfp4Matrix
from slipstream.models.config_reader import ConfigReader
from slipstream.models.quantized.float8 import read_block

FORMATS: Final = (
    "float-quantized",
    "int-quantized",
    "mxfp4-pack-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "pack-quantized",
)
_PACKED = "pack-quantized"
_FOUR_BITS: Final = {  # floats: how scales are shared, and by how many columns
    "mxfp4-pack-quantized": ("group", Mxfp4Matrix.group),
    "nvfp4-pack-quantized": ("tensor_group", Nvfp4Matrix.group),
}


@dataclass(frozen=True)
class Scheme:
    """How the modules of a group are stored.

    Attributes:
        format: one of `FORMATS`.
        group: columns of a group; None: all of them.
        block: rows and columns of a block, of floats; None: a scale a row or matrix.
        ordered: columns of a group may stand anywhere.
        rounds_input: activations are to be rounded; those beside integers row by row.
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
    """Read one group of settings; CheckpointError names a key that is not supported."""
    weights = group.nested("weights")
    is_float, bits = _kind(weights), weights.take("num_bits", int, 8)
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


def _kind(settings: ConfigReader) -> bool:
    kind = settings.take("type", str, "int").lower()
    if kind not in ("int", "float"):
        raise settings.error("type", f"is {kind!r}, but must be int or float")
    return kind == "float"


def _require_kind(weights: ConfigReader, format: str, is_float: bool, bits: int) -> None:
    known = (4, 8) if format == _PACKED else (4,) if format in _FOUR_BITS else (8,)
    if bits not in known:
        raise weights.error("num_bits", f"is {bits}, which {format} is not supported with")
    floats = format == "float-quantized" or format in _FOUR_BITS
    if is_float != floats and format != "naive-quantized":
        raise weights.error("type", f"does not go with the format {format}")


def _read_strategy(
    weights: ConfigReader, format: str, is_float: bool
) -> tuple[int | None, tuple[int, int] | None]:
    """(columns of a group, block), None of each for a scale a row or matrix."""
    size = weights.take_optional("group_size", int)
    block = weights.take_optional("block_structure", list)
    implied = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = weights.take("strategy", str, implied).lower()
    if format in _FOUR_BITS:
        if (strategy, size) != _FOUR_BITS[format]:
            shared, columns = _FOUR_BITS[format]
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
    """Whether the columns of a group may stand anywhere; other orders change nothing here."""
    order = weights.take_any("actorder")
    if order not in (None, True, False, "group", "dynamic", "weight", "static"):
        raise weights.error("actorder", f"is {order!r}, but must be group, weight or null")
    return order in (True, "group", "dynamic")


def _read_activations(group: ConfigReader, format: str, is_float: bool) -> bool:
    """Whether activations are rounded at run time.

    Rounding of FP8 activations by stored scales or in groups is for kernels that need it: here the
    numbers of such a checkpoint's weights are used and activations stay as they are.
    """
    if not group.take("input_activations", dict, {}) or format in _FOUR_BITS:
        return False  # beside four-bit floats activations keep their dtype
    inputs = group.nested("input_activations")
    floats, bits = _kind(inputs), inputs.take("num_bits", int, 8)
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
    """Accept keys about how scales were found and stored."""
    for key in ("observer", "observer_kwargs", "scale_dtype", "zp_dtype"):
        settings.take_any(key)
