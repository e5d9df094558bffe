"""FP8 checkpoints (DeepSeek, Qwen) with a scale for each block, each row or each matrix.

    weight           [N, K] e4m3
    weight_scale_inv [N / b, K / b], rounded up, or weight_scale, one number or one a row

weight = stored * scale in all cases, despite the name weight_scale_inv. FP8 kernels also quantise
activations, with scales computed at run time ("dynamic") or with input_scale ("static").
"""

from dataclasses import dataclass

import torch

from slipstream.kernels.formats.dense import DenseMatrix
from slipstream.kernels.formats.float8 import Float8Matrix, ToFloat8
from slipstream.kernels.formats.float8_blocks import BLOCK, Float8BlockMatrix, ToFloat8Blocks
from slipstream.kernels.formats.weight import Rounding, Weight
from slipstream.models.config_reader import ConfigReader
from slipstream.models.quantized.module import StoredModule, StoredQuantization
from slipstream.models.quantized.module_lists import ModuleList, read_list
from slipstream.models.safetensors_file import WEIGHT_DTYPES

HARMLESS = {"dequantize", "quant_method"}
STATIC_SCALES = ("input_scale", "activation_scale", "output_scale")
_SCALES = (*WEIGHT_DTYPES, torch.float8_e8m0fnu)
_SQUARE = (BLOCK, BLOCK)


@dataclass(frozen=True)
class Float8(StoredQuantization):
    """FP8 settings of a checkpoint; `block` None: a scale for the matrix or for each row.

    Attributes:
        unquantised: modules that are not quantised.
    """

    block: tuple[int, int] | None
    unquantised: ModuleList

    num_bits = 8

    @property
    def description(self) -> str:
        return f"fp8, {block_words(self.block)}"

    def kind(self, module: str) -> type[Weight]:
        return float8_kind(self.block)

    def unit(self, module: str, columns: int) -> int:
        return 1 if self.block is None else self.block[1]

    def rounding(self, module: str) -> Rounding | None:
        if self.unquantised.names(module):
            return None
        return float8_rounding(self.block) or super().rounding(module)

    def read(self, module: StoredModule, rows: int, columns: int) -> Weight:
        names = ("weight_scale_inv", "weight_scale")
        usual = names[1 if self.block is None else 0]  # the name in the error if both are missing
        name = next((it for it in names if it in module), usual)
        return read_float8(module, rows, columns, name, self.block)


def block_words(block: tuple[int, int] | None) -> str:
    """A description of the block size for the log."""
    return "a scale a row or matrix" if block is None else f"blocks of {block[0]} x {block[1]}"


def float8_kind(block: tuple[int, int] | None) -> type[Weight]:
    """The class that `read_float8` returns; block kernels support only 128 x 128."""
    if block is None:
        return Float8Matrix
    return Float8BlockMatrix if block == _SQUARE else DenseMatrix


def float8_rounding(block: tuple[int, int] | None) -> Rounding | None:
    """The rounding to the format of `read_float8`; None for blocks without a kernel."""
    if block is None:
        return ToFloat8()
    return ToFloat8Blocks() if block == _SQUARE else None


def read_float8(
    module: StoredModule, rows: int, columns: int, scale: str, block: tuple[int, int] | None
) -> Weight:
    """Read `weight` [rows, columns] of a module; `scale` is the name ending of its scales."""
    values = module.take("weight", (torch.float8_e4m3fn,), (rows, columns), stays=True)
    module.ignore(*STATIC_SCALES)
    if block is None:
        return Float8Matrix(values, module.take_row_scales(scale, rows, _SCALES))
    down, across = -(-rows // block[0]), -(-columns // block[1])
    # ModelOpt keeps the dimensions within a block, with size 1.
    shapes = (down, across), (down, 1, across, 1)
    scales = module.take_scales(scale, *shapes, dtypes=_SCALES).view(down, across)
    matrix = Float8BlockMatrix(values, scales, *block)
    return matrix if block == _SQUARE else DenseMatrix(matrix.dequantised())


def read_settings(reader: ConfigReader) -> Float8:
    """Read a quantization_config; CheckpointError for keys that are unknown or unsupported."""
    reader.expect("fmt", "e4m3")
    scale_format = reader.take("scale_fmt", str, "float")
    if scale_format not in ("float", "ue8m0"):
        raise reader.error("scale_fmt", f"is {scale_format!r}, but float and ue8m0 are supported")
    scheme = reader.take("activation_scheme", str, "dynamic")
    if scheme not in ("dynamic", "static"):
        raise reader.error("activation_scheme", f"is {scheme!r}, but must be dynamic or static")
    lists = [read_list(reader, key) for key in ("modules_to_not_convert", "ignored_layers")]
    unquantised = ModuleList(lists[0].key, lists[0].entries + lists[1].entries)
    block = reader.take_optional("weight_block_size", list)
    size = None if block is None else read_block(reader, "weight_block_size", block)
    return Float8(size, unquantised)


def read_block(reader: ConfigReader, key: str, block: list[object]) -> tuple[int, int]:
    """Rows and columns of a block."""
    sizes = [size for size in block if type(size) is int and size > 0]
    if len(sizes) != 2 or len(block) != 2:
        raise reader.error(key, f"must be two positive integers, not {block}")
    return sizes[0], sizes[1]
