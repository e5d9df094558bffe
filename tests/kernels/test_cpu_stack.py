"""Whole stacks in C++ do what their ops do one by one, to the bit."""
# ruff: noqa: E402  (the module may be missing)

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

cpp = pytest.importorskip("_slipstream_cpu", reason="the C++ kernels are not built")

from slipstream.kernels.cpu.column import cpu_column
from slipstream.kernels.formats.dense import DenseMatrix
from slipstream.kernels.formats.weight import Weight
from slipstream.kernels.reference import REFERENCE
from slipstream.kernels.stack_parts import LayerParts, Product, StackParts
from slipstream.kernels.table import Heads, Norm, Ops, one_by_one
from slipstream.layers.rope import RopeConfig, rope_table
from slipstream.layers.stack import Stack
from tests.kernels.batches import Requests, Shape, attention_inputs, filled_cache, seeded
from tests.pass_inputs import changed

WIDTH, INNER, OTHER = 44, 52, 36  # none of them fills a block of rows or a tile
SHAPE = Shape(3, 1, 20, 8)
REQUESTS = Requests([0, 5, 0, 21], [3, 1, 0, 2])
# What stands before the layers, how many there are, and whether a norm is behind them.
KINDS = {
    "plain": ("", 3, True),
    "one layer": ("", 1, False),
    "second input": ("beside", 2, True),
    "second input, norm kept": ("beside, keeps", 1, True),
    "norm kept": ("keeps", 2, False),
    "no first norm": ("entry, no norm", 2, False),
    "two joined": ("entry", 1, True),
    "one of three joined as it is": ("entry of three", 2, True),
}


@pytest.fixture(params=cpp.levels(), autouse=True)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    before = cpp.level()
    cpp.set_level(request.param)
    yield request.param
    cpp.set_level(before)


class Parts:
    """Makes the parts of a stack, with weights as a column takes them."""

    def __init__(self, dtype: torch.dtype, ops: Ops) -> None:
        self._generator, self._dtype, self._ops = seeded(5), dtype, ops

    def norm(self, width: int = WIDTH) -> Norm:
        return Norm((torch.rand(width, generator=self._generator) + 0.5).to(self._dtype), 1e-5)

    def product(self, rows: int, columns: int, bias: bool = False) -> Product:
        values = torch.randn(rows, columns, generator=self._generator) / columns**0.5
        weight: Weight = self._ops.pack(DenseMatrix(values.to(self._dtype)))
        if not bias:
            return weight, None
        return weight, torch.randn(rows, generator=self._generator).to(self._dtype)

    def layer(self, before: Norm | None, beside: Norm | None, keeps_normed: bool) -> LayerParts:
        queries, columns = SHAPE.heads * SHAPE.head_dim, WIDTH
        if beside is not None:
            columns += len(beside.weight)
        angles = rope_table(SHAPE.head_dim, RopeConfig(theta=1e4), 64, torch.device("cpu"))
        norms = self.norm(SHAPE.head_dim), self.norm(SHAPE.head_dim)
        heads = Heads(SHAPE.heads, SHAPE.kv_heads, SHAPE.head_dim, norms, angles, 0.2, None)
        return LayerParts(
            before_attention=before,
            heads=heads,
            qkv=self.product(queries + 2 * SHAPE.kv_heads * SHAPE.head_dim, columns, bias=True),
            output=self.product(WIDTH, queries),
            before_mlp=self.norm(),
            gate_up=self.product(2 * INNER, WIDTH),
            down=self.product(WIDTH, INNER, bias=True),
            beside=beside,
            keeps_normed=keeps_normed,
        )

    def stack(self, start: str, count: int, has_last: bool) -> StackParts:
        beside = self.norm(OTHER) if "beside" in start else None
        before = None if "no norm" in start else self.norm()
        layers = [self.layer(before, beside, "keeps" in start)]
        layers += [self.layer(self.norm(), None, False) for _ in range(count - 1)]
        last = self.norm() if has_last else None
        if "entry" not in start:
            return StackParts(layers, last)
        if "three" in start:
            norms = self.norm(OTHER), None, self.norm()
            return StackParts(layers, last, self.product(WIDTH, OTHER + 2 * WIDTH), norms)
        norm = None if "no norm" in start else self.norm(OTHER)
        return StackParts(layers, last, self.product(WIDTH, OTHER + WIDTH, bias=True), (norm, None))


