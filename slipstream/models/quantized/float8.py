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
from slipstream.models.quantized.module import (
    OneForm,
    StoredForm,
    StoredModule,
    Tensors,
    row_scale_shapes,
    row_scales,
)
from slipstream.models.quantized.module_lists import ModuleList, read_list
from slipstream.models.safetensors_file import WEIGHT_DTYPES

HARMLESS = {"dequantize", "kv_cache_scheme", "quant_method"}
_SCALES = (*WEIGHT_DTYPES, torch.float8_e8m0fnu)
_SQUARE = (BLOCK, BLOCK)


@dataclass(frozen=True)
class Float8Form(StoredForm):
    """e4m3 with scales of 32 or 16 bits, or e8m0.

    Attributes:
        block: rows and columns that have a scale; None: a scale for the matrix or for each row.
    """

    block: tuple[int, int] | None = None
    rounds_input: bool = True

    bits = 8

    @property
    def words(self) -> str:
        if self.block is None:
            return "fp8, a scale a row or matrix"
        return f"fp8, blocks of {self.block[0]} x {self.block[1]}"

    @property
    def kind(self) -> type[Weight]:
        """Block kernels support only 128 x 128."""
        if self.block is None:
            return Float8Matrix
        return Float8BlockMatrix if self.block == _SQUARE else DenseMatrix

    @property
    def rounding(self) -> Rounding | None:
        if self.block is None:
            return ToFloat8()
        return ToFloat8Blocks() if self.block == _SQUARE else None

    def unit(self, columns: int) -> int:
        return 1 if self.block is None else self.block[1]

    def tensors(self, module: StoredModule, rows: int, columns: int) -> Tensors:
        values = module.take("weight", (torch.float8_e4m3fn,), (rows, columns), stays=True)
        names = ("weight_scale_inv", "weight_scale")
        usual = names[1 if self.block is None else 0]  # named in the error if both are missing
        scale = next((it for it in names if it in module), usual)
        if self.block is None:
            shapes = row_scale_shapes(rows)
        else:
            down, across = -(-rows // self.block[0]), -(-columns // self.block[1])
            # ModelOpt keeps the dimensions within a block, with size 1.
            shapes = (down, across), (down, 1, across, 1)
        return {"values": values, "scales": module.take_scales(scale, *shapes, dtypes=_SCALES)}

    def matrix(self, module: StoredModule, found: Tensors, rows: int, columns: int) -> Weight:
        values, scales = found["values"], found["scales"]
        if self.block is None:
            return Float8Matrix(values, row_scales(scales, rows))
        scales = scales.view(-(-rows // self.block[0]), -(-columns // self.block[1]))
        matrix = Float8BlockMatrix(values, scales, *self.block)
        return matrix if self.block == _SQUARE else DenseMatrix(matrix.dequantised())


def read_settings(reader: ConfigReader) -> OneForm:
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
    return OneForm("", Float8Form(size), unquantised)


def read_block(reader: ConfigReader, key: str, block: list[object]) -> tuple[int, int]:
    """Rows and columns of a block."""
    sizes = [size for size in block if type(size) is int and size > 0]
    if len(sizes) != 2 or len(block) != 2:
        raise reader.error(key, f"must be two positive integers, not {block}")
    return sizes[0], sizes[1]
