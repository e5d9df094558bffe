"""Multi-head latent attention (MLA): keys and values are computed from one latent row per token."""

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.cache.latent import LatentSpec
from slipstream.cache.spec import LayerCache
from slipstream.kernels.latent_attention import LatentHeads
from slipstream.kernels.norm import SublayerOutput
from slipstream.kernels.ops import Ops
from slipstream.kernels.pass_inputs import PassInputs
from slipstream.kernels.table import LatentParts, Norm
from slipstream.layers.layer import BuildContext, MatrixShape, SublayerInput
from slipstream.layers.linear import Linear, column_linear, row_linear
from slipstream.layers.norm import LayerNorms, rms_norm
from slipstream.layers.parameters import (
    ROWS,
    WHOLE,
    InvalidSizesError,
    Part,
    Share,
    require_positive,
)
from slipstream.layers.rope import RopeConfig

_INNER_EPS = 1e-6  # eps of the norms of latent rows, whatever the model's other norms have


@dataclass(frozen=True, kw_only=True)
class LatentAttentionSpec:
    """Latent attention (DeepSeek-V2, arXiv:2405.04434).

    Attributes:
        rank: size of a latent row, without its rotated part (`kv_lora_rank`).
        plain_dim, rotary_dim: sizes of the parts of a query or key head without and with RoPE; all
            heads share the rotated part of the key.
        value_dim: size of a value head.
        rope: RoPE of the rotated parts, in interleaved pairs.
        query_rank: size of the normed latent row of queries (`q_lora_rank`); None: queries are
            computed from the stream.
        name: name of the module within its layer, in a checkpoint.
    """

    num_heads: int
    rank: int
    plain_dim: int
    rotary_dim: int
    value_dim: int
    rope: RopeConfig
    query_rank: int | None = None
    name: str = "self_attn"

    def __post_init__(self) -> None:
        require_positive(
            num_attention_heads=self.num_heads,
            kv_lora_rank=self.rank,
            qk_nope_head_dim=self.plain_dim,
            qk_rope_head_dim=self.rotary_dim,
            v_head_dim=self.value_dim,
        )
        if self.query_rank is not None:
            require_positive(q_lora_rank=self.query_rank)
        if self.rotary_dim % 2:
            raise InvalidSizesError(f'"qk_rope_head_dim" must be even, not {self.rotary_dim}')
        self.rope.require_fit(self.rotary_dim)

    @property
    def query_rows(self) -> int:
        return self.num_heads * (self.plain_dim + self.rotary_dim)

    @property
    def latent_rows(self) -> int:
        """The numbers of a token in the cache."""
        return self.rank + self.rotary_dim

    @property
    def expanded_rows(self) -> int:
        """Number of rows of the matrix that computes keys and values from latent rows."""
        return self.num_heads * (self.plain_dim + self.value_dim)

    def matrices(self, norms: LayerNorms, width: int) -> tuple[MatrixShape, ...]:
        of_values = self.num_heads * self.value_dim
        shapes = [(self.latent_rows, width), (self.expanded_rows, self.rank), (width, of_values)]
        if self.query_rank is None:
            return (*shapes, (self.query_rows, width))
        return (*shapes, (self.query_rank, width), (self.query_rows, self.query_rank))

    def numbers_per_row(self, width: int) -> int:
        of_heads = 2 * (self.latent_rows + self.rank) + self.value_dim
        first = 2 * (self.query_rank or 0) + self.latent_rows
        return first + self.query_rows + self.num_heads * of_heads

    def cache(self, dtype: torch.dtype, share: Share = WHOLE) -> LatentSpec:
        del share  # replicated: every rank needs whole latent rows for its heads
        return LatentSpec(self.latent_rows, dtype)

    def build(self, context: BuildContext, layer: str, norms: LayerNorms) -> "LatentAttention":
        return LatentAttention(self, context, layer, norms)


class LatentAttention:
    """The mixer. One stacked matrix computes latent rows, and queries or their latent rows."""

    def __init__(
        self, spec: LatentAttentionSpec, context: BuildContext, layer: str, norms: LayerNorms
    ) -> None:
        source, name, width = context.source, f"{layer}.{spec.name}", context.width
        share = context.share
        assert norms.mixer is not None, "latent attention reads a normed stream"
        self.norm = rms_norm(source, f"{layer}.{norms.mixer}", width, norms.eps)
        self._query_norm: Norm | None = None
        self._queries: Linear | None = None
        latents = Part(f"{name}.kv_a_proj_with_mqa.weight", spec.latent_rows)
        if spec.query_rank is None:
            of_queries = Part(f"{name}.q_proj.weight", spec.query_rows, ROWS)
        else:
            rank = spec.query_rank
            of_queries = Part(f"{name}.q_a_proj.weight", rank)
            self._query_norm = rms_norm(source, f"{name}.q_a_layernorm", rank, _INNER_EPS)
            parts = [Part(f"{name}.q_b_proj", spec.query_rows)]
            self._queries = column_linear(source, parts, rank, bias=False)
        self._first = source.matrix([of_queries, latents], width)
        self._columns = (self._first.shape[0] - spec.latent_rows, spec.latent_rows)
        self.heads = _heads(spec, context, name)
        columns = spec.num_heads * spec.value_dim
        self.output = row_linear(source, f"{name}.o_proj", width, columns, False, share)

    @property
    def parts(self) -> object:
        if self.output.is_shared:
            return self
        queries = None if self._queries is None else self._queries.product
        first = self._first, None
        return LatentParts(
            self.norm, self.heads, first, self._query_norm, queries, self.output.product
        )

    def apply(
        self, ops: Ops, entering: SublayerInput, inputs: PassInputs, cache: LayerCache
    ) -> tuple[SublayerOutput, Tensor]:
        """See `Mixer`; writes the tokens' latent rows to `cache`."""
        addend, residual, second = entering
        assert second is None, "only attention over keys and values has a second input"
        first, stream = ops.norm_linear(addend, residual, self.norm, self._first, None)
        queries, latents = first.split_with_sizes(self._columns, -1)
        if self._queries is not None:
            queries = ops.joined_linear([(queries, self._query_norm)], *self._queries.product)
        mixed = ops.latent_attention(queries, latents, self.heads, inputs, cache)
        return self.output.apply(ops, mixed, inputs), stream


def _heads(spec: LatentAttentionSpec, context: BuildContext, name: str) -> LatentHeads:
    """The op's view of the layer, with this rank's heads."""
    num_heads = context.share.of(spec.num_heads, "num_attention_heads")
    part = Part(f"{name}.kv_b_proj.weight", spec.expanded_rows, ROWS)
    expanded = context.source.table([part], spec.rank).values.view(num_heads, -1, spec.rank)
    norm = rms_norm(context.source, f"{name}.kv_a_layernorm", spec.rank, _INNER_EPS)
    return LatentHeads(
        num_heads=num_heads,
        norm_weight=norm.weight,
        eps=norm.eps,
        keys=expanded[:, : spec.plain_dim],
        values=expanded[:, spec.plain_dim :],
        cos_sin=context.ropes.table(spec.rope, spec.rotary_dim),
        query_scales=context.ropes.query_scales(spec.rope),
        scale=(spec.plain_dim + spec.rotary_dim) ** -0.5 * spec.rope.score_factor,
    )
