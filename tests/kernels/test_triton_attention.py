"""The whole attention op of the triton column against the reference's.

On the GPU where there is one, else interpreted: see `test_triton_ops.py`.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

pytest.importorskip("triton", reason="it is there for Linux only")

from slipstream.kernels.attention import FLOAT8_PAGES
from slipstream.kernels.pass_inputs import PassInputs
from slipstream.kernels.reference import REFERENCE
from slipstream.kernels.reference.attention import store
from slipstream.kernels.table import Heads, Norm
from slipstream.kernels.triton import attention as tuned
from slipstream.kernels.triton.attention import attend
from slipstream.kernels.triton.attention_parts import SMALLEST, most_splits, split_of, split_start
from slipstream.kernels.triton.attention_shapes import SHORT_ROWS
from slipstream.kernels.triton.attention_short_kernels import short_kernel
from slipstream.layers.rope import RopeConfig, rope_table
from tests.kernels.batches import Requests, Shape, attention_inputs, filled_cache, only, seeded
from tests.kernels.device import DEVICE, INTERPRETED, ON_GPU
from tests.pass_inputs import changed, moved, pass_inputs

pytestmark = INTERPRETED

DTYPES = [torch.float32, torch.float16]
if ON_GPU:
    DTYPES.append(torch.bfloat16)
# Both ways to see, in both types; the interpreter takes each once.
WINDOWED = [(window, dtype) for window in (None, 33) for dtype in DTYPES][:: 1 if ON_GPU else 3]
TILE = 128  # tokens of a tile in half precision
Case = tuple[Tensor, Heads, PassInputs, tuple[Tensor, Tensor]]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    if not ON_GPU:
        monkeypatch.setattr(tuned, "MULTIPROCESSORS", 5)


def case(
    shape: Shape,
    requests: Requests,
    dtype: torch.dtype,
    normed: bool = True,
    window: int | None = None,
    sinks: bool = False,
    rotated: float = 1.0,
    eight_bits: bool = False,
) -> Case:
    """The inputs of a layer: the cache has the tokens before this pass, and NaN elsewhere."""
    inputs = attention_inputs(requests, shape.block_size)
    before = changed(inputs, context_lens=torch.tensor(list(requests.computed)))
    keys, values = filled_cache(before, requests, replace(shape, dtype=dtype))
    if eight_bits:
        keys, values = (in_eight_bits(pages) for pages in (keys, values))
    generator = seeded(7)
    width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    qkv = torch.randn(len(inputs.rows.positions), width, generator=generator).to(dtype).to(DEVICE)
    norms = None
    if normed:
        weights = torch.rand(2, shape.head_dim, generator=generator).to(dtype).to(DEVICE) + 0.5
        norms = Norm(weights[0], 1e-3), Norm(weights[1], 1e-3)
    longest = max(int(inputs.paging.context_lens.max()), 8) + 64
    heads = Heads(
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        norms=norms,
        cos_sin=rope_table(shape.head_dim, RopeConfig(100.0, rotated=rotated), longest, DEVICE),
        scale=0.8 / shape.head_dim**0.5,
        window=window,
        sinks=(3 * torch.randn(shape.heads, generator=generator)).to(dtype).to(DEVICE)
        if sinks
        else None,
    )
    return qkv, heads, moved(inputs, DEVICE), (keys.to(DEVICE), values.to(DEVICE))


def in_eight_bits(pages: Tensor) -> Tensor:
    """The cache as the reference rounds it; rows of NaN have a scale of NaN."""
    stored = torch.empty(*pages.shape[:3], pages.shape[3] + 4, dtype=FLOAT8_PAGES)
    slots = torch.arange(stored[..., 0, 0].numel())
    rows = pages.flatten(0, 1)
    store(rows, rows, slots, (stored, stored.clone()))
    return stored


def truth(given: Case) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The reference in the same dtype on the host, and what it leaves in the cache."""
    qkv, heads, inputs, cache = given
    host = torch.device("cpu")
    norms = heads.norms
    if norms is not None:
        norms = Norm(norms[0].weight.cpu(), 1e-3), Norm(norms[1].weight.cpu(), 1e-3)
    sinks = None if heads.sinks is None else heads.sinks.cpu()
    heads = replace(heads, norms=norms, cos_sin=heads.cos_sin.cpu(), sinks=sinks)
    keys, values = (pages.cpu().clone() for pages in cache)
    out = REFERENCE.attend(qkv.cpu(), heads, moved(inputs, host), (keys, values))
    return out, (keys, values)


