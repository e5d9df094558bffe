"""The reference column against oracles in float64: it is the truth for the others."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from slipstream.kernels.formats.dense import DenseMatrix
from slipstream.kernels.pass_inputs import PassInputs
from slipstream.kernels.reference import REFERENCE
from slipstream.kernels.registry import kernels_for
from slipstream.layers.rope import RopeConfig, rope_table
from tests.kernels import oracles
from tests.kernels.batches import (
    Requests,
    Shape,
    attention_inputs,
    filled_cache,
    only,
    seeded,
)
from tests.pass_inputs import changed

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HALVES = [torch.bfloat16, torch.float16]


def randn(*sizes: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(sizes, generator=seeded(seed)).to(dtype)


def assert_near(out: Tensor, truth: Tensor, roundings: int = 1) -> None:
    """Equal up to float32 arithmetic and some roundings to the dtype of `out`."""
    ulp = torch.finfo(out.dtype).eps
    relative = roundings * ulp / 2 if out.dtype != torch.float32 else 0
    assert_close(out.double(), truth, rtol=relative + 2e-6, atol=2e-6)


def test_this_column_serves_what_no_faster_one_does() -> None:
    assert REFERENCE.backend == "reference"
    assert kernels_for(CPU, torch.float16).network is REFERENCE


# Norms, activations, products


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(1, 1), (3, 7), (5, 129), (2, 3, 10), (4, 0, 6)], ids=str)
@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_norm(sizes: tuple[int, ...], eps: float, dtype: torch.dtype) -> None:
    x, weight = randn(*sizes, dtype=dtype), randn(sizes[-1], seed=1, dtype=dtype)
    out = REFERENCE.rms_norm(x, weight, eps)
    assert out.dtype == dtype
    assert out.shape == x.shape
    if x.numel():
        assert_near(out, oracles.norm(x, weight, eps))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_norm_is_computed_in_float32(dtype: torch.dtype) -> None:
    """Squares of large numbers do not overflow, those of small ones do not vanish."""
    weight = randn(33, seed=1, dtype=dtype)
    for scale in (3000.0, 1e-4):
        x = (randn(4, 33) * scale).to(dtype)
        assert_near(REFERENCE.rms_norm(x, weight, 1e-12), oracles.norm(x, weight, 1e-12))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(1, 5), (7, 64), (3, 129)], ids=str)
def test_add_norm(sizes: tuple[int, int], dtype: torch.dtype) -> None:
    x, residual = randn(*sizes, dtype=dtype), randn(*sizes, seed=2, dtype=dtype) * 3
    weight = randn(sizes[1], seed=1, dtype=dtype)
    total = (x.double() + residual.double()).to(dtype)
    normed, summed = REFERENCE.add_rms_norm(x, residual, weight, 1e-5)
    assert normed.dtype == summed.dtype == dtype
    assert_close(summed, total, rtol=0, atol=0)
    assert_near(normed, oracles.norm(total, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(1, 2), (5, 26), (3, 258)], ids=str)
def test_gated_activation(sizes: tuple[int, int], dtype: torch.dtype) -> None:
    gate_up = (randn(*sizes) * 4).to(dtype)
    out = REFERENCE.gated_activation(gate_up)
    assert out.dtype == dtype
    assert out.shape == (sizes[0], sizes[1] // 2)
    assert_near(out, oracles.gated(gate_up), roundings=2)  # the gate is rounded once more


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "columns", "outputs"), [(1, 1, 1), (3, 37, 5), (17, 129, 66)])
def test_linear(rows: int, columns: int, outputs: int, bias: bool, dtype: torch.dtype) -> None:
    x, weight = product_inputs(rows, columns, outputs, dtype)
    added = randn(outputs, seed=3, dtype=dtype) if bias else None
    out = REFERENCE.product(x, DenseMatrix(weight), added)
    assert out.dtype == dtype
    assert_near(out, oracles.product(x, weight, added), roundings=2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("vocab", "columns"), [(1, 3), (255, 67), (256, 64), (257, 130), (1031, 1030), (5, 4100)]
)
@pytest.mark.parametrize("rows", [1, 3, 18])
def test_logits(rows: int, vocab: int, columns: int, dtype: torch.dtype) -> None:
    x, weight = product_inputs(rows, columns, vocab, dtype)
    out = REFERENCE.logits(x, DenseMatrix(weight))
    assert out.dtype == torch.float32
    assert out.shape == (rows, vocab)
    assert_close(out.double(), oracles.product(x, weight), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_logits_are_never_rounded_to_the_dtype_of_the_weights(dtype: torch.dtype) -> None:
    """Rounded logits tie, and a tie makes greedy text depend on the order of the vocabulary."""
    x, weight = product_inputs(9, 64, 1029, dtype)
    out = REFERENCE.logits(x, DenseMatrix(weight))
    rounded = oracles.product(x, weight).to(dtype).float()
    assert (out == rounded).float().mean() < 0.01
    assert (out == out.to(dtype).float()).float().mean() < 0.01
    ties = sum(len(row) - len(set(row)) for row in out.tolist())
    assert ties < 0.01 * out.numel()
    assert sum(len(row) - len(set(row)) for row in rounded.tolist()) > 10 * (ties + 1)


def product_inputs(
    rows: int, columns: int, outputs: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    x = randn(rows, columns, dtype=dtype)
    return x, (randn(outputs, columns, seed=1) / columns**0.5).to(dtype)


# Rotary embeddings


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("shape", "requests"),
    [
        (Shape(1, 1, 2, 1), Requests([0], [1])),
        (Shape(6, 2, 10, 4), Requests([0, 3, 8, 13], [5, 1, 4, 2])),
        (Shape(7, 1, 34, 16), Requests([40, 0], [1, 17])),
    ],
    ids=str,
)
def test_rotate_and_store(
    shape: Shape, requests: Requests, normed: bool, dtype: torch.dtype
) -> None:
    theta, eps = 100.0, 1e-3
    inputs = attention_inputs(requests, shape.block_size)
    query, key, value = query_key_value(shape, len(inputs.rows.positions), dtype)
    norms = None
    if normed:
        weights = randn(shape.head_dim, seed=5, dtype=dtype), randn(shape.head_dim, seed=6)
        norms = (weights[0], weights[1].to(dtype), eps)
    cache = filled_cache(inputs, requests, replace(shape, dtype=dtype))
    before = tuple(pages.clone() for pages in cache)

    out = REFERENCE.rotate_and_store(
        query, key, value, norms, cos_sin(shape.head_dim, theta), inputs, cache
    )
    assert out.dtype == dtype
    turns = oracles.angles(shape.head_dim, theta, inputs.rows.positions)
    heads = [query, key]
    if norms is not None:  # the norm is rounded to the dtype, as it is between two layers
        heads = [oracles.norm(x, w, eps).to(dtype) for x, w in zip(heads, norms[:2], strict=True)]
    assert_rotated(out, heads[0], turns, normed)
    stored_keys, stored_values = (pages.flatten(0, 1)[inputs.paging.slots] for pages in cache)
    assert_rotated(stored_keys, heads[1], turns, normed)
    assert_close(stored_values, value, rtol=0, atol=0)
    assert_untouched(cache, before, inputs.paging.slots)


def test_rows_of_an_excerpt_turn_by_positions_and_see_by_places() -> None:
    shape, requests = Shape(6, 2, 10, 4), Requests([2, 5, 0], [3, 1, 6])
    whole = attention_inputs(requests, shape.block_size)
    far = 2 * whole.rows.positions + 9
    query, key, value = query_key_value(shape, len(far), torch.float32)
    table = cos_sin(shape.head_dim, 100.0)
    results = []
    for inputs in (changed(whole, positions=far), changed(whole, positions=far, places=far - far)):
        cache = filled_cache(whole, requests, shape)
        op = REFERENCE.rotate_and_store
        results.append((op(query, key, value, None, table, inputs, cache), *cache))
    for ours, theirs in zip(*results, strict=True):
        assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    cache = filled_cache(whole, requests, shape)
    excerpt = changed(whole, positions=far, places=whole.rows.positions)
    for window in (None, 3):
        seen = [
            REFERENCE.paged_attention(query, cache, inputs, 0.3, window)
            for inputs in (whole, excerpt)
        ]
        assert_close(*seen, rtol=0, atol=0)


def test_rows_without_a_slot_are_rotated_but_not_stored() -> None:
    shape, requests = Shape(6, 2, 10, 4), Requests([2, 5, 0], [3, 1, 6])
    whole = attention_inputs(requests, shape.block_size)
    dropped = torch.tensor([1, 3, 9])
    slots = whole.paging.slots.clone()
    slots[dropped] = -1
    query, key, value = query_key_value(shape, len(slots), torch.float32)
    table = cos_sin(shape.head_dim, 100.0)

    caches, rotated = [], []
    for inputs in (whole, changed(whole, slots=slots), changed(whole, slots=torch.full((10,), -1))):
        caches.append(filled_cache(whole, requests, shape))
        rotated.append(
            REFERENCE.rotate_and_store(query, key, value, None, table, inputs, caches[-1])
        )
    for out in rotated[1:]:
        assert_close(out, rotated[0], rtol=0, atol=0)
    untouched = filled_cache(whole, requests, shape)
    written = slots[slots >= 0]
    for pages, full in zip(caches[1], caches[0], strict=True):
        assert_close(pages.flatten(0, 1)[written], full.flatten(0, 1)[written], rtol=0, atol=0)
    assert_untouched(caches[1], untouched, written)
    assert_untouched(caches[2], untouched, written[:0])


def query_key_value(shape: Shape, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as attention layers have them: columns of one product."""
    sizes = [count * shape.head_dim for count in (shape.heads, shape.kv_heads, shape.kv_heads)]
    parts = torch.split(randn(rows, sum(sizes), seed=4, dtype=dtype), sizes, dim=-1)
    query, key, value = (part.view(rows, -1, shape.head_dim) for part in parts)
    return query, key, value


