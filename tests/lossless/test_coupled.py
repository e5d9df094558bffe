"""A seeded request that is coupled gets the text of plain decoding with that seed, whatever is
drafted and whatever runs beside it: bit for bit on a CPU, in float32 and in bfloat16."""

import json
from collections.abc import Callable
from dataclasses import replace
from importlib import resources
from typing import Any

import pytest
import torch

from slipstream import LLM, RequestOutput, SamplingParams, StructuredOutput
from slipstream.kernels.registry import kernels_for
from tests.lossless.test_greedy import AXES as SHAPES
from tests.lossless.test_greedy import (
    WAYS,
    assert_case_came_about,
    length,
    make_llm,
    make_prompts,
    plain_tokens,
    speculative_config,
    tokens,
)
from tests.lossless.test_trees import TREES
from tests.padded_steps import use_steps
from tests.pairwise import Case
from tests.tiny_models import TinyModels

SAMPLINGS: dict[str, dict[str, Any]] = {
    "top_p": {"top_p": 0.9},
    "everything": {
        "temperature": 0.8,
        "top_k": 30,
        "min_p": 0.01,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.2,
        "logit_bias": {5: 1.0, 9: -2.0},
        "min_tokens": 5,
    },
}
AXES = {
    **{name: values for name, values in SHAPES.items() if name != "penalties"},
    "drafter": [name for name in SHAPES["drafter"] if name not in ("perfect", "wrong")],
    "k": [1, 4],
    "sampling": list(SAMPLINGS),
}
MAX_TOKENS = 28

# Torch's matmuls depend on the number of rows.
IS_BIT_EXACT = kernels_for(torch.device("cpu")).network.backend != "reference"
needs_cpp = pytest.mark.skipif(not IS_BIT_EXACT, reason="the C++ kernels are not built")


ORDINARY = [name for name in AXES["drafter"] if name in (*WAYS, "subset", "assistant", "suffix")]


@pytest.mark.matrix(AXES, whole=True, ordinary={"drafter": ORDINARY})
def test_a_seed_gives_the_text_of_plain_decoding(
    case: Case, tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft, heads = tiny_models.all
    prompts = make_prompts(case["batch"])
    params = [
        SamplingParams(
            seed=seed, max_tokens=length(case), ignore_eos=True, **SAMPLINGS[case["sampling"]]
        )
        for seed in range(len(prompts))
    ]
    expected = plain_tokens(target, case["batch"], params)

    use_steps(case["steps"], monkeypatch)
    llm = make_llm(target, speculative_config(case, target, draft, heads), case)
    if case["prefix"]:
        llm.generate(prompts, params)
    outputs = llm.generate(prompts, params)
    assert tokens(outputs) == expected
    assert all(output.metrics.num_drafts > 0 for output in outputs)
    assert_case_came_about(case, outputs)


def texts(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[list(sample.token_ids) for sample in output.outputs] for output in outputs]


WISHES: dict[str, dict[str, Any]] = {
    "n": {"n": 3},
    "logprobs": {"logprobs": 2, "prompt_logprobs": 1},
    "stop": {"stop_token_ids": list(range(1, 20))},
    "fewer drafts": {"num_speculative_tokens": 1},
    "greedy": {"temperature": 0},
    "allowed": {"allowed_token_ids": list(range(3, 60))},
}


def test_every_mode_may_stand_beside_every_other(tiny_target: str, tiny_draft: str) -> None:
    """Requests without a seed run beside them, and are verified by rejection."""
    prompts = make_prompts(8)[: len(WISHES)]
    base = SamplingParams(seed=5, max_tokens=MAX_TOKENS, ignore_eos=True)
    params = [replace(base, **wish) for wish in WISHES.values()]
    case = {"rows": 512, "blocks": 400}
    plain = make_llm(tiny_target, None, case)
    # Fewer drafts than the engine may make are an error without a drafter.
    asked = [replace(own, num_speculative_tokens=None) for own in params]
    expected = plain.generate(prompts, asked)
    llm = make_llm(tiny_target, {"model": tiny_draft, "num_speculative_tokens": 4}, case)
    others = [replace(base, seed=None)] * len(prompts)
    mixed = [it for both in zip(prompts, prompts, strict=True) for it in both]
    outputs = llm.generate(mixed, [it for both in zip(others, params, strict=True) for it in both])
    assert texts(outputs[1::2]) == texts(expected)
    for ours, theirs in zip(outputs[1::2], expected, strict=True):
        if IS_BIT_EXACT:
            assert ours.outputs[0].logprobs == theirs.outputs[0].logprobs
            assert ours.prompt_logprobs == theirs.prompt_logprobs
    assert texts(outputs[::2]) != texts(expected)


def test_the_mode_of_all_requests_can_be_given(tiny_target: str, tiny_draft: str) -> None:
    """Rejection gives a seed another text; coupled also holds for the engine's own seeds."""
    prompts = make_prompts(8)
    params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)

    def run(method: str | None, seed: int | None) -> list[list[list[int]]]:
        config = {"model": tiny_draft, "rejection_sample_method": method}
        llm = make_llm(tiny_target, config if method else None, {"rows": 512, "blocks": 400})
        return texts(llm.generate(prompts, replace(params, seed=seed)))

    for seed in (None, 7):
        assert run("coupled", seed) == run(None, seed)
        assert run("rejection", seed) != run(None, seed)


