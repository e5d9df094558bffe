"""The gated feed-forward layer."""

from torch import Tensor

from slipstream.kernels.table import Ops
from slipstream.layers.linear import ColumnLinear, RowLinear
from slipstream.layers.parameters import ParameterSource, Part


class GatedMLP:
    """down(silu(gate x) * up x), gate and up stacked into one matrix."""

    def __init__(
        self,
        ops: Ops,
        source: ParameterSource,
        name: str,
        width: int,
        intermediate: int,
        bias: bool,
    ) -> None:
        parts = [Part(f"{name}.gate_proj", intermediate), Part(f"{name}.up_proj", intermediate)]
        self._activation = ops.gated_activation
        self.gate_up = ColumnLinear(ops, source, parts, width, bias)
        self.down = RowLinear(ops, source, [Part(f"{name}.down_proj", width)], intermediate, bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self._activation(self.gate_up(x)))
