"""Whole stacks in C++ do what their ops do one by one, to the bit."""
# ruff: noqa: E402  (the module may be missing)

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

cpp = pytest.importorskip("_slipstream_cpu", reason="the C++ kernels are not built")

from slipstream.cache.spec import CacheSizes
from slipstream.kernels.cpu import CppOps
from slipstream.kernels.cpu.attention import tensors_of
from slipstream.kernels.cpu.layers import FusedStack
from slipstream.kernels.delta_net import DeltaCache
from slipstream.kernels.experts import ClampedGate, Routing, Scores
from slipstream.kernels.formats.dense import DenseMatrix
from slipstream.kernels.formats.weight import Weight
from slipstream.kernels.norm import Activation
from slipstream.kernels.ops import Ops
from slipstream.kernels.pass_inputs import PassInputs, StateInputs
from slipstream.kernels.reference import REFERENCE
from slipstream.kernels.table import FusedOp, InputProjection, Norm, Product, StackParts
from slipstream.layers.attention import AttentionSpec
from slipstream.layers.delta_net import DeltaNetSpec
from slipstream.layers.experts import ExpertsSpec
from slipstream.layers.latent_attention import LatentAttentionSpec
from slipstream.layers.layer import BuildContext, Layer, LayerCache, LayerSpec, SublayerInput
from slipstream.layers.mlp import MLPSpec
from slipstream.layers.norm import LayerNorms, rms_norm
from slipstream.layers.parameters import ParameterSource, Part
from slipstream.layers.rope import RopeConfig, RopeTables
from slipstream.layers.stack import Stack
from tests.kernels.batches import Requests, Shape, attention_inputs, filled_cache, seeded
from tests.pass_inputs import changed

pytestmark = pytest.mark.usefixtures("level")

WIDTH, INNER, OTHER = 44, 52, 36  # none of them fills a block of rows or a tile
SHAPE = Shape(3, 1, 20, 8)
REQUESTS = Requests([0, 5, 0, 21], [3, 1, 0, 2])
CPU = torch.device("cpu")


@dataclass(frozen=True)
class SquaredSpec:
    """A made-up feed-forward part, which no backend fuses: down(relu(up x) ** 2)."""

    def matrices(self, norms: LayerNorms, width: int) -> list[tuple[int, int]]:
        return [(INNER, width), (width, INNER)]

    def numbers_per_row(self, width: int) -> int:
        return 2 * INNER

    def build(self, context: BuildContext, layer: str, norms: LayerNorms) -> "Squared":
        return Squared(context, norms)


class Squared:
    def __init__(self, context: BuildContext, norms: LayerNorms) -> None:
        source, width = context.source, context.width
        self.norm, self.parts = rms_norm(source, "norm", width, norms.eps), self
        self.up = source.matrix([Part("up", INNER)], width)
        self.down = source.matrix([Part("down", width)], INNER)

    def apply(self, ops: Ops, entering: SublayerInput, inputs: PassInputs) -> tuple[Tensor, Tensor]:
        del inputs
        given = entering.addend, entering.residual
        up, stream = ops.norm_linear(*given, self.norm, self.up, None)
        return ops.linear(up.relu().square(), self.down, None), stream