# The demo


DRAFTERS: dict[str, dict[str, Any]] = {
    "draft": {"model": "demo/draft"},
    "subset": {"model": "demo/draft", "draft_vocab_size": 600},
    "pard": {"model": "demo/pard"},
    "eagle3": {"model": "demo/eagle3"},
    "p-eagle": {"model": "demo/p-eagle"},
    "mtp": {"model": "demo/mtp"},
    "ngram": {"method": "ngram"},
    "suffix": {"method": "suffix"},
}
NUCLEUS = SamplingParams(top_p=0.95, max_tokens=24)


def demo(config: dict[str, Any] | None, **options: Any) -> LLM:
    given = {"max_model_len": 512, "num_kv_blocks": 512, "max_num_seqs": 16, **options}
    return LLM("demo", device="cpu", dtype="bfloat16", speculative_config=config, **given)


def requests(number: int) -> tuple[list[str], list[SamplingParams]]:
    """This number of seeds, for the demo's held-out prompts in turn."""
    lines = resources.files("slipstream.demo").joinpath("prompts/held_out.jsonl").read_text()
    found = [json.loads(line).get("prompt") for line in lines.splitlines()]
    known = [text[:300] for text in found if text]
    seeds = range(number)
    return [known[seed % len(known)] for seed in seeds], [
        replace(NUCLEUS, seed=seed) for seed in seeds
    ]


@pytest.fixture(scope="module")
def plain() -> Callable[[int], list[list[list[int]]]]:
    """The outputs of plain decoding, one request at a time."""
    known: list[list[list[int]]] = []

    def first(number: int) -> list[list[list[int]]]:
        if len(known) < number:
            llm = demo(None, max_num_seqs=1)
            known[:] = texts(llm.generate(*requests(number)))
        return known[:number]

    return first


@needs_cpp
@pytest.mark.parametrize(
    "name", ["draft", pytest.param("subset", marks=pytest.mark.full), "eagle3"]
)
def test_in_bfloat16(name: str, plain: Callable[[int], Any]) -> None:
    """With batches, chunks and preemptions."""
    llm = demo(
        {**DRAFTERS[name], "num_speculative_tokens": 4},
        max_num_batched_tokens=48,
        num_kv_blocks=16,
        max_model_len=192,
    )
    outputs = llm.generate(*requests(12))
    assert texts(outputs) == plain(12)
    assert sum(output.metrics.num_accepted_tokens for output in outputs) > 12
    assert sum(output.metrics.num_preemptions for output in outputs) > 0


@pytest.mark.full
@needs_cpp
@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("name", ["none", *DRAFTERS, *TREES])
def test_500_requests(name: str, batch: int, plain: Callable[[int], Any]) -> None:
    """Temperature 1 and top-p; K of 1 and 4."""
    configs: list[dict[str, Any] | None] = [None]
    if name in TREES:
        configs = [{"model": "demo/eagle3", **TREES[name]}]
    elif name != "none":
        configs = [{**DRAFTERS[name], "num_speculative_tokens": k} for k in (1, 4)]
    # Ancestors of a tree's nodes lie at other places of the cache than a chain's, and sums over
    # them may be rounded in another order.
    most = 5 if name in TREES else 0
    for config in configs:
        outputs = demo(config, max_num_seqs=batch).generate(*requests(500))
        pairs = zip(texts(outputs), plain(500), strict=True)
        assert sum(ours != theirs for ours, theirs in pairs) <= most


@needs_cpp
def test_under_a_grammar(plain: Callable[[int], Any]) -> None:
    pytest.importorskip("llguidance")
    wish = StructuredOutput(regex="[A-Z][a-z]{2,8}( [a-z]{1,7}){3,6}[.]")
    prompts, params = requests(6)
    params = [replace(own, structured=wish) for own in params]
    expected = texts(demo(None).generate(prompts, params))
    llm = demo({**DRAFTERS["draft"], "num_speculative_tokens": 4})
    assert texts(llm.generate(prompts, params)) == expected
