"""FP8 checkpoints of DeepSeek's and Qwen's kind, and those of one scale a matrix.

    weight           [N, K] e4m3
    weight_scale_inv [N / b, K / b], rounded up, or weight_scale, one number or one a row

weight = stored * scale, whatever the scale is called. Kernels for FP8 round activations too, at run
time ("dynamic") or by input_scale ("static").
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.kernels.formats.dense import DenseMatrix
from slipstream.kernels.formats.float8 import Float8Matrix
from slipstream.kernels.formats.weight import Weight
from slipstream.models.config_reader import ConfigReader
from slipstream.models.quantized.module import StoredModule
from slipstream.models.safetensors_file import WEIGHT_DTYPES

HARMLESS = {
    "dequantize",
    "ignored_layers",  # what is stored tells the same
    "modules_to_not_convert",
    "quant_method",
}
STATIC_SCALES = ("input_scale", "activation_scale", "output_scale")
_SCALES = (*WEIGHT_DTYPES, torch.float8_e8m0fnu)


@dataclass(frozen=True)
class Float8:
    """The settings of one checkpoint; `block` None: a scale for all of a matrix, or for each row.

    Attributes:
        dynamic: activations are to be rounded row by row.
    """

    block: tuple[int, int] | None
    dynamic: bool

    @property
    def description(self) -> str:
        size = "a scale a row or matrix"
        if self.block is not None:
            size = f"blocks of {self.block[0]} x {self.block[1]}"
        return f"fp8, {size}"

    @property
    def float8_rows(self) -> bool:
        return self.block is None and self.dynamic

    def bits(self, module: str) -> int:
        del module
        return 8

    def keeps(self, module: str) -> bool:
        del module
        return self.block is None

    def read(self, module: StoredModule, rows: int, columns: int) -> Weight:
        name = "weight_scale_inv" if "weight_scale_inv" in module else "weight_scale"
        return read_float8(module, rows, columns, name, self.block)


def read_float8(
    module: StoredModule, rows: int, columns: int, scale: str, block: tuple[int, int] | None
) -> Weight:
    """`weight` of a module with the scales that it has under that name."""
    values = module.take("weight", (torch.float8_e4m3fn,), (rows, columns))
    module.pass_over(*STATIC_SCALES)
    if block is None:
        return Float8Matrix(values, module.take_row_scales(scale, rows, _SCALES))
    shape = (-(-rows // block[0]), -(-columns // block[1]))
    scales = module.take_scales(scale, shape, dtypes=_SCALES)
    return DenseMatrix(_by_blocks(values, scales, block))


def _by_blocks(values: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """[N, K] float32."""
    out = values.float()
    for index, row in enumerate(scales):
        part = out[index * block[0] : (index + 1) * block[0]]
        part.mul_(row.repeat_interleave(block[1])[: out.shape[1]])
    return out


def read_settings(reader: ConfigReader) -> Float8:
    """Read a quantization_config; keys that could change the numbers are read or refused."""
    reader.expect("fmt", "e4m3")
    scale_format = reader.take("scale_fmt", str, "float")
    if scale_format not in ("float", "ue8m0"):
        raise reader.error("scale_fmt", f"is {scale_format!r}, but float and ue8m0 are supported")
    scheme = reader.take("activation_scheme", str, "dynamic")
    if scheme not in ("dynamic", "static"):
        raise reader.error("activation_scheme", f"is {scheme!r}, but must be dynamic or static")
    block = reader.take_optional("weight_block_size", list)
    if block is None:
        return Float8(None, scheme == "dynamic")
    return Float8(read_block(reader, "weight_block_size", block), scheme == "dynamic")


def read_block(reader: ConfigReader, key: str, block: list[object]) -> tuple[int, int]:
    """Rows and columns of a block."""
    sizes = [size for size in block if type(size) is int and size > 0]
    if len(sizes) != 2 or len(block) != 2:
        raise reader.error(key, f"must be two positive integers, not {block}")
    return sizes[0], sizes[1]
