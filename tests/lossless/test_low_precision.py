"""On a CPU greedy output in bf16, int8 and int4 is the plain output, bit for bit.

The C++ kernels give a row the same bits whatever stands beside it, so nothing that shapes a step
may show: drafts, batches, prompt chunks, threads, preemption, cached prefixes.
"""

import functools
import json
from collections.abc import Iterator, Sequence
from importlib import resources
from typing import Any

import pytest

from slipstream import LLM, SamplingParams

cpp = pytest.importorskip("_slipstream_cpu", reason="the C++ kernels are not built")

PRECISIONS = ("none", "int8", "int8-dynamic", "int4", "int4-g128-asym", "mxfp4")
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
# One difference from plain decoding each, or some together.
SHAPES: dict[str, dict[str, Any]] = {
    "K 1": {"k": 1},
    "K 3, chunks of 16": {"k": 3, "max_num_batched_tokens": 16, "max_num_seqs": 3},
    "K 7, chunks of 256": {"k": 7, "max_num_batched_tokens": 256},
    "K 0, one by one": {"k": 0, "max_num_seqs": 1},
    "K 3, preempted": {"k": 3, "num_kv_blocks": 11, "max_model_len": 160},
    "K 7, 3 threads": {"k": 7, "threads": 3, "max_num_seqs": 2},
}


@functools.cache
def prompts() -> list[str]:
    """The first of the demo's held-out prompts, some of them cut from one text."""
    lines = resources.files("slipstream.demo").joinpath("prompts/held_out.jsonl").read_text()
    found = [
        json.loads(line).get("messages", [{}])[0].get("content") for line in lines.splitlines()
    ]
    texts = [text for text in found if text][:6]
    return [*texts, texts[0] + " " + texts[1], texts[0] + " " + texts[2]]


def make(precision: str, k: int = 0, **options: Any) -> LLM:
    drafter = {"model": "demo/draft", "num_speculative_tokens": k, "quantization": None}
    chosen: dict[str, Any] = {"max_model_len": 512, "num_kv_blocks": 256, "threads": 1, **options}
    return LLM(
        "demo",
        device="cpu",
        dtype="bfloat16",
        quantization=None if precision == "none" else precision,
        speculative_config=drafter if k else None,
        **chosen,
    )


def tokens(llm: LLM, texts: Sequence[str]) -> list[list[int]]:
    return [list(out.outputs[0].token_ids) for out in llm.generate(list(texts), GREEDY)]


@functools.cache
def expected(precision: str) -> list[list[int]]:
    return tokens(make(precision, max_num_seqs=8), prompts())


def pairs() -> Iterator[Any]:
    """An ordinary run tries two shapes of each precision, and so two precisions in each shape."""
    for row, precision in enumerate(PRECISIONS):
        for column, shape in enumerate(SHAPES):
            marks = () if (column - row) % len(SHAPES) in (0, 2) else pytest.mark.full
            yield pytest.param(precision, shape, marks=marks)


@pytest.mark.parametrize(("precision", "shape"), list(pairs()))
def test_nothing_that_shapes_a_step_shows(precision: str, shape: str) -> None:
    threads = cpp.num_threads()
    try:
        llm = make(precision, **SHAPES[shape])
        outputs = llm.generate(prompts(), GREEDY)
        assert [list(out.outputs[0].token_ids) for out in outputs] == expected(precision)
        preemptions = sum(out.metrics.num_preemptions for out in outputs)
        assert (preemptions > 0) == shape.endswith("preempted")
        # Now the prompts' blocks are cached.
        assert tokens(llm, prompts()[5:]) == expected(precision)[5:]
    finally:
        cpp.set_num_threads(threads)


def test_drafters_of_their_own_precision_change_nothing() -> None:
    for quantization in ("int8", "int4"):
        drafter = {"model": "demo/eagle3", "num_speculative_tokens": 4}
        llm = LLM(
            "demo",
            device="cpu",
            dtype="bfloat16",
            max_model_len=512,
            num_kv_blocks=256,
            threads=1,
            speculative_config={**drafter, "quantization": quantization},
        )
        assert tokens(llm, prompts()) == expected("none")