def cos_sin(head_dim: int, theta: float) -> Tensor:
    turns = oracles.angles(head_dim, theta, torch.arange(64))
    return torch.cat((turns.cos(), turns.sin()), dim=-1).float()


def assert_rotated(out: Tensor, x: Tensor, turns: Tensor, normed: bool) -> None:
    truth = oracles.rotated(x, turns)
    if out.dtype == torch.float32:
        assert_close(out.double(), truth, rtol=2e-6, atol=2e-6)
        return
    # A norm that was rounded the other way moves both numbers of a pair.
    length = truth.abs().max()
    roundings = 1 if normed else 0
    atol = float(length * torch.finfo(out.dtype).eps) * roundings
    assert_close(out.double(), truth, rtol=torch.finfo(out.dtype).eps / 2, atol=atol + 1e-6)


def assert_untouched(cache: tuple[Tensor, ...], before: tuple[Tensor, ...], slots: Tensor) -> None:
    for pages, old in zip(cache, before, strict=True):
        others = torch.ones(pages.shape[0] * pages.shape[1], dtype=torch.bool)
        others[slots] = False
        assert_close(
            pages.flatten(0, 1)[others], old.flatten(0, 1)[others], rtol=0, atol=0, equal_nan=True
        )


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize("head_dim", [2, 10, 64, 128])
@pytest.mark.parametrize(
    ("kind", "theta", "settings_"),
    [
        ("linear", 10000.0, {"factor": 2.5}),
        ("linear", 1e6, {"factor": 1.0}),
        ("llama3", 10000.0, LLAMA3),
        ("llama3", 500000.0, {**LLAMA3, "original_max_position_embeddings": 8192}),
        ("llama3", 300.0, {**LLAMA3, "low_freq_factor": 2.0, "high_freq_factor": 2.5}),
    ],
)
def test_rope_table_is_that_of_transformers(
    kind: str, theta: float, settings_: dict[str, Any], head_dim: int
) -> None:
    rope = {"rope_type": kind, "rope_theta": theta, **settings_}
    config = LlamaConfig(
        hidden_size=head_dim,
        num_attention_heads=1,
        head_dim=head_dim,
        max_position_embeddings=1 << 17,
        rope_parameters=rope,
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, CPU)
    assert factor == 1.0
    table = rope_table(head_dim, RopeConfig(theta, kind, **settings_), 4096, CPU)
    assert_table(table, frequencies.double())


