"""Matrices in the blocks of GGUF files, as one more way in which checkpoints store them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

import torch
from torch import Tensor

from slipstream.core.errors import UsageError
from slipstream.kernels.formats.int4 import Int4Matrix
from slipstream.kernels.formats.mxfp4 import Mxfp4Matrix
from slipstream.kernels.formats.weight import Rounding, Weight, chosen_rows, joined_rows
from slipstream.models.config_reader import ConfigReader
from slipstream.models.gguf.blocks import BY_NAME, MXFP4, Q4_0, BlockType
from slipstream.models.quantized.module import StoredModule, StoredQuantization

HARMLESS = {"quant_method"}
_TABLE = "model.embed_tokens"  # whose rows are looked up


@dataclass(frozen=True, eq=False)
class BlockMatrix(Weight):
    """A weight [N, K] as a file has it, which is nowhere multiplied by: it becomes floats.

    Attributes:
        raw: [N, bytes of a row] uint8.
    """

    raw: Tensor
    type: BlockType

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.raw), self.type.columns(self.raw.shape[1])

    @property
    def nbytes(self) -> int:
        return self.raw.nbytes

    def select(self, index: Tensor) -> Self:
        return self._with(chosen_rows(self.raw, index))

    def rows(self, start: int, stop: int | None = None) -> Self:
        return self._with(self.raw[start:stop])

    def columns(self, start: int, stop: int) -> Self:
        if start % self.type.numbers or stop % self.type.numbers:
            raise UsageError(
                f"{self.type.name} weights cannot be cut between columns {start} and {stop}; use a "
                "number of ranks whose shares are whole blocks"
            )
        place = slice(self.type.row_bytes(start), self.type.row_bytes(stop))
        return self._with(self.raw[:, place].contiguous())

    @classmethod
    def stack(cls, weights: Sequence[Self]) -> Self | None:
        first = weights[0]
        if any(weight.type is not first.type for weight in weights):
            return None
        return first._with(joined_rows([weight.raw for weight in weights]))

    def to(self, device: torch.device) -> Self:
        return self._with(self.raw.to(device))

    def dequantised(self) -> Tensor:
        return self.type.dequantised(self.raw)

    def _with(self, raw: Tensor) -> Self:
        return type(self)(raw, self.type)


@dataclass(frozen=True)
class Packing:
    """What kernels multiply by in the place of blocks of a type, with the numbers that these have.

    Attributes:
        kind: its class, one of those that devices keep (`KEPT_FORMATS`).
        pack: of the raw bytes [N, bytes of a row] uint8, whose scales are finite.
    """

    kind: type[Weight]
    pack: Callable[[Tensor], Weight]


def _pairs(halves: Tensor) -> Tensor:
    """halves [N, G, 16] uint8, columns i and i + 16 of a group a byte -> [N, 16 G], neighbours."""
    columns = torch.cat((halves & 15, halves >> 4), -1)
    return (columns[..., 0::2] | (columns[..., 1::2] << 4)).flatten(1)


def _q4_0(raw: Tensor) -> Int4Matrix:
    blocks = raw.view(len(raw), -1, Q4_0.nbytes)
    scales = blocks[..., :2].contiguous().view(torch.float16).squeeze(-1).float()
    return Int4Matrix(_pairs(blocks[..., 2:]), scales, None, Q4_0.numbers)


def _mxfp4(raw: Tensor) -> Mxfp4Matrix:
    blocks = raw.view(len(raw), -1, MXFP4.nbytes)
    return Mxfp4Matrix(_pairs(blocks[..., 1:]), blocks[..., 0].contiguous())


PACKED: Final[Mapping[str, Packing]] = {
    "MXFP4": Packing(Mxfp4Matrix, _mxfp4),
    "Q4_0": Packing(Int4Matrix, _q4_0),
}
"""By the name of the type; blocks of others become floats."""


@dataclass(frozen=True)
class Blocks(StoredQuantization):
    """The types of the modules of one file.

    Attributes:
        types: by the module's name.
    """

    types: Mapping[str, BlockType]

    becomes_floats = True

    @property
    def description(self) -> str:
        names = sorted({kind.name for kind in self.types.values()})
        return f"GGUF, {', '.join(names)}"

    @property
    def kinds(self) -> frozenset[type[Weight]]:
        return frozenset(map(self.kind, self.types))

    def bits(self, module: str) -> int:
        return int(self.types[module].bits)

    def count(self, module: str, nbytes: int) -> int:
        return self.types[module].columns(nbytes)

    def kind(self, module: str) -> type[Weight]:
        packing = PACKED.get(self.types[module].name) if module != _TABLE else None
        return BlockMatrix if packing is None else packing.kind

    def rounding(self, module: str) -> Rounding | None:
        """None: random weights are not rounded."""
        del module
        return None

    def read(self, module: StoredModule, rows: int, columns: int) -> Weight:
        kind = self.types[module.name]
        module.require_groups(columns, kind.numbers)
        shape = (rows, kind.row_bytes(columns))
        raw = module.take("weight", (torch.uint8,), shape)
        if not kind.is_finite(raw):
            raise module.error(
                f"holds NaN or infinity in {module.full_name('weight')}, so no text can be made "
                "with it; copy or download the file again"
            )
        packing = PACKED.get(kind.name) if module.name != _TABLE else None
        return BlockMatrix(raw, kind) if packing is None else packing.pack(raw)


def read_settings(reader: ConfigReader) -> Blocks:
    """Read what `config.py` makes of a file's tensors."""
    return Blocks({name: BY_NAME[kind] for name, kind in reader.take("types", dict).items()})
