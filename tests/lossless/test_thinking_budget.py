"""Greedy outputs with a limit of their thought are those without one, the closing mark aside."""

import re
from dataclasses import replace
from typing import Any

import pytest

from slipstream import LLM, SamplingParams, StructuredOutput
from slipstream.core.structured import Thought
from slipstream.speculative.catalogue import METHODS
from tests import fake_drafters
from tests.grammar_models import PIECES, drafter_of, make_llm
from tests.lossless.test_greedy import make_prompts, remember, tokens
from tests.tokenizers import write_byte_tokenizer

BUDGETS = [0, 1, 3, 8]
GREEDY = SamplingParams(temperature=0, max_tokens=20)
CLOSING = 3


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_byte_tokenizer(tmp_path_factory.mktemp("words"), PIECES))


@pytest.fixture(scope="module")
def plain(tiny_target: str, words: str) -> LLM:
    return make_llm(tiny_target, words, None)


def limited(opening: int, begun: bool, budget: int) -> SamplingParams:
    """Greedy, with this limit."""
    thought = Thought(opening=opening, closing=CLOSING, begun=begun, budget=budget)
    return replace(GREEDY, structured=StructuredOutput(thought=thought))


def worked_out(plain: LLM, begun: bool) -> tuple[list[SamplingParams], list[list[int]]]:
    """Limits of the prompts, and the outputs of plain decoding, computed piece by piece."""
    prompts, params, wanted = make_prompts(len(BUDGETS)), [], []
    free = tokens(plain.generate(prompts, GREEDY))
    for prompt, own, budget in zip(prompts, free, BUDGETS, strict=True):
        # Whatever the model writes first opens its thought.
        thought = own[: budget if begun else budget + 1]
        assert len(own) == 20
        assert CLOSING not in thought
        params.append(limited(own[0], begun, budget))
        closed = [*thought, CLOSING]
        further: list[Any] = [{"prompt_token_ids": [*prompt["prompt_token_ids"], *closed]}]
        wanted.append([*closed, *tokens(plain.generate(further, GREEDY))[0]][:20])
    return params, wanted


@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("drafter", [None, "draft_model", "ngram", "tree", "combination", "wrong"])
def test_a_budget_forces_the_closing_mark_alone(
    begun: bool,
    drafter: str | None,
    tiny_target: str,
    tiny_draft: str,
    tiny_heads: dict[str, str],
    words: str,
    plain: LLM,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params, wanted = worked_out(plain, begun)
    prompts: list[Any] = make_prompts(len(BUDGETS))
    llm = plain
    if drafter is not None:
        monkeypatch.setitem(METHODS, "fake", fake_drafters.METHOD)
        remember(prompts, wanted)
        config = drafter_of({"drafter": drafter, "k": 4}, tiny_target, tiny_draft, tiny_heads)
        llm = make_llm(tiny_target, words, config)
    outputs = llm.generate(prompts, params)
    assert tokens(outputs) == wanted
    if drafter is not None:
        assert sum(output.metrics.num_accepted_tokens for output in outputs) > 0


def test_a_thought_may_end_before_its_limit(plain: LLM) -> None:
    prompts = make_prompts(4)
    free = tokens(plain.generate(prompts, GREEDY))
    params = [limited(own[0], False, 30) for own in free]
    assert tokens(plain.generate(prompts, params)) == free
    # Thoughts that the model does not open have no limit.
    params = [limited(CLOSING - 1, False, 0) for _ in free]
    assert tokens(plain.generate(prompts, params)) == free


@pytest.mark.parametrize("drafter", ["draft_model", "suffix", "tree", "host_combination"])
def test_a_structure_behind_a_thought_is_that_of_plain_decoding(
    drafter: str,
    tiny_target: str,
    tiny_draft: str,
    tiny_heads: dict[str, str],
    words: str,
    plain: LLM,
) -> None:
    pytest.importorskip("llguidance")
    prompts = make_prompts(8)
    params: list[SamplingParams] = []
    for prompt in prompts:
        (free,) = tokens(plain.generate([prompt], replace(GREEDY, max_tokens=1)))
        begun = len(params) % 2 == 0
        thought = Thought(opening=free[0], closing=CLOSING, begun=begun, budget=len(params))
        wish = StructuredOutput(regex="[a-z]{3}[0-9]{2}( name){1,3}", thought=thought)
        params.append(replace(GREEDY, structured=wish, max_tokens=60))
    wanted = plain.generate(prompts, params)
    for place, output in enumerate(wanted):
        ids, (sample,) = output.outputs[0].token_ids, output.outputs
        before = place if place % 2 == 0 else place + 1
        assert ids[before] == CLOSING
        assert re.search("[a-z]{3}[0-9]{2}( name){1,3}$", sample.text)
    config = drafter_of({"drafter": drafter, "k": 4}, tiny_target, tiny_draft, tiny_heads)
    outputs = make_llm(tiny_target, words, config).generate(prompts, params)
    assert tokens(outputs) == tokens(wanted)


@pytest.mark.parametrize(
    ("drafter", "regex", "budget"),
    [("perfect", None, 1), ("perfect", "[a-z]{3}[0-9]{2}", 0), ("tree", "[a-z]{3}[0-9]{2}", 2)],
)
def test_marks_and_thoughts_may_have_end_tokens_that_end_nothing(
    drafter: str,
    regex: str | None,
    budget: int,
    tiny_target: str,
    tiny_draft: str,
    tiny_heads: dict[str, str],
    words: str,
    plain: LLM,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With ignore_eos. What follows a drafted one is masked as though it was another token."""
    monkeypatch.setitem(METHODS, "fake", fake_drafters.METHOD)
    prompts = make_prompts(8)
    free = tokens(plain.generate(prompts, replace(GREEDY, ignore_eos=True)))
    # Without a grammar the thought itself begins with one.
    ends = {CLOSING} if regex else {own[0] for own in free} - {CLOSING}
    thought = Thought(opening=0, closing=CLOSING, begun=True, budget=budget)
    wish = StructuredOutput(regex=regex, thought=thought)
    params = replace(GREEDY, structured=wish, ignore_eos=True)
    ended = {"eos_token_id": sorted(ends)}
    wanted = make_llm(tiny_target, words, None, hf_overrides=ended).generate(prompts, params)
    if regex is None:
        assert all(own[0] in ends and own[1] == CLOSING for own in tokens(wanted))
    remember(prompts, [[*own, *[0] * 8] for own in tokens(wanted)])
    config = {"method": "fake", "model": "perfect", "num_speculative_tokens": 4}
    if drafter == "tree":
        config = drafter_of({"drafter": drafter, "k": 4}, tiny_target, tiny_draft, tiny_heads)
    outputs = make_llm(tiny_target, words, config, hf_overrides=ended).generate(prompts, params)
    assert tokens(outputs) == tokens(wanted)
    assert {it.outputs[0].finish_reason for it in outputs} <= {"stop", "length"}
