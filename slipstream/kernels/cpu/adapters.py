"""Low-rank products of LoRA adapters in C++ (`csrc/low_rank.h`); see `kernels/adapters.py`."""

import _slipstream_cpu as cpp
from torch import Tensor

from slipstream.kernels.adapters import Adapted, LowRank
from slipstream.kernels.devices import CPP_DTYPES
from slipstream.kernels.reference import adapters as plain


def add_low_rank(y: Tensor, x: Tensor, adapted: Adapted) -> Tensor:
    """Add the low-rank products of x [T, K] to y [T, N], in place."""
    if x.dtype not in CPP_DTYPES:
        return plain.add_low_rank(y, x, adapted)
    x = x if x.stride(-1) == 1 else x.contiguous()
    cpp.add_low_rank(low_rank_of(adapted.factors), x, adapted.slots.contiguous(), y)
    return y


def low_rank_of(factors: LowRank) -> "cpp.LowRank":
    """The C++ object for these factors, made once."""
    found = factors.packed.get("cpu")
    if not isinstance(found, cpp.LowRank):
        found = factors.packed["cpu"] = cpp.LowRank(factors.down, factors.up, list(factors.ends))
    return found