NORMS = LayerNorms(1e-5)
ATTENTION = AttentionSpec(
    num_heads=SHAPE.heads,
    num_kv_heads=SHAPE.kv_heads,
    head_dim=SHAPE.head_dim,
    rope=RopeConfig(theta=1e4),
    qkv_bias=True,
    qk_norm=True,
)
WHOLE = LayerSpec(ATTENTION, MLPSpec(INNER, bias=True), NORMS)
MIXER = replace(WHOLE, feed_forward=None)
DENSE = replace(WHOLE, mixer=None)
CHOSEN = ExpertsSpec(
    routing=Routing(5, 2, Scores.CHOSEN_SOFTMAX),
    intermediate_size=INNER,
    router_bias=True,
    expert_bias=True,
    clamp=ClampedGate(1.0, 1.702),
)
GROUPED = ExpertsSpec(
    routing=Routing(6, 2, Scores.SIGMOID, True, 2.5, 3, 2),
    intermediate_size=INNER,
    corrected=True,
    shared_size=OTHER,
    shared_gate=True,
)
SUNK = replace(ATTENTION, sinks=True, window=3, rope=RopeConfig(1e4, rotated=0.5))
EXPERTS = replace(WHOLE, mixer=SUNK, feed_forward=CHOSEN)
DELTA = DeltaNetSpec(num_key_heads=2, num_value_heads=4, key_dim=12, value_dim=20, num_taps=3)
RECURRENT = replace(WHOLE, mixer=DELTA)
GATED = replace(WHOLE, mixer=replace(ATTENTION, gated=True))
SQUARED = replace(WHOLE, feed_forward=SquaredSpec())
ONLY_SQUARED = replace(SQUARED, mixer=None)


LATENT = LatentAttentionSpec(
    num_heads=3, rank=20, plain_dim=10, rotary_dim=12, value_dim=14, rope=RopeConfig(theta=1e4),
    query_rank=18,
)  # fmt: skip
LOW_QUERIES = replace(WHOLE, mixer=LATENT)
WHOLE_QUERIES = replace(WHOLE, mixer=replace(LATENT, query_rank=None))


def starting(**norms: object) -> LayerSpec:
    return replace(WHOLE, norms=replace(NORMS, **norms))


@dataclass(frozen=True)
class Kind:
    """Layers, and the parts before and after them."""

    layers: tuple[LayerSpec, ...]
    entry: tuple[int, ...] = ()  # widths of its sources
    has_last: bool = True
    last_bias: bool = False
    fused: tuple[int, ...] = ()  # layers of each op in C++


