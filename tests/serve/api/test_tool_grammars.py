"""The grammars of tool calls, token by token."""

from pathlib import Path

import pytest

from slipstream.core.structured import StructuredOutput
from slipstream.engine.grammar import Grammars
from slipstream.models.tokenizer import Tokenizer
from slipstream.serve.tools.call_format import ToolFormat
from slipstream.serve.tools.formats import FORMATS
from tests.serve.api.tool_models import write_tool_tokenizer

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTIONS = {"get_weather": CITY, "now": {}}
WEATHER = '{"name": "get_weather", "ARGS": {"city": "Rome"}}'
NOW = '{"name": "now", "ARGS": {"x": [1]}}'
WRONG = '{"name": "get_weather", "ARGS": {"city": "Bonn"}}'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One mark is text, the other a special token."""
    folder = tmp_path_factory.mktemp("tokenizer") / "mistral"
    return Tokenizer(write_tool_tokenizer(folder, "[TOOL_CALLS]", special=True))


def follows(tokenizer: Tokenizer, grammar: str, text: str) -> bool:
    """Whether the whole text is one of the grammar."""
    grammars = Grammars(tokenizer, tokenizer.vocab_size, [tokenizer.eos_token_id or 0])
    guide = grammars.guide(StructuredOutput(grammar=grammar), frozenset())
    tokens = tokenizer.encode(text, add_special_tokens=False)
    taken = guide.matcher.try_consume_tokens(tokens)
    return taken == len(tokens) and guide.matcher.is_accepting()


def said(format: ToolFormat, *calls: str) -> str:
    """Calls in the format of a family."""
    key = "parameters" if format.name == "llama3_json" else "arguments"
    own = [call.replace("ARGS", key) for call in calls]
    if format.name == "hermes":
        return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in own)
    if format.name == "mistral":
        return f"[TOOL_CALLS][{', '.join(own)}]"
    return "; ".join(own)


@pytest.mark.parametrize("name", FORMATS)
def test_nothing_but_calls(tokenizer: Tokenizer, name: str) -> None:
    format = FORMATS[name]
    one = format.only_calls(FUNCTIONS, tokenizer, several=False)
    many = format.only_calls(FUNCTIONS, tokenizer, several=True)
    assert follows(tokenizer, one, said(format, WEATHER))
    assert follows(tokenizer, one, said(format, NOW))
    assert not follows(tokenizer, one, said(format, NOW, WEATHER))
    assert follows(tokenizer, many, said(format, NOW, WEATHER, NOW))
    for text in (said(format, WRONG), said(format, NOW, WRONG), "Hello", "", f"Hello {NOW}"):
        assert not follows(tokenizer, many, text)


@pytest.mark.parametrize("name", FORMATS)
def test_calls_amid_any_text(tokenizer: Tokenizer, name: str) -> None:
    format = FORMATS[name]
    grammar = format.calls_amid_text(FUNCTIONS, tokenizer)
    for text in ("", "Hello.\nA < b", "so {this} is [no] call", said(format, WEATHER, NOW)):
        assert follows(tokenizer, grammar, text), text
    assert not follows(tokenizer, grammar, said(format, WRONG))
    assert not follows(tokenizer, grammar, said(format, NOW, WRONG))
    if name != "llama3_json":  # whose calls are the whole answer
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
    assert follows(tokenizer, grammar, said(format, '{"name": "b", "ARGS": {"u": "C"}}'))
    assert not follows(tokenizer, grammar, said(format, '{"name": "b", "ARGS": {"u": "F"}}'))
    functions["b"]["$defs"] = {"u": {"enum": ["F"]}}
    with pytest.raises(ValueError, match="defin"):
        format.only_calls(functions, tokenizer, several=False)


def test_formats_are_found_from_templates(tokenizer: Tokenizer, tmp_path: Path) -> None:
    from slipstream.models.chat_template import ChatTemplate
    from slipstream.serve.tools.formats import find_format

    assert find_format(ChatTemplate(tokenizer), tokenizer) is FORMATS["mistral"]
    demo = write_tool_tokenizer(tmp_path / "demo", "<tool_call>", special=False)
    plain = Tokenizer(demo)
    assert find_format(ChatTemplate(plain), plain) is FORMATS["hermes"]
    assert find_format(ChatTemplate(plain, "{{ messages }}"), plain) is None
    assert find_format(ChatTemplate(plain, "<tool_call><function=f>"), plain) is None
    llama = Tokenizer(write_tool_tokenizer(tmp_path / "llama", "<|python_tag|>", special=True))
    assert find_format(ChatTemplate(llama), llama) is FORMATS["llama3_json"]
