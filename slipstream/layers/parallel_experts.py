"""A dense feed-forward part and a mixture of experts side by side (Gemma 4)."""

from dataclasses import dataclass, replace

from torch import Tensor

from slipstream.kernels.norm import SublayerOutput, UnreducedSum, sum_parts
from slipstream.kernels.ops import Ops
from slipstream.kernels.pass_inputs import PassInputs
from slipstream.kernels.table import PostNorm, PostNormAddend
from slipstream.layers.experts import ExpertsSpec
from slipstream.layers.layer import BuildContext, FeedForwardSpec, MatrixShape, SublayerInput
from slipstream.layers.norm import LayerNorms


@dataclass(frozen=True, kw_only=True)
class ParallelExpertsSpec:
    """norm(dense(x)) + norm(experts(x)) of the stream x; each part also has a norm before it.

    Attributes:
        experts_norm: norm before the experts; the layer's norm is before the dense part.
        post_dense, post_experts: norms of their outputs.
    """

    dense: FeedForwardSpec
    experts: ExpertsSpec
    experts_norm: str
    post_dense: str
    post_experts: str

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
        self._post_dense, self._post_experts = (
            norms.load(source, f"{layer}.{name}", width)
            for name in (spec.post_dense, spec.post_experts)
        )
        self.norm = self._dense.norm

    @property
    def parts(self) -> object:
        return self

    def apply(
        self, ops: Ops, entering: SublayerInput, inputs: PassInputs
    ) -> tuple[SublayerOutput, Tensor]:
        dense, stream = self._dense.apply(ops, entering, inputs)
        dense = dense if isinstance(dense, UnreducedSum) else sum_parts(dense, stream.dtype)
        normed, _ = ops.norm(dense, None, self._post_dense)
        experts, _ = self._experts.apply(ops, SublayerInput(stream), inputs)
        addend = PostNormAddend(experts, PostNorm(self._post_experts))
        return ops.norm(addend, normed, None)[1], stream