SECOND_INPUT = starting(second_norm="second_norm")
KEPT = starting(second_norm="second_norm", keeps_normed=True)
UNNORMED = starting(mixer=None)
UNNORMED_MIXER = replace(UNNORMED, feed_forward=None)
CAPPED = replace(ATTENTION, scale=0.9, softcap=1.5, window=4)
TANH = MLPSpec(INNER, activation=Activation.GELU_TANH)
POST_NORMS = replace(NORMS, post_mixer="post", post_feed_forward="post", zero_centred=True)
SANDWICH = LayerSpec(CAPPED, TANH, POST_NORMS)
POST = LayerSpec(ATTENTION, TANH, replace(POST_NORMS, mixer=None, feed_forward=None))
HALF_POST = replace(EXPERTS, norms=replace(NORMS, mixer=None, post_mixer="post"))
LAYER_NORMS = replace(NORMS, layer_norms=True)
UNNORMED_HEADS = replace(ATTENTION, qk_norm=False)
LAYER_NORMED = LayerSpec(UNNORMED_HEADS, None, LAYER_NORMS)
LAYER_NORMED_DELTA = LayerSpec(DELTA, None, LAYER_NORMS)
LAYER_NORMED_DENSE = replace(DENSE, norms=LAYER_NORMS)
LAYER_NORMED_EXPERTS = LayerSpec(None, CHOSEN, LAYER_NORMS)
LAYER_POST_NORMED = replace(
    DENSE, norms=replace(LAYER_NORMS, feed_forward=None, post_feed_forward="post")
)
NORMED_VALUES = replace(WHOLE, mixer=replace(ATTENTION, value_norm=True, keys_as_values=True))
LENT = replace(WHOLE, mixer=replace(ATTENTION, kv_source=0))
KINDS = {
    "plain": Kind((WHOLE,) * 3, fused=(3,)),
    "one layer": Kind((WHOLE,), has_last=False, fused=(1,)),
    "second input": Kind((SECOND_INPUT, WHOLE), fused=(2,)),
    "second input, norm kept": Kind((KEPT,), fused=(1,)),
    "norm kept": Kind((starting(keeps_normed=True), WHOLE), has_last=False, fused=(2,)),
    "no first norm": Kind((UNNORMED, WHOLE), (OTHER, WIDTH), has_last=False, fused=(2,)),
    "no norm but the last": Kind((UNNORMED_MIXER,), fused=(1,)),
    "no norm in C++": Kind((UNNORMED_MIXER, ONLY_SQUARED)),
    "two joined": Kind((WHOLE,), (OTHER, WIDTH), fused=(1,)),
    "one of three joined as it is": Kind((WHOLE,) * 2, (OTHER, WIDTH, WIDTH), fused=(2,)),
    "no feed-forward part": Kind((WHOLE, MIXER, WHOLE, MIXER), fused=(4,)),
    "no mixer": Kind((WHOLE, DENSE, DENSE, WHOLE), fused=(4,)),
    "dense first": Kind((DENSE, MIXER, DENSE), (OTHER, WIDTH), has_last=False, fused=(3,)),
    "a sublayer each": Kind((MIXER, DENSE, MIXER, DENSE), fused=(4,)),
    "experts": Kind((EXPERTS, WHOLE, replace(EXPERTS, feed_forward=GROUPED)), fused=(3,)),
    "post-norms": Kind((SANDWICH, WHOLE, SANDWICH), fused=(3,)),
    "post-norms alone": Kind((POST,) * 2, has_last=False, fused=(2,)),
    "one post-norm": Kind((HALF_POST, POST), (OTHER, WIDTH), fused=(2,)),
    "made-up before a norm": Kind((replace(SQUARED, norms=POST_NORMS), SANDWICH), fused=(1,)),
    "recurrent": Kind((RECURRENT, RECURRENT, GATED, RECURRENT), fused=(4,)),
    "cache of another": Kind((NORMED_VALUES, LENT, WHOLE, LENT), fused=(4,)),
    "latent rows": Kind((LOW_QUERIES, WHOLE_QUERIES, WHOLE), fused=(3,)),
    "layer norms": Kind((WHOLE, LAYER_NORMED_DELTA, WHOLE, LAYER_NORMED, MIXER), fused=(1, 1, 1)),
    "layer norms of feed-forward parts": Kind((WHOLE, LAYER_NORMED_DENSE, WHOLE), fused=(1, 1)),
    "layer norms of experts": Kind((MIXER, LAYER_NORMED_EXPERTS, WHOLE), fused=(1, 1)),
    "layer norms of heads": Kind((replace(LAYER_NORMED, mixer=ATTENTION), WHOLE), fused=(1,)),
    "layer norms behind": Kind((WHOLE, LAYER_POST_NORMED, WHOLE), fused=(1, 1)),
    "layer norm at the end": Kind((WHOLE,) * 3, last_bias=True, fused=(2,)),
    "layer norm after a single layer": Kind((WHOLE,), (OTHER, WIDTH), last_bias=True),
    "made-up between": Kind((WHOLE, WHOLE, SQUARED, WHOLE), fused=(2, 1)),
    "made-up first": Kind((ONLY_SQUARED, SQUARED, WHOLE, MIXER), (OTHER, WIDTH), fused=(2,)),
    "made-up last": Kind((SECOND_INPUT, DENSE, ONLY_SQUARED), has_last=False, fused=(2,)),
    "made-up everywhere": Kind((SQUARED, ONLY_SQUARED)),
    "made-up by turns": Kind((ONLY_SQUARED, MIXER) * 2 + (DENSE, SQUARED, WHOLE), fused=(1, 2, 1)),
}


