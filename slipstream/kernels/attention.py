"""The interface of attention over paged keys and values."""

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.kernels.norm import Norm

# In a KV cache of 8 bits, a head of a token has D numbers and their float32 scale. The numbers are
# int8, or e4m3 viewed as uint8, since torch can neither index nor concatenate float8.
INTEGER_PAGES, FLOAT8_PAGES = torch.int8, torch.uint8
SCALE_BYTES = 4


def stored_dim(head_dim: int, pages: torch.dtype) -> int:
    """Size of a head in the cache, in numbers of the dtype `pages`, its scale included."""
    return head_dim + (SCALE_BYTES if pages.itemsize == 1 else 0)


QueryKeyNorms = tuple[Tensor, Tensor, float]


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


def gated(out: Tensor, qkv: Tensor, heads: Heads) -> Tensor:
    """The output of attention [T, Hq D], multiplied by the sigmoid of its gates if it has some."""
    if not heads.gated:
        return out
    gates = qkv[:, -out.shape[1] :]
    return (out.float() * gates.float().sigmoid()).to(out.dtype)


def split_heads(qkv: Tensor, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """Views: queries [T, Hq, D], keys and values [T, Hk, D]; omits gates, which follow them."""
    sizes = [count * heads.head_dim for count in (heads.num_heads, *[heads.num_kv_heads] * 2)]
    query, key, value = (
        part.view(len(qkv), -1, heads.head_dim)
        for part in torch.split(qkv[:, : sum(sizes)], sizes, -1)
    )
    return query, key, value


def query_key_norms(heads: Heads) -> QueryKeyNorms | None:
    """(query weight, key weight, eps), as `Ops.rotate_and_store` takes them."""
    if heads.norms is None:
        return None
    query, key = heads.norms
    return query.weight, key.weight, query.eps
