"""The gated feed-forward layer."""

from torch import Tensor

from slipstream.kernels.table import Norm, Ops
from slipstream.layers.linear import column_linear, row_linear
from slipstream.layers.parameters import ParameterSource, Part


class GatedMLP:
    """down(silu(gate x) * up x) of the normed stream, gate and up stacked into one matrix."""

    def __init__(
        self,
        ops: Ops,
        source: ParameterSource,
        name: str,
        norm: Norm,
        intermediate: int,
        bias: bool,
    ) -> None:
        width = len(norm.weight)
        parts = [Part(f"{name}.gate_proj", intermediate), Part(f"{name}.up_proj", intermediate)]
        self._ops, self.norm = ops, norm
        self.gate_up = column_linear(source, parts, width, bias)
        self.down = row_linear(source, f"{name}.down_proj", width, intermediate, bias)

    def __call__(self, addend: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(this layer's addend, the stream before it), from those of the layer before."""
        active, residual = self._ops.norm_gated_linear(
            addend, residual, self.norm, self.gate_up.weight, self.gate_up.bias
        )
        return self._ops.linear(active, self.down.weight, self.down.bias), residual