class Drawn(ParameterSource):
    """Random parameters as a backend takes them."""

    def __init__(self, dtype: torch.dtype, ops: Ops) -> None:
        self._generator, self._dtype, self._ops = seeded(5), dtype, ops

    def matrix(self, parts: Sequence[Part], columns: int) -> Weight:
        rows = sum(part.rows for part in parts)
        values = torch.randn(rows, columns, generator=self._generator) / columns**0.5
        return self._ops.pack(DenseMatrix(values.to(self._dtype)))

    def alike(self, parts: Sequence[Part]) -> bool:
        return parts[0].name.startswith("layers.0.")

    def table(self, parts: Sequence[Part], columns: int) -> DenseMatrix:
        rows = sum(part.rows for part in parts)
        return DenseMatrix(torch.randn(rows, columns, generator=self._generator).to(self._dtype))

    def vector(self, parts: Sequence[Part]) -> Tensor:
        rows = sum(part.rows for part in parts)
        is_bias = parts[0].name.endswith("bias")
        draw = torch.randn if is_bias else torch.rand
        values = draw(rows, generator=self._generator)
        return (values if is_bias else values + 0.5).to(parts[0].dtype or self._dtype)

    def norm(self, width: int = WIDTH) -> Norm:
        return rms_norm(self, "norm", width, NORMS.eps)

    def product(self, rows: int, columns: int, bias: bool = False) -> Product:
        weight = self.matrix([Part("weight", rows)], columns)
        return weight, self.vector([Part("bias", rows)]) if bias else None

    def layers(self, specs: Sequence[LayerSpec]) -> list[Layer]:
        context = BuildContext(self, WIDTH, RopeTables(64, CPU))
        layers = [spec.build(context, f"layers.{index}") for index, spec in enumerate(specs)]
        return [self._scaled(layer) for layer in layers]

    def _scaled(self, layer: Layer) -> Layer:
        """The stream after a sandwich is multiplied by a number."""
        post_norm = layer.feed_forward_post_norm
        if post_norm is None:
            return layer
        factor = torch.tensor([0.75], dtype=self._dtype)
        return replace(layer, feed_forward_post_norm=replace(post_norm, factor=factor))

    def stack(self, kind: Kind) -> Stack:
        layers = self.layers(kind.layers)
        last = self.norm() if kind.has_last else None
        if last is not None and kind.last_bias:
            last = replace(last, bias=self.vector([Part("bias", WIDTH)]))
        if not kind.entry:
            return Stack(self._ops, layers, last)
        norms: tuple[Norm | None, ...] = (self.norm(kind.entry[0]), None, self.norm())
        if kind.layers[0] is UNNORMED:
            norms = (None, None)
        product = self.product(WIDTH, sum(kind.entry), bias=True)
        return Stack(self._ops, layers, last, InputProjection(product, norms[: len(kind.entry)]))


def sources_of(kind: Kind, dtype: torch.dtype) -> list[Tensor]:
    """Views of a wider matrix: their rows have gaps between them."""
    rows = sum(REQUESTS.rows)
    second_norm = kind.layers[0].norms.second_norm
    widths = list(kind.entry) or [WIDTH] * (1 if second_norm is None else 2)
    whole = torch.randn(rows, sum(widths), generator=seeded(9)).to(dtype)
    return list(whole.split(widths, 1))


def caches_of(kind: Kind, dtype: torch.dtype, first_seed: int = 0) -> list[LayerCache]:
    inputs, shape = inputs_here(), replace(SHAPE, dtype=dtype)
    row = replace(shape, kv_heads=1, head_dim=LATENT.latent_rows)
    caches: list[LayerCache] = []
    for seed, layer in enumerate(layer for layer in kind.layers if layer.mixer is not None):
        if isinstance(layer.mixer, DeltaNetSpec):
            caches.append(states_of(layer.mixer, dtype, first_seed + seed))
            continue
        if isinstance(layer.mixer, AttentionSpec) and layer.mixer.kv_source is not None:
            caches.append(caches[layer.mixer.kv_source])
            continue
        is_latent = isinstance(layer.mixer, LatentAttentionSpec)
        pages = filled_cache(inputs, REQUESTS, row if is_latent else shape, first_seed + seed)
        caches.append(pages[0].squeeze(2) if is_latent else pages)
    return caches


