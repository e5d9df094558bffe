"""Self-attention over a paged cache of keys and values."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.cache.paged import KVSpec
from slipstream.cache.spec import LayerCache, SharedCache
from slipstream.kernels.adapters import Adapted
from slipstream.kernels.norm import SublayerOutput
from slipstream.kernels.ops import Ops
from slipstream.kernels.pass_inputs import PassInputs
from slipstream.kernels.table import AttentionParts, Heads, Norm
from slipstream.layers.layer import BuildContext, MatrixShape, SublayerInput
from slipstream.layers.linear import column_linear, row_linear
from slipstream.layers.norm import JointNorms, LayerNorms
from slipstream.layers.parameters import (
    ROWS,
    WHOLE,
    Interleaved,
    InvalidSizesError,
    PairedRows,
    ParameterSource,
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
        window: sliding window in tokens, the token itself included; None: full attention.
        qkv_bias: whether the query, key and value projections have biases.
        output_bias: whether the output projection has a bias.
        qk_norm: each query and key head is normed before RoPE, with a weight [head_dim].
        joint_norms: all query heads of a token are normed as one vector before RoPE, with a weight
            [num_heads * head_dim]; likewise all key heads.
        sinks: attention sinks: one learned logit for each query head in the softmax's denominator.
        gated: the output is multiplied by the sigmoid of a gate; its projection is interleaved with
            the query projection: for each head, the query's rows, then the gate's.
        paired: checkpoints have RoPE's rotated pairs interleaved, see `PairedRows`.
        scale: factor of attention scores; None: head_dim^-0.5.
        softcap: softcap of scaled scores; see `Heads`.
        keys_as_values: values are the output of the key projection (before norm and RoPE).
        value_norm: value heads are normed, without a weight.
        kv_source: index, among layers with a mixer, of the layer whose KV cache this layer reads
            instead of computing keys and values; None: the layer has its own.
        name: name of the module within its layer, in a checkpoint.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    window: int | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    joint_norms: bool = False
    sinks: bool = False
    gated: bool = False
    paired: bool = False
    scale: float | None = None
    softcap: float | None = None
    keys_as_values: bool = False
    value_norm: bool = False
    kv_source: int | None = None
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
        if self.softcap is not None:
            require_positive(attn_logit_softcapping=self.softcap)

    @property
    def query_rows(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        """Number of rows of the key projection, and of the value projection."""
        return self.num_kv_heads * self.head_dim

    def projections(self, name: str) -> list[Part]:
        """The parts of the stacked projection: queries, keys and values, then gates if there are
        some."""
        paired: PairedRows | None = None
        if self.paired:
            assert not self.qk_norm, "the weights of norms would have to be permuted as well"
            paired = PairedRows(self.head_dim, self.rope.rotary_dim(self.head_dim))
        heads = self.num_kv_heads
        query = Part(f"{name}.q_proj", self.query_rows, paired=paired)
        key = Part(f"{name}.k_proj", self.kv_rows, paired=paired, heads=heads)
        value = key if self.keys_as_values else Part(f"{name}.v_proj", self.kv_rows, heads=heads)
        parts = [key, value] if self.kv_source is None else []
        if not self.gated:
            return [query, *parts]
        rows, group = 2 * self.query_rows, 2 * self.head_dim
        own, gates = (Interleaved(rows, group, start) for start in (0, self.head_dim))
        return [replace(query, within=own), *parts, replace(query, within=gates)]

    def matrices(self, norms: LayerNorms, width: int) -> tuple[MatrixShape, ...]:
        columns = width if norms.second_norm is None else 2 * width
        rows = sum(part.rows for part in self.projections(""))
        return (rows, columns), (width, self.query_rows)

    def numbers_per_row(self, width: int) -> int:
        return (4 if self.gated else 3) * self.query_rows + 4 * self.kv_rows

    def cache(self, dtype: torch.dtype, share: Share = WHOLE) -> KVSpec | SharedCache:
        if self.kv_source is not None:
            return SharedCache(self.kv_source, self.window)
        num_kv_heads = _kv_heads(self, share)
        return KVSpec(num_kv_heads, self.head_dim, dtype, self.window)

    def build(self, context: BuildContext, layer: str, norms: LayerNorms) -> "Attention":
        return Attention(self, context, layer, norms)


class Attention:
    """The attention sublayer: norm, stacked query, key and value projection, attention, output."""

    def __init__(
        self, spec: AttentionSpec, context: BuildContext, layer: str, norms: LayerNorms
    ) -> None:
        source, name, width = context.source, f"{layer}.{spec.name}", context.width
        second_norm = norms.load_optional(source, layer, norms.second_norm, width)
        self.norm = norms.load_optional(source, layer, norms.mixer, width)
        share = context.share
        num_heads = share.of(spec.num_heads, "num_attention_heads")
        num_kv_heads = _kv_heads(spec, share)
        parts = spec.projections(name)
        columns = spec.matrices(norms, width)[0][1]
        fused, adapters = f"{name}.qkv_proj", context.adapters
        self.qkv = column_linear(source, parts, columns, spec.qkv_bias, fused, adapters)
        self.output = row_linear(
            source, f"{name}.o_proj", width, spec.query_rows, spec.output_bias, share, adapters
        )
        joint_norms: tuple[Norm, Norm] | None = None
        self._joint_norms: JointNorms | None = None
        if spec.joint_norms:
            joint_norms = (
                norms.load(source, f"{name}.q_norm", spec.query_rows, split=ROWS),
                norms.load(source, f"{name}.k_norm", spec.kv_rows, spec.num_kv_heads, split=ROWS),
            )
            if share.reduce is not None:
                rows = spec.query_rows, spec.kv_rows * share.copies(spec.num_kv_heads)
                self._joint_norms = JointNorms(joint_norms, rows, share.reduce)
        head_norms = _head_norms(spec, source, name, norms)
        self.heads = Heads(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=spec.head_dim,
            norms=head_norms,
            cos_sin=context.ropes.table(spec.rope, spec.head_dim),
            scale=spec.head_dim**-0.5 if spec.scale is None else spec.scale,
            softcap=spec.softcap,
            window=spec.window,
            sinks=source.vector([Part(f"{name}.sinks", spec.num_heads, ROWS)])
            if spec.sinks
            else None,
            gated=spec.gated,
        )
        self._parts = AttentionParts(
            norm=self.norm,
            heads=self.heads,
            qkv=self.qkv.product,
            output=self.output.product,
            second_norm=second_norm,
            keeps_normed=norms.keeps_normed,
            joint_norms=joint_norms,
            query_scales=context.ropes.query_scales(spec.rope),
            value_norm=_value_norm(spec, head_norms),
            reads_only=spec.kv_source is not None,
            adapters=(self.qkv.adapters, self.output.adapters),
        )

    @property
    def parts(self) -> object:
        return self if self.output.is_shared else self._parts

    def apply(
        self, ops: Ops, entering: SublayerInput, inputs: PassInputs, cache: LayerCache
    ) -> tuple[SublayerOutput, Tensor]:
        """See `Mixer`; writes the rows' keys and values to `cache`, unless there is a
        `kv_source`."""
        addend, residual, second = entering
        adapted = self.qkv.adapted(inputs)
        if residual is None and self._parts.needs_sources:
            assert isinstance(addend, Tensor), "the first addend is the stream itself"
            qkv, stream = self._first_qkv(ops, addend, second, adapted)
        else:
            qkv, stream = ops.norm_linear(addend, residual, self.norm, *self.qkv.product, adapted)
        inputs = inputs.within_window(self.heads.window)
        if self._parts.reads_only:
            nothing = qkv.new_zeros((len(qkv), 2 * self.heads.num_kv_heads * self.heads.head_dim))
            qkv, inputs = torch.cat((qkv, nothing), -1), inputs.read_only()
        else:
            qkv = self._before_rotation(ops, qkv, inputs)
        mixed = ops.attend(qkv, self.heads, inputs, cache)
        return self.output.apply(ops, mixed, inputs), stream

    def store(self, ops: Ops, x: Tensor, inputs: PassInputs, cache: LayerCache) -> None:
        """Compute keys and values of x [T, columns], without a norm, and write them to `cache`."""
        assert self._parts.feeds_attention, "keys and values are as the projection makes them"
        heads = self.heads
        rows = heads.num_heads * heads.head_dim  # of the queries
        end = rows + 2 * heads.num_kv_heads * heads.head_dim
        weight, bias = self.qkv.weight.rows(rows, end), self.qkv.bias
        bias = None if bias is None else bias[rows:end]
        kv = ops.joined_linear([(x, None)], weight, bias)
        ops.store(kv, self.heads, inputs.within_window(self.heads.window), cache)

    def _before_rotation(self, ops: Ops, qkv: Tensor, inputs: PassInputs) -> Tensor:
        """Apply joint norms, query scales and value norms, which the attention op does not do."""
        if self._parts.feeds_attention:
            return qkv
        heads, parts = self.heads, self._parts
        kv_rows = heads.num_kv_heads * heads.head_dim
        sizes = [heads.num_heads * heads.head_dim, kv_rows, kv_rows]
        query, key, value = torch.split(qkv, sizes, -1)
        if self._joint_norms is not None:
            query, key = self._joint_norms(query, key)
        elif parts.joint_norms is not None:
            of_query, of_key = parts.joint_norms
            query, key = ops.norm(query, None, of_query)[0], ops.norm(key, None, of_key)[0]
        if parts.query_scales is not None:
            scales = parts.query_scales[inputs.rows.positions].unsqueeze(-1)
            query = (query * scales).to(qkv.dtype)
        if parts.value_norm is not None:
            by_head = value.reshape(-1, heads.head_dim)
            value = ops.norm(by_head, None, parts.value_norm)[0].view(value.shape)
        return torch.cat((query, key, value), -1)

    def _first_qkv(
        self, ops: Ops, stream: Tensor, second: Tensor | None, adapted: Adapted | None
    ) -> tuple[Tensor, Tensor]:
        """The qkv projection of a layer at which the residual stream starts, and that stream.

        Args:
            second: second input, concatenated before the stream (EAGLE-3).
        """
        norm = self.norm
        if norm is not None and self._parts.keeps_normed:
            stream, norm = ops.norm(stream, None, norm)[0], None
        sides: list[tuple[Tensor, Norm | None]] = [(stream, norm)]
        if second is not None:
            sides.insert(0, (second, self._parts.second_norm))
        return ops.joined_linear(sides, *self.qkv.product, adapted), stream


def _kv_heads(spec: AttentionSpec, share: Share) -> int:
    """Number of KV heads on this rank: at least one."""
    count = spec.num_kv_heads
    return share.of(count, "num_key_value_heads", count)


def _head_norms(
    spec: AttentionSpec, source: ParameterSource, name: str, norms: LayerNorms
) -> tuple[Norm, Norm] | None:
    """The norms of query and key heads; with a `kv_source` there are no keys to norm, and the
    query norm stands for both."""
    if not spec.qk_norm or spec.joint_norms:
        return None
    query = norms.load(source, f"{name}.q_norm", spec.head_dim)
    if spec.kv_source is not None:
        return query, query
    return query, norms.load(source, f"{name}.k_norm", spec.head_dim)


def _value_norm(spec: AttentionSpec, head_norms: tuple[Norm, Norm] | None) -> Norm | None:
    if not spec.value_norm or spec.kv_source is not None:
        return None
    assert head_norms is not None, "families with value norms have key norms"
    return Norm(torch.ones_like(head_norms[1].weight), head_norms[1].eps)
