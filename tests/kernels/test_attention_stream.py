"""The kernel for prompt chunks on Hopper against the reference in float32.

No interpreter has it, so most of these tests need such a GPU; `test_gluon_compiles.py` does not.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="it is there for Linux only")

from slipstream.kernels.attention import FLOAT8_PAGES
from slipstream.kernels.pass_inputs import CAUSAL, PassInputs, TreeInputs, Visibility
from slipstream.kernels.reference import REFERENCE
from slipstream.kernels.triton import attention_stream
from slipstream.kernels.triton.attention import paged_attention
from slipstream.kernels.triton.attention_shapes import SHORT_ROWS, AttentionShape
from slipstream.kernels.triton.matmul import is_hopper
from tests.kernels.batches import Requests, Shape, attention_inputs, filled_cache, only, seeded
from tests.kernels.device import DEVICE, INTERPRETED
from tests.pass_inputs import moved, pass_inputs

pytestmark = INTERPRETED
HOPPER_ONLY = pytest.mark.skipif(not is_hopper(DEVICE), reason="the kernel is for Hopper")

HALF = torch.bfloat16
RAGGED = Requests([0, 5, 1000, 77, 0, 300, 4096, 9], [40, 1, 130, 17, 600, 5, 333, 3000])
MIXED = Requests([0, 5, 1000, 77, 0], [40, 1, 60, 17, 200])
MANY = Requests([31 * n % 300 for n in range(70)], [17 * n % 230 + 17 for n in range(70)])
CASES = {
    "17 rows": (Shape(8, 2, 128, 16, HALF), Requests([0], [17])),
    "300 rows behind 100": (Shape(8, 2, 128, 16, HALF), Requests([100], [300])),
    "groups of 4": (Shape(32, 8, 128, 16, HALF), RAGGED),
    "no groups": (Shape(4, 4, 128, 32, HALF), RAGGED),
    "float16": (Shape(16, 2, 128, 64, torch.float16), RAGGED),
    "blocks of 128": (Shape(14, 2, 128, 128, HALF), RAGGED),
    "blocks of 8, small heads": (Shape(10, 2, 64, 8, HALF), RAGGED),
    "70 requests": (Shape(8, 2, 128, 16, HALF), MANY),
}
Case = tuple[Tensor, tuple[Tensor, Tensor], PassInputs, float, None, Tensor | None]


def case(shape: Shape, requests: Requests, sinks: bool = False) -> Case:
    """Arguments of `paged_attention`; the cache has NaN after the contexts."""
    inputs = attention_inputs(requests, shape.block_size)
    keys, values = filled_cache(inputs, requests, shape)
    generator = seeded(3)
    rows = len(inputs.rows.positions), shape.heads, shape.head_dim
    query = (1.5 * torch.randn(rows, generator=generator)).to(shape.dtype).to(DEVICE)
    added = (3 * torch.randn(shape.heads, generator=generator)).to(shape.dtype).to(DEVICE)
    cache = keys.to(DEVICE), values.to(DEVICE)
    scale = 0.8 / shape.head_dim**0.5
    return query, cache, moved(inputs, DEVICE), scale, None, added if sinks else None


def streamed(given: Case) -> bool:
    query, cache, inputs, scale, window, sinks = given
    layer = AttentionShape(query.shape[1], cache[0].shape[2], query.shape[2], scale, window, sinks)
    return attention_stream.streams(query, layer, inputs.sees, cache)


def assert_agrees(given: Case, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Errors are about those of the general kernel, and a second run has the same bits."""
    assert streamed(given)
    out = paged_attention(*given)
    assert torch.equal(paged_attention(*given), out)
    query, (keys, values), inputs, scale, window, sinks = given
    wide = None if sinks is None else sinks.float()
    expected = REFERENCE.paged_attention(
        query.float(), (keys.float(), values.float()), inputs, scale, window, wide
    )
    with monkeypatch.context() as patch:
        patch.setattr(attention_stream, "streams", lambda *_: False)
        general = paged_attention(*given)
    starts = inputs.rows.query_start.tolist()
    worst, usual = (
        max(
            float((x[first:end].float() - expected[first:end]).norm() / expected[first:end].norm())
            for first, end in pairwise(starts)
        )
        for x in (out, general)
    )
    assert out.isfinite().all()
    assert worst <= max(1.3 * usual, 1e-3)
    return out


