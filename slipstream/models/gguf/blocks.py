"""The tensor types of GGUF files: block formats, and how blocks are dequantised.

Every row is a whole number of blocks. Source: https://github.com/ggml-org/llama.cpp, the structs
`block_*` of `ggml/src/ggml-common.h`, from which names and layouts are taken; little endian.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from slipstream.kernels.formats.blocks import BlockMatrix, Blocks
from slipstream.kernels.formats.dense import DenseMatrix
from slipstream.kernels.formats.float4 import MAGNITUDES
from slipstream.kernels.formats.mxfp4 import Mxfp4Matrix
from slipstream.kernels.formats.weight import Rounding, Weight
from slipstream.models.config_reader import ConfigReader
from slipstream.models.quantized.module import (
    StoredForm,
    StoredModule,
    StoredQuantization,
    Tensors,
)

_NIBBLES = 16  # bytes of 32 numbers with 4 bits each
_K = 256  # numbers in a block of the K types
_HALF_EXPONENT = 0x7C  # exponent bits in a float16's upper byte; all set for NaN and infinity
_SLICE = 1 << 22  # how many numbers are dequantised to float32 at a time


@dataclass(frozen=True)
class GgufType:
    """A tensor type.

    Attributes:
        number: id of the type in files.
        numbers: how many numbers a block has.
        nbytes: size of a block in bytes.
        decode: blocks [B, nbytes] uint8 -> [B, numbers] float32, bit for bit as llama.cpp does.
        floats: dtype of an unquantised type, whose blocks have one number; None if quantised.
        scales: byte offsets of float16 numbers in a block.
    """

    name: str
    number: int
    numbers: int
    nbytes: int
    decode: Callable[[Tensor], Tensor]
    floats: torch.dtype | None = None
    scales: tuple[int, ...] = ()

    @property
    def bits(self) -> float:
        """Bits per number, scales included."""
        return 8 * self.nbytes / self.numbers

    def row_bytes(self, columns: int) -> int:
        """Size in bytes of a row of `columns` numbers, which must be whole blocks."""
        return columns // self.numbers * self.nbytes

    def columns(self, row_bytes: int) -> int:
        """Number of columns of a row of `row_bytes`."""
        return row_bytes // self.nbytes * self.numbers

    def is_finite(self, raw: Tensor) -> bool:
        """Whether all scales in raw [N, bytes of a row] uint8, of a quantised type, are finite."""
        blocks = raw.view(-1, self.nbytes)
        if not self.scales:  # MXFP4: an e8m0 scale, in which 255 is NaN
            return not bool((blocks[:, 0] == 255).any())
        ends = (blocks[:, place + 1] & _HALF_EXPONENT for place in self.scales)
        return not any(bool((end == _HALF_EXPONENT).any()) for end in ends)

    def dequantised(self, raw: Tensor) -> Tensor:
        """Dequantise raw [N, bytes of a row] uint8 -> [N, K] float32."""
        rows, row_bytes = raw.shape
        out = torch.empty((rows, self.columns(row_bytes)), dtype=torch.float32, device=raw.device)
        step = max(1, _SLICE // max(1, out.shape[1]))
        for start in range(0, rows, step):
            some = raw[start : start + step]
            out[start : start + step] = self.decode(some.reshape(-1, self.nbytes)).view(
                len(some), -1
            )
        return out


def _half(blocks: Tensor, place: int) -> Tensor:
    """Read the float16 number of each block at byte `place`, [B, 1] float32."""
    return blocks[:, place : place + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """[..., n] uint8 -> [..., 2 n] uint8: the lower halves of all bytes, then the upper halves."""
    return torch.cat((packed & 15, packed >> 4), -1)


def _fifth_bits(blocks: Tensor, place: int) -> Tensor:
    """[B, 32] uint8: bit i of the 32-bit word at byte `place`, times 16."""
    bits = blocks[:, place : place + 4].unsqueeze(-1) >> torch.arange(8, device=blocks.device)
    return (bits & 1).flatten(1).to(torch.uint8) << 4


def _q4_0(blocks: Tensor) -> Tensor:
    return (_nibbles(blocks[:, 2:]).float() - 8) * _half(blocks, 0)


def _q4_1(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 4:]).float() * _half(blocks, 0) + _half(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    values = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)
    return (values.float() - 16) * _half(blocks, 0)


def _q5_1(blocks: Tensor) -> Tensor:
    values = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)
    return values.float() * _half(blocks, 0) + _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].contiguous().view(torch.int8).float() * _half(blocks, 0)


def k_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack [B, 12] uint8 of Q4_K or Q5_K to (scales, minima) of the eight groups of 32, each
    [B, 8] uint8 with 6 bits."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), 1)
    minima = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), 1)
    return scales, minima


def _scaled_with_minima(blocks: Tensor, values: Tensor) -> Tensor:
    """Apply the scales and minima in the first 16 bytes of Q4_K or Q5_K to values [B, 8, 32]."""
    scales, minima = k_scales(blocks[:, 4:16])
    scale, minimum = _half(blocks, 0) * scales.float(), _half(blocks, 2) * minima.float()
    numbers = scale.unsqueeze(-1) * values.float() - minimum.unsqueeze(-1)
    return numbers.flatten(1)


def _q4_k(blocks: Tensor) -> Tensor:
    return _scaled_with_minima(blocks, _nibbles(blocks[:, 16:].view(-1, 4, 32)).view(-1, 8, 32))


def _q5_k(blocks: Tensor) -> Tensor:
    lower = _nibbles(blocks[:, 48:].view(-1, 4, 32)).view(-1, 8, 32)
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device).view(8, 1)
    upper = (blocks[:, 16:48].unsqueeze(1) >> shifts) & 1
    return _scaled_with_minima(blocks, lower | (upper << 4))


def _q6_k(blocks: Tensor) -> Tensor:
    # In each half of 128, numbers 0 to 63 are in the lower halves of bytes, others in the upper.
    lower = _nibbles(blocks[:, :128].view(-1, 2, 64)).view(-1, 2, 4, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=blocks.device).view(4, 1)
    upper = (blocks[:, 128:192].view(-1, 2, 1, 32) >> shifts) & 3
    values = (lower | (upper << 4)).float() - 32
    scales = _half(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8).float()
    return (values.view(-1, 16, 16) * scales.unsqueeze(-1)).flatten(1)


def _mxfp4(blocks: Tensor) -> Tensor:
    magnitudes = torch.tensor(MAGNITUDES, device=blocks.device)
    table = torch.cat([magnitudes, -magnitudes])
    powers = blocks[:, :1].contiguous().view(torch.float8_e8m0fnu).float()
    return table[_nibbles(blocks[:, 1:]).long()] * powers


def _floats(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda blocks: blocks.contiguous().view(dtype).float()


def _plain(name: str, number: int, dtype: torch.dtype) -> GgufType:
    return GgufType(name, number, 1, dtype.itemsize, _floats(dtype), dtype)


F32: Final = _plain("F32", 0, torch.float32)
F16: Final = _plain("F16", 1, torch.float16)
BF16: Final = _plain("BF16", 30, torch.bfloat16)
Q4_0: Final = GgufType("Q4_0", 2, 32, 2 + _NIBBLES, _q4_0, scales=(0,))
Q4_1: Final = GgufType("Q4_1", 3, 32, 4 + _NIBBLES, _q4_1, scales=(0, 2))
Q5_0: Final = GgufType("Q5_0", 6, 32, 6 + _NIBBLES, _q5_0, scales=(0,))
Q5_1: Final = GgufType("Q5_1", 7, 32, 8 + _NIBBLES, _q5_1, scales=(0, 2))
Q8_0: Final = GgufType("Q8_0", 8, 32, 34, _q8_0, scales=(0,))
Q4_K: Final = GgufType("Q4_K", 12, _K, 144, _q4_k, scales=(0, 2))
Q5_K: Final = GgufType("Q5_K", 13, _K, 176, _q5_k, scales=(0, 2))
Q6_K: Final = GgufType("Q6_K", 14, _K, 210, _q6_k, scales=(208,))
MXFP4: Final = GgufType("MXFP4", 39, 32, 1 + _NIBBLES, _mxfp4)

BLOCK_TYPES: Final = {
    kind.number: kind
    for kind in (F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, MXFP4)
}
"""The types that are read, by their numbers in files."""
BY_NAME: Final = {kind.name: kind for kind in BLOCK_TYPES.values()}

OTHER_TYPES: Final = {
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    40: "NVFP4",
    41: "Q1_0",
    42: "Q2_0",
}
"""Names of types that are not read, for messages."""


HARMLESS = {"quant_method"}
_TABLE = "model.embed_tokens"


def _pairs(halves: Tensor) -> Tensor:
    """Repack nibbles: halves [N, G, 16] uint8, in which a byte has columns i and i + 16 of a group,
    -> [N, 16 G], in which it has neighbouring columns."""
    columns = torch.cat((halves & 15, halves >> 4), -1)
    return (columns[..., 0::2] | (columns[..., 1::2] << 4)).flatten(1)


def _as_mxfp4(raw: Tensor) -> Mxfp4Matrix:
    blocks = raw.view(len(raw), -1, MXFP4.nbytes)
    return Mxfp4Matrix(_pairs(blocks[..., 1:]), blocks[..., 0].contiguous())


@dataclass(frozen=True)
class BlockForm(StoredForm):
    """A matrix of blocks; `is_table`: its rows must be looked up."""

    block: GgufType
    is_table: bool

    @property
    def bits(self) -> int:  # type: ignore[override]
        return int(self.block.bits)

    @property
    def words(self) -> str:
        return self.block.name

    @property
    def kind(self) -> type[Weight]:
        if self.block is MXFP4:  # no class supports looking up its rows
            return DenseMatrix if self.is_table else Mxfp4Matrix
        return BlockMatrix if self.block.floats is None else DenseMatrix

    def count(self, nbytes: int) -> int:
        return self.block.columns(nbytes)

    def unit(self, columns: int) -> int:
        return self.block.numbers

    def tensors(self, module: StoredModule, rows: int, columns: int) -> Tensors:
        module.require_groups(columns, self.block.numbers)
        shape = rows, self.block.row_bytes(columns)
        return {"weight": module.take("weight", (torch.uint8,), shape)}

    def matrix(self, module: StoredModule, found: Tensors, rows: int, columns: int) -> Weight:
        kind, raw = self.block, found["weight"]
        if not kind.is_finite(raw):
            raise module.error(
                f"holds NaN or infinity in {module.full_name('weight')}, so no text can be made "
                "with it; copy or download the file again"
            )
        return _as_mxfp4(raw) if kind is MXFP4 else BlockMatrix((Blocks(raw, kind),))


@dataclass(frozen=True)
class BlockTypes(StoredQuantization):
    """The types of a file's quantised modules, by module name."""

    types: Mapping[str, GgufType]

    name = "GGUF"
    becomes_floats = True

    @property
    def description(self) -> str:
        return f"GGUF, {', '.join(sorted({form.words for form in self.forms}))}"

    @property
    def forms(self) -> list[BlockForm]:
        return [BlockForm(kind, module == _TABLE) for module, kind in self.types.items()]

    def form_of(self, module: str) -> BlockForm | None:
        kind = self.types.get(module)
        return None if kind is None else BlockForm(kind, module == _TABLE)

    def rounding(self, module: str) -> Rounding | None:
        """None: random weights are not quantised."""
        return None


def read_settings(reader: ConfigReader) -> BlockTypes:
    """Read the types that `config.py` collects from a file's tensors."""
    return BlockTypes({name: BY_NAME[kind] for name, kind in reader.take("types", dict).items()})
