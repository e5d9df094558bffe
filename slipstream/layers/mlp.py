"""The dense feed-forward parts: with a gate, and without."""

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
class GatedMLPSpec:
    """down(activation(gate x) * up x) of the normed stream x.

    Attributes:
        bias: whether the three projections have biases.
        name: name of the module within its layer, in a checkpoint.
    """

    intermediate_size: int
    bias: bool = False
    name: str = "mlp"
    activation: Activation = Activation.SILU

    def __post_init__(self) -> None:
        require_positive(intermediate_size=self.intermediate_size)

    def matrices(self, norms: LayerNorms, width: int) -> tuple[MatrixShape, ...]:
        return (2 * self.intermediate_size, width), (width, self.intermediate_size)

    def numbers_per_row(self, width: int) -> int:
        return 3 * self.intermediate_size

    def build(self, context: BuildContext, layer: str, norms: LayerNorms) -> "GatedMLP":
        return GatedMLP(self, context, layer, norms)


class GatedMLP:
    """Gate and up projections stacked into one matrix, then the down projection."""

    def __init__(
        self, spec: GatedMLPSpec, context: BuildContext, layer: str, norms: LayerNorms
    ) -> None:
        source, name, width = context.source, f"{layer}.{spec.name}", context.width
        inner = spec.intermediate_size
        self.norm = norms.load_optional(source, layer, norms.feed_forward, width)
        self.activation = spec.activation
        fused, adapters, share = f"{name}.gate_up_proj", context.adapters, context.share
        parts = [Part(f"{name}.{it}_proj", inner, unit=share.unit) for it in ("gate", "up")]
        self.gate_up = column_linear(source, parts, width, spec.bias, fused, adapters)
        down = f"{name}.down_proj"
        self.down = row_linear(source, down, width, inner, spec.bias, share, adapters, share.unit)

    @property
    def parts(self) -> object:
        if self.down.is_shared:
            return self
        adapters = self.gate_up.adapters, self.down.adapters
        products = self.gate_up.product, self.down.product
        return GatedMLPParts(self.norm, *products, self.activation, adapters)

    def apply(
        self, ops: Ops, entering: SublayerInput, inputs: PassInputs
    ) -> tuple[SublayerOutput, Tensor]:
        """See `FeedForward`."""
        product, adapted = self.gate_up.product, self.gate_up.adapted(inputs)
        addend, residual, _ = entering
        active, stream = ops.norm_gated_linear(
            addend, residual, self.norm, *product, self.activation, adapted
        )
        return self.down.apply(ops, active, inputs), stream


@dataclass(frozen=True)
class PlainMLPSpec:
    """down(activation(up x)) of the normed stream x.

    Attributes:
        bias: whether both projections have biases.
        up, down: names of the projections within the module `name` of a layer, in a checkpoint.
    """

    intermediate_size: int
    activation: Activation
    bias: bool = False
    up: str = "up_proj"
    down: str = "down_proj"
    name: str = "mlp"

    def __post_init__(self) -> None:
        require_positive(intermediate_size=self.intermediate_size)

    def matrices(self, norms: LayerNorms, width: int) -> tuple[MatrixShape, ...]:
        return (self.intermediate_size, width), (width, self.intermediate_size)

    def numbers_per_row(self, width: int) -> int:
        return 2 * self.intermediate_size

    def build(self, context: BuildContext, layer: str, norms: LayerNorms) -> "PlainMLP":
        return PlainMLP(self, context, layer, norms)


class PlainMLP:
    """Up projection, activation, down projection."""

    def __init__(
        self, spec: PlainMLPSpec, context: BuildContext, layer: str, norms: LayerNorms
    ) -> None:
        source, name, width = context.source, f"{layer}.{spec.name}", context.width
        inner, bias = spec.intermediate_size, spec.bias
        self.norm = norms.load_optional(source, layer, norms.feed_forward, width)
        self.activation = spec.activation
        adapters, down = context.adapters, f"{name}.{spec.down}"
        unit = context.share.unit
        parts = [Part(f"{name}.{spec.up}", inner, unit=unit)]
        self.up = column_linear(source, parts, width, bias, adapters=adapters)
        self.down = row_linear(source, down, width, inner, bias, context.share, adapters, unit)

    @property
    def parts(self) -> object:
        return self

    def apply(
        self, ops: Ops, entering: SublayerInput, inputs: PassInputs
    ) -> tuple[SublayerOutput, Tensor]:
        """See `FeedForward`."""
        product, adapted = self.up.product, self.up.adapted(inputs)
        addend, residual, _ = entering
        inner, stream = ops.norm_linear(addend, residual, self.norm, *product, adapted)
        return self.down.apply(ops, ops.activate(inner, self.activation), inputs), stream
