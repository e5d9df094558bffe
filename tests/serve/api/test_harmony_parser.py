"""Answers in the harmony format, cut anywhere, and malformed ones."""

import random
from dataclasses import replace

import pytest

from slipstream.models.harmony import find_harmony
from slipstream.models.tokenizer import Tokenizer
from slipstream.serve.output.harmony import HarmonyParser
from slipstream.serve.output.parts import OutputPart, Reading
from slipstream.serve.token_texts import TokenTexts
from slipstream.serve.tools.events import AnswerEvent, Arguments, CallBegun, CallEnded, Content
from slipstream.serve.updates import Delta
from tests.serve.api.harmony_models import MARKS, write_harmony_tokenizer

THINK = "<|channel|>analysis<|message|>"
SAY = "<|channel|>final<|message|>"
TELL = "<|channel|>commentary<|message|>"
NEXT = "<|end|><|start|>assistant"
CALL = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>"
OPENING = "<|start|>user<|message|>hi<|end|><|start|>assistant"
TOOLS = Reading(functions=("now", "get_weather"))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("harmony") / "tokenizer"
    tokenizer = Tokenizer(write_harmony_tokenizer(folder))
    assert {id: tokenizer.id_to_token(id) for id in MARKS} == MARKS
    assert tokenizer.special_token_ids == set(MARKS)
    return tokenizer


def make(tokenizer: Tokenizer, reading: Reading, opening: str = OPENING) -> HarmonyParser:
    tokens = find_harmony(tokenizer)
    assert tokens is not None
    prompt = tokenizer.encode(opening, add_special_tokens=False)
    return HarmonyParser(tokens, TokenTexts(tokenizer), replace(reading, prompt=prompt))


def told(events: list[AnswerEvent]) -> tuple[str, str, list[str]]:
    """Reasoning, content, and calls; one that was cut off ends with "..."."""
    reasoning, content, calls = "", "", []
    for event in events:
        if isinstance(event, CallBegun):
            calls.append(f"{event.name}...")
        elif isinstance(event, Arguments):
            calls[-1] = calls[-1].removesuffix("...") + event.text + "..."
        elif isinstance(event, CallEnded):
            calls[-1] = calls[-1].removesuffix("...")
        elif isinstance(event, Content):
            content += event.text
        else:
            reasoning += event.text
    return reasoning, content, calls


def read(
    tokenizer: Tokenizer, text: str, reading: Reading = TOOLS, opening: str = OPENING, cut: int = 0
) -> tuple[str, str, list[str]]:
    """The result of parsing an answer that is split at random."""
    parser, chance = make(tokenizer, reading, opening), random.Random(cut)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    events: list[AnswerEvent] = []
    while tokens:
        size = chance.randint(1, 4) if cut else len(tokens)
        events += parser.read(tokens[:size]).events
        del tokens[:size]
    return told([*events, *parser.finish()])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{THINK}Hm, é🎈.{NEXT}{SAY}Hello!<|return|>", ("Hm, é🎈.", "Hello!", [])),
        (f"{SAY}Hello!", ("", "Hello!", [])),
        (
            f"{THINK}a{NEXT}{TELL}Let me see.{NEXT}{THINK}b{NEXT}{CALL}" + '{"x": 1}<|call|>',
            ("a\nb", "Let me see.", ['now{"x": 1}']),
        ),
        # The recipient stands after the role; no type; no arguments; several calls.
        (" to=functions.now<|channel|>commentary<|message|>{}<|call|>", ("", "", ["now{}"])),
        (f"{CALL}<|call|>", ("", "", ["now{}"])),
        (
            f"{CALL}{{}}{NEXT} to=functions.other<|channel|>commentary json<|message|>[]<|call|>",
            ("", "", ["now{}", "other[]"]),
        ),
        ("<|channel|>commentary to=now<|message|>{}<|call|>", ("", "", ["now{}"])),
        # Spellings that models produce now and then.
        ("<|channel|>commentary to= functions.now<|message|>{}<|call|>", ("", "", ["now{}"])),
        (" to= functions.now<|channel|>commentary<|message|>{}<|call|>", ("", "", ["now{}"])),
        ("<|channel|>commentary to= <|constrain|>json<|message|>{}<|call|>", ("", "{}", [])),
        (f"<|channel|>Analysis<|message|>a{NEXT}{SAY}b", ("a", "b", [])),
        # What was cut off.
        (f"{THINK}Hm", ("Hm", "", [])),
        (f"{CALL}" + '{"x', ("", "", ['now{"x...'])),
        ("<|channel|>ana", ("", "", [])),
        (" to=functions.n", ("", "", [])),
        # Recipients that are neither the user nor functions.
        ("<|channel|>analysis to=python code<|message|>1+1<|call|>", ("1+1", "", [])),
        ("<|channel|>commentary to=browser.open<|message|>x<|call|>", ("x", "", [])),
        ("<|channel|>commentary to=functions.a/b<|message|>x<|call|>", ("x", "", [])),
        (f"{THINK}a<|end|><|start|>user<|message|>b{NEXT}{SAY}c", ("a\nb", "c", [])),
        # Marks that are missing, unknown or too many.
        ("Hello there", ("", "Hello there", [])),
        ("<|message|>Hello", ("", "Hello", [])),
        ("<|channel|>finale<|message|>Hello", ("", "Hello", [])),
        (f"{THINK}a{SAY}b<|start|>{SAY}c", ("a", "b\nc", [])),
        (f"{THINK}a<|end|>{SAY}b<|message|>c<|constrain|>d<|end|>", ("a", "bcd", [])),
        (f"{THINK}a<|end|>b", ("a", "b", [])),
        (f"{THINK}a<|end|><|end|><|return|><|return|>{SAY}b", ("a", "b", [])),
        (f"{THINK}{NEXT}{SAY}<|return|>", ("", "", [])),
        (f"<|channel|>{'x' * 300}", ("", "x" * 300, [])),
    ],
)
def test_answers(tokenizer: Tokenizer, text: str, expected: tuple[str, str, list[str]]) -> None:
    for cut in range(4):
        assert read(tokenizer, text, cut=cut) == expected