def sources_of(parts: StackParts, dtype: torch.dtype) -> list[Tensor]:
    """Views of a wider matrix: their rows have gaps between them."""
    rows = sum(REQUESTS.rows)
    widths = [WIDTH]
    if parts.entry_norms or parts.layers[0].beside is not None:
        widths = [OTHER, WIDTH, WIDTH][: len(parts.entry_norms) or 2]
    whole = torch.randn(rows, sum(widths), generator=seeded(9)).to(dtype)
    return list(whole.split(widths, 1))


def run(
    ops: Ops, dtype: torch.dtype, kind: str, wanted: Sequence[int]
) -> tuple[list[Tensor], list[Tensor]]:
    """What leaves and the wanted streams; and the caches, as the pass leaves them."""
    parts = Parts(dtype, ops).stack(*KINDS[kind])
    inputs = attention_inputs(REQUESTS, SHAPE.block_size)
    inputs = changed(inputs, first_seen=1) if "entry" in KINDS[kind][0] else inputs
    shape = replace(SHAPE, dtype=dtype)
    caches = [filled_cache(inputs, REQUESTS, shape, seed) for seed in range(len(parts.layers))]
    hidden, streams = Stack(ops, parts)(sources_of(parts, dtype), inputs, caches, wanted)
    return [hidden, *streams], [pages for cache in caches for pages in cache]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_stack_is_its_ops_one_by_one(kind: str, dtype: torch.dtype) -> None:
    column, count = cpu_column(), KINDS[kind][1]
    for wanted in ((), (0,), (count, 0), tuple(range(count + 1))):
        fused = run(column, dtype, kind, wanted)
        single = run(replace(column, fuse=one_by_one), dtype, kind, wanted)
        assert len(fused[0]) == 1 + len(wanted)
        for ours, theirs in zip([*fused[0], *fused[1]], [*single[0], *single[1]], strict=True):
            assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())


@pytest.mark.parametrize("kind", KINDS)
def test_a_stack_agrees_with_plain_torch(kind: str) -> None:
    wanted = (0, KINDS[kind][1])
    ours, theirs = (run(ops, torch.float32, kind, wanted)[0] for ops in (cpu_column(), REFERENCE))
    for one, two in zip(ours, theirs, strict=True):
        assert_close(one, two, rtol=1e-4, atol=1e-4)


def test_caches_may_change_between_passes() -> None:
    """Others of the same number, and the same ones in another list."""
    column = cpu_column()
    parts = Parts(torch.float32, column).stack("", 2, True)
    inputs, stack = attention_inputs(REQUESTS, SHAPE.block_size), Stack(column, parts)
    sources = sources_of(parts, torch.float32)
    several = [[filled_cache(inputs, REQUESTS, SHAPE, seed + i) for i in (0, 1)] for seed in (0, 7)]
    expected = [Stack(column, parts)(sources, inputs, caches)[0] for caches in several]
    assert not torch.equal(*expected)
    for index in (0, 1, 1, 0):
        assert torch.equal(stack(sources, inputs, [*several[index]])[0], expected[index])


def test_what_does_not_fit_is_refused() -> None:
    column = cpu_column()
    parts = Parts(torch.float32, column).stack("beside", 1, True)
    inputs = attention_inputs(REQUESTS, SHAPE.block_size)
    caches = [filled_cache(inputs, REQUESTS, SHAPE)]
    beside, stream = sources_of(parts, torch.float32)
    stack = Stack(column, parts)
    for wrong in ([stream], [stream, beside], [beside, stream, stream], [beside[:-1], stream[:-1]]):
        with pytest.raises(ValueError, match="sources"):
            stack(wrong, inputs, caches)
    with pytest.raises(ValueError, match="dtype"):
        stack([beside.bfloat16(), stream], inputs, caches)
    with pytest.raises(ValueError, match="cache"):
        stack([beside, stream], inputs, [*caches, *caches])
    for wanted in (-1, 2):
        with pytest.raises(ValueError, match="wanted"):
            stack([beside, stream], inputs, caches, [wanted])


def test_weights_of_another_type_are_refused() -> None:
    """Their bytes would be read as something else."""
    column = cpu_column()
    down = Parts(torch.float32, column).product(WIDTH, INNER)
    parts = Parts(torch.bfloat16, column).stack("", 1, True)
    layer = parts.layers[0]
    own = Parts(torch.float32, column).norm(SHAPE.head_dim)
    for wrong in (
        replace(layer, down=down),
        replace(layer, heads=replace(layer.heads, norms=(own, own))),
    ):
        with pytest.raises(ValueError, match="type"):
            Stack(column, replace(parts, layers=[wrong]))