@HOPPER_ONLY
@pytest.mark.parametrize("name", CASES)
def test_prompts_between_other_requests(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each prompt has the same bits when it is alone."""
    given = case(*CASES[name], sinks=name == "no groups")
    out = assert_agrees(given, monkeypatch)
    query, cache, inputs = given[:3]
    for request, rows in enumerate(CASES[name][1].rows):
        if rows > SHORT_ROWS:
            alone, own = only(inputs, request)
            assert torch.equal(paged_attention(query[own], cache, alone, *given[3:]), out[own])


LONG = Requests([5000, 0, 8180, 34_000, 4095], [100, 5, 200, 70, 17])


@HOPPER_ONLY
@pytest.mark.parametrize(
    ("shape", "sinks"),
    [(Shape(8, 2, 128, 16, HALF), False), (Shape(40, 8, 64, 32, HALF), True)],
)
def test_segments_of_long_contexts(
    shape: Shape, sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits do not depend on whether programs share a context, nor on the other requests."""
    given = case(shape, LONG, sinks)
    shared = assert_agrees(given, monkeypatch)
    monkeypatch.setattr(attention_stream, "FEW_TILES", 0)
    assert torch.equal(paged_attention(*given), shared)
    query, cache, inputs = given[:3]
    for few in (0, 10_000):
        monkeypatch.setattr(attention_stream, "FEW_TILES", few)
        for request, rows in enumerate(LONG.rows):
            if rows > SHORT_ROWS:
                alone, own = only(inputs, request)
                assert torch.equal(
                    paged_attention(query[own], cache, alone, *given[3:]), shared[own]
                )


def nodes_of_trees(inputs: PassInputs, requests: Requests) -> Visibility:
    """Requests of up to 63 rows are trees whose nodes see the root, one more and themselves."""
    words: list[int] = []
    for rows in requests.rows:
        few = rows <= 63
        words += [1 | 1 << node // 2 | 1 << node if few else -1 for node in range(rows)]
    starts = torch.tensor(list(requests.computed), device=DEVICE)
    positions = inputs.rows.positions
    return Visibility(tree=TreeInputs(starts, positions, torch.tensor(words, device=DEVICE)))


def rows_of_an_image(inputs: PassInputs, _: Requests) -> Visibility:
    last_seen = inputs.rows.positions.clone()
    last_seen[5:40] = last_seen[39].clone()
    return Visibility(last_seen=last_seen)


@HOPPER_ONLY
@pytest.mark.parametrize("seen", [nodes_of_trees, rows_of_an_image])
def test_rows_that_do_not_see_up_to_themselves(
    seen: Callable[[PassInputs, Requests], Visibility], monkeypatch: pytest.MonkeyPatch
) -> None:
    for requests in (MIXED, LONG):
        given = case(Shape(8, 2, 128, 16, HALF), requests)
        inputs = replace(given[2], sees=seen(given[2], requests))
        assert_agrees((*given[:2], inputs, *given[3:]), monkeypatch)


@HOPPER_ONLY
@pytest.mark.parametrize("sinks", [False, True])
def test_requests_without_a_context(sinks: bool) -> None:
    """Padding of graphs, between others or alone: its rows are zero and change no other rows."""
    given = case(Shape(8, 2, 128, 16, HALF), Requests([100, 0], [40, 20]), sinks)
    query, cache, inputs = given[:3]
    padding = torch.full((30,), 7, device=DEVICE)
    tables = inputs.paging.block_tables
    nothing = torch.full_like(tables[:1], 1 << 30)
    padded = pass_inputs(
        query_start=torch.tensor([0, 40, 70, 90], device=DEVICE),
        context_lens=torch.tensor([140, 0, 20], device=DEVICE),
        block_tables=torch.cat((tables[:1], nothing, tables[1:])),
        positions=torch.cat((inputs.rows.positions[:40], padding, inputs.rows.positions[40:])),
        slots=torch.full((90,), -1, device=DEVICE),
    )
    rows = torch.cat((query[:40], query[:30], query[40:]))
    out = paged_attention(rows, cache, padded, *given[3:])
    assert torch.equal(torch.cat((out[:40], out[70:])), paged_attention(*given))
    assert not out[40:70].any()
    alone, own = only(padded, 1)
    assert not paged_attention(rows[own], cache, alone, *given[3:]).any()


def test_what_the_kernel_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything else, and every other GPU, is left to the general kernel."""
    pytest.importorskip("triton.experimental.gluon", reason="still an experiment")
    layer = AttentionShape(8, 2, 128, 0.1, None, None)

    def serves(
        dtype: torch.dtype = HALF,
        sees: Visibility = CAUSAL,
        pages: torch.dtype | None = None,
        block_size: int = 16,
        **of_layer: object,
    ) -> bool:
        cache = torch.zeros(2, 3, block_size, 2, 128, dtype=pages or dtype).unbind(0)
        query = torch.zeros(20, 8 * 128, dtype=dtype)
        shaped = replace(layer, **of_layer)  # type: ignore[arg-type]
        return attention_stream.streams(query, shaped, sees, (cache[0], cache[1]))

    assert not serves()  # on a CPU
    monkeypatch.setattr(attention_stream, "is_hopper", lambda _: True)
    assert serves()
    assert serves(torch.float16, head_dim=64, sinks=torch.zeros(8), block_size=128)
    assert not serves(torch.float32)
    assert not serves(pages=FLOAT8_PAGES)
    assert not serves(head_dim=96)
    assert not serves(window=128)
    assert not serves(softcap=30.0)
    assert not serves(block_size=24)
    assert not serves(sees=Visibility(causal=False))
    assert not serves(sees=Visibility(first_seen=1))
