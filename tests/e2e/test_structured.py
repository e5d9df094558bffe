"""Structured output of the demo: valid, the same with and without speculation, and no one else's
concern."""

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from slipstream import LLM, RequestOutput, SamplingParams, StructuredOutput, UsageError
from slipstream.core.structured import Advance
from slipstream.engine.grammar import NOTHING_LEFT, GrammarGuide
from tests.e2e.test_demo import prompts
from tests.json_schemas import SCHEMAS

pytest.importorskip("llguidance")

GREEDY = SamplingParams(temperature=0, max_tokens=300)
WORD = StructuredOutput(regex="[a-z]{2,5}")
DRAFTERS: dict[str, dict[str, Any]] = {
    "draft_model": {"model": "demo/draft", "num_speculative_tokens": 4},
    "ngram": {"method": "ngram", "num_speculative_tokens": 4},
}


def make(drafter: str | None) -> LLM:
    config = None if drafter is None else DRAFTERS[drafter]
    return LLM("demo", speculative_config=config, dtype="float32", max_num_seqs=32)


@pytest.fixture(scope="module")
def plain() -> LLM:
    return make(None)


@pytest.fixture(scope="module")
def drafted() -> LLM:
    return make("draft_model")


# ---------------------------------------------------------------------- schemas


def test_requests_for_json_get_what_their_schema_says(plain: LLM, drafted: LLM) -> None:
    check_schemas(plain, drafted, len(SCHEMAS))


@pytest.mark.full
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_200_requests_for_json_get_what_their_schema_says(drafter: str, plain: LLM) -> None:
    check_schemas(plain, make(drafter), 200)


def check_schemas(plain: LLM, drafted: LLM, number: int) -> None:
    texts = prompts(10)
    asked = [f"{texts[index % 10][:300]}\n# JSON:\n" for index in range(number)]
    schemas = [SCHEMAS[index % len(SCHEMAS)] for index in range(number)]
    params = [replace(GREEDY, structured=StructuredOutput(json_schema=it)) for it in schemas]
    expected, outputs = (llm.generate(asked, params) for llm in (plain, drafted))
    assert [text_of(output) for output in outputs] == [text_of(output) for output in expected]
    for output, schema in zip(outputs, schemas, strict=True):
        assert output.outputs[0].finish_reason == "stop"
        jsonschema.validate(json.loads(text_of(output)), schema)
    steps = [sum(output.metrics.num_steps for output in run) for run in (expected, outputs)]
    assert steps[1] < 0.7 * steps[0]


def text_of(output: RequestOutput) -> str:
    return output.outputs[0].text


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_json_object_is_one(temperature: float, drafted: LLM) -> None:
    wish = StructuredOutput(json_object=True)
    params = replace(GREEDY, temperature=temperature, structured=wish, seed=3)
    ended = [
        output.outputs[0]
        for output in drafted.generate(["{", "An empty object: ", "json.loads('"], params)
        if output.outputs[0].finish_reason == "stop"
    ]
    assert ended
    assert all(isinstance(json.loads(sample.text), dict) for sample in ended)


def test_samples_of_one_prompt_go_their_own_ways(drafted: LLM) -> None:
    wish = StructuredOutput(choice=["yes", "no", "maybe", "never ever"])
    params = SamplingParams(n=12, temperature=3.0, seed=5, structured=wish, max_tokens=20)
    output = drafted.generate("Is it? ", params)[0]
    texts = {sample.text for sample in output.outputs}
    assert len(texts) > 1
    assert texts <= set(wish.choice or ())
    assert all(sample.finish_reason == "stop" for sample in output.outputs)


# ---------------------------------------------------------------------- other parameters


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_min_tokens_and_ignore_eos_hold_as_far_as_the_grammar_goes(
    ignore_eos: bool, plain: LLM, drafted: LLM
) -> None:
    wish = StructuredOutput(regex="([a-z]{1,3} ){1,9}")
    params = replace(GREEDY, structured=wish, min_tokens=12, ignore_eos=ignore_eos)
    expected, output = (llm.generate("def ", params)[0] for llm in (plain, drafted))
    assert text_of(output) == text_of(expected)
    assert output.outputs[0].finish_reason == "stop"
    groups = text_of(output).split()
    assert len(groups) == 9 if ignore_eos else len(output.outputs[0].token_ids) >= 12
    # No token may follow a complete text.
    short = replace(params, structured=StructuredOutput(choice=["abc"]))
    assert text_of(drafted.generate("def ", short)[0]) == "abc"


def test_a_stop_string_ends_a_text_in_its_middle(plain: LLM, drafted: LLM) -> None:
    wish = StructuredOutput(json_schema=SCHEMAS[0])
    params = replace(GREEDY, structured=wish, stop=['"age"'])
    for llm in (plain, drafted):
        sample = llm.generate("# JSON:\n", params)[0].outputs[0]
        assert (sample.finish_reason, sample.stop_reason) == ("stop", '"age"')
        assert '"name"' in sample.text
        assert '"age"' not in sample.text
    sample = drafted.generate("# JSON:\n", replace(params, stop=(), max_tokens=5))[0].outputs[0]
    assert (sample.finish_reason, len(sample.token_ids)) == ("length", 5)


