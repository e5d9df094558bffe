"""Norms, and the norms of a decoder layer."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.kernels.table import Norm, PostNorm
from slipstream.layers.parameters import ParameterSource, Part, require_positive


@dataclass(frozen=True)
class LayerNorms:
    """The norms before and after the sublayers of a layer, by their names in a checkpoint.

    Attributes:
        eps: eps of these norms and of the norms of query and key heads.
        mixer, feed_forward: before the sublayers; None: no norm, the sublayer reads the stream.
        post_mixer, post_feed_forward: of a sublayer's output, before it is added to the stream.
        layer_norms: all of them are layer norms with a bias.
        zero_centred: checkpoints store the weight minus 1, also for norms of heads.
        second_norm: of the mixer's second input, as wide as the stream; None: it has one input.
        keeps_normed: the output of the mixer's norm replaces the stream.
        scalar: a tensor [1] that multiplies the layer's output stream; None: there is none.
    """

    eps: float
    mixer: str | None = "input_layernorm"
    feed_forward: str | None = "post_attention_layernorm"
    post_mixer: str | None = None
    post_feed_forward: str | None = None
    layer_norms: bool = False
    zero_centred: bool = False
    second_norm: str | None = None
    keeps_normed: bool = False
    scalar: str | None = None

    def __post_init__(self) -> None:
        require_positive(rms_norm_eps=self.eps)

    def load(
        self,
        source: ParameterSource,
        name: str,
        width: int,
        heads: int | None = None,
        split: int | None = None,
    ) -> Norm:
        """Load a norm of this kind over `width` numbers.

        Args:
            heads, split: how its weight is split over ranks; see `Part`.
        """
        offset = 1.0 if self.zero_centred else 0.0
        part = Part(f"{name}.weight", width, split, offset=offset, heads=heads)
        norm = Norm(source.vector([part]), self.eps)
        if not self.layer_norms:
            return norm
        return replace(norm, bias=source.vector([Part(f"{name}.bias", width)]))

    def load_optional(
        self, source: ParameterSource, layer: str, name: str | None, width: int
    ) -> Norm | None:
        return None if name is None else self.load(source, f"{layer}.{name}", width)

    def mixer_post_norm(self, source: ParameterSource, layer: str, width: int) -> PostNorm | None:
        """How the mixer's output is added to the stream; None: as it is."""
        norm = self.load_optional(source, layer, self.post_mixer, width)
        return None if norm is None else PostNorm(norm)

    def feed_forward_post_norm(
        self, source: ParameterSource, layer: str, width: int
    ) -> PostNorm | None:
        """How the feed-forward part's output is added to the stream; None: as it is."""
        norm = self.load_optional(source, layer, self.post_feed_forward, width)
        if self.scalar is None:
            return None if norm is None else PostNorm(norm)
        return PostNorm(norm, source.vector([Part(f"{layer}.{self.scalar}", 1)]))


def rms_norm(source: ParameterSource, name: str, width: int, eps: float) -> Norm:
    """Load the norm over `width` numbers whose weight is called `name`."""
    return Norm(source.vector([Part(f"{name}.weight", width)]), eps)


@dataclass(frozen=True)
class JointNorms:
    """RMS norms over all query heads, and over all key heads, which are split over ranks.

    Attributes:
        norms: the norms, with this rank's share of their weights.
        rows: the number of rows that squares are summed over, on all ranks together.
        reduce: all-reduce (sum) of two floats per token.
    """

    norms: tuple[Norm, Norm]
    rows: tuple[int, int]
    reduce: Callable[[Tensor], Tensor]

    def __call__(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Norm queries and keys, [T, n] each."""
        given = query, key
        sums = self.reduce(torch.stack([it.float().square().sum(-1) for it in given], -1))
        query, key = (
            (x.float() * torch.rsqrt(total / rows + norm.eps).unsqueeze(-1)).to(x.dtype)
            * norm.weight
            for x, total, rows, norm in zip(
                given, sums.unbind(-1), self.rows, self.norms, strict=True
            )
        )
        return query, key
