"""The ops that drafting heads need beside a decoder's, in both columns."""
# ruff: noqa: E402  (what is imported first decides whether kernels are interpreted)

import importlib.util
import os
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed (it is there for Linux only)", allow_module_level=True)

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")

from slipstream.kernels.reference import PARTS as REFERENCE_PARTS
from slipstream.kernels.reference import REFERENCE
from slipstream.kernels.table import AttentionInputs, Norm, Ops
from slipstream.kernels.triton import PARTS as TRITON_PARTS
from slipstream.kernels.triton import TRITON
from slipstream.kernels.triton import attention as triton_attention
from slipstream.models.precision import rounded
from tests.kernels import oracles
from tests.kernels.batches import Requests, Shape, attention_inputs, filled_cache, seeded

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning"),
]

DEVICE = torch.device("cuda" if ON_GPU else "cpu")
BATCHES = [
    Requests([1, 0, 150, 3], [1, 2, 1, 1]),
    Requests([9, 126, 2], [5, 5, 5]),
    Requests([0, 130, 5], [18, 20, 2]),
]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    if not ON_GPU:
        monkeypatch.setattr(triton_attention, "PROGRAMS", 8)


def randn(*sizes: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(sizes, generator=seeded(seed)).to(dtype).to(DEVICE)


@pytest.mark.parametrize("first", [1, 3])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("parts", [REFERENCE_PARTS, TRITON_PARTS], ids=["reference", "triton"])
@pytest.mark.parametrize("requests", BATCHES, ids=str)
def test_tokens_before_the_first_seen_are_left_out(
    requests: Requests, parts: object, window: int | None, first: int
) -> None:
    shape = Shape(4, 2, 16, 8)
    inputs = attention_inputs(requests, shape.block_size)
    cache = filled_cache(inputs, requests, shape)
    query = torch.randn(len(inputs.positions), 4, 16, generator=seeded(7))
    inputs = replace(inputs, first_seen=first)
    seeing = inputs.positions >= first  # earlier rows see nothing and mean nothing
    truth = torch.empty(0)
    if window is None or bool(seeing.all()):
        at = replace(inputs, positions=inputs.positions.clamp_min(first))
        truth = oracles.attention(query, cache, at, 0.25, window)
    moved = AttentionInputs(
        *(
            getattr(inputs, name).to(DEVICE)
            for name in ("query_start", "context_lens", "block_tables", "positions", "slots")
        ),
        first_seen=first,
    )
    on_device = (cache[0].to(DEVICE), cache[1].to(DEVICE))
    out = parts.paged_attention(query.to(DEVICE), on_device, moved, 0.25, window)  # type: ignore[attr-defined]
    if len(truth):
        assert_close(out[seeing].double().cpu(), truth[seeing], rtol=1e-4, atol=1e-5)
    for pages in on_device:
        for table in inputs.block_tables.tolist():
            pages[table[0], :first] = 100.0
    again = parts.paged_attention(query.to(DEVICE), on_device, moved, 0.25, window)  # type: ignore[attr-defined]
    assert_close(again[seeing], out[seeing], rtol=0, atol=0)


@pytest.mark.parametrize("float8", [False, True])
@pytest.mark.parametrize("column", [REFERENCE, TRITON], ids=lambda ops: ops.column)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_joined_linear(dtype: torch.dtype, column: Ops, float8: bool) -> None:
    """Against the same in two steps."""
    one, two = randn(5, 32, dtype=dtype), randn(5, 48, seed=1, dtype=dtype)
    norm = Norm(1 + 0.3 * randn(48, seed=4, dtype=dtype), 1e-3)
    matrix = (randn(70, 80, seed=2) / 80**0.5).to(dtype)
    bias = randn(70, seed=3, dtype=dtype)
    weight = rounded(matrix) if float8 else matrix
    normed, total = column.norm(two, None, norm)
    assert_close(total, two, rtol=0, atol=0)
    out = column.joined_linear([(one, None), (two, norm)], weight, bias)
    assert out.dtype == dtype
    joined = torch.cat((one, normed), -1)
    truth = oracles.product(joined.cpu(), matrix.cpu(), bias.cpu())
    assert_close(out.double().cpu(), truth, rtol=0.0, atol=0.2 if float8 else 4e-3)


@pytest.mark.parametrize("column", [REFERENCE, TRITON], ids=lambda ops: ops.column)
def test_norm_gives_the_sum_too(column: Ops) -> None:
    addend, residual = randn(5, 64), 2 * randn(5, 64, seed=1)
    norm = Norm(1 + 0.3 * randn(64, seed=4), 1e-3)
    normed, total = column.norm(addend, residual, norm)
    assert_close(total, addend + residual)
    assert_close(normed, column.add_norm(addend, residual, norm), rtol=0, atol=0)