def states_of(spec: DeltaNetSpec, dtype: torch.dtype, seed: int) -> DeltaCache:
    """Room for one draft row a slot."""
    sizes = CacheSizes(0, SHAPE.block_size, len(REQUESTS.rows), CPU, num_drafts=1)
    (cache,) = spec.cache(dtype).allocate(1, sizes).layers
    for tensor in vars(cache).values():
        tensor.copy_(torch.randn(tensor.shape, generator=seeded(seed)))
    return cache


def inputs_here() -> PassInputs:
    """The first request has a draft row after two known ones, the last one takes one in."""
    rows, none = torch.tensor(REQUESTS.rows), torch.full((4,), -1)
    drafts = torch.tensor([1, 0, 0, 0])
    states = StateInputs(torch.arange(4), rows - drafts, drafts.flip(0), none, none)
    return replace(attention_inputs(REQUESTS, SHAPE.block_size), states=states)


class Passes:
    """Passes through a stack of a kind, which is built once; each finds the caches as at first."""

    def __init__(self, ops: Ops, dtype: torch.dtype, name: str) -> None:
        kind, inputs = KINDS[name], inputs_here()
        self._inputs = changed(inputs, first_seen=1) if kind.entry else inputs
        self._caches = caches_of(kind, dtype)
        self._sources = sources_of(kind, dtype)
        self._stack = Drawn(dtype, ops).stack(kind)

    def __call__(
        self, wanted: Sequence[int], read: Tensor | None = None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The output and the wanted streams, and the caches after the pass."""
        caches = copy.deepcopy(self._caches)
        hidden, streams = self._stack(self._sources, self._inputs, caches, wanted, read=read)
        return [hidden, *streams], [kept for cache in caches for kept in tensors(cache)]


def run(
    ops: Ops, dtype: torch.dtype, name: str, wanted: Sequence[int]
) -> tuple[list[Tensor], list[Tensor]]:
    return Passes(ops, dtype, name)(wanted)


def tensors(cache: LayerCache) -> tuple[Tensor, ...]:
    return tensors_of(cache) if isinstance(cache, DeltaCache) else cache


class Unfused(CppOps):
    def fuse(self, parts: StackParts) -> FusedOp | None:
        return None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", KINDS)
def test_a_stack_is_its_ops_one_by_one(name: str, dtype: torch.dtype) -> None:
    backend, count = CppOps(), len(KINDS[name].layers)
    as_one = Passes(backend, dtype, name)
    by_ops = Passes(Unfused(), dtype, name)
    for wanted in ((), (0,), (count, 0), tuple(range(count + 1))):
        fused, single = as_one(wanted), by_ops(wanted)
        assert len(fused[0]) == 1 + len(wanted)
        for ours, theirs in zip([*fused[0], *fused[1]], [*single[0], *single[1]], strict=True):
            assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", KINDS)
def test_rows_that_are_read_have_their_bits(name: str, dtype: torch.dtype) -> None:
    """The last feed-forward part leaves out the others, which nothing else depends on."""
    backend, count = CppOps(), len(KINDS[name].layers)
    read = torch.tensor([1, 2, 5])
    for ops in (backend, Unfused()):
        passes = Passes(ops, dtype, name)
        for wanted in ((), (count - 1,), (0, count)):
            whole, some = passes(wanted), passes(wanted, read)
            some[0][0], whole[0][0] = some[0][0][read], whole[0][0][read]
            for ours, theirs in zip([*some[0], *some[1]], [*whole[0], *whole[1]], strict=True):
                assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())


@cache
def by_plain_torch(name: str, wanted: tuple[int, ...]) -> list[Tensor]:
    """What all levels are compared with."""
    return run(REFERENCE, torch.float32, name, wanted)[0]


@pytest.mark.parametrize("name", KINDS)
def test_a_stack_agrees_with_plain_torch(name: str) -> None:
    wanted = (0, len(KINDS[name].layers))
    ours = run(CppOps(), torch.float32, name, wanted)[0]
    for one, two in zip(ours, by_plain_torch(name, wanted), strict=True):
        assert_close(one, two, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", KINDS)
def test_all_layers_that_can_be_are_fused(name: str) -> None:
    found: list[FusedOp] = []

    class Noted(CppOps):
        def fuse(self, parts: StackParts) -> FusedOp | None:
            op = CppOps.fuse(parts)
            found.extend([] if op is None else [op])
            return op

    Drawn(torch.float32, Noted()).stack(KINDS[name])
    assert tuple(op.num_layers for op in found) == KINDS[name].fused
    assert all(isinstance(op, FusedStack) for op in found)


def test_a_profile_measures_the_op_that_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused op runs under a profiler too, gives the same bits, and names its parts."""
    calls: list[bool] = []
    serve = FusedStack.__call__

    def counted(self: FusedStack, *args: object) -> tuple[Tensor, list[Tensor]]:
        calls.append(torch._C._autograd._profiler_enabled())
        return serve(self, *args)

    monkeypatch.setattr(FusedStack, "__call__", counted)
    plain = run(CppOps(), torch.float32, "plain", (1,))
    with torch.profiler.profile() as profiler:
        profiled = run(CppOps(), torch.float32, "plain", (1,))
    assert calls == [False, True]
    for ours, theirs in zip([*profiled[0], *profiled[1]], [*plain[0], *plain[1]], strict=True):
        assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())
    names = {event.key: event.count for event in profiler.key_averages()}
    expected = {"matmul": 12, "norm": 7, "attend": 3, "gated": 3}
    assert {name: names[f"slipstream::{name}"] for name in expected} == expected