@pytest.mark.parametrize("head_dim", [2, 10, 128])
@pytest.mark.parametrize("theta", [100.0, 10000.0, 1e6])
def test_plain_rope_table(theta: float, head_dim: int) -> None:
    table = rope_table(head_dim, RopeConfig(theta), 4096, CPU)
    # A power in float32 is as exact as the logarithm that it multiplies.
    assert_table(table, oracles.angles(head_dim, theta, torch.tensor([1]))[0], relative=1e-6)


def assert_table(table: Tensor, frequencies: Tensor, relative: float = 3e-7) -> None:
    """Near the exact one: an angle has the relative precision of float32, as in transformers."""
    positions = torch.arange(len(table), dtype=torch.float64)
    turns = torch.outer(positions, frequencies)
    exact = torch.cat((turns.cos(), turns.sin()), dim=-1)
    assert table.dtype == torch.float32
    assert table.shape == exact.shape
    allowed = 1e-7 + torch.cat((turns, turns), dim=-1) * relative
    assert ((table.double() - exact).abs() <= allowed).all()


# Attention


SHAPES = [
    Shape(1, 1, 2, 1),
    Shape(4, 4, 16, 8),
    Shape(6, 2, 10, 4),
    Shape(7, 1, 6, 5),
    Shape(14, 2, 12, 16),
]
BATCHES = {
    "one row": Requests([0], [1]),
    "decoding": Requests([8, 0, 15, 3], [1, 1, 1, 1]),
    "prompts": Requests([0, 0, 0], [7, 1, 16]),
    "chunk in the middle": Requests([13], [6]),
    "verification": Requests([9, 20, 2], [5, 5, 5]),
    "all of it": Requests([0, 11, 24, 5, 16], [9, 1, 4, 3, 8]),
}


