"""Latent attention of every backend on this machine against float64, in its plain form."""

import pytest
import torch
from torch import Tensor

from slipstream.kernels.reference import REFERENCE
from slipstream.kernels.registry import kernels_for, runs_cpp
from tests.kernels.batches import Requests, only
from tests.kernels.latents import LatentShape, drawn, expected
from tests.pass_inputs import changed

BACKENDS = {
    "reference": REFERENCE.latent_attention,
    "cpu": kernels_for(torch.device("cpu")).network.latent_attention,
}
SHAPES = [
    LatentShape(heads=3, rank=12, plain=6, rotary=4, value=10, block_size=4),
    LatentShape(heads=5, rank=40, plain=24, rotary=8, value=16, block_size=7, scaled=True),
    LatentShape(heads=20, rank=96, plain=48, rotary=16, value=64, block_size=16),
]
REQUESTS = Requests(computed=(0, 9, 33, 0, 70), rows=(5, 1, 4, 1, 17))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_latent_attention(backend: str, shape: LatentShape, dtype: torch.dtype) -> None:
    op = BACKENDS[backend]
    layer = drawn(LatentShape(**{**vars(shape), "dtype": dtype}), REQUESTS)
    out, cache = expected(layer)
    found = op(layer.queries, layer.latents, layer.heads, layer.inputs, layer.cache)
    assert found.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    assert distance(found, out) < tolerance
    empty = cache.isnan()
    assert torch.equal(layer.cache.isnan(), empty)
    assert distance(layer.cache[~empty], cache[~empty]) < tolerance


def distance(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm())


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_without_a_slot_are_not_stored(backend: str) -> None:
    layer = drawn(SHAPES[0], Requests(computed=(3, 5), rows=(2, 3)))
    slots = layer.inputs.paging.slots.clone()
    slots[[1, 4]] = -1
    before = layer.cache.clone()
    padded = changed(layer.inputs, slots=slots)
    BACKENDS[backend](layer.queries, layer.latents, layer.heads, padded, layer.cache)
    written = (layer.cache != before) & ~layer.cache.isnan()
    assert written.flatten(0, 1).any(-1).sum() == 3


@pytest.mark.skipif(not runs_cpp(torch.device("cpu")), reason="the C++ kernels are not built")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_its_bits_in_any_batch(dtype: torch.dtype, level: str, two_threads: None) -> None:
    """For every level: alone, beside other requests, and in several passes."""
    op, shape = BACKENDS["cpu"], LatentShape(**{**vars(SHAPES[2]), "dtype": dtype, "rotary": 20})
    requests = Requests(computed=(0, 611, 30), rows=(40, 5, 1))
    layer = drawn(shape, requests)
    out, _ = expected(layer)
    before = layer.cache.clone()
    together = op(layer.queries, layer.latents, layer.heads, layer.inputs, layer.cache)
    assert distance(together, out) < (1e-5 if dtype == torch.float32 else 2e-2)
    for request in range(len(requests.rows)):
        alone, rows = only(layer.inputs, request)
        own = before.clone()
        args = layer.queries[rows], layer.latents[rows], layer.heads
        assert torch.equal(op(*args, alone, own), together[rows])
        for row in range(rows.start, rows.stop):
            start = alone.rows.positions[row - rows.start]
            one = changed(
                alone,
                query_start=torch.tensor([0, 1]),
                context_lens=start.view(1) + 1,
                positions=start.view(1),
                slots=alone.paging.slots[row - rows.start, None],
            )
            found = op(layer.queries[row, None], layer.latents[row, None], layer.heads, one, own)
            assert torch.equal(found[0], together[row])
