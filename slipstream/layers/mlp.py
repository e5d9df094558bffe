"""The gated feed-forward layer."""

from slipstream.kernels.table import Norm
from slipstream.layers.linear import column_linear, row_linear
from slipstream.layers.parameters import ParameterSource, Part


class GatedMLP:
    """down(silu(gate x) * up x) of the normed stream, gate and up stacked into one matrix."""

    def __init__(
        self,
        source: ParameterSource,
        name: str,
        norm: Norm,
        intermediate: int,
        bias: bool,
    ) -> None:
        width = len(norm.weight)
        parts = [Part(f"{name}.gate_proj", intermediate), Part(f"{name}.up_proj", intermediate)]
        self.norm = norm
        self.gate_up = column_linear(source, parts, width, bias)
        self.down = row_linear(source, f"{name}.down_proj", width, intermediate, bias)