def test_logprobs_are_of_the_raw_logits(plain: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=2)
    free = plain.generate("def main", params)[0].outputs[0]
    bound = plain.generate("def main", replace(params, structured=WORD))[0].outputs[0]
    assert free.logprobs is not None
    assert bound.logprobs is not None
    assert bound.token_ids != free.token_ids
    first = free.token_ids[0]
    assert bound.logprobs[0][first].logprob == pytest.approx(free.logprobs[0][first].logprob)


def test_a_request_beside_others_changes_nothing_for_them(drafted: LLM) -> None:
    asked = prompts(6)
    params = replace(GREEDY, max_tokens=40)
    alone = drafted.generate(asked, params)
    wishes = [None, WORD, None, StructuredOutput(json_schema=SCHEMAS[3]), None, None]
    mixed = drafted.generate(asked, [replace(params, structured=wish) for wish in wishes])
    for wish, output, expected in zip(wishes, mixed, alone, strict=True):
        if wish is None:
            assert output.outputs[0].token_ids == expected.outputs[0].token_ids
            counts = (output.metrics.num_drafts, output.metrics.num_accepted_tokens)
            assert counts == (expected.metrics.num_drafts, expected.metrics.num_accepted_tokens)


# ---------------------------------------------------------------------- what goes wrong


def test_a_bad_grammar_costs_nobody_anything(drafted: LLM) -> None:
    good = replace(GREEDY, max_tokens=8)
    stream = drafted.stream("def main(", good)
    next(stream)
    bad = replace(good, structured=StructuredOutput(regex="("))
    with pytest.raises(UsageError, match="this regex cannot be used"):
        drafted.generate(["a", "b"], [good, bad])
    with pytest.raises(UsageError, match="this regex cannot be used"):
        drafted.engine.compile(StructuredOutput(regex="("))
    assert list(stream)[-1].outputs[0].finish_reason == "length"
    assert not drafted.engine.has_unfinished


def test_where_nothing_is_left_to_say_a_request_ends_alone(drafted: LLM) -> None:
    """Whatever is sampled then is not allowed."""
    params = replace(GREEDY, max_tokens=12)
    end = drafted.engine.resolved.eos_token_ids[0]
    stuck = replace(params, structured=WORD, allowed_token_ids=[end])
    outputs = drafted.generate(["def main("] * 3, [params, stuck, params])
    sample = outputs[1].outputs[0]
    assert (sample.finish_reason, sample.stop_reason) == ("error", NOTHING_LEFT)
    assert list(sample.token_ids) == []
    assert [outputs[place].outputs[0].finish_reason for place in (0, 2)] == ["length"] * 2
    drafted.engine.scheduler.check_invariants()


def test_a_grammar_that_fails_on_the_way_ends_its_request_alone(
    drafted: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    advance = GrammarGuide.advance

    def failing(self: GrammarGuide, token: int) -> Advance:
        if len(taken := seen.setdefault(id(self), [])) == 2 and len(seen) == 2:
            self.problem = "it failed"
            return Advance.REFUSED
        taken.append(token)
        return advance(self, token)

    seen: dict[int, list[int]] = {}
    monkeypatch.setattr(GrammarGuide, "advance", failing)
    wish = StructuredOutput(regex="[a-z]([a-z] ){6}")
    params = [replace(GREEDY, max_tokens=30, structured=it) for it in (wish, wish, None)]
    outputs = [output.outputs[0] for output in drafted.generate(["x", "y", "z"], params)]
    reasons = [sample.finish_reason for sample in outputs]
    assert reasons.count("error") >= 1
    assert reasons[2] == "length"
    failed = outputs[reasons.index("error")]
    assert failed.stop_reason == "it failed"
    assert len(failed.token_ids) == 2
    assert not drafted.engine.has_unfinished


def test_forced_acceptance_and_grammars_exclude_each_other() -> None:
    synthetic = {
        **DRAFTERS["ngram"],
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": 2.0,
    }
    llm = LLM("demo", speculative_config=synthetic)
    with pytest.raises(UsageError, match="synthetic"):
        llm.generate("a", replace(GREEDY, structured=WORD))


def test_the_package_is_loaded_when_it_is_asked_for() -> None:
    """A machine without it runs everything else."""
    code = (
        "import sys; sys.modules['llguidance'] = None\n"
        "from slipstream import LLM, SamplingParams, StructuredOutput, UsageError\n"
        "llm = LLM('demo')\n"
        "assert llm.generate('a', SamplingParams(max_tokens=2))[0].finished\n"
        "try:\n"
        "    llm.generate('a', SamplingParams(structured=StructuredOutput(regex='a')))\n"
        "except UsageError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "slipstream[structured]" in done.stdout
