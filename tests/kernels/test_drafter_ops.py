"""The ops that drafting heads need beside a decoder's, in both backends."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

pytest.importorskip("triton", reason="it is there for Linux only")


from slipstream.kernels.formats.dense import DenseMatrix
from slipstream.kernels.formats.float8 import ToFloat8
from slipstream.kernels.ops import Ops
from slipstream.kernels.pass_inputs import PassInputs
from slipstream.kernels.reference import REFERENCE
from slipstream.kernels.table import Heads, Norm
from slipstream.kernels.triton import TRITON
from slipstream.kernels.triton import attention as triton_attention
from slipstream.layers.rope import RopeConfig, rope_table
from tests.kernels import oracles
from tests.kernels.batches import Requests, Shape, attention_inputs, filled_cache, only, seeded
from tests.kernels.device import DEVICE, INTERPRETED, ON_GPU
from tests.pass_inputs import changed, moved

pytestmark = INTERPRETED

BATCHES = [
    Requests([1, 0, 150, 3], [1, 2, 1, 1]),
    Requests([9, 126, 2], [5, 5, 5]),
    Requests([0, 130, 5], [18, 20, 2]),
]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    if not ON_GPU:
        monkeypatch.setattr(triton_attention, "MULTIPROCESSORS", 3)


def randn(*sizes: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(sizes, generator=seeded(seed)).to(dtype).to(DEVICE)


@pytest.mark.parametrize("first", [1, 3])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("ops", [REFERENCE, TRITON], ids=["reference", "triton"])
@pytest.mark.parametrize("requests", BATCHES, ids=str)
def test_tokens_before_the_first_seen_are_left_out(
    requests: Requests, ops: Ops, window: int | None, first: int
) -> None:
    shape = Shape(4, 2, 16, 8)
    inputs = attention_inputs(requests, shape.block_size)
    cache = filled_cache(inputs, requests, shape)
    query = torch.randn(len(inputs.rows.positions), 4, 16, generator=seeded(7))
    inputs = changed(inputs, first_seen=first)
    seeing = inputs.rows.positions >= first  # earlier rows see nothing and mean nothing
    truth = torch.empty(0)
    if window is None or bool(seeing.all()):
        at = changed(inputs, positions=inputs.rows.positions.clamp_min(first))
        truth = oracles.attention(query, cache, at, 0.25, window)
    there = moved(inputs, DEVICE)
    on_device = (cache[0].to(DEVICE), cache[1].to(DEVICE))
    out = ops.paged_attention(query.to(DEVICE), on_device, there, 0.25, window)
    if len(truth):
        assert_close(out[seeing].double().cpu(), truth[seeing], rtol=1e-4, atol=1e-5)
    for pages in on_device:
        for table in inputs.paging.block_tables.tolist():
            pages[table[0], :first] = 100.0
    again = ops.paged_attention(query.to(DEVICE), on_device, there, 0.25, window)
    assert_close(again[seeing], out[seeing], rtol=0, atol=0)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("ops", [REFERENCE, TRITON], ids=["reference", "triton"])
@pytest.mark.parametrize("requests", BATCHES, ids=str)
def test_rows_that_are_not_causal_see_each_other(
    requests: Requests, ops: Ops, window: int | None
) -> None:
    shape = Shape(4, 2, 16, 8)
    inputs = changed(attention_inputs(requests, shape.block_size), causal=False)
    cache = filled_cache(inputs, requests, shape)
    query = torch.randn(len(inputs.rows.positions), 4, 16, generator=seeded(7))
    pages = (cache[0].to(DEVICE), cache[1].to(DEVICE))
    there = moved(inputs, DEVICE)
    out = ops.paged_attention(query.to(DEVICE), pages, there, 0.25, window)
    truth = oracles.attention(query, cache, inputs, 0.25, window)
    assert_close(out.double().cpu(), truth, rtol=1e-4, atol=1e-5)
    causal = ops.paged_attention(query.to(DEVICE), pages, changed(there, causal=True), 0.25, window)
    last = inputs.rows.query_start[1:] - 1
    assert_close(out[last], causal[last])
    assert (out - causal).abs().max() > 0.1


def layer_inputs(requests: Requests) -> tuple[Tensor, Heads, PassInputs, tuple[Tensor, ...]]:
    """The inputs of a layer, and a cache that has the earlier tokens."""
    shape = Shape(4, 2, 16, 8)
    inputs = attention_inputs(requests, shape.block_size)
    before = changed(inputs, context_lens=torch.tensor(list(requests.computed)))
    pages = tuple(pages.to(DEVICE) for pages in filled_cache(before, requests, shape))
    norms = Norm(1 + 0.3 * randn(16, seed=4), 1e-3), Norm(1 + 0.3 * randn(16, seed=5), 1e-3)
    cos_sin = rope_table(16, RopeConfig(100.0), 256, DEVICE)
    heads = Heads(4, 2, 16, norms, cos_sin, 0.25, None, randn(4, seed=7))
    return randn(len(inputs.rows.positions), 8 * 16, seed=6), heads, moved(inputs, DEVICE), pages


@pytest.mark.parametrize("requests", BATCHES, ids=str)
def test_both_columns_attend_alike_where_rows_see_each_other(requests: Requests) -> None:
    """Those of a pass are stored before they are seen; padding is neither."""
    qkv, heads, inputs, pages = layer_inputs(requests)
    inputs = changed(inputs, causal=False)
    if min(requests.rows) > 1 and max(requests.rows) < 16:  # one row less means something
        inputs = changed(inputs, context_lens=inputs.paging.context_lens - 1)
        inputs.paging.slots[inputs.rows.query_start[1:] - 1] = -1
    caches = [(pages[0].clone(), pages[1].clone()) for _ in range(2)]
    ours = TRITON.attend(qkv, heads, inputs, caches[0])
    theirs = REFERENCE.attend(qkv, heads, inputs, caches[1])
    assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert_close(caches[0], caches[1], rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("backend", [REFERENCE, TRITON], ids=lambda ops: ops.backend)
@pytest.mark.parametrize("requests", BATCHES[1:], ids=str)
def test_store_is_the_first_half_of_attend(requests: Requests, backend: Ops) -> None:
    qkv, heads, inputs, pages = layer_inputs(requests)
    inputs.paging.slots[1] = -1
    stored, expected = ((pages[0].clone(), pages[1].clone()) for _ in range(2))
    backend.store(qkv[:, 4 * 16 :], heads, inputs, stored)
    REFERENCE.attend(qkv, heads, inputs, expected)
    assert_close(stored, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    none = changed(inputs, positions=inputs.rows.positions[:0], slots=inputs.paging.slots[:0])
    backend.store(qkv[:0, 4 * 16 :], heads, none, stored)
    assert_close(stored, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("window", [None, 6, 7, 40])
@pytest.mark.parametrize("backend", [REFERENCE, TRITON], ids=lambda ops: ops.backend)
def test_rows_behind_the_cache_see_it_and_store_nothing(backend: Ops, window: int | None) -> None:
    """A drafter that only has queries has one row, at the position of the next token."""
    requests = Requests([6, 7, 40, 130], [1, 1, 1, 1])
    shape = Shape(4, 2, 16, 8)
    whole = attention_inputs(requests, shape.block_size)
    before = changed(whole, context_lens=torch.tensor(list(requests.computed)))
    keys, values = filled_cache(before, requests, shape)
    inputs = changed(before, slots=torch.full_like(whole.paging.slots, -1), max_rows=1)
    weight = Norm(1 + 0.3 * randn(16, seed=4), 1e-3)
    cos_sin = rope_table(16, RopeConfig(100.0), 256, DEVICE)
    heads = Heads(4, 2, 16, (weight, weight), cos_sin, 1.0, window)
    query = randn(4, 64, seed=6)
    qkv = torch.cat((query, torch.zeros_like(query)), -1)
    pages = (keys.to(DEVICE), values.to(DEVICE))
    out = backend.attend(qkv, heads, moved(inputs, DEVICE), pages)
    assert_close((pages[0].cpu(), pages[1].cpu()), (keys, values), rtol=0, atol=0, equal_nan=True)
    normed = oracles.norm(query.view(4, 4, 16).cpu(), weight.weight.cpu(), 1e-3)
    turned = oracles.rotated(normed, oracles.angles(16, 100.0, inputs.rows.positions))
    # A row sees no key of its own, so the last one in its window is the last one there is.
    truth = torch.cat(
        [
            oracles.attention(
                turned[row : row + 1].float(),
                (keys, values),
                changed(only(inputs, row)[0], causal=False),
                1.0,
                window,
            )
            for row in range(4)
        ]
    )
    assert_close(out.double().cpu(), truth.flatten(1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("float8", [False, True])
@pytest.mark.parametrize("backend", [REFERENCE, TRITON], ids=lambda ops: ops.backend)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_joined_linear(dtype: torch.dtype, backend: Ops, float8: bool) -> None:
    """Against the same in two steps."""
    one, two = randn(5, 32, dtype=dtype), randn(5, 48, seed=1, dtype=dtype)
    norm = Norm(1 + 0.3 * randn(48, seed=4, dtype=dtype), 1e-3)
    matrix = (randn(70, 80, seed=2) / 80**0.5).to(dtype)
    bias = randn(70, seed=3, dtype=dtype)
    weight = ToFloat8().round(matrix) if float8 else DenseMatrix(matrix)
    normed, total = backend.norm(two, None, norm)
    assert_close(total, two, rtol=0, atol=0)
    out = backend.joined_linear([(one, None), (two, norm)], weight, bias)
    assert out.dtype == dtype
    joined = torch.cat((one, normed), -1)
    truth = oracles.product(joined.cpu(), matrix.cpu(), bias.cpu())
    assert_close(out.double().cpu(), truth, rtol=0.0, atol=0.2 if float8 else 4e-3)


@pytest.mark.parametrize("backend", [REFERENCE, TRITON], ids=lambda ops: ops.backend)
def test_norm_gives_the_sum_too(backend: Ops) -> None:
    addend, residual = randn(5, 64), 2 * randn(5, 64, seed=1)
    norm = Norm(1 + 0.3 * randn(64, seed=4), 1e-3)
    normed, total = backend.norm(addend, residual, norm)
    assert_close(total, addend + residual)
    assert_close(normed, backend.add_norm(addend, residual, norm), rtol=0, atol=0)
