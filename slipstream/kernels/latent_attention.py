"""Latent attention: what its op means."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from slipstream.kernels.pass_inputs import PassInputs


@dataclass(frozen=True, eq=False)
class LatentHeads:
    """One layer of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434).

    Attributes:
        num_heads: H.
        norm_weight: [R], of the norm of a token's latent row.
        eps: of that norm.
        keys: [H, N, R], makes the first N numbers of each head's key of a normed latent row. Rows
            of R are dense, and heads may be apart.
        values: [H, V, R], makes each head's value of it; strides as of `keys`.
        cos_sin: [max_positions, P] float32: P/2 cosines, then P/2 sines. Pair i is made of the
            numbers 2i and 2i + 1.
        scale: of the scores.
        query_scales: [max_positions] float32, that the scores of a row at a position are multiplied
            by as well; None: nothing.
    """

    num_heads: int
    norm_weight: Tensor
    eps: float
    keys: Tensor
    values: Tensor
    cos_sin: Tensor
    scale: float
    query_scales: Tensor | None = None

    @property
    def rank(self) -> int:
        """R."""
        return self.norm_weight.shape[0]

    @property
    def plain_dim(self) -> int:
        """N."""
        return self.keys.shape[1]

    @property
    def rotary_dim(self) -> int:
        """P."""
        return self.cos_sin.shape[1]

    @property
    def value_dim(self) -> int:
        """V."""
        return self.values.shape[1]


class LatentAttentionOp(Protocol):
    """Causal self-attention of ragged rows over a paged cache of one latent row a token.

    queries [T, H (N + P)]: of each head N numbers, then P that are rotated. latents [T, R + P]: R
    that are normed, then P that are rotated, one key part for all heads. Both may be columns of
    wider tensors. Latent rows are normed and rotated and stored at the rows' slots of the cache
    [num_blocks, block_size, R + P]; then a row sees the tokens that `AttendOp` tells, c and r being
    the two parts of what is stored of a token:

        score = scale ((keys^T q_plain) . c + q_rotated . r)
        out = values (sum of softmax(scores) c)

    Returns [T, H V]. This absorbed form reads a token's latent row once for all heads. The plain
    one, score = scale (q_plain . keys c + q_rotated . r), does fewer products where rows are many
    and rounds otherwise: rows of decoding and of verification must be in the same form.
    """

    def __call__(
        self,
        queries: Tensor,
        latents: Tensor,
        heads: LatentHeads,
        inputs: PassInputs,
        cache: Tensor,
    ) -> Tensor: ...