def run(given: Case) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The op on a copy of the cache."""
    qkv, heads, inputs, (keys, values) = given
    cache = keys.clone(), values.clone()
    return attend(qkv, heads, inputs, cache), cache


def assert_same(out: Tensor, other: Tensor) -> None:
    """Assert that all bits are equal."""
    assert_close(out, other, rtol=0, atol=0, equal_nan=True)


def assert_agrees(given: Case) -> None:
    """Up to some roundings; what the op does not own stays NaN, and what it reads is not."""
    out, cache = run(given)
    expected, expected_cache = truth(given)
    tiny = 8 * torch.finfo(out.dtype).eps if out.dtype != torch.float32 else 1e-5
    if cache[0].dtype == FLOAT8_PAGES:
        # A key between two numbers of e4m3 may go to either, by the last bit of its rotation.
        assert_close(out.cpu(), expected, rtol=0, atol=0.02)
        same = (cache[0].cpu() == expected_cache[0]).float().mean()
        assert same > 0.99
        assert_same(cache[1].cpu(), expected_cache[1])
        return
    assert_close(out.cpu(), expected, rtol=tiny, atol=tiny)
    assert_close(cache[0].cpu(), expected_cache[0], rtol=tiny, atol=tiny, equal_nan=True)
    assert_same(cache[1].cpu(), expected_cache[1])


SHAPES = [
    Shape(1, 1, 2, 1),
    Shape(6, 2, 10, 4),
    Shape(7, 1, 72, 24),
    Shape(8, 2, 128, 16),
    Shape(2, 1, 512, 16),
    Shape(16, 1, 16, 32),
]
BATCHES = {
    "one row": Requests([0], [1]),
    "decoding": Requests([8, 0, 150, 3], [1, 1, 1, 1]),
    "verification": Requests([9, 126, 2], [5, 6, 5]),
    "all of it": Requests([0, 11, 127, 5, 70], [9, 1, 16, 0, 20]),
}
MATRIX = [(shape, batch, dtype) for shape in SHAPES for batch in BATCHES for dtype in DTYPES]


@pytest.mark.parametrize(("shape", "batch", "dtype"), MATRIX if ON_GPU else MATRIX[::7])
def test_attend(shape: Shape, batch: str, dtype: torch.dtype) -> None:
    assert_agrees(case(shape, BATCHES[batch], dtype))


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize(
    ("shape", "requests", "window"),
    [
        (Shape(6, 2, 12, 24), BATCHES["verification"], None),
        (Shape(4, 2, 16, 16), Requests([0, 30], [20, 1]), 33),
    ]
    + [(Shape(8, 2, 128, 16), BATCHES["all of it"], window) for window in (None, 33)] * ON_GPU,
)
def test_attend_over_eight_bits(
    shape: Shape, requests: Requests, window: int | None, dtype: torch.dtype
) -> None:
    assert_agrees(case(shape, requests, dtype, window is None, window, eight_bits=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attend_with_capped_scores(dtype: torch.dtype) -> None:
    """Both kernels cap scores."""
    qkv, heads, inputs, cache = case(Shape(6, 2, 24, 16), Requests([0, 150, 40], [5, 2, 20]), dtype)
    assert_agrees((qkv, replace(heads, scale=1.0, softcap=2.0), inputs, cache))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attend_without_norms_in_a_window(dtype: torch.dtype) -> None:
    requests = Requests([0, 150, 40], [5, 2, 20])
    assert_agrees(case(Shape(6, 2, 24, 16), requests, dtype, normed=False, window=33))


@pytest.mark.parametrize(
    ("shape", "rotated", "normed", "dtype"),
    [
        (Shape(6, 2, 24, 16), 0.75, True, torch.float16),
        (Shape(2, 1, 128, 16), 0.5, True, torch.float32),
        (Shape(2, 1, 32, 8), 0.25, False, torch.float16),
        (Shape(3, 1, 10, 16), 0.2, False, torch.float32),
    ],
    ids=str,
)
def test_heads_that_turn_in_part(
    shape: Shape, rotated: float, normed: bool, dtype: torch.dtype
) -> None:
    requests = Requests([0, 60, 40], [5, 2, 20])
    assert_agrees(case(shape, requests, dtype, normed, sinks=True, rotated=rotated))


@pytest.mark.parametrize(("window", "dtype"), WINDOWED, ids=str)
def test_rows_of_an_excerpt_turn_by_their_positions(window: int | None, dtype: torch.dtype) -> None:
    requests = Requests([0, 150, 40], [5, 2, 20])
    qkv, heads, inputs, cache = case(Shape(6, 2, 24, 16), requests, dtype, window=window)
    places = inputs.rows.positions
    moved_on = changed(inputs, positions=places + 1 + places % 5, places=places)
    assert_agrees((qkv, heads, moved_on, cache))


@pytest.mark.parametrize(("window", "dtype"), WINDOWED, ids=str)
def test_rows_of_an_image_see_each_other(window: int | None, dtype: torch.dtype) -> None:
    """Tests both kernels; the other rows are causal."""
    requests = Requests([0, 150, 40, 7], [5, 12, 20, 1])
    qkv, heads, inputs, cache = case(Shape(6, 2, 24, 16), requests, dtype, window=window)
    last_seen = inputs.rows.in_context.clone()
    for first, last in ((1, 4), (8, 17), (20, 30)):  # rows of an image each
        last_seen[first:last] = last_seen[last - 1].clone()
    inputs = replace(inputs, sees=replace(inputs.sees, last_seen=last_seen))
    assert_agrees((qkv, heads, inputs, cache))


class Noted:
    """A kernel whose grids are noted."""

    def __init__(self, kernel: Any, launched: list[tuple[int, ...]]) -> None:
        self._kernel, self._launched = kernel, launched

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self._launched.append(grid)
        return self._kernel[grid]


EDGES = Requests([127, 253, 0], [4, 4, 2])


@pytest.mark.parametrize("narrow", [True, False])
def test_a_window_ends_at_its_edge(narrow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a verification across the edges of blocks, tiles and splits; all is NaN after the
    tiles that the oldest window begins in."""
    window, shape = 128, Shape(8, 1, 64, 16)
    monkeypatch.setattr(tuned, "NARROW_WINDOW", 256 if narrow else 0)
    monkeypatch.setattr(tuned, "MULTIPROCESSORS", 1000)
    launched: list[tuple[int, ...]] = []
    monkeypatch.setattr(tuned, "short_kernel", Noted(short_kernel, launched))
    given = case(shape, EDGES, DTYPES[-1], False, window, sinks=True)
    inputs, cache = given[2], given[3]
    expected, _ = truth(given)
    for request, computed in enumerate(EDGES.computed):
        oldest = max(computed - window + 1, 0) // TILE * TILE
        unseen = inputs.paging.block_tables[request, : oldest // shape.block_size]
        for pages in cache:
            pages[unseen.long()] = torch.nan
    # Tables have room for long contexts, whose splits no row sees.
    wider = torch.nn.functional.pad(inputs.paging.block_tables, (0, 200), value=1 << 30)
    hinted = changed(inputs, max_rows=4, block_tables=wider)
    out, _ = run((given[0], given[1], hinted, cache))
    assert_close(out.cpu(), expected, rtol=0.008, atol=0.008)
    assert launched == [(1, len(EDGES.rows), 1 if narrow else 3)]


def test_a_split_ends_where_the_next_begins() -> None:
    for split in range(60):
        start, end = split_start.fn(split), split_start.fn(split + 1)
        assert start % SMALLEST == 0
        assert end > start
        assert {split_of.fn(token) for token in (start, start + 1, end - 1)} == {split}
        assert [most_splits(start + n) for n in (1, end - start)] == [split + 1] * 2


LONG = Requests([150, 4094, 0], [1, 3, 2])


@pytest.mark.parametrize(("window", "sinks"), [(None, False), (700, True)])
def test_bits_do_not_follow_from_who_does_the_work(
    window: int | None, sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One program for a request and head, or several."""
    given = case(Shape(2, 1, 16, 16), LONG, DTYPES[-1], window=window, sinks=sinks)
    monkeypatch.setattr(tuned, "MULTIPROCESSORS", 1)
    alone, cache = run(given)
    assert_agrees(given)
    for multiprocessors in (2, 5, 64, 1000) if ON_GPU else (5,):
        monkeypatch.setattr(tuned, "MULTIPROCESSORS", multiprocessors)
        out, again = run(given)
        assert_same(out, alone)
        assert_same(again[0], cache[0])


@pytest.mark.parametrize("dtype", DTYPES if ON_GPU else DTYPES[1:], ids=str)
@pytest.mark.parametrize(
    "shape", [Shape(2, 1, 10, 4), Shape(8, 2, 64, 16) if ON_GPU else Shape(4, 2, 32, 16)], ids=str
)
def test_a_row_has_its_bits_in_any_batch(shape: Shape, dtype: torch.dtype) -> None:
    """Alone without draft rows, and beside requests of few and of many rows."""
    requests = Requests([62, 125, 250, 3], [4, 6, SHORT_ROWS, 20])
    given = case(shape, requests, dtype)
    together, cache = run(given)
    qkv, heads, inputs, _ = given
    for row in range(0, 26, 1 if ON_GPU else 8):
        request = int((inputs.rows.query_start[1:] <= row).sum())
        one = slice(row, row + 1)
        alone = changed(
            only(inputs, request)[0],
            query_start=torch.tensor([0, 1], device=DEVICE),
            context_lens=inputs.rows.positions[one] + 1,
            positions=inputs.rows.positions[one],
            slots=inputs.paging.slots[one],
        )
        # The rows before it have been stored by the pass of all of them.
        out, again = run((qkv[one], heads, alone, cache))
        assert_same(out[0], together[row])
        assert_same(again[0], cache[0])


def test_hints_change_nothing() -> None:
    qkv, heads, inputs, cache = case(Shape(4, 2, 16, 16), Requests([0, 200], [4, 1]), DTYPES[-1])
    expected, _ = run((qkv, heads, inputs, cache))
    wider = torch.nn.functional.pad(inputs.paging.block_tables, (0, 60), value=1 << 30)
    for other in (
        changed(inputs, max_rows=4),
        changed(inputs, block_tables=wider),
        changed(inputs, block_tables=wider, max_rows=4),
    ):
        assert_same(run((qkv, heads, other, cache))[0], expected)


@pytest.mark.parametrize(("multiprocessors", "window"), [(1, 20), (40, None)])
def test_padding_costs_nothing(
    multiprocessors: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows after a request's last one, and requests without a context, as a graph has them."""
    monkeypatch.setattr(tuned, "MULTIPROCESSORS", multiprocessors)
    monkeypatch.setattr(tuned, "NARROW_WINDOW", 0)
    shape, requests = Shape(4, 2, 16, 16), Requests([20, 140], [2, 1])
    qkv, heads, inputs, cache = case(shape, requests, torch.float32, window=window)
    expected, written = run((qkv, heads, inputs, cache))
    rows = torch.tensor([0, 1, 0, 2, 2, 2, 0, 1, 2], device=DEVICE)  # three for each request
    real = torch.tensor([1, 1, 0, 1, 0, 0, 0, 0, 0], device=DEVICE) > 0
    padded = pass_inputs(
        query_start=torch.arange(4, device=DEVICE) * 3,
        context_lens=torch.cat(
            (inputs.paging.context_lens, inputs.paging.context_lens.new_zeros(1))
        ),
        block_tables=torch.nn.functional.pad(
            inputs.paging.block_tables, (0, 0, 0, 1), value=1 << 30
        ),
        positions=torch.where(real, inputs.rows.positions[rows], 7),
        slots=torch.where(real, inputs.paging.slots[rows], -1),
        max_rows=3,
    )
    out, again = run((qkv[rows], heads, padded, cache))
    assert_same(out[real], expected)
    assert out[:6].isfinite().all()
    assert not out[6:].any()
    for ours, theirs in zip(again, written, strict=True):
        assert_same(ours, theirs)


def test_chunks_take_no_memory_for_partial_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would take 19 GB for a prompt chunk of 8,192 rows in a context of 131,072 tokens."""
    monkeypatch.setattr(tuned, "MULTIPROCESSORS", 40)
    shape, requests = Shape(4, 2, 16, 16), Requests([140, 0], [1, 100])
    given = case(shape, requests, torch.float32)
    sizes, empty = [], torch.empty

    def watched(*shape: Any, **options: Any) -> Tensor:
        made = empty(*shape, **options)
        sizes.append(made.shape)
        return made

    monkeypatch.setattr(torch, "empty", watched)
    attend(*given)
    monkeypatch.undo()
    assert any(len(size) == 5 and size[:3] == (2, SHORT_ROWS, 4) for size in sizes)
    assert not any(len(size) > 3 and size[0] == 101 for size in sizes)


def test_rows_that_are_not_stored_see_the_cache() -> None:
    """A token may be computed again without being written: slot -1."""
    shape, requests = Shape(4, 2, 16, 16), Requests([40], [1])
    qkv, heads, inputs, cache = case(shape, requests, torch.float32)
    expected, written = run((qkv, heads, inputs, cache))
    out, again = run((qkv, heads, changed(inputs, slots=inputs.paging.slots * 0 - 1), written))
    assert_same(out, expected)
    assert_same(again[0], written[0])


def test_no_rows() -> None:
    qkv, heads, inputs, cache = case(Shape(4, 2, 16, 16), Requests([5], [1]), torch.float32)
    none = changed(
        inputs,
        query_start=inputs.rows.query_start * 0,
        positions=inputs.rows.positions[:0],
        slots=inputs.paging.slots[:0],
    )
    assert run((qkv[:0], heads, none, cache))[0].shape == (0, 64)


def test_gates_multiply_what_comes_out() -> None:
    qkv, heads, inputs, cache = case(SHAPES[1], Requests([5, 0], [2, 20]), torch.float32)
    gates = torch.randn(len(qkv), 6 * 10, generator=seeded(8)).to(DEVICE)
    qkv = torch.cat((qkv, gates), 1)
    assert_agrees((qkv, replace(heads, gated=True), inputs, cache))
