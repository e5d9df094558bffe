"""Attention in C++, at every level of instructions that this machine has."""
# ruff: noqa: E402  (the module may be missing)

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

cpp = pytest.importorskip("_slipstream_cpu", reason="the C++ kernels are not built")

from slipstream.kernels.attention import SCALE_BYTES, query_key_norms, split_heads
from slipstream.kernels.cpu import attention
from slipstream.kernels.cpu.attention import attend, store
from slipstream.kernels.pass_inputs import PassInputs, TreeInputs
from slipstream.kernels.reference import REFERENCE
from slipstream.kernels.reference.attention import paged_attention, rotate_and_store
from slipstream.kernels.table import Heads, Norm
from slipstream.layers.rope import RopeConfig, rope_table
from tests.kernels.batches import (
    Requests,
    Shape,
    attention_inputs,
    filled_cache,
    num_blocks,
    only,
    seeded,
)
from tests.pass_inputs import changed

pytestmark = pytest.mark.usefixtures("level", "two_threads")

Cache = tuple[Tensor, Tensor]
POSITIONS = 1200
DTYPES = [torch.float32, torch.bfloat16]
RAGGED = Requests([0, 37, 0, 600, 1100], [3, 2, 0, 20, 1])
# (heads, KV heads, head_dim, block size, window)
SHAPES = [
    (4, 2, 128, 16, None),
    (3, 3, 16, 8, 7),
    (6, 2, 64, 32, 530),
    (8, 1, 80, 16, None),
    (8, 8, 96, 16, 40),
    (2, 1, 256, 8, None),
    (2, 2, 20, 16, None),
]


def make_heads(
    shape: Shape,
    window: int | None = None,
    norms: bool = True,
    sinks: bool = False,
    rotated: float = 1.0,
) -> Heads:
    generator = seeded(7)
    weights = (torch.rand(2, shape.head_dim, generator=generator) + 0.5).to(shape.dtype)
    query, key = (Norm(weight, 1e-6) for weight in weights)
    return Heads(
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        norms=(query, key) if norms else None,
        cos_sin=rope_table(
            shape.head_dim, RopeConfig(10_000.0, rotated=rotated), POSITIONS, torch.device("cpu")
        ),
        scale=shape.head_dim**-0.5,
        window=window,
        sinks=(3 * torch.randn(shape.heads, generator=generator)).to(shape.dtype)
        if sinks
        else None,
    )


def make_qkv(shape: Shape, rows: int, seed: int = 3) -> Tensor:
    columns = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    return torch.randn(rows, columns, generator=seeded(seed)).to(shape.dtype)


