"""Random and hostile calls in every format, cut at every place."""

import json
import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest

from slipstream.models.harmony import find_harmony
from slipstream.models.tokenizer import Tokenizer
from slipstream.serve.output.harmony import HarmonyParser
from slipstream.serve.output.parts import Reading
from slipstream.serve.token_texts import TokenTexts
from slipstream.serve.tools.events import AnswerEvent, Arguments, CallBegun, CallEnded, Content
from slipstream.serve.tools.formats import FORMATS
from tests.serve.api.call_texts import SAID, Call, newer_mistral
from tests.serve.api.harmony_models import write_harmony_tokenizer

PIECES = [
    *("<tool_call>", "</tool_call>", "</tool_", "<function=", "</function>", "<parameter=x>"),
    *("</parameter>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<|python_start|>", "<arg_key>"),
    *("</arg_value>", "<|call|>", "<|end|>", "'''", '"""', '\\"', "\\", "\\u00e9", '"', "'", "{"),
    *("}", "[", "]", "(", ")", ",", ":", "=", ";", "<", "\n", " ", "\t", "é", "🎈", "\u2028"),
    *("null", "true", "1e5", "a", "add", '{"name": "add"', "[add("),
]
# Ends of texts that a format has no way to write.
CLOSING = {"qwen3_coder": "</parameter>", "glm45": "</arg_value>"}
CONVERTED = ("qwen3_coder", "glm45", "pythonic")  # whose arguments are always JSON
WHOLE = ("llama3_json", "pythonic")  # whose calls are the whole answer
TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
OPENING = "<|start|>user<|message|>hi<|end|><|start|>assistant"

Reader = Callable[[Sequence[Any]], list[AnswerEvent]]  # pieces of an answer -> joined events


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_harmony_tokenizer(tmp_path_factory.mktemp("harmony") / "tokenizer"))


def text(chance: random.Random) -> str:
    return "".join(chance.choices(PIECES, k=chance.randint(0, 6)))


def value(chance: random.Random, depth: int = 2) -> Any:
    kind = chance.randrange(8 if depth else 6)
    if kind >= 6:
        inner = [value(chance, depth - 1) for _ in range(chance.randint(0, 3))]
        return inner if kind == 6 else {text(chance): it for it in inner}
    return [text(chance), text(chance), chance.randint(-9, 10**20), 0.5, True, None][kind]


def calls(chance: random.Random, format: str) -> list[Call]:
    """Calls of `add` and `get`; a text that the format cannot write is left out."""
    made: list[Call] = []
    for _ in range(chance.randint(1, 3)):
        arguments = {f"key_{place}": value(chance) for place in range(chance.randint(0, 3))}
        texts = [it for it in arguments.values() if isinstance(it, str)]
        if not any(CLOSING.get(format, "\0") in it for it in texts):
            made.append((chance.choice(["add", "get"]), arguments))
    return made


def schemas(made: Sequence[Call]) -> dict[str, dict[str, Any]]:
    """Types that fit all calls."""
    found: dict[str, dict[str, Any]] = {"add": {}, "get": {}}
    for name, arguments in made:
        for key, it in arguments.items():
            kind = TYPES.get(type(it), "array" if isinstance(it, list) else "object")
            found[name].setdefault("properties", {}).setdefault(key, {})["type"] = kind
    return found


def joined(events: Sequence[AnswerEvent]) -> list[AnswerEvent]:
    """Pieces of one text as one."""
    found: list[AnswerEvent] = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, Content | Arguments) and type(last) is type(event):
            found[-1] = type(event)(last.text + event.text)
        else:
            found.append(event)
    return found


def reader(format: str, functions: dict[str, dict[str, Any]], tokenizer: Tokenizer) -> Reader:
    def read(pieces: Sequence[str]) -> list[AnswerEvent]:
        parser = FORMATS[format].parser(functions, ["<|im_end|>"])
        events = [event for piece in pieces for event in parser.feed(piece)]
        return joined([*events, *parser.finish()])

    def read_tokens(pieces: Sequence[Sequence[int]]) -> list[AnswerEvent]:
        tokens = find_harmony(tokenizer)
        assert tokens is not None
        prompt = tokenizer.encode(OPENING, add_special_tokens=False)
        reading = Reading(prompt=prompt, functions=functions)
        parser = HarmonyParser(tokens, TokenTexts(tokenizer), reading)
        events = [event for piece in pieces for event in parser.read(piece).events]
        return joined([*events, *parser.finish()])

    return read_tokens if format == "openai" else read


def written(
    format: str, made: Sequence[Call], tokenizer: Tokenizer, newer: bool = False
) -> Sequence[Any]:
    if format == "mistral" and newer:
        return newer_mistral(made)
    if format != "openai":
        return SAID[format](made)
    tokens: list[int] = []
    for place, (name, arguments) in enumerate(made):
        role = "<|start|>assistant" if place else ""
        header = f"{role}<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        tokens += tokenizer.encode(header, add_special_tokens=False)
        # Without its first character a mark is none.
        parts = json.dumps(arguments, ensure_ascii=False).replace("<|", "<\0|").split("\0")
        tokens += [*tokenizer.encode_parts(parts), *tokenizer.encode("<|call|>")]
    return tokens


def mangled(chance: random.Random, answer: Sequence[Any]) -> Sequence[Any]:
    """Cut short, with a part twice or missing, or with pieces of marks put in."""
    place, end = sorted(chance.choices(range(len(answer) + 1), k=2))
    kind = chance.randrange(4 if isinstance(answer, str) else 3)
    if kind == 3:
        return answer[:place] + text(chance) + answer[place:]  # type: ignore[operator]
    return [answer[:end], answer[:end] + answer[place:], answer[:place] + answer[end:]][kind]  # type: ignore[operator]


@pytest.mark.parametrize("format", [*FORMATS, "openai"])
def test_calls_come_out_as_they_were(format: str, harmony: Tokenizer) -> None:
    chance = random.Random(5)
    for number in range(150):
        made = calls(chance, format)
        # One schema for all calls of a function, so each is called once.
        made = [*dict(made).items()]
        if not made:
            continue
        read = reader(format, schemas(made), harmony)
        answer = written(format, made, harmony, newer=number % 2 == 0)
        events = read([answer])
        names = [event.name for event in events if isinstance(event, CallBegun)]
        told = [json.loads(event.text) for event in events if isinstance(event, Arguments)]
        assert [*zip(names, told, strict=True)] == made
        assert sum(isinstance(event, CallEnded) for event in events) == len(made)
        assert read([answer[place : place + 1] for place in range(len(answer))]) == events


@pytest.mark.parametrize("format", [*FORMATS, "openai"])
def test_no_cut_changes_anything(format: str, harmony: Tokenizer) -> None:
    chance = random.Random(6)
    for number in range(200):
        made = calls(chance, format)
        read = reader(format, schemas(made), harmony)
        answer = written(format, made, harmony, newer=number % 8 < 4)
        if format != "openai" and format not in WHOLE and number % 2:
            answer = f"{text(chance)}{answer}{text(chance)}"
        for _ in range(number % 4):
            answer = mangled(chance, answer)
        events = read([answer])
        assert read([answer[place : place + 1] for place in range(len(answer))]) == events, answer
        if number < 12:
            for place in range(len(answer)):
                assert read([answer[:place], answer[place:]]) == events, (answer, place)
        for arguments, ended in pairwise(events):
            if format in CONVERTED and isinstance(ended, CallEnded):
                assert isinstance(arguments, Arguments)
                assert isinstance(json.loads(arguments.text), dict)
