"""The triton column against the reference: on the GPU where there is one, else interpreted.

The interpreter runs the kernels on CPU tensors, program by program. Its `tl.dot` is wrong for
bfloat16, so that dtype is tested on a GPU only.
"""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

pytest.importorskip("triton", reason="it is there for Linux only")

from slipstream.kernels.pass_inputs import PassInputs, TreeInputs
from slipstream.kernels.reference import REFERENCE
from slipstream.kernels.registry import kernels_for
from slipstream.kernels.triton import TRITON
from slipstream.kernels.triton import attention as triton_attention
from slipstream.kernels.triton.attention import paged_attention
from slipstream.kernels.triton.attention_parts import SMALLEST, most_splits, split_of, split_start
from slipstream.kernels.triton.attention_shapes import SHORT_ROWS
from tests.kernels import oracles
from tests.kernels.batches import Requests, Shape, attention_inputs, filled_cache, only, seeded
from tests.kernels.device import DEVICE, INTERPRETED, ON_GPU
from tests.pass_inputs import changed, moved

pytestmark = INTERPRETED

DTYPES = [torch.float32, torch.float16]
if ON_GPU:
    DTYPES.append(torch.bfloat16)


# The interpreter takes about a millisecond for each program: it gets few of them, and every so
# manieth case (a prime, so that all values of all parameters come up).
INTERPRETED_SHARE = 11


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    if not ON_GPU:
        monkeypatch.setattr(triton_attention, "MULTIPROCESSORS", 3)


def randn(*sizes: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(sizes, generator=seeded(seed)).to(dtype).to(DEVICE)


def assert_near(out: Tensor, truth: Tensor, roundings: float = 1, tiny: float = 4e-6) -> None:
    """Equal up to float32 arithmetic and some roundings to the dtype of `out`."""
    assert out.device.type == DEVICE.type
    relative = roundings * torch.finfo(out.dtype).eps if out.dtype != torch.float32 else 0.0
    assert_close(out.double().cpu(), truth.double().cpu(), rtol=relative + tiny, atol=tiny)


def assert_same(out: Tensor, other: Tensor) -> None:
    """Assert that all bits are equal."""
    assert_close(out, other, rtol=0, atol=0, equal_nan=True)


def test_the_column_serves_cuda_devices_only() -> None:
    assert TRITON.backend == "triton"
    assert kernels_for(torch.device("cuda")).network is TRITON
    assert kernels_for(torch.device("cuda:1")).network is TRITON
    assert kernels_for(torch.device("cpu")).network.backend != "triton"


# Norms and activations


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "sizes", [(1, 1), (3, 7), (5, 129), (2, 3, 10), (4, 0, 6), (2, 5120)], ids=str
)
def test_norm(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = randn(*sizes, dtype=dtype), randn(sizes[-1], seed=1, dtype=dtype)
    out = TRITON.rms_norm(x, weight, 1e-3)
    assert out.dtype == dtype
    assert out.shape == x.shape
    if x.numel():
        assert_near(out, oracles.norm(x.cpu(), weight.cpu(), 1e-3), roundings=0.5)


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != torch.float32], ids=str)
def test_norm_is_computed_in_float32(dtype: torch.dtype) -> None:
    weight = randn(33, seed=1, dtype=dtype)
    for scale in (3000.0, 1e-4):
        x = (randn(4, 33) * scale).to(dtype)
        truth = oracles.norm(x.cpu(), weight.cpu(), 1e-12)
        assert_near(TRITON.rms_norm(x, weight, 1e-12), truth, roundings=0.5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(1, 5), (7, 64), (3, 129), (2, 5120)], ids=str)
