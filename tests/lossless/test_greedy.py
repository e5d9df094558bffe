"""Greedy output with speculation is token for token the plain output, in float32."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from slipstream import LLM, RequestOutput, SamplingParams
from slipstream.speculative.catalogue import METHODS
from tests import fake_drafters
from tests.draft_traffic import learn_costs_while_running
from tests.last_hidden_checkpoints import medusa_for, mlp_for
from tests.padded_steps import packed_rows, use_steps
from tests.pairwise import Case
from tests.tiny_models import TinyModels

AXES: dict[str, list[Any]] = {
    "drafter": [
        *("draft_model", "self", "subset", "pard", "medusa", "mlp_speculator"),
        *("ngram", "suffix", "custom", "perfect", "wrong", "eagle", "eagle3", "p-eagle"),
        *("dflash", "dflash2", "dspark", "assistant", "mtp", "mtp_modules"),
        *("combination", "host_combination", "uneven_combination"),
    ],
    "k": [1, "auto", 7, 15],
    "batch": [1, 8],
    "rows": [512, 24],  # 24: prompts come in chunks, mixed with decoding
    "blocks": [400, 16],  # 16 blocks of 8 tokens: requests are preempted
    "prefix": [False, True],  # the same prompts were run before
    "penalties": [False, True],
    "steps": ["exact", "padded"],  # as on a CPU, and as where steps are captured
}
# One of each way to draft: enough, in an ordinary run, for a matrix of targets or of modes.
WAYS = (
    *("draft_model", "pard", "medusa", "ngram", "perfect", "eagle3", "p-eagle", "dflash", "dspark"),
    *("mtp", "combination", "uneven_combination"),
)
MAX_TOKENS = 28
_PLAIN: dict[str, list[list[int]]] = {}


@pytest.mark.matrix(AXES, whole=True, ordinary={"k": [1, "auto", 15]})  # 7: packed steps, below
def test_greedy_output_is_the_plain_output(
    case: Case, tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(case, *tiny_models.all, monkeypatch)


@pytest.mark.parametrize("drafter", AXES["drafter"])
def test_greedy_output_of_packed_steps_is_the_plain_output(
    drafter: str, tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests draft different numbers of tokens."""
    case = {"drafter": drafter, "k": 7, "batch": 8, "rows": 512, "blocks": 400, "prefix": False}
    case.update(penalties=drafter > "eagle", steps="packed")
    check(case, *tiny_models.all, monkeypatch)


def check(
    case: Case, target: str, draft: str, heads: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METHODS, "fake", fake_drafters.METHOD)
    prompts = make_prompts(case["batch"])
    params = SamplingParams(
        temperature=0,
        max_tokens=length(case),
        ignore_eos=True,
        repetition_penalty=1.3 if case["penalties"] else 1.0,
        presence_penalty=0.4 if case["penalties"] else 0.0,
    )
    expected = plain_tokens(target, case["batch"], params, case.get("dtype", "auto"))
    remember(prompts, expected)

    learn_costs_while_running(monkeypatch)
    use_steps(case["steps"], monkeypatch)
    llm = make_llm(target, speculative_config(case, target, draft, heads), case)
    if case["prefix"]:
        llm.generate(prompts, params)
    asked: Any = params
    if case["steps"] == "packed":
        counts = [1 + 5 * index % 7 for index in range(case["batch"])]
        asked = [replace(params, num_speculative_tokens=count) for count in counts]
    outputs = llm.generate(prompts, asked)
    assert tokens(outputs) == expected
    if case["steps"] == "packed":
        assert any(bucket == 6 for bucket, _, _ in packed_rows(llm))
    if case["k"] == "auto":
        assert llm.metrics.speculation.num_drafts > 0
    else:
        assert all(output.metrics.num_drafts > 0 for output in outputs)
    assert_case_came_about(case, outputs)


def length(case: Case) -> int:
    """Tokens of an output: more where requests are to be preempted, or to repeat themselves."""
    return MAX_TOKENS if case["blocks"] == 16 or case["drafter"] in ("ngram", "suffix") else 18


