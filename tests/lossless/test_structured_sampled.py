"""Sampled outputs that follow a grammar have the distribution of plain sampling under it.

The truth is worked out token by token, from plain forward passes: what the target says of tokens
that are not allowed is left out, and the rest is scaled to 1.
"""

from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare

from slipstream import LLM, SamplingParams, StructuredOutput
from slipstream.core.structured import Advance
from slipstream.engine.grammar import Grammars
from slipstream.models.tokenizer import Tokenizer
from tests.checkpoints import write_qwen3
from tests.drafters.heads import write_eagle1, write_eagle3
from tests.last_hidden_checkpoints import mapped_medusa_for
from tests.lossless.counted_pair import SHAPE
from tests.lossless.test_sampled import NGRAM
from tests.padded_steps import use_padded_steps
from tests.stopping_policy import use_stopping_policy
from tests.tokenizers import write_byte_tokenizer

pytest.importorskip("llguidance")

PIECES = ["a", "b", "c", "ab", "bc"]
TOKENS = ["", *PIECES]  # the first one ends a text
PROMPT = [1, 4, 2, 4, 2]
TEXTS = (
    *(text for text in map("".join, product("abc", repeat=3)) if "cc" not in text),
    *(text for text in map("".join, product("abc", repeat=4)) if text[0] == "b" and "aa" in text),
    *("ccabab", "cccb", "aabca"),  # at whose ends there is no choice
)
WISH = StructuredOutput(choice=TEXTS)
SAMPLES = 1200
MOST_TOKENS = 8
CASES: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "draft_model": {"model": "draft"},
    "subset": {"model": "draft", "draft_vocab_size": 4},
    "eagle3_reduced": {"model": "eagle3"},
    "medusa": {"method": "medusa", "model": "medusa"},
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 2},
    "combination": {"drafters": [NGRAM, {"model": "draft"}]},
    "tree": {"model": "eagle", "speculative_token_tree": "[(0,), (1,), (0, 0), (1, 0), (0, 0, 0)]"},
}
PADDED = ("draft_model", "combination")
Outputs = dict[tuple[int, ...], float]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A target, its tokenizer and its drafters."""
    folder = tmp_path_factory.mktemp("models")
    shape = {"seed": 3, "logit_scale": 0.8, **SHAPE}
    target = str(write_qwen3(folder / "target", **shape))
    return {
        "target": target,
        "words": str(write_byte_tokenizer(folder / "words", PIECES)),
        "draft": str(write_qwen3(folder / "draft", keep_layers=1, **shape)),
        "eagle": str(write_eagle1(folder / "eagle", target)),
        "eagle3": str(write_eagle3(folder / "eagle3", target, draft_vocab=4)),
        "medusa": mapped_medusa_for(target),
    }


def allowed_after(prefix: tuple[int, ...], grammars: Grammars) -> list[int]:
    """Empty where the output is complete."""
    guide = grammars.guide(WISH, frozenset({0}))
    for token in prefix:
        if guide.advance(token) is Advance.COMPLETE:
            return []
    masks = grammars.masks(1)
    grammars.fill(masks, [(guide, 0, [])])
    tokens = [token for token in range(len(TOKENS)) if int(masks[0, 0]) >> token & 1]
    text = "".join(TOKENS[token] for token in prefix)
    for token in tokens:  # an own opinion; a forced text has one spelling only
        assert token or text in TEXTS
        assert any(one.startswith(text + TOKENS[token]) for one in TEXTS)
    return tokens


@pytest.fixture(scope="module")
def truth(models: dict[str, str]) -> Outputs:
    """The probability of every output."""
    grammars = Grammars(Tokenizer(Path(models["words"])), len(TOKENS), (0,))

    @cache
    def allowed(prefix: tuple[int, ...]) -> list[int]:
        return allowed_after(prefix, grammars)

    def every_prefix(prefix: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if allowed(prefix):
            yield prefix
        for token in allowed(prefix):
            yield from every_prefix((*prefix, token))

    llm = LLM(models["target"], skip_tokenizer_init=True, num_kv_blocks=2000)
    prefixes = list(every_prefix(()))
    outputs = llm.generate(
        [{"prompt_token_ids": [*PROMPT, *prefix]} for prefix in prefixes],
        SamplingParams(temperature=0, max_tokens=1, logprobs=len(TOKENS)),
    )
    shares = {(): 1.0}
    for prefix, output in zip(prefixes, outputs, strict=True):
        logprobs = output.outputs[0].logprobs
        assert logprobs is not None
        weights = np.exp([logprobs[0][token].logprob for token in range(len(TOKENS))])
        share = shares.pop(prefix) / sum(weights[token] for token in allowed(prefix))
        shares |= {(*prefix, token): share * float(weights[token]) for token in allowed(prefix)}
    return shares


LESS_TRIED = ("subset", "medusa")  # the combination has the one, and eagle3 the other's columns


@pytest.mark.parametrize(
    "name",
    [pytest.param(it, marks=pytest.mark.full) if it in LESS_TRIED else it for it in CASES],
)
def test_the_distribution_is_the_targets_under_the_grammar(
    name: str, models: dict[str, str], truth: Outputs
) -> None:
    check(name, models, truth)


@pytest.mark.parametrize("name", PADDED)
def test_so_it_is_in_padded_steps(
    name: str, models: dict[str, str], truth: Outputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_padded_steps(monkeypatch)
    check(name, models, truth)


def test_so_it_is_where_chains_end_early(
    models: dict[str, str], truth: Outputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.engine.resolve.captures_graphs", lambda *_: False)
    policies = use_stopping_policy(monkeypatch)
    check("draft_model", models, truth)
    asked = Counter(drafted for planned, drafted in policies[-1].asked if planned == 3)
    assert len(asked) == 4, asked


def test_the_statistic_sees_a_wrong_distribution(models: dict[str, str], truth: Outputs) -> None:
    assert p_value(draw("draft_model", models, temperature=0.7), truth) < 1e-6


def check(name: str, models: dict[str, str], truth: Outputs) -> None:
    assert sum(truth.values()) == pytest.approx(1.0)
    assert p_value(draw(name, models), truth) > 0.001


def draw(name: str, models: dict[str, str], temperature: float = 1.0) -> Counter[tuple[int, ...]]:
    """Count the outputs, with requests without a grammar in between."""
    config = CASES[name]
    if config is not None:
        config = {"num_speculative_tokens": 5 if name == "tree" else 3, **named(config, models)}
    llm = LLM(
        models["target"],
        tokenizer=models["words"],
        speculative_config=config,
        num_kv_blocks=600,
        max_num_seqs=100,
    )
    own = SamplingParams(temperature=temperature, max_tokens=MOST_TOKENS, structured=WISH)
    params = [own] * SAMPLES  # each with a seed of the engine's
    params[::20] = [SamplingParams(max_tokens=4, seed=1, ignore_eos=True)] * len(params[::20])
    outputs = llm.generate([{"prompt_token_ids": PROMPT}] * SAMPLES, params)
    assert all(output.outputs[0].finish_reason == "length" for output in outputs[::20])
    del outputs[::20]
    assert all(output.outputs[0].finish_reason == "stop" for output in outputs)
    assert all(output.outputs[0].text in TEXTS for output in outputs)
    if config is not None:
        assert sum(output.metrics.num_accepted_tokens for output in outputs) > SAMPLES / 10
    return Counter(tuple(output.outputs[0].token_ids) for output in outputs)


def named(config: dict[str, Any], models: dict[str, str]) -> dict[str, Any]:
    """The config with the places of its models."""
    if "drafters" in config:
        return {"drafters": [named(member, models) for member in config["drafters"]]}
    model = {"model": models[config["model"]]} if "model" in config else {}
    return {**config, **model}


def p_value(drawn: Counter[tuple[int, ...]], truth: Outputs) -> float:
    """Chi-square over whole outputs; rare ones are counted together."""
    total = drawn.total()
    assert all(truth.get(output, 0.0) > 0 for output in drawn), "what is not allowed came out"
    common = [output for output, share in truth.items() if share * total >= 5]
    columns = [(drawn[output], truth[output] * total) for output in common]
    rest = total - sum(expected for _, expected in columns)
    if rest > 1:
        columns.append((total - sum(seen for seen, _ in columns), rest))
    assert len(columns) > 8
    seen, wanted = zip(*columns, strict=True)
    return float(chisquare(seen, np.array(wanted) * total / sum(wanted)).pvalue)
