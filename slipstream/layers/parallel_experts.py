"""A dense feed-forward part and a mixture of experts side by side (Gemma 4)."""

from dataclasses import dataclass, replace

from torch import Tensor

from slipstream.kernels.norm import Made, Spread, summed
from slipstream.kernels.pass_inputs import PassInputs
from slipstream.kernels.table import Behind, JoiningAddend, Ops
from slipstream.layers.experts import ExpertsSpec
from slipstream.layers.layer import BuildContext, Entering, FeedForwardSpec, MatrixShape
from slipstream.layers.norm import LayerNorms


@dataclass(frozen=True, kw_only=True)
class ParallelExpertsSpec:
    """norm(dense(x)) + norm(experts(x)) of the stream x; each part also has a norm before it.

    Attributes:
        experts_norm: norm before the experts; the layer's norm is before the dense part.
        dense_after, experts_after: norms of their outputs.
    """

    dense: FeedForwardSpec
    experts: ExpertsSpec
    experts_norm: str
    dense_after: str
    experts_after: str

    @property
    def inner(self) -> tuple[FeedForwardSpec, ...]:
        return self.dense, self.experts

    def matrices(self, norms: LayerNorms, width: int) -> tuple[MatrixShape, ...]:
        return (*self.dense.matrices(norms, width), *self.experts.matrices(norms, width))

    def numbers_per_row(self, width: int) -> int:
        return sum(part.numbers_per_row(width) for part in self.inner) + 2 * width

    def build(self, context: BuildContext, layer: str, norms: LayerNorms) -> "ParallelExperts":
        return ParallelExperts(self, context, layer, norms)


class ParallelExperts:
    """Both parts, and the norms of their outputs."""

    def __init__(
        self, spec: ParallelExpertsSpec, context: BuildContext, layer: str, norms: LayerNorms
    ) -> None:
        source, width = context.source, context.width
        self._dense = spec.dense.build(context, layer, norms)
        own = replace(norms, feed_forward=spec.experts_norm)
        self._experts = spec.experts.build(context, layer, own)
        self._dense_after, self._experts_after = (
            norms.of(source, f"{layer}.{name}", width)
            for name in (spec.dense_after, spec.experts_after)
        )
        self.norm = self._dense.norm

    @property
    def parts(self) -> object:
        return self

    def apply(self, ops: Ops, entering: Entering, inputs: PassInputs) -> tuple[Made, Tensor]:
        """See `FeedForward`."""
        made, stream = self._dense.apply(ops, entering, inputs)
        dense = made if isinstance(made, Spread) else summed(made, stream.dtype)
        dense, _ = ops.norm(dense, None, self._dense_after)
        chosen, _ = self._experts.apply(ops, Entering(stream), inputs)
        joining = JoiningAddend(chosen, Behind(self._experts_after))
        return ops.norm(joining, dense, None)[1], stream