@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize("requests", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention(shape: Shape, requests: Requests, window: int | None) -> None:
    assert_attention(shape, requests, window, torch.float32)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("shape", SHAPES[2:], ids=str)
def test_attention_in_half_precision(shape: Shape, window: int | None, dtype: torch.dtype) -> None:
    assert_attention(shape, BATCHES["all of it"], window, dtype)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), min_size=1, max_size=4),
    st.sampled_from([1, 3, 7]),
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(1, 20),
    st.none() | st.integers(1, 50),
)
def test_attention_of_any_ragged_batch(
    contexts: list[tuple[int, int]],
    groups: int,
    kv_heads: int,
    half_dim: int,
    block_size: int,
    window: int | None,
) -> None:
    shape = Shape(groups * kv_heads, kv_heads, 2 * half_dim, block_size)
    computed, rows = zip(*contexts, strict=True)
    assert_attention(shape, Requests(computed, rows), window, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("shape", SHAPES[1:4], ids=str)
def test_attention_with_sinks(shape: Shape, window: int | None, dtype: torch.dtype) -> None:
    sinks = 2 * randn(shape.heads, seed=4, dtype=dtype)
    for name in ("decoding", "all of it"):
        assert_attention(shape, BATCHES[name], window, dtype, sinks)


def test_a_request_without_rows_is_passed_over() -> None:
    shape, requests = Shape(6, 2, 10, 4), Requests([5, 7, 2], [2, 0, 3])
    assert_attention(shape, requests, None, torch.float32)
    assert_attention(shape, requests, 3, torch.float32)


def assert_attention(
    shape: Shape,
    requests: Requests,
    window: int | None,
    dtype: torch.dtype,
    sinks: Tensor | None = None,
) -> None:
    """Against the oracle; whatever is read outside of a request's own tokens is NaN."""
    inputs, query, cache = attention_case(shape, requests, dtype)
    scale = 0.8 / shape.head_dim**0.5
    out = REFERENCE.paged_attention(query, cache, inputs, scale, window, sinks)
    assert out.dtype == dtype
    assert out.shape == query.shape
    truth = oracles.attention(query, cache, inputs, scale, window, sinks)
    if dtype == torch.float32:
        assert_close(out.double(), truth, rtol=2e-6, atol=2e-6)
    else:  # weights may be rounded before they are multiplied with the values
        ulp = torch.finfo(dtype).eps
        assert_close(out.double(), truth, rtol=ulp, atol=2 * ulp)


def attention_case(
    shape: Shape, requests: Requests, dtype: torch.dtype
) -> tuple[PassInputs, Tensor, tuple[Tensor, Tensor]]:
    inputs = attention_inputs(requests, shape.block_size)
    cache = filled_cache(inputs, requests, replace(shape, dtype=dtype))
    query = 2 * randn(len(inputs.rows.positions), shape.heads, shape.head_dim, dtype=dtype)
    return inputs, query, cache


# A row's numbers are its own


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_does_not_depend_on_the_rest_of_the_batch(
    shape: Shape, window: int | None
) -> None:
    requests = BATCHES["all of it"]
    inputs, query, cache = attention_case(shape, requests, torch.float32)
    together = REFERENCE.paged_attention(query, cache, inputs, 0.3, window)
    for request in range(len(requests.rows)):
        alone, rows = only(inputs, request)
        out = REFERENCE.paged_attention(query[rows], cache, alone, 0.3, window)
        assert_close(out, together[rows], rtol=0, atol=1e-6)


def test_rotation_does_not_depend_on_the_rest_of_the_batch() -> None:
    shape, requests = Shape(6, 2, 10, 4), BATCHES["all of it"]
    inputs = attention_inputs(requests, shape.block_size)
    query, key, value = query_key_value(shape, len(inputs.rows.positions), torch.float32)
    norms = (randn(10, seed=5), randn(10, seed=6), 1e-6)
    table = cos_sin(shape.head_dim, 100.0)
    together = filled_cache(inputs, requests, shape)
    out = REFERENCE.rotate_and_store(query, key, value, norms, table, inputs, together)
    one_by_one = filled_cache(inputs, requests, shape)
    for request in range(len(requests.rows)):
        alone, rows = only(inputs, request)
        turned = REFERENCE.rotate_and_store(
            query[rows], key[rows], value[rows], norms, table, alone, one_by_one
        )
        assert_close(turned, out[rows], rtol=0, atol=1e-6)
    for pages, expected in zip(one_by_one, together, strict=True):
        assert_close(pages, expected, rtol=0, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [2, 7, 33])
def test_logits_do_not_depend_on_the_rest_of_the_batch(rows: int, dtype: torch.dtype) -> None:
    x, weight = product_inputs(rows, 130, 517, dtype)
    together = REFERENCE.logits(x, DenseMatrix(weight))
    for row in range(rows):
        alone = REFERENCE.logits(x[row : row + 1], DenseMatrix(weight))
        # 1e-6 of numbers of order 1: some are as large as 5.
        assert_close(alone, together[row : row + 1], rtol=1e-6, atol=1e-6)
