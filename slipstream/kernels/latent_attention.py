"""The interface of multi-head latent attention (MLA)."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class LatentHeads:
    """One layer of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434).

    Attributes:
        num_heads: H.
        norm_weight, eps: RMS norm [R] of a token's latent row.
        keys: [H, N, R], projects a normed latent row to the first N numbers of each head's key.
            Only the last dimension must be contiguous.
        values: [H, V, R], projects it to each head's value; strides like `keys`.
        cos_sin: [max_positions, P] float32: P/2 cosines, then P/2 sines, for RoPE in interleaved
            pairs: pair i has the numbers 2i and 2i + 1.
        scale: factor of attention scores.
        query_scales: [max_positions] float32, another factor of the scores of the rows at each
            position; None: 1.
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
        """R, size of a latent row without its rotated part (`kv_lora_rank`)."""
        return self.norm_weight.shape[0]

    @property
    def plain_dim(self) -> int:
        """N, size of a head's part without RoPE (`qk_nope_head_dim`)."""
        return self.keys.shape[1]

    @property
    def rotary_dim(self) -> int:
        """P, size of a head's part with RoPE (`qk_rope_head_dim`)."""
        return self.cos_sin.shape[1]

    @property
    def value_dim(self) -> int:
        """V, size of a value head (`v_head_dim`)."""
        return self.values.shape[1]
