"""The grammars of tool calls, token by token."""

import json
import random
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from slipstream.core.errors import UsageError
from slipstream.core.structured import StructuredOutput
from slipstream.engine.grammar import GrammarGuide, Grammars
from slipstream.models.tokenizer import Tokenizer
from slipstream.serve.tools.call_format import ToolFormat
from slipstream.serve.tools.call_rules import MOST_CALLS, require_well_formed
from slipstream.serve.tools.formats import FORMATS
from tests.serve.api.call_texts import SAID, Call
from tests.serve.api.tool_models import write_tool_tokenizer

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTIONS = {"get_weather": CITY, "now": {}}
WEATHER: Call = ("get_weather", {"city": "Rome"})
NOW: Call = ("now", {"x": [1]})
WRONG: Call = ("get_weather", {"city": "Bonn"})
WHOLE = ("llama3_json", "pythonic")  # whose calls are the whole answer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One mark is text, the other a special token."""
    folder = tmp_path_factory.mktemp("tokenizer") / "mistral"
    return Tokenizer(write_tool_tokenizer(folder, "[TOOL_CALLS]", special=True))


@cache
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, tokenizer.vocab_size, [tokenizer.eos_token_id or 0])


def follows(tokenizer: Tokenizer, grammar: str, text: str) -> bool:
    """Whether the whole text is one of the grammar."""
    guide = grammars(tokenizer).guide(StructuredOutput(grammar=grammar), frozenset())
    assert isinstance(guide, GrammarGuide)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    taken = guide.matcher.try_consume_tokens(tokens)
    return taken == len(tokens) and guide.matcher.is_accepting()


def said(format: ToolFormat, *calls: Call) -> str:
    """Calls in the format of a family."""
    return SAID[format.name](calls)


@pytest.mark.parametrize("name", FORMATS)
def test_nothing_but_calls(tokenizer: Tokenizer, name: str) -> None:
    format = FORMATS[name]
    one = format.only_calls(FUNCTIONS, tokenizer, several=False)
    many = format.only_calls(FUNCTIONS, tokenizer, several=True)
    assert follows(tokenizer, one, said(format, WEATHER))
    assert follows(tokenizer, one, said(format, NOW))
    assert not follows(tokenizer, one, said(format, NOW, WEATHER))
    assert follows(tokenizer, many, said(format, NOW, WEATHER, NOW))
    for text in (
        said(format, WRONG),
        said(format, NOW, WRONG),
        "Hello",
        "",
        f"Hello {said(format, NOW)}",
    ):
        assert not follows(tokenizer, many, text)


@pytest.mark.parametrize("name", FORMATS)
def test_the_number_of_calls_is_limited(tokenizer: Tokenizer, name: str) -> None:
    format = FORMATS[name]
    many = format.only_calls(FUNCTIONS, tokenizer, several=True)
    assert follows(tokenizer, many, said(format, *[NOW] * MOST_CALLS))
    assert not follows(tokenizer, many, said(format, *[NOW] * (MOST_CALLS + 1)))


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "glm45"])
def test_marks_that_are_added_tokens_but_not_special(tmp_path: Path, name: str) -> None:
    folder = write_tool_tokenizer(tmp_path / "added", "<tool_call>", special=False)
    content = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    first, tags = content["added_tokens"][0], ("tool_call", "arg_key", "arg_value")
    for id, mark in enumerate((it for tag in tags for it in (f"<{tag}>", f"</{tag}>")), 4096):
        content["added_tokens"].append({**first, "id": id, "content": mark, "special": False})
    (folder / "tokenizer.json").write_text(json.dumps(content), "utf-8")
    tokenizer, format = Tokenizer(folder), FORMATS[name]
    assert tokenizer.encode(said(format, NOW), False)[0] == 4096
    many = format.only_calls(FUNCTIONS, tokenizer, several=True)
    amid = format.calls_in_text(FUNCTIONS, tokenizer)
    for grammar in (many, amid):
        assert follows(tokenizer, grammar, said(format, WEATHER, NOW))
        assert not follows(tokenizer, grammar, said(format, NOW, WRONG))
    assert follows(tokenizer, amid, f"Let me see.\n{said(format, NOW)}")


@pytest.mark.parametrize("name", FORMATS)
def test_calls_amid_any_text(tokenizer: Tokenizer, name: str) -> None:
    format = FORMATS[name]
    grammar = format.calls_in_text(FUNCTIONS, tokenizer)
    for text in ("", "Hello.\nA < b", "so {this} is [no] call", said(format, WEATHER, NOW)):
        assert follows(tokenizer, grammar, text), text
    assert not follows(tokenizer, grammar, said(format, WRONG))
    assert not follows(tokenizer, grammar, said(format, NOW, WRONG))
    if name not in WHOLE:
        assert follows(tokenizer, grammar, f"Let me see.\n{said(format, NOW)}")
        assert not follows(tokenizer, grammar, f"Let me see.\n{said(format, WRONG)}")


