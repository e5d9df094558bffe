"""Sampled output through the whole engine has exactly the target's distribution.

The big samples run at the verifier (test_verifier_distribution.py); here the engine's own parts are
in play: positions and steps that key the noise, catch-up of the drafter, penalties across steps.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare

from slipstream import LLM, LoRARequest, SamplingParams
from slipstream.engine.prompts import TokensPrompt
from tests.last_hidden_checkpoints import mapped_medusa_for, medusa_for, mlp_for
from tests.lossless.counted_pair import VOCAB
from tests.padded_steps import use_padded_steps

PROMPT = [1, 4, 2, 4, 2]
SAMPLES = 1000
LOTS = 2  # calls that they are drawn by: each step of a call looks through all its requests
LENGTH = 4
Distribution = dict[tuple[int, ...], float]


NGRAM = {"method": "ngram", "min_match": 2, "prompt_lookup_max": 3}
CASES: dict[str, dict[str, Any]] = {
    "plain": {"drafter": None},
    "draft_model": {"drafter": "draft"},
    "greedy_drafts": {"drafter": "draft", "draft_sample_method": "greedy"},
    "subset": {"drafter": "draft", "draft_vocab_size": 4},
    "pard": {"drafter": "draft", "parallel_drafting": True, "pard_token": 3},
    "greedy_pard": {
        "drafter": "draft",
        "parallel_drafting": True,
        "pard_token": 3,
        "draft_sample_method": "greedy",
    },
    "pard2": {"drafter": "pard2"},
    "greedy_pard2": {"drafter": "pard2", "draft_sample_method": "greedy"},
    "medusa": {"drafter": "medusa"},
    "mlp_speculator": {"drafter": "mlp_speculator"},
    "mapped_medusa": {"drafter": "mapped_medusa"},
    "greedy_medusa": {"drafter": "medusa", "draft_sample_method": "greedy"},
    "ngram": {"drafter": "ngram"},
    "suffix": {"drafter": "suffix"},
    "custom": {"drafter": "custom"},
    "assistant": {"drafter": "assistant"},
    "assistant_of_parts": {"drafter": "assistant_of_parts", "params": {"temperature": 0.8}},
    "assistant_greedy_drafts": {"drafter": "assistant", "draft_sample_method": "greedy"},
    "dflash": {"drafter": "dflash", "params": {"temperature": 0.7, "top_p": 0.9}},
    "dflash_reduced": {"drafter": "dflash_reduced"},
    "dflash_greedy_drafts": {"drafter": "dflash_reduced", "draft_sample_method": "greedy"},
    "dflash2": {"drafter": "dflash2"},
    "dspark": {"drafter": "dspark", "params": {"temperature": 0.7, "top_p": 0.9}},
    "dspark_reduced": {"drafter": "dspark_reduced"},
    "eagle": {"drafter": "eagle"},
    "eagle3": {"drafter": "eagle3", "params": {"temperature": 0.7, "top_p": 0.9}},
    "eagle3_reduced": {"drafter": "eagle3_reduced"},
    "eagle_tree": {
        "drafter": "eagle",
        "speculative_token_tree": "[(0,), (1,), (0, 0), (1, 0), (1, 1)]",
        "num_speculative_tokens": 5,
    },
    "eagle3_dynamic_tree": {
        "drafter": "eagle3",
        "speculative_eagle_topk": 2,
        "speculative_num_steps": 3,
        "num_speculative_tokens": 6,
        "params": {"frequency_penalty": 0.7, "presence_penalty": 0.3, "logit_bias": {2: 0.8}},
    },
    "eagle3_greedy_drafts": {"drafter": "eagle3_reduced", "draft_sample_method": "greedy"},
    "p-eagle": {"drafter": "p-eagle"},
    "p-eagle_truncated": {"drafter": "p-eagle", "params": {"temperature": 0.7, "top_p": 0.9}},
    "p-eagle_greedy_drafts": {"drafter": "p-eagle", "draft_sample_method": "greedy"},
    "combination": {"drafter": "ngram+draft"},
    "combination_of_subsets": {"drafter": "ngram+subset"},
    "host_combination": {"drafter": "suffix+eagle3", "params": {"temperature": 0.7, "top_p": 0.9}},
    "uneven_combination": {"drafter": "ngram+medusa"},
    "mtp": {"drafter": "mtp"},
    "mtp_modules": {"drafter": "mtp_modules", "params": {"temperature": 0.7, "top_p": 0.9}},
    "mtp_subset": {"drafter": "mtp", "draft_vocab_size": 4},
    "mtp_greedy_drafts": {"drafter": "mtp", "draft_sample_method": "greedy"},
    "block": {"drafter": "draft", "rejection_sample_method": "block"},
    "block_combination": {
        "drafter": "ngram+subset",
        "rejection_sample_method": "block",
        "params": {"temperature": 0.7, "top_p": 0.9},
    },
    "truncated": {"drafter": "draft", "params": {"temperature": 0.7, "top_p": 0.9}},
    "penalties": {
        "drafter": "draft",
        "params": {"frequency_penalty": 0.7, "presence_penalty": 0.3, "logit_bias": {2: 0.8}},
    },
}


# Their variations are tested with other drafters too.
LESS_TRIED = (
    *("greedy_pard", "greedy_pard2", "greedy_medusa", "assistant_greedy_drafts"),
    *("dflash_greedy_drafts", "p-eagle_greedy_drafts", "mtp_greedy_drafts"),
    *("dspark_reduced", "p-eagle_truncated", "mtp_subset"),
    *("assistant_of_parts", "dflash_reduced", "mtp_modules"),  # in padded steps, below
    "combination_of_subsets",  # in blocks
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(it, marks=pytest.mark.full) if it in LESS_TRIED else it for it in CASES],
)
def test_sampled_output_has_the_targets_distribution(
    name: str, pair: tuple[str, str], heads: Mapping[str, str]
) -> None:
    check(CASES[name], pair, heads, None)


@pytest.mark.parametrize("name", ["mtp", "mtp_modules", "p-eagle", "block"])
def test_padded_steps_sample_from_the_targets_distribution(
    name: str, pair: tuple[str, str], heads: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With steps that are padded as captured ones are."""
    check(CASES[name], pair, heads, monkeypatch)


