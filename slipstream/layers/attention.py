"""Self-attention over a paged cache of keys and values."""

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.cache.paged import KVSpec
from slipstream.cache.spec import LayerCache
from slipstream.kernels.pass_inputs import PassInputs
from slipstream.kernels.table import AttentionParts, Heads, Norm, Ops
from slipstream.layers.layer import BuildContext, MatrixShape
from slipstream.layers.linear import column_linear, row_linear
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


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Grouped-query attention with rotary embeddings.

    Attributes:
        rope: how queries and keys are rotated.
        window: tokens that a row sees, itself included; None sees all.
        qkv_bias: of the query, key and value projections.
        output_bias: of the output projection.
        qk_norm: query and key heads are normed, each with a weight [head_dim], before they are
            rotated.
        sinks: a score per query head takes part in the softmax and has no value.
        name: of the module within its layer, in a checkpoint.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    window: int | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    sinks: bool = False
    name: str = "self_attn"

    def __post_init__(self) -> None:
        require_positive(
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            head_dim=self.head_dim,
        )
        if self.num_heads % self.num_kv_heads:
            raise InvalidSizesError(
                f'"num_attention_heads" ({self.num_heads}) must be a multiple of '
                f'"num_key_value_heads" ({self.num_kv_heads})'
            )
        if self.head_dim % 2:
            raise InvalidSizesError(f'"head_dim" must be even to be rotated, not {self.head_dim}')
        rotated = self.rope.rotary_dim(self.head_dim)
        if rotated % 2 or not rotated:
            raise InvalidSizesError(
                f'"partial_rotary_factor" ({self.rope.rotated}) must leave an even number of '
                f'"head_dim" ({self.head_dim}) to be rotated'
            )
        self.rope.require_fit(self.head_dim)
        if self.window is not None:
            require_positive(sliding_window=self.window)

    @property
    def query_rows(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        """Rows of the keys' projection; the values' has as many."""
        return self.num_kv_heads * self.head_dim

    def matrices(self, norms: LayerNorms, width: int) -> tuple[MatrixShape, ...]:
        columns = width if norms.beside is None else 2 * width
        return (self.query_rows + 2 * self.kv_rows, columns), (width, self.query_rows)

    def numbers_per_row(self, width: int) -> int:
        del width
        return 3 * self.query_rows + 4 * self.kv_rows

    def cache(self, dtype: torch.dtype, share: Share = WHOLE) -> KVSpec:
        num_kv_heads = share.of(self.num_kv_heads, "num_key_value_heads")
        return KVSpec(num_kv_heads, self.head_dim, dtype, self.window)

    def build(self, context: BuildContext, layer: str, norms: LayerNorms) -> "Attention":
        return Attention(self, context, layer, norms)


class Attention:
    """Query, key and value projections stacked into one matrix, attention, output projection."""

    def __init__(
        self, spec: AttentionSpec, context: BuildContext, layer: str, norms: LayerNorms
    ) -> None:
        source, name, width, eps = context.source, f"{layer}.{spec.name}", context.width, norms.eps
        beside: Norm | None = None
        if norms.beside is not None:
            beside = rms_norm(source, f"{layer}.{norms.beside}", width, eps)
        self.norm: Norm | None = None
        if norms.mixer is not None:
            self.norm = rms_norm(source, f"{layer}.{norms.mixer}", width, eps)
        share = context.share
        num_heads = share.of(spec.num_heads, "num_attention_heads")
        num_kv_heads = share.of(spec.num_kv_heads, "num_key_value_heads")
        parts = [
            Part(f"{name}.q_proj", spec.query_rows),
            Part(f"{name}.k_proj", spec.kv_rows),
            Part(f"{name}.v_proj", spec.kv_rows),
        ]
        columns = spec.matrices(norms, width)[0][1]
        self.qkv = column_linear(source, parts, columns, spec.qkv_bias)
        self.output = row_linear(
            source, f"{name}.o_proj", width, spec.query_rows, spec.output_bias, share
        )
        head_norms: tuple[Norm, Norm] | None = None
        if spec.qk_norm:
            head_norms = (
                rms_norm(source, f"{name}.q_norm", spec.head_dim, eps),
                rms_norm(source, f"{name}.k_norm", spec.head_dim, eps),
            )
        self.heads = Heads(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=spec.head_dim,
            norms=head_norms,
            cos_sin=context.ropes.table(spec.rope, spec.head_dim),
            scale=spec.head_dim**-0.5,
            window=spec.window,
            sinks=source.vector([Part(f"{name}.sinks", spec.num_heads, ROWS)])
            if spec.sinks
            else None,
        )
        self._parts = AttentionParts(
            norm=self.norm,
            heads=self.heads,
            qkv=self.qkv.product,
            output=self.output.product,
            beside=beside,
            keeps_normed=norms.keeps_normed,
        )

    @property
    def parts(self) -> object:
        return self._parts if self.output.reduce is None else self

    def apply(
        self,
        ops: Ops,
        addend: Tensor,
        residual: Tensor | None,
        inputs: PassInputs,
        cache: LayerCache,
        beside: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `Mixer`; keys and values of the rows are written into `cache`."""
        if residual is None and self._parts.needs_sources:
            qkv, stream = self._first_qkv(ops, addend, beside)
        else:
            assert self.norm is not None, "only where a stream begins is it read without a norm"
            qkv, stream = ops.norm_linear(addend, residual, self.norm, *self.qkv.product)
        mixed = ops.attend(qkv, self.heads, inputs.seen_through(self.heads.window), cache)
        return self.output.apply(ops, mixed), stream

    def store(self, ops: Ops, x: Tensor, inputs: PassInputs, cache: LayerCache) -> None:
        """Store keys and values of rows x [T, columns] in their slots of `cache`."""
        rows = self.heads.num_heads * self.heads.head_dim  # of the queries
        weight, bias = self.qkv.weight.rows(rows), self.qkv.bias
        bias = None if bias is None else bias[rows:]
        kv = ops.joined_linear([(x, None)], weight, bias)
        ops.store(kv, self.heads, inputs.seen_through(self.heads.window), cache)

    def _first_qkv(self, ops: Ops, stream: Tensor, beside: Tensor | None) -> tuple[Tensor, Tensor]:
        """Queries, keys and values where the stream begins, and the stream that is kept."""
        norm = self.norm
        if norm is not None and self._parts.keeps_normed:
            stream, norm = ops.norm(stream, None, norm)[0], None
        sides: list[tuple[Tensor, Norm | None]] = [(stream, norm)]
        if beside is not None:
            sides.insert(0, (beside, self._parts.beside))
        return ops.joined_linear(sides, *self.qkv.product), stream
