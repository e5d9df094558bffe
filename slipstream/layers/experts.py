"""Mixtures of experts: a router chooses a few feed-forward parts for each row."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.kernels.experts import ClampedGate, Router, Routing
from slipstream.kernels.norm import Activation, SublayerOutput, sum_parts
from slipstream.kernels.ops import Ops
from slipstream.kernels.pass_inputs import PassInputs
from slipstream.kernels.table import ExpertsParts, Norm, SharedExpert
from slipstream.layers.layer import BuildContext, MatrixShape, SublayerInput
from slipstream.layers.linear import column_linear, row_linear
from slipstream.layers.norm import LayerNorms
from slipstream.layers.parameters import (
    COLUMNS,
    ROWS,
    FusedExperts,
    InvalidSizesError,
    Part,
    require_positive,
)

_MOST_EXPERTS = 1 << 16  # a sanity limit: the parts of all experts are listed before they are read


@dataclass(frozen=True)
class ExpertNames:
    """The names of a mixture's parts in a checkpoint, within its layer.

    Attributes:
        router: module of the router.
        router_scale: tensor that the router's input is multiplied by.
        gains: tensor that the experts' routing weights are multiplied by.
        correction: tensor that is added to the router's scores.
        experts: module that has a module for each expert, or fused tensors.
        projections: gate, up and down of an expert.
        fused: tensors of all experts: gate and up stacked, and down.
        alternating, transposed: layout of the fused tensors; see `FusedExperts`.
        shared, shared_gate: modules of the shared expert and of its gate.
    """

    router: str = "mlp.gate"
    router_scale: str = "router.scale"
    gains: str = "router.per_expert_scale"
    correction: str = "mlp.gate.e_score_correction_bias"
    experts: str = "mlp.experts"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    fused: tuple[str, str] = ("gate_up_proj", "down_proj")
    alternating: bool = False
    transposed: bool | None = False
    shared: str = "mlp.shared_experts"
    shared_gate: str = "mlp.shared_expert_gate"


@dataclass(frozen=True, kw_only=True)
class ExpertsSpec:
    """Gated experts of one size, the router that chooses among them, and a shared expert.

    Attributes:
        intermediate_size: intermediate size of one expert.
        router_bias, expert_bias: whether the router, and both matrices of experts, have biases.
        corrected: whether scores are corrected before experts are chosen.
        clamp: gpt-oss's clamped gate; None: experts are gated by `activation`.
        shared_size: intermediate size of the shared expert; None: there is none.
        shared_gate: whether the shared expert has a gate.
        scaled_router: the router has its own norm, without a weight; its output is multiplied by a
            vector and by width ** -0.5.
        gained: whether each expert's routing weight is multiplied by a learned number.
    """

    routing: Routing
    intermediate_size: int
    router_bias: bool = False
    expert_bias: bool = False
    corrected: bool = False
    clamp: ClampedGate | None = None
    shared_size: int | None = None
    shared_gate: bool = False
    activation: Activation = Activation.SILU
    scaled_router: bool = False
    gained: bool = False
    names: ExpertNames = ExpertNames()

    def __post_init__(self) -> None:
        routing = self.routing
        require_positive(
            num_experts=routing.num_experts,
            num_experts_per_tok=routing.num_chosen,
            moe_intermediate_size=self.intermediate_size,
            n_group=routing.num_groups,
            topk_group=routing.kept_groups,
            routed_scaling_factor=routing.scale,
        )
        if self.clamp is not None:
            require_positive(swiglu_limit=self.clamp.limit, swiglu_alpha=self.clamp.alpha)
        if self.shared_size is not None:
            require_positive(shared_expert_intermediate_size=self.shared_size)
        if routing.num_experts > _MOST_EXPERTS:
            raise InvalidSizesError(
                f'"num_experts" is {routing.num_experts}, but at most {_MOST_EXPERTS} work'
            )
        in_group, rest = divmod(routing.num_experts, routing.num_groups)
        if rest or (routing.num_groups > 1 and in_group < 2):
            raise InvalidSizesError(
                f'"n_group" ({routing.num_groups}) must divide the experts '
                f"({routing.num_experts}) into groups of two or more"
            )
        if routing.kept_groups > routing.num_groups:
            raise InvalidSizesError(
                f'"topk_group" ({routing.kept_groups}) must not be above "n_group" '
                f"({routing.num_groups})"
            )
        if routing.num_chosen > in_group * routing.kept_groups:
            raise InvalidSizesError(
                f'"num_experts_per_tok" ({routing.num_chosen}) is more than the '
                f"{in_group * routing.kept_groups} experts that a token can choose from"
            )

    @property
    def active_size(self) -> int:
        """The intermediate size of all experts that a row uses, together."""
        return self.routing.num_chosen * self.intermediate_size + (self.shared_size or 0)

    def matrices(self, norms: LayerNorms, width: int) -> tuple[MatrixShape, ...]:
        del norms
        count, inner = self.routing.num_experts, self.intermediate_size
        shapes = [(count, width), (count * 2 * inner, width), (count * width, inner)]
        if self.shared_size is not None:
            shapes += [(2 * self.shared_size, width), (width, self.shared_size)]
        return tuple(shapes)

    def idle_parameters(self, width: int) -> int:
        """Number of parameters of experts that a row does not use, for a stream of this width."""
        idle = self.routing.num_experts - self.routing.num_chosen
        return idle * 3 * self.intermediate_size * width

    def numbers_per_row(self, width: int) -> int:
        # Outputs of the chosen experts and of the shared one are float32 until they are summed.
        outputs = self.routing.num_chosen + (self.shared_size is not None)
        return 3 * self.active_size + 2 * outputs * width

    def build(self, context: BuildContext, layer: str, norms: LayerNorms) -> "Experts":
        return Experts(self, context, layer, norms)


class Experts:
    """The feed-forward sublayer: router, two stacked matrices of all experts, and shared expert."""

    def __init__(
        self, spec: ExpertsSpec, context: BuildContext, layer: str, norms: LayerNorms
    ) -> None:
        self._pool = context.pool
        if self._pool is not None:
            self._pool.join(self)
            context = replace(context, source=self._pool.source, share=self._pool.share)
        source, width, inner = context.source, context.width, spec.intermediate_size
        self._ranks = context.share
        gate_up, down = _stacks(spec, layer, width, context.share.unit)
        biases: list[Tensor | None] = [None, None]
        if spec.expert_bias:
            count = spec.routing.num_experts
            biases = [source.vector(stack.biases()).view(count, -1) for stack in (gate_up, down)]
        norm = norms.load_optional(source, layer, norms.feed_forward, width)
        assert norm is not None, "experts read a normed stream"
        if spec.scaled_router:
            norm = replace(norm, weight=_without_zeros(norm.weight))
        self._parts = ExpertsParts(
            norm=norm,
            router=_router(spec, context, layer, norm),
            gate_up=source.matrix(gate_up.weights(), width),
            gate_up_bias=biases[0],
            down=source.matrix(down.weights(), inner),
            # Partial results of ranks are summed, so only the first rank adds the bias.
            down_bias=biases[1] if context.share.rank == 0 else None,
            clamp=spec.clamp,
            shared=_shared_expert(spec, context, layer),
            activation=spec.activation,
        )
        self.norm = self._parts.norm

    @property
    def parts(self) -> object:
        return self._parts if self._ranks.reduce is None else self

    def apply(
        self, ops: Ops, entering: SublayerInput, inputs: PassInputs
    ) -> tuple[SublayerOutput, Tensor]:
        addend, residual, _ = entering
        if self._pool is None:
            output, stream = ops.experts(addend, residual, self._parts)
            if self._ranks.reduce is None:
                return output, stream
            return self._ranks.addend(output, stream.dtype, ops.sums_addends), stream
        if residual is None:
            assert isinstance(addend, Tensor), "without a residual the addend is the stream"
            stream = addend
        else:
            _, stream = ops.norm(addend, residual, None)
        partial = self._partial(ops, stream, inputs.pooled_rows or len(stream))
        return self._pool.own(partial, len(stream), ops.sums_addends), stream

    def assist(self, ops: Ops, num_rows: int) -> None:
        nothing = self._parts.router.weight[:0]
        assert self._pool is not None
        self._pool.own(self._partial(ops, nothing, num_rows), 0, ops.sums_addends)

    def _partial(self, ops: Ops, stream: Tensor, num_rows: int) -> Tensor:
        """stream [T, H] -> [ranks num_rows, H], this rank's partial results for all ranks' rows."""
        assert self._pool is not None
        rows = self._pool.gather(stream, num_rows)
        return sum_parts(ops.experts(rows, None, self._parts)[0], rows.dtype)


def _without_zeros(weight: Tensor) -> Tensor:
    """Raise magnitudes below eps times the largest one to that bound, so that none is 0."""
    largest = weight.abs().max()
    least = torch.finfo(weight.dtype).eps * torch.where(largest > 0, largest, 1.0)
    return torch.where(weight.abs() < least, least, weight).to(weight.dtype)


def _router(spec: ExpertsSpec, context: BuildContext, layer: str, norm: Norm) -> Router:
    source, names, count = context.source, spec.names, spec.routing.num_experts
    name = f"{layer}.{names.router}"
    correction: Tensor | None = None
    if spec.corrected:
        part = Part(f"{layer}.{names.correction}", count, dtype=torch.float32)
        correction = source.vector([part]).float()
    width = context.width
    weight = source.table([Part(f"{name}.weight", count)], width).values
    if spec.scaled_router:
        # The router reads the experts' rows, which lack these factors; so its columns get them.
        scale = source.vector([Part(f"{layer}.{names.router_scale}", width)]).float()
        weight = (weight.float() * scale / norm.weight.float() * width**-0.5).to(weight.dtype)
    gains = [Part(f"{layer}.{names.gains}", count)]
    return Router(
        spec.routing,
        weight,
        source.vector([Part(f"{name}.bias", count)]) if spec.router_bias else None,
        correction,
        source.vector(gains).float() if spec.gained else None,
    )


@dataclass(frozen=True)
class _Stack:
    """A stacked matrix of all experts of a layer, expert by expert.

    Attributes:
        singles: modules of an expert; braces stand for its number.
        fused: tensor of all experts, without the ending of a bias.
        rows: number of rows of each of an expert's modules.
        split: split dimension of the parts; see `Part`.
        unit: see `Part`.
    """

    singles: tuple[str, ...]
    fused: FusedExperts
    rows: int
    split: int
    unit: int

    def weights(self) -> list[Part]:
        return self._parts("weight", self.fused, self.split)

    def biases(self) -> list[Part]:
        """Biases are split like the rows that they belong to; if columns are split, not at all."""
        fused = replace(self.fused, name=f"{self.fused.name}_bias")
        return self._parts("bias", fused, ROWS if self.split == ROWS else None)

    def _parts(self, ending: str, fused: FusedExperts, split: int | None) -> list[Part]:
        return [
            Part(f"{name.format(expert)}.{ending}", self.rows, split, fused, unit=self.unit)
            for expert in range(fused.experts)
            for name in self.singles
        ]


def _stacks(spec: ExpertsSpec, layer: str, width: int, unit: int) -> tuple[_Stack, _Stack]:
    """The stack of gate and up, and the stack of down."""
    names, count = spec.names, spec.routing.num_experts
    module = f"{layer}.{names.experts}"
    gate, up, down = (f"{module}.{{}}.{projection}" for projection in names.projections)
    of_gate_up, of_down = (f"{module}.{fused}" for fused in names.fused)
    gate_up_fused = FusedExperts(of_gate_up, count, names.alternating, names.transposed)
    down_fused = FusedExperts(of_down, count, transposed=names.transposed)
    return (
        _Stack((gate, up), gate_up_fused, spec.intermediate_size, ROWS, unit),
        _Stack((down,), down_fused, width, COLUMNS, unit),
    )


def _shared_expert(spec: ExpertsSpec, context: BuildContext, layer: str) -> SharedExpert | None:
    if spec.shared_size is None:
        return None
    source, width, inner = context.source, context.width, spec.shared_size
    name, gate_name = f"{layer}.{spec.names.shared}", f"{layer}.{spec.names.shared_gate}.weight"
    unit = context.share.unit
    parts = [Part(f"{name}.{it}_proj", inner, unit=unit) for it in ("gate", "up")]
    return SharedExpert(
        column_linear(source, parts, width, bias=False).product,
        row_linear(source, f"{name}.down_proj", width, inner, bias=False, unit=unit).product,
        source.table([Part(gate_name, 1)], width).values if spec.shared_gate else None,
    )
