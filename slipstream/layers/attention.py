"""Self-attention over the paged cache."""

from dataclasses import dataclass

from torch import Tensor

from slipstream.kernels.pass_inputs import PassInputs
from slipstream.kernels.table import Heads, Norm, Ops
from slipstream.layers.linear import column_linear, row_linear
from slipstream.layers.norm import rms_norm
from slipstream.layers.parameters import ParameterSource, Part


@dataclass(frozen=True)
class AttentionShape:
    """The sizes and switches of one attention layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    norm_eps: float
    window: int | None  # tokens a row sees, itself included; None sees all


class Attention:
    """Query, key and value stacked into one matrix; grouped heads; optional q/k norm and window.

    Args:
        columns: of what queries, keys and values are made from.
        width: of what comes out.
    """

    def __init__(
        self,
        ops: Ops,
        source: ParameterSource,
        name: str,
        columns: int,
        width: int,
        shape: AttentionShape,
        cos_sin: Tensor,
    ) -> None:
        self._ops = ops
        query_rows = shape.num_heads * shape.head_dim
        kv_rows = shape.num_kv_heads * shape.head_dim
        parts = [
            Part(f"{name}.q_proj", query_rows),
            Part(f"{name}.k_proj", kv_rows),
            Part(f"{name}.v_proj", kv_rows),
        ]
        self.qkv = column_linear(source, parts, columns, shape.qkv_bias)
        self.output = row_linear(source, f"{name}.o_proj", width, query_rows, shape.output_bias)
        norms: tuple[Norm, Norm] | None = None
        if shape.qk_norm:
            head_dim, eps = shape.head_dim, shape.norm_eps
            norms = (
                rms_norm(source, f"{name}.q_norm", head_dim, eps),
                rms_norm(source, f"{name}.k_norm", head_dim, eps),
            )
        self.heads = Heads(
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            norms=norms,
            cos_sin=cos_sin,
            scale=shape.head_dim**-0.5,
            window=shape.window,
        )

    def store(self, x: Tensor, inputs: PassInputs, cache: tuple[Tensor, Tensor]) -> None:
        """Keys and values of rows x [T, columns] go to their slots, for others to see."""
        rows = self.heads.num_heads * self.heads.head_dim  # of the queries
        weight, bias = self.qkv.weight.rows(rows), self.qkv.bias
        bias = None if bias is None else bias[rows:]
        self._ops.store(
            self._ops.joined_linear([(x, None)], weight, bias), self.heads, inputs, cache
        )