def plain_tokens(target: str, batch: int, asked: Any, dtype: str = "auto") -> list[list[int]]:
    """The tokens without speculation, which are cached since many cases share them."""
    key = f"{target} {batch} {asked} {dtype}"
    if key not in _PLAIN:
        llm = make_llm(target, None, {"dtype": dtype, "rows": 512, "blocks": 400})
        _PLAIN[key] = tokens(llm.generate(make_prompts(batch), asked))
    return _PLAIN[key]


def assert_case_came_about(case: Case, outputs: list[RequestOutput]) -> None:
    """Requests were preempted, and found their prefix, where the case is about that."""
    # How much is drafted with "auto", and so how many blocks are wanted, depends on measured times;
    # with 15 tokens a step some requests end before blocks run out.
    lacks_blocks = case["blocks"] == 16 and case["batch"] == 8
    if lacks_blocks and case.get("k") not in ("auto", 15):
        assert sum(output.metrics.num_preemptions for output in outputs) > 0
    if case["prefix"] and case["blocks"] == 400:
        assert all(output.metrics.num_cached_tokens > 0 for output in outputs)


def speculative_config(
    case: Case, target: str, draft: str, heads: dict[str, str]
) -> dict[str, Any]:
    drafters: dict[str, dict[str, Any]] = {
        "draft_model": {"model": draft},
        "self": {"model": target},
        "subset": {"model": draft, "draft_vocab_size": 60},
        "pard": {"method": "pard", "model": draft, "pard_token": 90},
        "medusa": {"method": "medusa", "model": medusa_for(target, heads=15)},
        "mlp_speculator": {"method": "mlp_speculator", "model": mlp_for(target, steps=15)},
        "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
        "suffix": {"method": "suffix", "suffix_decoding_max_spec_factor": 3},
        "custom": {"method": "custom", "model": "tests.user_drafters:LastFollower"},
        "perfect": {"method": "fake", "model": "perfect"},
        "wrong": {"method": "fake", "model": "wrong"},
        "assistant": {"model": heads["assistant"]},
        "dflash": {"model": heads["dflash"]},
        "dflash2": {"model": heads["dflash2"]},
        "dspark": {"model": heads["dspark"]},
        "eagle": {"model": heads["eagle"]},
        "eagle3": {"model": heads["eagle3"]},
        "p-eagle": {"model": heads["p-eagle"]},
        "combination": {"drafters": [{"method": "ngram", "min_match": 1}, {"model": draft}]},
        "host_combination": {
            "drafters": [{"method": "suffix", "min_match": 1}, {"model": heads["eagle3"]}]
        },
        "uneven_combination": {
            "drafters": [
                {"method": "custom", "model": "tests.user_drafters:LastFollower"},
                {"method": "ngram", "min_match": 2, "num_speculative_tokens": 1},
                {
                    "method": "pard",
                    "model": draft,
                    "pard_token": 90,
                    "num_speculative_tokens": 2 if case["k"] == "auto" else min(2, case["k"]),
                },
            ]
        },
        "mtp": {"model": heads["mtp"]},
        "mtp_modules": {"model": heads["mtp_modules"]},
    }
    return {**drafters[case["drafter"]], "num_speculative_tokens": case["k"]}


def make_llm(target: str, speculative: dict[str, Any] | None, case: Case) -> LLM:
    return LLM(
        target,
        dtype=case.get("dtype", "auto"),
        speculative_config=speculative,
        skip_tokenizer_init=True,
        max_num_seqs=6,  # fewer than the largest batch: some wait
        max_num_batched_tokens=case["rows"],
        num_kv_blocks=case["blocks"],
        block_size=8,
        max_model_len=128,
    )


def make_prompts(number: int) -> list[Any]:
    """Mixed lengths; each has a stretch that comes twice, so that n-grams are found."""
    generator = torch.Generator().manual_seed(number)
    prompts = []
    for length in (26, 33, 9, 61, 47, 12, 70, 18)[:number]:
        ids = torch.randint(1, 96, (length,), generator=generator).tolist()
        prompts.append({"prompt_token_ids": ids[:8] + ids})
    return prompts


def remember(prompts: list[Any], expected: list[list[int]]) -> None:
    fake_drafters.ANSWERS.clear()
    for prompt, answer in zip(prompts, expected, strict=True):
        ids = prompt["prompt_token_ids"]
        fake_drafters.ANSWERS[tuple(ids)] = [*ids, *answer]


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]