def test_caches_may_change_between_passes() -> None:
    """Others of the same number, and the same ones in another list."""
    backend, kind = CppOps(), KINDS["made-up between"]
    inputs, stack = (
        inputs_here(),
        Drawn(torch.float32, backend).stack(kind),
    )
    sources = sources_of(kind, torch.float32)
    several = [caches_of(kind, torch.float32, seed) for seed in (0, 7)]
    expected = [
        Drawn(torch.float32, backend).stack(kind)(sources, inputs, caches)[0] for caches in several
    ]
    assert not torch.equal(*expected)
    for index in (0, 1, 1, 0):
        assert torch.equal(stack(sources, inputs, [*several[index]])[0], expected[index])


def test_what_does_not_fit_is_refused() -> None:
    backend, kind = CppOps(), Kind((SECOND_INPUT,))
    inputs = inputs_here()
    caches = caches_of(kind, torch.float32)
    second, stream = sources_of(kind, torch.float32)
    stack = Drawn(torch.float32, backend).stack(kind)
    for wrong in (
        [stream],
        [stream, second[:, :-1]],
        [second, stream, stream],
        [second[:-1], stream[:-1]],
    ):
        with pytest.raises(ValueError, match="sources"):
            stack(wrong, inputs, caches)
    with pytest.raises(TypeError, match="dtype"):
        stack([second.bfloat16(), stream], inputs, caches)
    with pytest.raises(ValueError, match="cache"):
        stack([second, stream], inputs, [*caches, *caches])
    for wanted in (-1, 2):
        with pytest.raises(ValueError, match="wanted"):
            stack([second, stream], inputs, caches, [wanted])
    for read in ([0, 0], [2, 1], [6], [-1]):
        with pytest.raises(ValueError, match="read"):
            stack([second, stream], inputs, caches, read=torch.tensor(read))


def test_weights_of_another_type_are_refused() -> None:
    """C++ would misread their bytes."""
    backend = CppOps()
    drawn, other = Drawn(torch.bfloat16, backend), Drawn(torch.float32, backend)
    (layer,) = drawn.layers([WHOLE])
    parts = layer.parts
    own = other.norm(SHAPE.head_dim)
    dense = replace(parts.feed_forward, down=other.product(WIDTH, INNER))
    mixer = replace(parts.mixer, heads=replace(parts.mixer.heads, norms=(own, own)))
    for wrong in (replace(parts, feed_forward=dense), replace(parts, mixer=mixer)):
        with pytest.raises(ValueError, match="type"):
            backend.fuse(StackParts([wrong], drawn.norm()))
