"""Attention over paged keys and values: what the op means."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from slipstream.kernels.norm import Norm
from slipstream.kernels.pass_inputs import PassInputs

# Of a cache of 8 bits a head of a token is D numbers and a float32, their scale. Numbers are int8,
# or e4m3 as bytes, since torch can neither choose nor join rows of float8.
INTEGER_PAGES, FLOAT8_PAGES = torch.int8, torch.uint8
SCALE_BYTES = 4


def stored_dim(head_dim: int, pages: torch.dtype) -> int:
    """Numbers of a head in pages of this dtype, its scale included."""
    return head_dim + (SCALE_BYTES if pages.itemsize == 1 else 0)


@dataclass(frozen=True, eq=False)
class Heads:
    """One attention layer.

    Attributes:
        num_heads, num_kv_heads, head_dim: Hq, Hk and D.
        norms: of queries and keys, over D; None where there are none.
        cos_sin: [max_positions, R] float32: R/2 cosines, then R/2 sines, for the half-split layout
            of the first R numbers of a head; those behind them are not rotated. R is even and at
            most D.
        scale: of the scores.
        softcap: scaled scores become softcap * tanh(score / softcap); None leaves them.
        window: tokens a row sees, itself included; None sees all.
        sinks: [Hq], a score of each query head that takes part in the softmax, as it is, and has no
            value.
        gated: what comes out is multiplied by the sigmoid of a gate for each of its numbers.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    norms: tuple[Norm, Norm] | None
    cos_sin: Tensor
    scale: float
    window: int | None
    sinks: Tensor | None = None
    gated: bool = False
    softcap: float | None = None

    @property
    def rotary_dim(self) -> int:
        """R of `cos_sin`."""
        return self.cos_sin.shape[1]


class AttendOp(Protocol):
    """Causal self-attention of ragged rows over paged keys and values.

    qkv [T, (Hq + 2 Hk) D]: queries, keys, values, and behind them the gates, [T, Hq D], of heads
    that are gated. Queries and keys are normed and rotated, keys and
    values stored at the rows' slots of the caches [num_blocks, block_size, Hk, D]; then a row at
    position p sees the cached tokens 0..p of its request, or the last `window` of them; of those of
    a tree, its ancestors and itself; where `inputs` is not causal, those behind p as well.
    A cache of 8 bits is [num_blocks, block_size, Hk, D + SCALE_BYTES]: of int8 a head's D numbers,
    then their scale; of e4m3 the numbers of all heads of a token, then all their scales, so that
    numbers begin at whole words of 16 bytes.
    Returns [T, Hq D].
    """

    def __call__(
        self, qkv: Tensor, heads: Heads, inputs: PassInputs, cache: tuple[Tensor, Tensor]
    ) -> Tensor: ...


class StoreOp(Protocol):
    """Keys and values of ragged rows to their slots, for others to see.

    kv [T, 2 Hk D]: keys, which are normed and rotated as `AttendOp` does it, and values. Of
    `inputs` only positions and slots count.
    """

    def __call__(
        self, kv: Tensor, heads: Heads, inputs: PassInputs, cache: tuple[Tensor, Tensor]
    ) -> None: ...
