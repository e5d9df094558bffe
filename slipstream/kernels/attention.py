"""Attention over paged keys and values: what the op means."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from slipstream.kernels.norm import Norm
from slipstream.kernels.pass_inputs import PassInputs

SCALE_BYTES = 4  # of an int8 cache: a head of a token is D numbers and a float32, their scale


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
    A cache of int8 is [num_blocks, block_size, Hk, D + SCALE_BYTES]: D numbers, then their scale.
    Returns [T, Hq D].
    """

    def __call__(
        self,
        qkv: Tensor,
        heads: Heads,
        inputs: PassInputs,
        cache: tuple[Tensor, Tensor],
    ) -> Tensor: ...


class StoreOp(Protocol):
    """Keys and values of ragged rows to their slots, for others to see.

    kv [T, 2 Hk D]: keys, which are normed and rotated as `AttendOp` does it, and values. Of
    `inputs` only positions and slots count.
    """

    def __call__(
        self,
        kv: Tensor,
        heads: Heads,
        inputs: PassInputs,
        cache: tuple[Tensor, Tensor],
    ) -> None: ...
