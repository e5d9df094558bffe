"""Norms, activation and rotation of the triton column on a GPU, for `gpu_kernels.py`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.graph_timing import bytes_per_us, graph_us
from slipstream.kernels.pass_inputs import Paging, PassInputs, RowPlaces
from slipstream.kernels.reference import REFERENCE
from slipstream.kernels.triton import TRITON
from slipstream.layers.rope import RopeConfig, rope_table

WIDTH, INNER = 4096, 12288
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
MAX_LEN = 40960
MOST_CALLS = 48
DTYPE, DEVICE = torch.bfloat16, torch.device("cuda")

Row = dict[str, Any]


def randn(*sizes: int) -> Tensor:
    return torch.randn(sizes, dtype=DTYPE, device=DEVICE)


def relative_error(out: Tensor, truth: Tensor) -> float:
    """NaN, as a missing write in a poisoned cache would give, stays NaN."""
    return float((out.float() - truth.float()).norm() / truth.float().norm())


def dense_rows() -> list[Row]:
    rows = []
    for tokens in (1, 8, 64):
        rows += [_add_norm(tokens), _gated(tokens), _rotate(tokens)]
    return rows


def _add_norm(tokens: int) -> Row:
    xs = [randn(tokens, WIDTH) for _ in range(MOST_CALLS)]
    residuals = [randn(tokens, WIDTH) for _ in range(MOST_CALLS)]
    weight = randn(WIDTH)

    def run(op: Callable[..., Any]) -> Callable[[], None]:
        def each() -> None:
            for x, residual in zip(xs, residuals, strict=True):
                op(x, residual, weight, 1e-6)

        return each

    out, total = TRITON.add_rms_norm(xs[0], residuals[0], weight, 1e-6)
    truth = REFERENCE.rms_norm(total.float(), weight.float(), 1e-6)
    assert torch.equal(total, xs[0] + residuals[0])
    plain = REFERENCE.rms_norm(xs[0].float(), weight.float(), 1e-6)
    assert relative_error(TRITON.rms_norm(xs[0], weight, 1e-6), plain) < 1e-2
    return {
        "op": f"add + norm {WIDTH} T={tokens}",
        "us": graph_us(run(TRITON.add_rms_norm), MOST_CALLS, repeats=15, warm_up=3),
        "torch_us": graph_us(run(REFERENCE.add_rms_norm), MOST_CALLS, repeats=15, warm_up=3),
        "limit_us": 4 * tokens * WIDTH * 2 / bytes_per_us(),
        "error": relative_error(out, truth),
    }


def _gated(tokens: int) -> Row:
    xs = [randn(tokens, 2 * INNER) for _ in range(MOST_CALLS)]

    def run(op: Callable[[Tensor], Tensor]) -> Callable[[], None]:
        def each() -> None:
            for x in xs:
                op(x)

        return each

    truth = REFERENCE.gated_activation(xs[0].float())
    return {
        "op": f"silu(gate) * up {INNER} T={tokens}",
        "us": graph_us(run(TRITON.gated_activation), MOST_CALLS, repeats=15, warm_up=3),
        "torch_us": graph_us(run(REFERENCE.gated_activation), MOST_CALLS, repeats=15, warm_up=3),
        "limit_us": 3 * tokens * INNER * 2 / bytes_per_us(),
        "error": relative_error(TRITON.gated_activation(xs[0]), truth),
    }


def _rotate(tokens: int) -> Row:
    heads = HEADS + 2 * KV_HEADS
    wholes = [randn(tokens, heads * HEAD_DIM) for _ in range(MOST_CALLS)]
    norms = (randn(HEAD_DIM), randn(HEAD_DIM), 1e-6)
    table = rope_table(HEAD_DIM, RopeConfig(1e6), MAX_LEN, DEVICE)
    pages = torch.zeros(2, tokens, BLOCK_SIZE, KV_HEADS, HEAD_DIM, dtype=DTYPE, device=DEVICE)
    cache = pages[0], pages[1]
    query_start = torch.tensor([0, tokens], device=DEVICE)
    inputs = PassInputs(
        RowPlaces(query_start, torch.randint(MAX_LEN, (tokens,), device=DEVICE)),
        Paging(
            torch.zeros(1, 1, dtype=torch.int32, device=DEVICE),
            context_lens=query_start[1:],
            slots=torch.randperm(tokens * BLOCK_SIZE, device=DEVICE)[:tokens],
        ),
    )

    def run() -> None:
        for whole in wholes:
            TRITON.rotate_and_store(*_heads(whole), norms, table, inputs, cache)

    out = TRITON.rotate_and_store(*_heads(wholes[0]), norms, table, inputs, cache)
    found = torch.cat((out.flatten(), pages.flatten()))
    exact = torch.zeros_like(pages, dtype=torch.float32)
    wide = (norms[0].float(), norms[1].float(), norms[2])
    truth = REFERENCE.rotate_and_store(
        *_heads(wholes[0].float()), wide, table, inputs, (exact[0], exact[1])
    )
    return {
        "op": f"norm + rope + store T={tokens}",
        "us": graph_us(run, MOST_CALLS, repeats=15, warm_up=3),
        "limit_us": 2 * tokens * heads * HEAD_DIM * 2 / bytes_per_us(),
        "error": relative_error(found, torch.cat((truth.flatten(), exact.flatten()))),
    }


def _heads(whole: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    sizes = [heads * HEAD_DIM for heads in (HEADS, KV_HEADS, KV_HEADS)]
    parts = torch.split(whole, sizes, -1)
    query, key, value = (part.view(len(whole), -1, HEAD_DIM) for part in parts)
    return query, key, value
