"""The interface of attention over paged keys and values."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from slipstream.kernels.norm import Norm
from slipstream.kernels.pass_inputs import PassInputs

# In a KV cache of 8 bits, a head of a token has D numbers and their float32 scale. The numbers are
# int8, or e4m3 viewed as uint8, since torch can neither index nor concatenate float8.
INTEGER_PAGES, FLOAT8_PAGES = torch.int8, torch.uint8
SCALE_BYTES = 4


def stored_dim(head_dim: int, pages: torch.dtype) -> int:
    """Size of a head in the cache, in numbers of the dtype `pages`, its scale included."""
    return head_dim + (SCALE_BYTES if pages.itemsize == 1 else 0)


@dataclass(frozen=True, eq=False)
class Heads:
    """The heads of one attention layer.

    Attributes:
        num_heads, num_kv_heads, head_dim: Hq, Hk and D.
        norms: norms of query and key heads, over D; None: there are none.
        cos_sin: [max_positions, R] float32: R/2 cosines, then R/2 sines, for RoPE in the half-split
            layout on the first R numbers of a head; the others are not rotated. R is even and at
            most D.
        scale: factor of attention scores.
        softcap: scaled scores become softcap * tanh(score / softcap); None: no softcap.
        window: sliding window in tokens, the token itself included; None: full attention.
        sinks: [Hq], attention sinks: a logit of each query head that is added to the softmax's
            denominator, unscaled, and has no value.
        gated: each number of the output is multiplied by the sigmoid of a gate.
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

    qkv [T, (Hq + 2 Hk) D]: queries, keys and values, then the gates [T, Hq D] if heads are gated.
    Queries and keys are normed and rotated. Keys and values are written to the rows' slots of the
    caches [num_blocks, block_size, Hk, D]. Then a row at position p attends to the cached tokens
    0..p of its request, or to the last `window` of them. A node of a token tree attends only to its
    ancestors and itself in the tree; `Visibility` has the other exceptions. Returns [T, Hq D].

    A cache of 8 bits is [num_blocks, block_size, Hk, D + SCALE_BYTES]. With int8 each head's D
    numbers are followed by their scale; with e4m3 the numbers of all heads of a token are followed
    by all scales, so that numbers begin at multiples of 16 bytes.
    """

    def __call__(
        self, qkv: Tensor, heads: Heads, inputs: PassInputs, cache: tuple[Tensor, Tensor]
    ) -> Tensor: ...


class StoreOp(Protocol):
    """Writes keys and values of ragged rows to their slots of the cache.

    kv [T, 2 Hk D]: keys, which are normed and rotated like in `AttendOp`, and values. Only
    positions and slots of `inputs` are used.
    """

    def __call__(
        self, kv: Tensor, heads: Heads, inputs: PassInputs, cache: tuple[Tensor, Tensor]
    ) -> None: ...