def int8_cache(inputs: PassInputs, requests: Requests, shape: Shape) -> Cache:
    """`filled_cache`, rounded by the reference; the scales of empty slots are NaN."""
    stored = replace(shape, dtype=torch.float32)
    keys, values = filled_cache(inputs, requests, stored)
    sizes = (num_blocks(requests, shape.block_size), shape.block_size, shape.kv_heads)
    rounded = [torch.full((*sizes, shape.head_dim + SCALE_BYTES), -1, dtype=torch.int8)] * 2
    caches = rounded[0], rounded[1].clone()
    places = (~keys[..., 0, 0].isnan()).flatten().nonzero().squeeze(1)
    rows = torch.cat((keys.flatten(0, 1)[places], values.flatten(0, 1)[places]), 1).flatten(1)
    plain = replace(make_heads(stored, norms=False), cos_sin=torch.ones(1, shape.head_dim))
    plain.cos_sin[:, shape.head_dim // 2 :] = 0.0  # no angle
    nowhere = changed(inputs, slots=places, positions=torch.zeros_like(places))
    REFERENCE.store(rows, plain, nowhere, caches)
    return caches


def truth(qkv: Tensor, heads: Heads, inputs: PassInputs, cache: Cache) -> tuple[Tensor, Cache]:
    """Queries and keys rounded as the reference does it, then float32; and the written cache."""
    keys, values = cache[0].clone(), cache[1].clone()
    query = rotate_and_store(
        *split_heads(qkv, heads), query_key_norms(heads), heads.cos_sin, inputs, (keys, values)
    )
    wide = (keys, values) if keys.dtype == torch.int8 else (keys.float(), values.float())
    sinks = None if heads.sinks is None else heads.sinks.float()
    out = paged_attention(
        query.float(), wide, inputs, heads.scale, heads.window, sinks, heads.softcap
    )
    return out.flatten(-2), (keys, values)


def assert_near(got: Tensor, want: Tensor) -> None:
    if got.dtype == torch.float32:
        assert_close(got, want, rtol=1e-5, atol=1e-5)
    else:  # weights and results are rounded to 8 bits: half a unit each, of the largest of a row
        most = want.abs().amax(-1, keepdim=True) * 2**-8 + want.abs() * 2**-8
        assert ((got.float() - want).abs() <= most).all()


def assert_same_cache(got: Cache, want: Cache) -> None:
    """But for the last bit of what was normed and rotated."""
    for pages, expected in zip(got, want, strict=True):
        if pages.dtype == torch.int8:
            unlike = (pages != expected).sum()
            assert unlike <= pages.numel() // 500
        else:
            close = 1e-5 if pages.dtype == torch.float32 else 2**-7
            assert_close(pages, expected, rtol=close, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("stored", ["as computed", "int8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_ragged_requests(
    sizes: tuple[int, int, int, int, int | None], dtype: torch.dtype, stored: str
) -> None:
    *numbers, window = sizes
    shape = Shape(*numbers, dtype)
    inputs = attention_inputs(RAGGED, shape.block_size)
    fill = int8_cache if stored == "int8" else filled_cache
    cache = fill(inputs, RAGGED, shape)
    heads = make_heads(shape, window)
    qkv = make_qkv(shape, sum(RAGGED.rows))
    want, written = truth(qkv, heads, inputs, cache)
    got = attend(qkv, heads, inputs, cache)
    assert got.dtype == dtype
    assert_near(got, want)
    assert_same_cache(cache, written)


@pytest.mark.parametrize("stored", ["as computed", "int8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("sizes", "rotated"), [((16, 2, 64, 16, 128), 1.0), ((6, 2, 20, 8, None), 0.5)], ids=str
)
def test_sinks_and_heads_that_turn_in_part(
    sizes: tuple[int, int, int, int, int | None], rotated: float, dtype: torch.dtype, stored: str
) -> None:
    """Verified rows are before, on and after the edges of blocks and parts."""
    *numbers, window = sizes
    shape, requests = Shape(*numbers, dtype), Requests([0, 127, 510, 637, 90], [3, 5, 5, 8, 60])
    inputs = attention_inputs(requests, shape.block_size)
    fill = int8_cache if stored == "int8" else filled_cache
    cache = fill(inputs, requests, shape)
    heads = make_heads(shape, window, sinks=True, rotated=rotated)
    qkv = make_qkv(shape, sum(requests.rows))
    want, written = truth(qkv, heads, inputs, cache)
    got = attend(qkv, heads, inputs, cache)
    assert_near(got, want)
    assert_same_cache(cache, written)
    if window is not None and stored == "as computed":
        for request, computed in enumerate(requests.computed):
            oldest = max(computed - window + 1, 0) // 64 * 64  # keys that are packed at once
            unseen = inputs.paging.block_tables[request, : oldest // shape.block_size]
            for pages in cache:
                pages[unseen.long()] = torch.nan
        assert torch.equal(attend(qkv, heads, inputs, cache), got)
    sunk = replace(heads, sinks=torch.full((shape.heads,), 1e30))
    assert not attend(qkv, sunk, inputs, cache).any()


@pytest.mark.parametrize("ops", ["cpp", "reference"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gates_behind_the_values(ops: str, dtype: torch.dtype) -> None:
    shape, requests = Shape(4, 2, 20, 8, dtype), Requests([30, 60], [5, 3])
    inputs = attention_inputs(requests, 8)
    cache = filled_cache(inputs, requests, shape)
    heads, qkv = make_heads(shape), make_qkv(shape, 8)
    gates = torch.randn(8, shape.heads * shape.head_dim, generator=seeded(9)).to(dtype)
    own = REFERENCE.attend if ops == "reference" else attend
    plain = own(qkv, heads, inputs, cache)
    got = own(torch.cat((qkv, gates), 1), replace(heads, gated=True), inputs, cache)
    assert_close(got, (plain.float() * gates.float().sigmoid()).to(dtype))


@pytest.mark.parametrize("stored", ["as computed", "int8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_capped_scores(dtype: torch.dtype, stored: str) -> None:
    """Within a part of the context and across several."""
    shape, requests = Shape(6, 2, 64, 32, dtype), Requests([0, 127, 510, 637], [3, 1, 5, 40])
    inputs = attention_inputs(requests, shape.block_size)
    cache = (int8_cache if stored == "int8" else filled_cache)(inputs, requests, shape)
    heads = replace(make_heads(shape), scale=0.7, softcap=3.0)
    qkv = make_qkv(shape, sum(requests.rows))
    want, _ = truth(qkv, heads, inputs, cache)
    got = attend(qkv, heads, inputs, cache)
    assert_near(got, want)
    wide, _ = truth(qkv, replace(heads, softcap=None), inputs, cache)
    assert not torch.allclose(got.float(), wide.float(), atol=0.1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("change", ["no norms", "not causal", "first seen", "nowhere", "excerpt"])
def test_other_ways_to_attend(change: str, dtype: torch.dtype) -> None:
    shape = Shape(4, 2, 64, 8, dtype)
    requests = Requests([30, 60], [5, 3])
    inputs = attention_inputs(requests, 8)
    cache = filled_cache(inputs, requests, shape)
    heads = make_heads(shape, norms=change != "no norms", sinks=True)
    if change == "not causal":
        inputs = changed(inputs, causal=False)
    elif change == "first seen":
        inputs = changed(inputs, first_seen=29)
    elif change == "excerpt":
        places = inputs.rows.positions
        heads = replace(heads, window=40)
        inputs = changed(inputs, positions=places * 7 + 3, places=places)
    elif change == "nowhere":
        inputs = changed(
            inputs, slots=torch.where(inputs.rows.positions % 2 == 0, -1, inputs.paging.slots)
        )
    qkv = make_qkv(shape, 8)
    want, written = truth(qkv, heads, inputs, cache)
    assert_near(attend(qkv, heads, inputs, cache), want)
    assert_same_cache(cache, written)


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_trees(dtype: torch.dtype, window: int | None) -> None:
    shape = Shape(6, 2, 32, 16, dtype)
    requests = Requests([500, 40], [63, 4])
    inputs = attention_inputs(requests, 16)
    cache = filled_cache(inputs, requests, shape)
    tokens = inputs.rows.positions
    generator = seeded(11)
    words, depths = [1], [0]
    for node in range(1, 63):
        parent = int(torch.randint(0, node, (), generator=generator))
        words.append(words[parent] | 1 << node)
        depths.append(depths[parent] + 1)
    ancestors = torch.tensor([*words, -1, -1, -1, -1])
    positions = torch.cat((500 + torch.tensor(depths), tokens[63:]))
    tree = TreeInputs(torch.tensor([500, 40]), tokens, ancestors)
    inputs = changed(inputs, positions=positions, tree=tree)
    qkv = make_qkv(shape, 67)
    heads = make_heads(shape, window, sinks=window is not None)
    want, _ = truth(qkv, heads, inputs, cache)
    assert_near(attend(qkv, heads, inputs, cache), want)


@pytest.mark.parametrize("stored", ["as computed", "int8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("window", "head_dim"), [(None, 64), (150, 84)])
def test_a_rows_bits_are_its_own(
    dtype: torch.dtype, window: int | None, head_dim: int, stored: str
) -> None:
    """Alone, in chunks, beside other requests and with any number of threads; few rows, which take
    keys and values as they are stored, like many."""
    shape = Shape(4, 2, head_dim, 16, dtype)
    requests = Requests([0, 40, 980], [200, 7, 90])
    inputs = attention_inputs(requests, 16)
    fill = int8_cache if stored == "int8" else filled_cache
    cache = fill(inputs, requests, shape)
    heads = make_heads(shape, window, sinks=window is not None)
    qkv = make_qkv(shape, 297)
    together = attend(qkv, heads, inputs, cache)
    for threads in (1, 3, 9):
        cpp.set_num_threads(threads)
        assert torch.equal(attend(qkv, heads, inputs, cache), together)
        for request in range(3):
            alone, rows = only(inputs, request)
            assert torch.equal(attend(qkv[rows], heads, alone, cache), together[rows])
            for first, count in ((0, 1), (1, 1), (2, 5), (6, 1), (30, 35), (89, 1)):
                part = slice(rows.start + first, min(rows.start + first + count, rows.stop))
                if part.start >= part.stop:
                    continue
                chunk = changed(
                    alone,
                    query_start=torch.tensor([0, part.stop - part.start]),
                    context_lens=inputs.rows.positions[part.stop - 1 : part.stop] + 1,
                    positions=inputs.rows.positions[part],
                    slots=inputs.paging.slots[part],
                )
                assert torch.equal(attend(qkv[part], heads, chunk, cache), together[part])


def test_rows_that_nobody_wants_read_nothing_outside() -> None:
    """Padded passes: contexts of 0, rows after the context or the table, blocks that are none."""
    shape = Shape(4, 2, 32, 16)
    requests = Requests([20, 5], [2, 2])
    inputs = attention_inputs(requests, 16)
    cache = filled_cache(inputs, requests, shape)
    padded = changed(
        inputs,
        query_start=torch.tensor([0, 2, 4, 5]),
        context_lens=torch.tensor([22, 7, 0]),
        block_tables=torch.cat(
            (inputs.paging.block_tables, torch.full((1, 3), -7, dtype=torch.int32))
        ),
        positions=torch.cat((inputs.rows.positions, torch.tensor([1 << 40, -5]))),
        slots=torch.cat((inputs.paging.slots, torch.tensor([-1, 1 << 40]))),
    )
    qkv = make_qkv(shape, 6)
    heads = make_heads(shape)
    want = attend(qkv[:4], heads, inputs, cache)
    got = attend(qkv, heads, padded, cache)
    assert torch.equal(got[:4], want)
    assert torch.equal(got[4:], torch.zeros_like(got[4:]))
    past_end = changed(padded, context_lens=torch.tensor([22, 3, 1 << 40]))
    assert torch.isfinite(attend(qkv, heads, past_end, cache)[:4]).all()


@pytest.mark.parametrize("stored", ["as computed", "int8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_storing_alone(dtype: torch.dtype, stored: str) -> None:
    shape = Shape(4, 2, 64, 8, dtype)
    requests = Requests([POSITIONS - 9, 0], [9, 5])
    inputs = attention_inputs(requests, 8)
    inputs = changed(inputs, slots=torch.where(inputs.rows.positions == 3, -1, inputs.paging.slots))
    sizes = (num_blocks(requests, 8), 8, 2, 64)
    cache = (torch.zeros(sizes, dtype=dtype), torch.zeros(sizes, dtype=dtype))
    if stored == "int8":
        sizes = (*sizes[:3], 64 + SCALE_BYTES)
        cache = (torch.zeros(sizes, dtype=torch.int8), torch.zeros(sizes, dtype=torch.int8))
    want = cache[0].clone(), cache[1].clone()
    kv = make_qkv(shape, 14)[:, 4 * 64 :]
    REFERENCE.store(kv, make_heads(shape), inputs, want)
    store(kv, make_heads(shape), inputs, cache)
    assert_same_cache(cache, want)
    assert cache[0].any()


def test_layers_share_what_is_made_of_a_pass_beside_other_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two engines of a process take turns, layer by layer."""
    made: list[PassInputs] = []
    prepare = attention._pass

    def noted(inputs: PassInputs) -> object:
        made.append(inputs)
        return prepare(inputs)

    monkeypatch.setattr(attention, "_pass", noted)
    shape, requests = Shape(4, 2, 32, 16), Requests([3], [2])
    passes = [attention_inputs(requests, 16) for _ in range(2)]
    heads, qkv = make_heads(shape), make_qkv(shape, 2)
    for _ in range(3):
        for inputs in passes:
            attend(qkv, heads, inputs, filled_cache(inputs, requests, shape))
    assert made == passes


def test_what_does_not_fit_is_refused() -> None:
    shape = Shape(4, 2, 32, 16)
    requests = Requests([0], [2])
    inputs = attention_inputs(requests, 16)
    cache = filled_cache(inputs, requests, shape)
    heads, qkv = make_heads(shape), make_qkv(shape, 2)
    with pytest.raises(ValueError, match=r"sinks: \[Hq\]"):
        attend(qkv, replace(heads, sinks=torch.zeros(3)), inputs, cache)
    with pytest.raises(ValueError, match="cos_sin"):
        attend(qkv, replace(heads, cos_sin=torch.zeros(5, 34)), inputs, cache)
    with pytest.raises(ValueError, match="dtype"):
        attend(qkv.bfloat16(), heads, inputs, cache)
    with pytest.raises(ValueError, match="another shape"):
        attend(qkv[:1], heads, inputs, cache)
    with pytest.raises(ValueError, match="heads or their size"):
        attend(qkv, heads, inputs, (cache[0][..., :16], cache[1][..., :16]))
    with pytest.raises(ValueError, match="query_start"):
        attend(qkv, heads, changed(inputs, query_start=torch.tensor([0, 3])), cache)