def test_definitions_are_found_from_within(tokenizer: Tokenizer) -> None:
    unit = {"type": "object", "properties": {"u": {"$ref": "#/$defs/u"}}, "required": ["u"]}
    functions = {
        "a": {**unit, "$defs": {"u": {"enum": ["C"]}}},
        "b": {**unit, "$defs": {"u": {"enum": ["C"]}}},
    }
    format = FORMATS["hermes"]
    grammar = format.only_calls(functions, tokenizer, several=False)
    assert follows(tokenizer, grammar, said(format, ("b", {"u": "C"})))
    assert not follows(tokenizer, grammar, said(format, ("b", {"u": "F"})))
    functions["b"]["$defs"] = {"u": {"enum": ["F"]}}
    with pytest.raises(ValueError, match="defin"):
        format.only_calls(functions, tokenizer, several=False)


ANY_ORDER = {
    "type": "object",
    "properties": {
        "size": {"$ref": "#/$defs/size"},
        "note": {"type": ["string", "null"]},
        "zip": {"type": "string", "pattern": "^[0-9/]{3}$"},
        "word": {"type": "string", "minLength": 2, "maxLength": 5},
        "unit": {"anyOf": [{"enum": ["C", "F"]}, {"type": "null"}]},
    },
    "required": ["size"],
    "$defs": {"size": {"type": "integer", "maximum": 9}},
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("more", "legal"),
    [
        ({}, True),
        ({"note": "a\n\nb", "zip": "1/2", "word": "naïve", "unit": "F"}, True),
        ({"note": None, "unit": None}, True),
        ({"size": 10}, False),
        ({"zip": "12"}, False),
        ({"zip": "1234"}, False),
        ({"word": "a"}, False),
        ({"word": "abcdef"}, False),
        ({"unit": "K"}, False),
    ],
)
def test_arguments_follow_the_schema(
    tokenizer: Tokenizer, name: str, more: dict[str, Any], legal: bool
) -> None:
    format, functions = FORMATS[name], {"f": ANY_ORDER}
    text = said(format, ("f", {"size": 5, **more}))
    for grammar in (
        format.only_calls(functions, tokenizer, several=False),
        format.calls_in_text(functions, tokenizer),
    ):
        assert follows(tokenizer, grammar, text) is legal


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("format", "legal", "wrong"),
    [
        ("date", "2024-02-29", "2024-04-31"),
        ("time", "23:59:00.5Z", "24:00:00Z"),
        ("date-time", "2024-12-31T00:00:00+01:00", "2024-12-31 00:00:00Z"),
        ("uuid", "0123abcd-0123-4567-89ab-0123456789ab", "0123abcd-0123-4567-89ab"),
    ],
)
def test_formats_of_texts(
    tokenizer: Tokenizer, name: str, format: str, legal: str, wrong: str
) -> None:
    functions = {"f": {"properties": {"at": {"type": "string", "format": format}}}}
    grammar = FORMATS[name].only_calls(functions, tokenizer, several=False)
    assert follows(tokenizer, grammar, said(FORMATS[name], ("f", {"at": legal})))
    assert not follows(tokenizer, grammar, said(FORMATS[name], ("f", {"at": wrong})))


@pytest.mark.parametrize("name", FORMATS)
def test_an_argument_may_be_one_of_many(tokenizer: Tokenizer, name: str) -> None:
    many = {"properties": {"a": {"enum": [f"text {number}" for number in range(2500)]}}}
    grammar = FORMATS[name].only_calls({"f": many}, tokenizer, several=False)
    assert follows(tokenizer, grammar, said(FORMATS[name], ("f", {"a": "text 77"})))
    assert not follows(tokenizer, grammar, said(FORMATS[name], ("f", {"a": "text 2500"})))


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45"])
@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"properties": {"at": {"type": "string", "format": "email"}}}, "'at' has the format"),
        ({"properties": {"at": {"allOf": [{"type": "string"}, {}]}}}, "'at' has allOf"),
        ({"properties": {"at": {"enum": ["a", "</parameter></arg_value>"]}}}, "has </"),
        ({"minProperties": 1}, "schema has minProperties"),
        ({"additionalProperties": {"type": "integer"}}, "has additionalProperties"),
    ],
)
def test_what_plain_text_cannot_follow(
    tokenizer: Tokenizer, name: str, schema: dict[str, Any], named: str
) -> None:
    with pytest.raises(UsageError, match="the tool 'f'") as raised:
        FORMATS[name].only_calls({"f": schema}, tokenizer, several=False)
    assert named in str(raised.value)


