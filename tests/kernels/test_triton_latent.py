"""Latent attention of the triton column against the reference's.

On the GPU where there is one, else interpreted: see `test_triton_ops.py`.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

pytest.importorskip("triton", reason="it is there for Linux only")

from slipstream.kernels.pass_inputs import TreeInputs
from slipstream.kernels.reference import REFERENCE
from slipstream.kernels.triton import latent as tuned
from slipstream.kernels.triton.latent import latent_attention
from tests.kernels.batches import Requests, only, seeded
from tests.kernels.device import DEVICE, INTERPRETED, ON_GPU
from tests.kernels.latents import Drawn, LatentShape, drawn
from tests.pass_inputs import changed, moved

pytestmark = INTERPRETED

DTYPES = [torch.float32, torch.float16]
SHAPES = [LatentShape(3, 24, 10, 6, 20, 4), LatentShape(5, 32, 16, 16, 16, 16)]
if ON_GPU:
    DTYPES.append(torch.bfloat16)
    SHAPES += [LatentShape(20, 512, 192, 64, 256, 16), LatentShape(128, 512, 128, 64, 128, 16)]
BATCHES = {
    "one row": Requests([0], [1]),
    "decoding": Requests([8, 0, 150, 3], [1, 1, 1, 1]),
    "verification": Requests([9, 126, 2], [5, 6, 5]),
    "all of it": Requests([0, 11, 127, 5, 30], [9, 1, 16, 0, 18]),
}
MATRIX = [(shape, batch, dtype) for shape in SHAPES for batch in BATCHES for dtype in DTYPES]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    if not ON_GPU:
        monkeypatch.setattr(tuned, "PROGRAMS", 4)


def run(layer: Drawn) -> tuple[Tensor, Tensor]:
    """The op on the device and a copy of the cache: (its result, the cache)."""
    tensors = {key: one for key, one in vars(layer.heads).items() if isinstance(one, Tensor)}
    there: dict[str, Any] = {key: one.to(DEVICE) for key, one in tensors.items()}
    cache = layer.cache.clone().to(DEVICE)
    queries, latents = layer.queries.to(DEVICE), layer.latents.to(DEVICE)
    inputs = moved(layer.inputs, DEVICE)
    out = latent_attention(queries, latents, replace(layer.heads, **there), inputs, cache)
    return out.cpu(), cache.cpu()


def assert_agrees(layer: Drawn) -> None:
    """Up to some roundings; what the op does not own stays NaN, and what it reads is not."""
    out, cache = run(layer)
    after = layer.cache.clone()
    truth = REFERENCE.latent_attention(
        layer.queries, layer.latents, layer.heads, layer.inputs, after
    )
    tiny = 16 * torch.finfo(out.dtype).eps if out.dtype != torch.float32 else 2e-5
    assert_close(cache, after, rtol=tiny, atol=tiny, equal_nan=True)
    assert_close(out, truth, rtol=tiny, atol=tiny)


@pytest.mark.parametrize(("shape", "batch", "dtype"), MATRIX if ON_GPU else MATRIX[::5], ids=str)
def test_latent_attention(shape: LatentShape, batch: str, dtype: torch.dtype) -> None:
    assert_agrees(drawn(replace(shape, dtype=dtype), BATCHES[batch]))


def test_scaled_queries() -> None:
    assert_agrees(drawn(replace(SHAPES[0], scaled=True), Requests([0, 5], [2, 17])))


@pytest.mark.parametrize("most_rows", [5, 20])
def test_rows_of_trees(most_rows: int) -> None:
    """Rows see their ancestors, and are stored one after the other; those of a chunk do, too."""
    layer = drawn(SHAPES[0], Requests([130, 4], [5, most_rows]))
    tokens = layer.inputs.rows.positions  # none of them is deeper in its tree than that
    starts = torch.tensor([130, 4])
    owner = torch.repeat_interleave(torch.arange(2), torch.tensor([5, most_rows]))
    words = torch.randint(0, 1 << 20, (len(tokens),), generator=seeded(5))
    words |= 1 << (tokens - starts[owner])
    tree = TreeInputs(starts, tokens, words)
    positions = torch.maximum(tokens - 1, starts[owner])
    assert_agrees(replace(layer, inputs=changed(layer.inputs, tree=tree, positions=positions)))


def test_rows_that_see_those_behind_them_and_no_unset_tokens() -> None:
    layer = drawn(SHAPES[0], Requests([9, 20], [5, 18]))
    assert_agrees(replace(layer, inputs=changed(layer.inputs, causal=False, first_seen=3)))


def test_padding() -> None:
    """A request without a context stores nothing, and what comes out is finite."""
    layer = drawn(SHAPES[0], Requests([0, 6], [1, 3]))
    slots, lengths = layer.inputs.paging.slots.clone(), layer.inputs.paging.context_lens.clone()
    slots[0], lengths[0] = -1, 0
    inputs = changed(layer.inputs, slots=slots, context_lens=lengths)
    out, cache = run(replace(layer, inputs=inputs))
    whole = run(layer)[1]
    assert torch.equal(out[0], torch.zeros_like(out[0]))
    assert out.isfinite().all()
    assert int(cache.isnan().sum() - whole.isnan().sum()) == cache.shape[-1]


@pytest.mark.parametrize("shape", SHAPES[2:] if ON_GPU else SHAPES[:1], ids=str)
def test_bits_of_a_row_are_its_own(shape: LatentShape) -> None:
    """Alone, in a batch, and with any number of rows after it."""
    requests = Requests([300 if ON_GPU else 140, 17, 131, 5, 6], [4, 1, 3, 20, 16])
    layer = drawn(replace(shape, dtype=DTYPES[-1]), requests)
    whole = run(layer)[0]
    for request in (0, 2, 4):
        alone, rows = only(layer.inputs, request)
        for count in (rows.stop - rows.start, 1):
            own = slice(rows.start, rows.start + count)
            hidden = rows.stop - own.stop  # rows that this pass does not have
            inputs = changed(
                alone,
                query_start=torch.tensor([0, count]),
                context_lens=alone.paging.context_lens - hidden,
                positions=alone.rows.positions[:count],
                slots=alone.paging.slots[:count],
            )
            part = replace(
                layer, queries=layer.queries[own], latents=layer.latents[own], inputs=inputs
            )
            assert torch.equal(run(part)[0], whole[own])
