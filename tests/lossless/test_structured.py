"""Greedy outputs that follow a grammar are, token for token, those of plain decoding under it."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from slipstream import LLM, RequestOutput, SamplingParams, StructuredOutput
from slipstream.speculative.catalogue import METHODS
from tests import fake_drafters
from tests.grammar_models import PIECES, drafter_of, make_llm
from tests.lossless.test_greedy import WAYS, make_prompts, remember
from tests.lossless.test_padded import check_empty
from tests.padded_steps import use_steps
from tests.pairwise import Case
from tests.tokenizers import write_byte_tokenizer

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "colour": {"enum": ["red", "green", "blue"]},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-c]{1,3}$"}},
        "home": {
            "type": "object",
            "properties": {"number": {"type": "integer", "maximum": 99, "minimum": 0}},
            "required": ["number"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "colour", "tags", "home"],
    "additionalProperties": False,
}
PERSON["properties"]["tags"]["maxItems"] = 2  # type: ignore[index]
DIGITS = "[0-9]{2,4}(-[ab]{1,3}){1,2}"
CHOICE = ["true", "truest", "tab", "name: ab"]
WISHES: list[StructuredOutput | None] = [
    StructuredOutput(json_schema=PERSON),
    None,
    StructuredOutput(regex=DIGITS),
    StructuredOutput(choice=CHOICE),
    StructuredOutput(json_schema=json.dumps(PERSON)),
    StructuredOutput(grammar='start: "<" (/[a-c]/ ",")+ ">"'),
    None,
    StructuredOutput(json_schema={"type": "array", "items": {"enum": [1, True]}, "minItems": 2}),
]
AXES: dict[str, list[Any]] = {
    "drafter": [
        *("draft_model", "subset", "pard", "medusa", "ngram", "suffix", "custom", "wrong"),
        *("eagle", "eagle3", "p-eagle", "dflash", "assistant", "mtp"),
        *("tree", "combination", "host_combination", "uneven_combination"),
    ],
    "k": [1, 4],
    "batch": [1, 8],
    "rows": [512, 24],
    "blocks": [400, 40],  # 40: requests are preempted
    "prefix": [False, True],
    "penalties": [False, True],
    "steps": ["exact", "padded"],
}
MAX_TOKENS = 150


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_byte_tokenizer(tmp_path_factory.mktemp("words"), PIECES))


@pytest.fixture(scope="module")
def plain(tiny_target: str, words: str) -> LLM:
    return make_llm(tiny_target, words, None)


ORDINARY = [name for name in AXES["drafter"] if name in (*WAYS, "subset", "wrong", "tree")]


@pytest.mark.matrix(AXES, ordinary={"drafter": ORDINARY})
def test_greedy_output_is_that_of_plain_decoding(
    case: Case,
    tiny_target: str,
    tiny_draft: str,
    tiny_heads: dict[str, str],
    words: str,
    plain: LLM,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts, params = make_prompts(case["batch"]), greedy(case)
    expected = plain_outputs(plain, case["batch"], case["penalties"])
    use_steps(case["steps"], monkeypatch)
    monkeypatch.setitem(METHODS, "fake", fake_drafters.METHOD)
    remember(prompts, [list(output.outputs[0].token_ids) for output in expected])
    config = drafter_of(case, tiny_target, tiny_draft, tiny_heads)
    llm = make_llm(tiny_target, words, config, case)
    if case["prefix"]:
        llm.generate(prompts, params)
    outputs = llm.generate(prompts, params)
    assert facts(outputs) == facts(expected)
    assert sum(output.metrics.num_accepted_tokens for output in outputs) > 0
    steps = [sum(output.metrics.num_steps for output in runs) for runs in (outputs, expected)]
    assert steps[0] < steps[1]
    if case["blocks"] == 40 and case["batch"] == 8:
        assert sum(output.metrics.num_preemptions for output in outputs) > 0
    check_empty(llm)


OUTPUTS: dict[tuple[int, bool], list[RequestOutput]] = {}


def plain_outputs(plain: LLM, batch: int, penalties: bool) -> list[RequestOutput]:
    """The outputs of plain decoding, computed once for each case."""
    if (batch, penalties) not in OUTPUTS:
        params = greedy({"batch": batch, "penalties": penalties})
        outputs = plain.generate(make_prompts(batch), params)
        check_followed(outputs, params)
        OUTPUTS[batch, penalties] = outputs
    return OUTPUTS[batch, penalties]


def greedy(case: Case) -> list[SamplingParams]:
    common: dict[str, Any] = {"temperature": 0, "max_tokens": MAX_TOKENS}
    if case["penalties"]:
        common |= {"repetition_penalty": 1.3, "presence_penalty": 0.4}
    params = [SamplingParams(**common, structured=wish) for wish in WISHES[: case["batch"]]]
    return [
        own if own.structured else replace(own, ignore_eos=True, max_tokens=30) for own in params
    ]


def facts(outputs: Sequence[RequestOutput]) -> list[Any]:
    return [
        (list(it.token_ids), it.text, it.finish_reason, it.stop_reason)
        for output in outputs
        for it in output.outputs
    ]


def check_followed(outputs: Sequence[RequestOutput], params: Sequence[SamplingParams]) -> None:
    """Every output that ended by itself satisfies its grammar; most do end."""
    ended = 0
    for output, own in zip(outputs, params, strict=True):
        for sample in output.outputs:
            assert sample.finish_reason in ("stop", "length")
            if own.structured is not None and sample.finish_reason == "stop":
                check_text(sample.text, own.structured)
                ended += 1
    assert ended >= len(outputs) // 2


def check_text(text: str, wish: StructuredOutput) -> None:
    if wish.json_schema is not None:
        jsonschema.validate(json.loads(text), json.loads(wish.text))
    elif wish.choice is not None:
        assert text in wish.choice
    elif wish.regex is not None:
        assert re.fullmatch(wish.regex, text)
    else:
        assert re.fullmatch("<([a-c],)+>", text)
