"""The dense feed-forward part, with a gate or without."""

from dataclasses import dataclass

from torch import Tensor

from slipstream.kernels.norm import Activation, SublayerOutput
from slipstream.kernels.ops import Ops
from slipstream.kernels.pass_inputs import PassInputs
from slipstream.kernels.table import GatedMLPParts
from slipstream.layers.layer import BuildContext, MatrixShape, SublayerInput
from slipstream.layers.linear import column_linear, row_linear
from slipstream.layers.norm import LayerNorms
from slipstream.layers.parameters import Part, require_positive


@dataclass(frozen=True)
class MLPSpec:
    """down(activation(gate x) * up x) of the normed stream x; or, without a gate,
    down(activation(up x)).

    Attributes:
        bias: whether the projections have biases.
        name: name of the module within its layer, in a checkpoint.
        up, down: names of the projections within the module; the gate is `gate_proj`.
    """

    intermediate_size: int
    bias: bool = False
    name: str = "mlp"
    activation: Activation = Activation.SILU
    gated: bool = True
    up: str = "up_proj"
    down: str = "down_proj"

    def __post_init__(self) -> None:
        require_positive(intermediate_size=self.intermediate_size)

    @property
    def projections(self) -> tuple[str, ...]:
        """The names of the projections before the activation, which are stacked."""
        return ("gate_proj", self.up) if self.gated else (self.up,)

    def matrices(self, norms: LayerNorms, width: int) -> tuple[MatrixShape, ...]:
        rows = len(self.projections) * self.intermediate_size
        return (rows, width), (width, self.intermediate_size)

    def numbers_per_row(self, width: int) -> int:
        return (len(self.projections) + 1) * self.intermediate_size

    def build(self, context: BuildContext, layer: str, norms: LayerNorms) -> "MLP":
        return MLP(self, context, layer, norms)


class MLP:
    """The stacked projections before the activation, then the down projection."""

    def __init__(self, spec: MLPSpec, context: BuildContext, layer: str, norms: LayerNorms) -> None:
        source, name, width = context.source, f"{layer}.{spec.name}", context.width
        size, bias = spec.intermediate_size, spec.bias
        share, adapters = context.share, context.adapters
        self.norm = norms.load_optional(source, layer, norms.feed_forward, width)
        self._activation, self._gated = spec.activation, spec.gated
        fused = f"{name}.gate_up_proj" if spec.gated else ""
        parts = [Part(f"{name}.{it}", size, unit=share.unit) for it in spec.projections]
        self.inner = column_linear(source, parts, width, bias, fused, adapters)
        down = f"{name}.{spec.down}"
        self.down = row_linear(source, down, width, size, bias, share, adapters, share.unit)

    @property
    def parts(self) -> object:
        if self.down.is_shared or not self._gated:
            return self
        adapters = self.inner.adapters, self.down.adapters
        products = self.inner.product, self.down.product
        return GatedMLPParts(self.norm, *products, self._activation, adapters)

    def apply(
        self, ops: Ops, entering: SublayerInput, inputs: PassInputs
    ) -> tuple[SublayerOutput, Tensor]:
        product, adapted = self.inner.product, self.inner.adapted(inputs)
        addend, residual, _ = entering
        if self._gated:
            active, stream = ops.norm_gated_linear(
                addend, residual, self.norm, *product, self._activation, adapted
            )
        else:
            inner, stream = ops.norm_linear(addend, residual, self.norm, *product, adapted)
            active = ops.activate(inner, self._activation)
        return self.down.apply(ops, active, inputs), stream