WORDS = [
    "type",
    "properties",
    "required",
    "additionalProperties",
    "enum",
    "const",
    "anyOf",
    "oneOf",
]
WORDS += [
    "allOf",
    "$ref",
    "$defs",
    "pattern",
    "minLength",
    "maxLength",
    "format",
    "items",
    "a",
    "b",
]
SCALARS = [
    None,
    True,
    False,
    5,
    -1,
    0.5,
    "string",
    "integer",
    "object",
    "null",
    "#/$defs/a",
    "[",
    "",
]


def random_schema(chance: random.Random, depth: int) -> Any:
    kind = chance.randrange(10)
    if depth and kind < 5:
        words = chance.choices(WORDS, k=chance.randint(0, 4))
        return {word: random_schema(chance, depth - 1) for word in words}
    if depth and kind < 7:
        return [random_schema(chance, depth - 1) for _ in range(chance.randint(0, 3))]
    return chance.choice(SCALARS)


def test_no_schema_is_too_strange(tokenizer: Tokenizer) -> None:
    chance, num_legal = random.Random(2), 0
    for _ in range(1500):
        schema = {"properties": {"a": random_schema(chance, 3)}, "$defs": {"a": {"enum": ["x"]}}}
        more = random_schema(chance, 3)
        schema |= more if isinstance(more, dict) else {}
        try:
            require_well_formed("f", schema)
        except UsageError:
            continue
        for format in FORMATS.values():
            with suppress(UsageError):
                format.only_calls({"f": schema}, tokenizer, several=True)
                num_legal += 1
    assert num_legal > 500


def test_pythonic_calls_need_names_for_their_arguments(tokenizer: Tokenizer) -> None:
    properties = {"a": {"type": "boolean"}, "b": {"type": "integer"}, "c": {}}
    format, functions = FORMATS["pythonic"], {"f": {"properties": properties}}
    grammar = format.only_calls(functions, tokenizer, several=False)
    for arguments in ("", "a=True", "b=1, c=[]", "a=False, c=1", "c=null"):
        assert follows(tokenizer, grammar, f"[f({arguments})]"), arguments
    for arguments in ("a=1", "b=1, a=True", "b=1,", ", b=1", "b=1 c=1"):
        assert not follows(tokenizer, grammar, f"[f({arguments})]"), arguments
    with pytest.raises(UsageError, match="'a b' has an invalid name"):
        format.only_calls({"f": {"properties": {"a b": {}}}}, tokenizer, several=False)


def test_the_newer_calls_of_mistral(tmp_path: Path) -> None:
    folder = write_tool_tokenizer(tmp_path / "mistral", "[TOOL_CALLS]", special=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (folder / name).read_text("utf-8")
        (folder / name).write_text(text.replace("<|endoftext|>", "[ARGS]"), "utf-8")
    newer, format = Tokenizer(folder), FORMATS["mistral"]
    one = format.only_calls(FUNCTIONS, newer, several=False)
    many = format.only_calls(FUNCTIONS, newer, several=True)
    amid = format.calls_in_text(FUNCTIONS, newer)
    rome, bonn = (f'[TOOL_CALLS]get_weather[ARGS]{{"city": "{it}"}}' for it in ("Rome", "Bonn"))
    now = '[TOOL_CALLS]now[ARGS]{"x": [1]}'
    assert follows(newer, one, rome)
    assert not follows(newer, one, rome + now)
    assert follows(newer, many, now + rome)
    assert follows(newer, many, now * MOST_CALLS)
    assert not follows(newer, many, now * (MOST_CALLS + 1))
    assert follows(newer, amid, f"So. {now}{rome}")
    assert follows(newer, amid, "So.")
    for grammar in (many, amid):
        assert not follows(newer, grammar, bonn)
        assert not follows(newer, grammar, now + bonn)


def test_formats_are_found_from_templates(tokenizer: Tokenizer, tmp_path: Path) -> None:
    from slipstream.models.chat_template import ChatTemplate
    from slipstream.serve.tools.formats import find_format

    assert find_format(ChatTemplate(tokenizer), tokenizer) is FORMATS["mistral"]
    demo = write_tool_tokenizer(tmp_path / "demo", "<tool_call>", special=False)
    plain = Tokenizer(demo)
    assert find_format(ChatTemplate(plain), plain) is FORMATS["hermes"]
    assert find_format(ChatTemplate(plain, "{{ messages }}"), plain) is None
    for name, text in (
        ("qwen3_coder", "<tool_call><function=f><parameter=a>"),
        ("pythonic", "[func_name1(params_name1=params_value1)]"),
        ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>"),
    ):
        assert find_format(ChatTemplate(plain, text), plain) is FORMATS[name]
    llama = Tokenizer(write_tool_tokenizer(tmp_path / "llama", "<|python_tag|>", special=True))
    assert find_format(ChatTemplate(llama), llama) is FORMATS["llama3_json"]