def test_marks_spelled_by_other_tokens_are_text(tokenizer: Tokenizer) -> None:
    parser = make(tokenizer, TOOLS)
    spelled = "<|end|><|start|>assistant<|channel|>final<|message|>x"
    letters = [token for letter in spelled for token in tokenizer.encode(letter)]
    assert not set(MARKS) & set(letters)
    events = [*parser.read(tokenizer.encode(THINK)).events, *parser.read(letters).events]
    assert told(events) == (spelled, "", [])


def test_no_mark_is_ever_shown(tokenizer: Tokenizer) -> None:
    chance = random.Random(4)
    words = [*MARKS, *(tokenizer.encode(it)[0] for it in ("analysis", "final", " to=", "x", "{"))]
    for _ in range(300):
        tokens = chance.choices(words, k=30)
        for reading in (TOOLS, Reading(skip_special=False)):
            parser = make(tokenizer, reading)
            piece = parser.read(tokens)
            reasoning, content, calls = told([*piece.events, *parser.finish()])
            assert "<|" not in reasoning + content + "".join(calls)
            assert len(piece.parts or ()) == len(tokens)


def test_without_tools_there_are_no_calls(tokenizer: Tokenizer) -> None:
    assert read(tokenizer, f"{CALL}{{}}<|call|>", Reading()) == ("{}", "", [])


def test_the_prompt_may_have_begun_the_answer(tokenizer: Tokenizer) -> None:
    cases: list[tuple[str, str, tuple[str, str, list[str]]]] = [
        (f"{OPENING}{SAY}Hel", "lo", ("", "lo", [])),
        (f"{OPENING}{THINK}", f"a{NEXT}{SAY}b", ("a", "b", [])),
        (f"{OPENING}{SAY}x<|end|>", f"<|start|>assistant{SAY}b", ("", "b", [])),
        ("no marks", f"{THINK}a{NEXT}{SAY}b", ("a", "b", [])),
    ]
    for opening, text, expected in cases:
        assert read(tokenizer, text, opening=opening, cut=2) == expected
        assert not make(tokenizer, TOOLS, opening).begins_anew
    assert make(tokenizer, TOOLS).begins_anew


def test_each_token_has_a_part(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(f"{THINK}a b{NEXT}{SAY}c{NEXT}{CALL}{{}}<|call|>")
    parts = make(tokenizer, TOOLS).read(tokens).parts
    assert parts is not None
    seen = [(part, tokenizer.decode([token])) for token, part in zip(tokens, parts, strict=True)]
    assert [text for part, text in seen if part is OutputPart.REASONING] == ["a", " b"]
    assert [text for part, text in seen if part is OutputPart.CONTENT] == ["c"]
    assert "".join(text for part, text in seen if part is OutputPart.CALL) == "{}"


def test_stop_strings_end_the_content_alone(tokenizer: Tokenizer) -> None:
    text = f"{THINK}a STOP b{NEXT}{SAY}one ST two STOP three<|return|>"
    tokens = tokenizer.encode(text)
    for include in (False, True):
        parser = make(tokenizer, Reading(stop=["STOP"], include_stop=include))
        events: list[AnswerEvent] = []
        parts = 0
        for token in tokens:
            piece = parser.read([token])
            events += piece.events
            parts += len(piece.parts or ())
        reasoning, content, _ = told([*events, *parser.finish()])
        assert (reasoning, content) == ("a STOP b", "one ST two STOP" if include else "one ST two ")
        assert piece.stop == "STOP"
        assert parts < len(tokens)
    late = make(tokenizer, Reading(stop=["STOP"], min_tokens=100))
    assert told([*late.read(tokens).events]) == ("a STOP b", "one ST two STOP three", [])


def test_a_held_back_beginning_of_a_stop_string_comes_out(tokenizer: Tokenizer) -> None:
    reading = Reading(stop=["STOP"])
    assert read(tokenizer, f"{SAY}one ST", reading) == ("", "one ST", [])
    assert read(tokenizer, f"{SAY}one ST<|end|>", reading) == ("", "one ST", [])


def test_a_stop_token_of_the_request_is_no_text(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(f"{SAY}one two")
    delta = Delta(0, "", tokens, None, [], "stop", tokens[-1])
    piece = make(tokenizer, Reading()).feed(delta)
    assert told([*piece.events]) == ("", "one", [])
    assert len(piece.parts or ()) == len(tokens)
    assert told([*make(tokenizer, Reading(include_stop=True)).feed(delta).events])[1] == "one two"


def test_a_call_ends_with_its_output_unless_that_was_cut_short(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(f"{CALL}{{}}<|call|>")
    ended = Delta(0, "", tokens, None, [], "stop", tokens[-1])
    for delta, call in (
        (ended, "now{}"),
        (replace(ended, token_ids=tokens[:-1], stop_reason=None), "now{}"),  # as a grammar says
        (replace(ended, token_ids=tokens[:-1], finish_reason="length"), "now{}..."),
    ):
        assert told([*make(tokenizer, TOOLS).feed(delta).events])[2] == [call]
