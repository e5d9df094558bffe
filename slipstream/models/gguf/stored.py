"""Matrices in the blocks of GGUF files, as one more way in which checkpoints store them."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.kernels.formats.blocks import BlockMatrix, Blocks
from slipstream.kernels.formats.dense import DenseMatrix
from slipstream.kernels.formats.mxfp4 import Mxfp4Matrix
from slipstream.kernels.formats.weight import Rounding, Weight
from slipstream.models.config_reader import ConfigReader
from slipstream.models.gguf.blocks import BY_NAME, MXFP4, BlockType
from slipstream.models.quantized.module import StoredModule, StoredQuantization

HARMLESS = {"quant_method"}
_TABLE = "model.embed_tokens"  # whose rows are looked up


def _pairs(halves: Tensor) -> Tensor:
    """halves [N, G, 16] uint8, columns i and i + 16 of a group a byte -> [N, 16 G], neighbours."""
    columns = torch.cat((halves & 15, halves >> 4), -1)
    return (columns[..., 0::2] | (columns[..., 1::2] << 4)).flatten(1)


def _mxfp4(raw: Tensor) -> Mxfp4Matrix:
    blocks = raw.view(len(raw), -1, MXFP4.nbytes)
    return Mxfp4Matrix(_pairs(blocks[..., 1:]), blocks[..., 0].contiguous())


def form_of(kind: BlockType, is_table: bool) -> type[Weight]:
    """The class of the matrices that a type's blocks become where a device keeps such."""
    if kind is MXFP4:  # whose rows no class looks up
        return DenseMatrix if is_table else Mxfp4Matrix
    return BlockMatrix if kind.floats is None else DenseMatrix


@dataclass(frozen=True)
class BlockTypes(StoredQuantization):
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
        return form_of(self.types[module], module == _TABLE)

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
        return _mxfp4(raw) if kind is MXFP4 else BlockMatrix((Blocks(raw, kind),))


def read_settings(reader: ConfigReader) -> BlockTypes:
    """Read what `config.py` makes of a file's tensors."""
    return BlockTypes({name: BY_NAME[kind] for name, kind in reader.take("types", dict).items()})