def test_add_norm(sizes: tuple[int, int], dtype: torch.dtype) -> None:
    x, residual = randn(*sizes, dtype=dtype), randn(*sizes, seed=2, dtype=dtype) * 3
    weight = randn(sizes[1], seed=1, dtype=dtype)
    before = x.clone(), residual.clone()
    normed, summed = TRITON.add_rms_norm(x, residual, weight, 1e-5)
    assert normed.dtype == summed.dtype == dtype
    assert_same(summed, REFERENCE.add_rms_norm(x, residual, weight, 1e-5)[1])
    assert_near(normed, oracles.norm(summed.cpu(), weight.cpu(), 1e-5), roundings=0.5)
    assert_same(x, before[0])
    assert_same(residual, before[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(1, 2), (5, 26), (3, 258), (2, 4098), (0, 4)], ids=str)
def test_gated_activation(sizes: tuple[int, int], dtype: torch.dtype) -> None:
    gate_up = (randn(*sizes) * 4).to(dtype)
    out = TRITON.gated_activation(gate_up)
    assert out.dtype == dtype
    assert out.shape == (sizes[0], sizes[1] // 2)
    assert_near(out, oracles.gated(gate_up.cpu()), roundings=0.5)


def test_a_gate_far_out_is_zero_or_one() -> None:
    gate_up = torch.tensor([[-200.0, 200.0, -88.0, 3.0, 3.0, 3.0]], device=DEVICE)
    assert_near(TRITON.gated_activation(gate_up), torch.tensor([[0.0, 600.0, 0.0]]))


def test_rows_of_dense_ops_do_not_depend_on_the_others() -> None:
    dtype = DTYPES[-1]
    x, residual, weight = randn(9, 130, dtype=dtype), randn(9, 130, seed=1, dtype=dtype), randn(130)
    weight = weight.to(dtype)
    normed, summed = TRITON.add_rms_norm(x, residual, weight, 1e-5)
    active = TRITON.gated_activation(x)
    for row in range(9):
        one = slice(row, row + 1)
        alone = TRITON.add_rms_norm(x[one], residual[one], weight, 1e-5)
        assert_same(alone[0], normed[one])
        assert_same(alone[1], summed[one])
        assert_same(TRITON.gated_activation(x[one]), active[one])


# Rotary embedding and cache write


ROTATED = [
    (Shape(1, 1, 2, 1), Requests([0], [1])),
    (Shape(6, 2, 10, 8), Requests([0, 3, 8, 13], [5, 1, 4, 2])),
    (Shape(7, 1, 34, 16), Requests([40, 0], [1, 17])),
    (Shape(18, 9, 64, 16), Requests([4, 0], [1, 2])),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("shape", "requests"), ROTATED, ids=str)
def test_rotate_and_store(
    shape: Shape, requests: Requests, normed: bool, dtype: torch.dtype
) -> None:
    inputs, query, key, value = rotation_case(shape, requests, dtype)
    slots = inputs.paging.slots.clone()
    slots[::3] = -1
    norms = None
    if normed:
        weights = [randn(shape.head_dim, seed=5 + i, dtype=dtype) for i in range(2)]
        norms = (weights[0], weights[1], 1e-3)
    table = turns(shape.head_dim)
    for places in (inputs.paging.slots, slots, torch.full_like(slots, -1)):
        at = changed(inputs, slots=places)
        ours, theirs = (rotation_cache(shape, requests, dtype) for _ in range(2))
        out = TRITON.rotate_and_store(query, key, value, norms, table, at, ours)
        truth = REFERENCE.rotate_and_store(query, key, value, norms, table, at, theirs)
        assert out.dtype == dtype
        # The norm is rounded before the turn: where the two fall apart there, by one step each.
        roundings = 2 if normed else 1
        length = float(query.double().abs().max()) * 2 if normed else 1.0
        tiny = torch.finfo(dtype).eps * length * 2 if normed else 4e-6
        assert_near(out, truth, roundings, max(tiny, 4e-6))
        assert_cache(ours[0], theirs[0], roundings, max(tiny, 4e-6))
        assert_same(ours[1], theirs[1])


def assert_cache(ours: Tensor, theirs: Tensor, roundings: int, tiny: float) -> None:
    """Untouched places are NaN in both."""
    assert_same(ours.isnan(), theirs.isnan())
    assert_near(ours.nan_to_num(), theirs.nan_to_num(), roundings, tiny)


def test_rotation_does_not_depend_on_the_rest_of_the_batch() -> None:
    dtype = DTYPES[-1]
    shape, requests = ROTATED[1]
    inputs, query, key, value = rotation_case(shape, requests, dtype)
    norms = (randn(10, seed=5, dtype=dtype), randn(10, seed=6, dtype=dtype), 1e-6)
    together, one_by_one = (rotation_cache(shape, requests, dtype) for _ in range(2))
    args: tuple[Any, ...] = (norms, turns(10))
    out = TRITON.rotate_and_store(query, key, value, *args, inputs, together)
    for request in range(len(requests.rows)):
        alone, rows = only(inputs, request)
        alone = moved(alone, DEVICE)
        one = TRITON.rotate_and_store(query[rows], key[rows], value[rows], *args, alone, one_by_one)
        assert_same(one, out[rows])
    for pages, expected in zip(one_by_one, together, strict=True):
        assert_same(pages, expected)


def rotation_case(
    shape: Shape, requests: Requests, dtype: torch.dtype
) -> tuple[PassInputs, Tensor, Tensor, Tensor]:
    """Query, key and value are views of one matrix, as they come out of the layer's matmul."""
    inputs = moved(attention_inputs(requests, shape.block_size), DEVICE)
    parts = [shape.heads, shape.kv_heads, shape.kv_heads]
    rows = len(inputs.rows.positions)
    whole = randn(rows, sum(parts) * shape.head_dim, dtype=dtype)
    split = whole.split([heads * shape.head_dim for heads in parts], -1)
    query, key, value = (part.view(rows, -1, shape.head_dim) for part in split)
    return inputs, query, key, value


def rotation_cache(shape: Shape, requests: Requests, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    inputs = attention_inputs(requests, shape.block_size)
    empty = changed(inputs, context_lens=torch.zeros_like(inputs.paging.context_lens))
    keys, values = filled_cache(empty, requests, replace(shape, dtype=dtype))
    return keys.to(DEVICE), values.to(DEVICE)


def turns(head_dim: int) -> Tensor:
    angles = oracles.angles(head_dim, 100.0, torch.arange(64))
    return torch.cat((angles.cos(), angles.sin()), -1).float().to(DEVICE)


# Attention


def test_splits_cover_every_token_once() -> None:
    starts = [split_start.fn(split) for split in range(60)]
    assert starts[:3] == [0, 128, 256]
    assert starts[32] == 11264
    assert all(start % SMALLEST == 0 for start in starts)
    lengths = [end - start for start, end in itertools.pairwise(starts)]
    assert lengths == sorted(lengths)
    for token in range(0, starts[-1], 64):
        split = split_of.fn(token)
        assert starts[split] <= token < starts[split + 1]
    assert [most_splits(n) for n in (1, 128, 129, 1024, 1025, 32768)] == [1, 1, 2, 8, 9, 53]


SHAPES = [
    Shape(1, 1, 2, 1),
    Shape(4, 4, 16, 8),
    Shape(6, 2, 10, 4),
    Shape(7, 1, 72, 24),
    Shape(14, 2, 12, 16),
    Shape(8, 2, 128, 16),
]
BATCHES = {
    "one row": Requests([0], [1]),
    "decoding": Requests([8, 0, 150, 3], [1, 1, 1, 1]),
    "prompts": Requests([0, 0, 0], [7, 1, 18]),
    "verification": Requests([9, 126, 2], [5, 5, 5]),
    "all of it": Requests([0, 11, 127, 5, 70], [9, 1, 4, 0, 33]),
}


WINDOWS = [None, 1, 5, 100]
MATRIX = list(itertools.product(SHAPES, BATCHES, WINDOWS, DTYPES))


@pytest.mark.parametrize(
    ("shape", "batch", "window", "dtype"), MATRIX if ON_GPU else MATRIX[::INTERPRETED_SHARE]
)
def test_attention(shape: Shape, batch: str, window: int | None, dtype: torch.dtype) -> None:
    assert_attention(shape, BATCHES[batch], window, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [80, 96, 192, 256])
def test_attention_of_other_head_sizes(head_dim: int, dtype: torch.dtype) -> None:
    shape = Shape(4, 2, head_dim, 16)
    assert_attention(shape, Requests([150, 0, 40], [2, 20, 1]), None, dtype)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("groups", [3, 8, 16, 71])
def test_attention_of_other_group_sizes(groups: int, dtype: torch.dtype) -> None:
    assert_attention(Shape(groups, 1, 16, 16), Requests([130, 0], [1, 18]), None, dtype)


@pytest.mark.parametrize("window", [None, 700])
def test_attention_over_splits_of_every_length(window: int | None) -> None:
    """Split lengths change at 1024, 3072 and 11264 tokens."""
    requests = Requests([1020, 3100, 1400], [6, 2, 20])
    assert_attention(Shape(2, 1, 16, 16), requests, window, torch.float16)
    if ON_GPU:
        requests = Requests([11262, 16383, 0, 12000], [4, 2, 1, 40])
        assert_attention(Shape(4, 1, 64, 16), requests, window, torch.bfloat16)


def assert_attention(
    shape: Shape, requests: Requests, window: int | None, dtype: torch.dtype
) -> None:
    """Against the reference in float32; whatever is read outside of a request's tokens is NaN."""
    inputs, query, cache = attention_case(shape, requests, dtype)
    scale = 0.8 / shape.head_dim**0.5
    out = TRITON.paged_attention(query, cache, inputs, scale, window)
    assert out.dtype == dtype
    assert out.shape == query.shape
    assert_weighted(out, attention_truth(query, cache, inputs, scale, window))


def assert_weighted(out: Tensor, truth: Tensor) -> None:
    """Weights may be rounded before they are multiplied with the values."""
    ulp = torch.finfo(out.dtype).eps
    tiny = 4e-6 if out.dtype == torch.float32 else 2 * ulp
    assert_near(out, truth, roundings=1, tiny=tiny)


def attention_truth(
    query: Tensor,
    cache: tuple[Tensor, Tensor],
    inputs: PassInputs,
    scale: float,
    window: int | None,
) -> Tensor:
    """The reference, in double precision on the host."""
    pages = cache[0].double().cpu(), cache[1].double().cpu()
    host = moved(inputs, "cpu")
    return REFERENCE.paged_attention(query.double().cpu(), pages, host, scale, window)


def attention_case(
    shape: Shape, requests: Requests, dtype: torch.dtype
) -> tuple[PassInputs, Tensor, tuple[Tensor, Tensor]]:
    inputs = attention_inputs(requests, shape.block_size)
    keys, values = filled_cache(inputs, requests, replace(shape, dtype=dtype))
    query = 2 * randn(len(inputs.rows.positions), shape.heads, shape.head_dim, dtype=dtype)
    return moved(inputs, DEVICE), query, (keys.to(DEVICE), values.to(DEVICE))


# A row's numbers are its own


def cases_of_bits(small: Shape, kv_heads: int) -> list[tuple[Shape, int | None]]:
    """Shapes and windows; the interpreter takes a smaller one, and each of them once."""
    large = Shape(8, kv_heads, 64, 16) if ON_GPU else Shape(4, kv_heads, 32, 16)
    cases: list[tuple[Shape, int | None]] = [
        (shape, window) for shape in (small, large) for window in (None, 140)
    ]
    return cases if ON_GPU else cases[::3]


@pytest.mark.parametrize("dtype", DTYPES if ON_GPU else DTYPES[1:], ids=str)
@pytest.mark.parametrize(("shape", "window"), cases_of_bits(Shape(3, 1, 10, 4), 2), ids=str)
def test_attention_does_not_depend_on_the_rest_of_the_batch(
    shape: Shape, window: int | None, dtype: torch.dtype
) -> None:
    requests = Requests([11, 300, 5, 16], [1, 4, 16, 40])
    inputs, query, cache = attention_case(shape, requests, dtype)
    together = paged_attention(query, cache, inputs, 0.3, window)
    for request in range(len(requests.rows)):
        alone, rows = only(inputs, request)
        out = paged_attention(query[rows], cache, alone, 0.3, window)
        assert_same(out, together[rows])


@pytest.mark.parametrize("dtype", DTYPES if ON_GPU else DTYPES[1:], ids=str)
@pytest.mark.parametrize(("shape", "window"), cases_of_bits(Shape(1, 1, 2, 1), 1), ids=str)
def test_a_verified_row_has_the_bits_of_a_decoded_one(
    shape: Shape, window: int | None, dtype: torch.dtype
) -> None:
    """Rows 1 and k+1 at a time, also where the drafts begin a new tile or split."""
    requests = Requests([62, 125, 250], [4, 6, SHORT_ROWS])
    inputs, query, cache = attention_case(shape, requests, dtype)
    verified = paged_attention(query, cache, inputs, 0.3, window)
    for row in range(0, len(query), 1 if ON_GPU else 3):
        request = int((inputs.rows.query_start[1:] <= row).sum())
        alone, _ = only(inputs, request)
        alone = changed(
            alone,
            query_start=torch.tensor([0, 1], device=DEVICE),
            context_lens=inputs.rows.positions[row : row + 1] + 1,
            positions=inputs.rows.positions[row : row + 1],
            slots=inputs.paging.slots[row : row + 1],
        )
        assert_same(
            paged_attention(query[row : row + 1], cache, alone, 0.3, window)[0], verified[row]
        )


def test_hints_and_the_number_of_programs_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    shape, requests = Shape(4, 2, 16, 16), Requests([0, 300, 130], [4, 1, 5])
    inputs, query, cache = attention_case(shape, requests, DTYPES[-1])
    out = paged_attention(query, cache, inputs, 0.3, None)
    assert_same(paged_attention(query, cache, changed(inputs, max_rows=5), 0.3, None), out)
    wider = torch.nn.functional.pad(inputs.paging.block_tables, (0, 200), value=1 << 30)
    assert_same(paged_attention(query, cache, changed(inputs, block_tables=wider), 0.3, None), out)
    for programs in (1, 30):
        monkeypatch.setattr(triton_attention, "MULTIPROCESSORS", programs)
        assert_same(paged_attention(query, cache, inputs, 0.3, None), out)


def test_rows_of_a_padded_batch() -> None:
    """Requests without rows or without context neither read nor spoil anything."""
    shape, requests = Shape(4, 2, 16, 16), Requests([20, 3], [2, 1])
    inputs, query, cache = attention_case(shape, requests, torch.float32)
    out = paged_attention(query, cache, inputs, 0.3, None)
    padded = changed(
        inputs,
        query_start=torch.tensor([0, 2, 3, 4, 4], device=DEVICE),
        context_lens=torch.cat(
            (inputs.paging.context_lens, inputs.paging.context_lens.new_zeros(2))
        ),
        block_tables=torch.cat(
            (inputs.paging.block_tables, inputs.paging.block_tables.new_full((2, 3), 1 << 30))
        ),
        positions=torch.cat((inputs.rows.positions, inputs.rows.positions.new_zeros(1))),
        max_rows=2,
    )
    more = paged_attention(torch.cat((query, query[:1])), cache, padded, 0.3, None)
    assert_same(more[:3], out)
    assert not more[3].any()


# What some models and token trees add


EXTRA = Requests([5, 130, 40, 0], [6, 3, 21, 1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("kind", ["softcap", "sinks", "tree", "all"])
def test_extras(kind: str, window: int | None, dtype: torch.dtype) -> None:
    shape = Shape(6, 2, 24, 16)
    inputs, query, cache = attention_case(shape, EXTRA, dtype)
    if kind in ("tree", "all"):
        inputs = changed(inputs, tree=random_tree(inputs))
    softcap = 1.7 if kind in ("softcap", "all") else None
    sinks = randn(6, seed=3) if kind in ("sinks", "all") else None
    out = paged_attention(query, cache, inputs, 0.4, window, sinks, softcap)
    assert_weighted(out, with_extras(query, cache, inputs, 0.4, window, sinks, softcap))


def random_tree(inputs: PassInputs) -> TreeInputs:
    """Rows see themselves and any of the request's new tokens before them, or all of those."""
    counts = inputs.rows.query_start.diff()
    tokens = inputs.rows.positions.clone()
    row = torch.arange(len(tokens), device=DEVICE)
    row -= inputs.rows.query_start[:-1].repeat_interleave(counts)
    own = torch.ones_like(row) << row
    drawn = torch.randint(1 << 62, (len(tokens),), generator=seeded(4)).to(DEVICE)
    words = torch.where(row % 5 == 4, -1, (drawn & (own - 1)) | own)
    return TreeInputs(inputs.paging.context_lens - counts, tokens, words)


def test_the_tree_of_a_causal_chain_is_the_default() -> None:
    inputs, query, cache = attention_case(Shape(6, 2, 24, 16), EXTRA, torch.float32)
    tree = random_tree(inputs)
    own = tree.tokens - tree.starts.repeat_interleave(inputs.rows.query_start.diff())
    words = (torch.ones_like(own) << (own + 1)) - 1
    for chain in (words, torch.full_like(words, -1)):
        assert_close(
            paged_attention(
                query, cache, changed(inputs, tree=replace(tree, ancestors=chain)), 0.4, None
            ),
            paged_attention(query, cache, inputs, 0.4, None),
            rtol=1e-6,
            atol=1e-6,
        )


def with_extras(
    query: Tensor,
    cache: tuple[Tensor, Tensor],
    inputs: PassInputs,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
    softcap: float | None,
) -> Tensor:
    """Row by row, in float64."""
    keys, values = (pages.double().cpu().flatten(0, 1) for pages in cache)
    block_size, groups = cache[0].shape[1], query.shape[1] // cache[0].shape[2]
    tables, starts = inputs.paging.block_tables.cpu(), inputs.rows.query_start.tolist()
    out = torch.empty(query.shape, dtype=torch.float64)
    for request, context in enumerate(inputs.paging.context_lens.tolist()):
        first, last = starts[request : request + 2]
        places = [
            int(tables[request, token // block_size]) * block_size + token % block_size
            for token in range(context)
        ]
        token = torch.arange(context)
        own_keys, own_values = (
            pages[places].repeat_interleave(groups, 1) for pages in (keys, values)
        )
        for row in range(first, last):
            position = int(inputs.rows.positions[row])
            seen = token <= position
            if inputs.sees.tree is not None:
                word = int(inputs.sees.tree.ancestors[row])
                for new in range(last - first):
                    seen[context - (last - first) + new] &= bool(word >> new & 1)
            if window is not None:
                seen &= token > position - window
            score = torch.einsum("hd,nhd->hn", query[row].double().cpu(), own_keys) * scale
            if softcap is not None:
                score = softcap * (score / softcap).tanh()
            weight = score.masked_fill(~seen, -torch.inf)
            if sinks is not None:
                weight = torch.cat((weight, sinks.double().cpu()[:, None]), 1)
            weight = weight.softmax(1)[:, :context]
            out[row] = torch.einsum("hn,nhd->hd", weight, own_values)
    return out
