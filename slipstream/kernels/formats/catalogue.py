"""All weight formats. To add one, write its file and add it here."""

from typing import Final

from slipstream.kernels.formats.blocks import BlockMatrix
from slipstream.kernels.formats.dense import DenseMatrix
from slipstream.kernels.formats.float8 import Float8Matrix
from slipstream.kernels.formats.float8_blocks import Float8BlockMatrix
from slipstream.kernels.formats.int4 import Int4Matrix
from slipstream.kernels.formats.int8 import Int8Matrix
from slipstream.kernels.formats.mxfp4 import Mxfp4Matrix
from slipstream.kernels.formats.nvfp4 import Nvfp4Matrix
from slipstream.kernels.formats.weight import Weight

FORMATS: Final[tuple[type[Weight], ...]] = (
    DenseMatrix,
    Float8Matrix,
    Float8BlockMatrix,
    Int8Matrix,
    Int4Matrix,
    Mxfp4Matrix,
    Nvfp4Matrix,
    BlockMatrix,
)


def kept_on(device_type: str) -> frozenset[type[Weight]]:
    """The formats of quantised matrices that such a device multiplies in stored form."""
    return frozenset(it for it in FORMATS if device_type in it.kept_on)