def check(
    case: dict[str, Any],
    pair: tuple[str, str],
    heads: Mapping[str, str],
    padded: pytest.MonkeyPatch | None,
) -> None:
    params: dict[str, Any] = {"temperature": 1.0, **case.get("params", {})}
    exact = exact_distribution(pair[0], params)
    if padded is not None:
        use_padded_steps(padded)
    drawn = draw(pair, case, params, heads)
    for places in ((0, 1), (1, 2), (2, 3)):
        assert p_value(drawn, exact, places) > 0.001, places


@pytest.mark.parametrize(
    "name", ["assistant", "assistant_of_parts", "dflash", "dflash_reduced", "dspark"]
)
def test_padded_steps_have_the_targets_distribution(
    name: str, pair: tuple[str, str], heads: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_padded_steps(monkeypatch)
    test_sampled_output_has_the_targets_distribution(name, pair, heads)


def test_the_statistic_sees_a_wrong_distribution(pair: tuple[str, str]) -> None:
    exact = exact_distribution(pair[0], {"temperature": 1.0})
    drawn = draw(pair, CASES["draft_model"], {"temperature": 0.8})
    assert p_value(drawn, exact, (1, 2)) < 1e-6


def draw(
    pair: tuple[str, str],
    case: dict[str, Any],
    params: dict[str, Any],
    heads: Mapping[str, str] | None = None,
) -> Counter[tuple[int, ...]]:
    """Count the outputs of requests with different seeds."""
    speculative = speculation(pair, case, heads)
    llm = LLM(pair[0], speculative_config=speculative, skip_tokenizer_init=True, num_kv_blocks=300)
    sampling = SamplingParams(max_tokens=LENGTH, ignore_eos=True, **params)
    return drawn_from(llm, sampling, is_drafted=speculative is not None)


def speculation(
    pair: tuple[str, str], case: dict[str, Any], heads: Mapping[str, str] | None
) -> dict[str, Any] | None:
    """The `speculative_config` of a case."""
    target, draft = pair
    chosen: dict[str, dict[str, Any]] = {
        "draft": {"model": draft},
        "medusa": {"method": "medusa", "model": medusa_for(target)},
        "mapped_medusa": {"method": "medusa", "model": mapped_medusa_for(target)},
        "mlp_speculator": {"method": "mlp_speculator", "model": mlp_for(target)},
        "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 2},
        "suffix": {"method": "suffix"},
        "ngram+draft": {"drafters": [NGRAM, {"model": draft}]},
        "ngram+subset": {"drafters": [NGRAM, {"model": draft, "draft_vocab_size": 4}]},
        "suffix+eagle3": {
            "drafters": [
                {"method": "suffix", "min_match": 2},
                {"model": (heads or {}).get("eagle3_reduced")},
            ]
        },
        "ngram+medusa": {
            "drafters": [
                NGRAM,
                {
                    "method": "medusa",
                    "model": mapped_medusa_for(target),
                    "num_speculative_tokens": 1,
                },
            ]
        },
        "custom": {"method": "custom", "model": "tests.user_drafters:LastFollower"},
    }
    speculative = chosen.get(case["drafter"])
    if heads and case["drafter"] in heads:
        speculative = {"model": heads[case["drafter"]]}
    if speculative is not None:
        speculative["num_speculative_tokens"] = 2
        options = {key: case[key] for key in case if key not in ("drafter", "params")}
        speculative |= options
    return speculative


def drawn_from(
    llm: LLM, sampling: SamplingParams, adapter: LoRARequest | None = None, *, is_drafted: bool
) -> Counter[tuple[int, ...]]:
    """Count the outputs; with a drafter, some draft tokens must be accepted."""
    lot = [TokensPrompt(prompt_token_ids=PROMPT)] * (SAMPLES // LOTS)
    outputs = [output for _ in range(LOTS) for output in llm.generate(lot, sampling, adapter)]
    if is_drafted:
        assert sum(output.metrics.num_accepted_tokens for output in outputs) > SAMPLES / 10
    drawn = Counter(tuple(output.outputs[0].token_ids) for output in outputs)
    assert drawn.total() == SAMPLES
    return drawn


@cache
def next_logits(target: str) -> dict[tuple[int, ...], np.ndarray]:
    """The logits after the prompt and after each prefix of an output, from plain forward passes."""
    llm = LLM(target, skip_tokenizer_init=True, num_kv_blocks=2000)
    prefixes = [p for size in range(LENGTH) for p in product(range(VOCAB), repeat=size)]
    outputs = llm.generate(
        [{"prompt_token_ids": [*PROMPT, *prefix]} for prefix in prefixes],
        SamplingParams(temperature=0, max_tokens=1, logprobs=VOCAB),
    )
    rows: dict[tuple[int, ...], np.ndarray] = {}
    for prefix, output in zip(prefixes, outputs, strict=True):
        logprobs = output.outputs[0].logprobs
        assert logprobs is not None
        rows[prefix] = np.array([logprobs[0][token].logprob for token in range(VOCAB)])
    return rows


def exact_distribution(target: str, params: dict[str, Any]) -> Distribution:
    """The probability of every output, by plain forward passes and NumPy."""
    rows = {
        prefix: processed(logits, prefix, params) for prefix, logits in next_logits(target).items()
    }
    return {
        text: float(np.prod([rows[text[:i]][text[i]] for i in range(LENGTH)]))
        for text in product(range(VOCAB), repeat=LENGTH)
    }


def processed(logits: np.ndarray, output: tuple[int, ...], params: dict[str, Any]) -> np.ndarray:
    """One row's distribution, written independently of the engine."""
    logits = logits.copy()
    counts = Counter(output)
    for token, count in counts.items():
        logits[token] -= params.get("frequency_penalty", 0.0) * count
        logits[token] -= params.get("presence_penalty", 0.0)
    for token, bias in params.get("logit_bias", {}).items():
        logits[token] += bias
    weights = np.exp((logits - logits.max()) / params["temperature"])
    weights /= weights.sum()
    order = np.argsort(-weights)
    before = np.cumsum(weights[order]) - weights[order]
    weights[order[before >= params.get("top_p", 1.0)]] = 0.0
    return weights / weights.sum()


def p_value(drawn: Counter[tuple[int, ...]], exact: Distribution, places: tuple[int, int]) -> float:
    """Chi-square of the pairs of tokens at two places; rare pairs are counted together."""
    observed: Counter[tuple[int, ...]] = Counter()
    expected: defaultdict[tuple[int, ...], float] = defaultdict(float)
    for text, count in drawn.items():
        observed[tuple(text[place] for place in places)] += count
    for text, probability in exact.items():
        expected[tuple(text[place] for place in places)] += probability * SAMPLES
    assert all(expected[pair] > 0 for pair in observed), "a token of probability 0 came out"
    common = [pair for pair, count in expected.items() if count >= 5]
    rest = SAMPLES - sum(expected[pair] for pair in common)
    columns = [(observed[pair], expected[pair]) for pair in common]
    if rest > 1:
        columns.append((SAMPLES - sum(observed[pair] for pair in common), rest))
    seen, wanted = zip(*columns, strict=True)
    return float(chisquare(seen, np.array(wanted) * sum(seen) / sum(wanted)).pvalue)
