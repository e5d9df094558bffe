"""Self-attention over the paged cache."""

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.kernels.table import AttentionInputs, Ops
from slipstream.layers.linear import ColumnLinear, RowLinear
from slipstream.layers.norm import RMSNorm
from slipstream.layers.parameters import ParameterSource, Part


@dataclass(frozen=True)
class AttentionShape:
    """The sizes and switches of one attention layer."""

    width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    norm_eps: float
    window: int | None  # tokens a row sees, itself included; None sees all


class Attention:
    """Query, key and value stacked into one matrix; grouped heads; optional q/k norm and window."""

    def __init__(
        self, ops: Ops, source: ParameterSource, name: str, shape: AttentionShape, cos_sin: Tensor
    ) -> None:
        self._ops, self._shape, self._cos_sin = ops, shape, cos_sin
        query_rows = shape.num_heads * shape.head_dim
        kv_rows = shape.num_kv_heads * shape.head_dim
        self._split = [query_rows, kv_rows, kv_rows]
        self._scale = shape.head_dim**-0.5
        parts = [
            Part(f"{name}.q_proj", query_rows),
            Part(f"{name}.k_proj", kv_rows),
            Part(f"{name}.v_proj", kv_rows),
        ]
        self.qkv = ColumnLinear(ops, source, parts, shape.width, shape.qkv_bias)
        output = [Part(f"{name}.o_proj", shape.width)]
        self.output = RowLinear(ops, source, output, query_rows, shape.output_bias)
        self._norms: tuple[Tensor, Tensor, float] | None = None
        if shape.qk_norm:
            norms = (
                RMSNorm(ops, source, f"{name}.{part}", shape.head_dim, shape.norm_eps)
                for part in ("q_norm", "k_norm")
            )
            query_norm, key_norm = norms
            self._norms = (query_norm.weight, key_norm.weight, shape.norm_eps)

    def __call__(self, x: Tensor, inputs: AttentionInputs, cache: tuple[Tensor, Tensor]) -> Tensor:
        """x [T, width] -> [T, width]; writes this layer's keys and values into `cache`."""
        head_dim = self._shape.head_dim
        query, key, value = (
            part.view(len(x), -1, head_dim) for part in torch.split(self.qkv(x), self._split, -1)
        )
        query = self._ops.rotate_and_store(
            query, key, value, self._norms, self._cos_sin, inputs, cache
        )
        mixed = self._ops.paged_attention(query, cache, inputs, self._scale, self._shape.window)
        return self.output(mixed.flatten(-2))
