"""Tool calls in the formats of the model families, cut into pieces in every way."""

import json
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.serve.tools.events import (
    Arguments,
    CallBegun,
    CallEnded,
    Content,
    ToolEvent,
    ToolParser,
)
from slipstream.serve.tools.hermes import HermesParser
from slipstream.serve.tools.llama3 import Llama3Parser
from slipstream.serve.tools.mistral import MistralParser

Read = tuple[str, list[tuple[str, str, bool]]]  # content; name, arguments and whether whole

HERMES = ["<|im_end|>"]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "}"]}}\n</tool_call>'
ADDED = ("add", '{"a": 1, "b": [2, "}"]}', True)


def hermes() -> ToolParser:
    return HermesParser(["<|im_end|>"])


def llama3() -> ToolParser:
    return Llama3Parser(["add", "get"])


def mistral() -> ToolParser:
    return MistralParser(["</s>"])


def read(parser: ToolParser, pieces: Sequence[str]) -> Read:
    events: list[ToolEvent] = []
    for piece in pieces:
        events.extend(parser.feed(piece))
    events.extend(parser.finish())
    content, calls = "", []
    for event in events:
        if isinstance(event, Content):
            content += event.text
        elif isinstance(event, CallBegun):
            calls.append((event.name, "", False))
        else:
            name, arguments, _ = calls[-1]
            more = event.text if isinstance(event, Arguments) else ""
            calls[-1] = (name, arguments + more, isinstance(event, CallEnded))
    return content, calls


CASES: list[tuple[Callable[[], ToolParser], str, Read]] = [
    (hermes, "Hello.\n", ("Hello.\n", [])),
    (hermes, CALL, ("", [ADDED])),
    (hermes, f"Let me see.\n\n{CALL}\n{CALL}\n", ("Let me see.", [ADDED, ADDED])),
    (hermes, f"{CALL} Done.<|im_end|>", (" Done.", [ADDED])),
    (hermes, "a < b <tool", ("a < b <tool", [])),
    (hermes, "<tool_call>\nno json</tool_call>", ("<tool_call>\nno json</tool_call>", [])),
    (hermes, f"<tool_call>[1]{CALL}", ("<tool_call>[1]", [ADDED])),
    (hermes, '<tool_call>{"name": "f"}</tool_call>', ("", [("f", "{}", True)])),
    (
        hermes,
        '<tool_call>{"arguments": {"x": "\\"}"}, "name": "f"}</tool_call>',
        ("", [("f", '{"x": "\\"}"}', True)]),
    ),
    (
        hermes,
        '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>',
        ("", [("f", '{"x": 1}', True)]),
    ),
    (
        hermes,
        '<tool_call>{"name": "f", "arguments": {"x": 1',
        ("", [("f", '{"x": 1', False)]),
    ),
    (hermes, '<tool_call>{"na', ('<tool_call>{"na', [])),
    (hermes, '<tool_call>{"name": 5}</tool_call>', ('<tool_call>{"name": 5}</tool_call>', [])),
    (hermes, '<tool_call>{"n\\"": 5, "name": "f"}</tool_call>', ("", [("f", "{}", True)])),
    (llama3, "Hello {world}", ("Hello {world}", [])),
    (llama3, '{"name": "add", "parameters": {"a": 1}}', ("", [("add", '{"a": 1}', True)])),
    (
        llama3,
        ' <|python_tag|>{"name": "add", "parameters": {}}; {"name": "get", "parameters": {"k": 2}}',
        ("", [("add", "{}", True), ("get", '{"k": 2}', True)]),
    ),
    (
        llama3,
        '{"name": "other", "parameters": {}}',
        ('{"name": "other", "parameters": {}}', []),
    ),
    (llama3, '{"a": 1} is an object', ('{"a": 1} is an object', [])),
    (llama3, '{"name": "add", "para', ("", [("add", "", False)])),
    (llama3, '{"na', ('{"na', [])),
    (llama3, "  ", ("  ", [])),
    (llama3, '{"name": "add", "parameters": {}}\nSo.', ("\nSo.", [("add", "{}", True)])),
    (
        mistral,
        '[TOOL_CALLS][{"name": "add", "arguments": {"a": [1]}}, '
        '{"name": "f", "arguments": {}}]</s>',
        ("", [("add", '{"a": [1]}', True), ("f", "{}", True)]),
    ),
    (mistral, '[TOOL_CALLS] add[ARGS]{"a": 1}', ("", [("add", '{"a": 1}', True)])),
    (
        mistral,
        '[TOOL_CALLS]add[CALL_ID]abc123xyz[ARGS]{"a": 1}[TOOL_CALLS]f{"b": "}"}',
        ("", [("add", '{"a": 1}', True), ("f", '{"b": "}"}', True)]),
    ),
    (mistral, "Sure.\n[TOOL_CALLS]", ("Sure.", [])),
    (mistral, "[1, 2] [TOOL", ("[1, 2] [TOOL", [])),
    (mistral, "[TOOL_CALLS]what is this, then", ("what is this, then", [])),
]


def test_read_whole_texts() -> None:
    for make, text, expected in CASES:
        assert read(make(), [text]) == expected, text


@given(st.data())
def test_pieces_change_nothing(data: st.DataObject) -> None:
    make, text, _ = data.draw(st.sampled_from(CASES))
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(text) - 1)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(make(), pieces) == read(make(), [text])


def test_letter_by_letter_changes_nothing() -> None:
    for make, text, expected in CASES:
        assert read(make(), list(text)) == expected, text


@given(st.text(alphabet='{}[]":,name\\argumentsf1 \n<tool_call>/;|</s>TOOL_CALLS', max_size=60))
@pytest.mark.parametrize("make", [hermes, llama3, mistral])
def test_anything_at_all(make: Callable[[], ToolParser], text: str) -> None:
    for start in ("", "<tool_call>", "[TOOL_CALLS]", '{"name": "add", "arguments": '):
        whole = read(make(), [start + text])
        assert read(make(), list(start + text)) == whole


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
        ),
        max_leaves=8,
    )
)
def test_arguments_come_out_as_they_were(value: object) -> None:
    arguments = json.dumps({"value": value})
    call = f'{{"name": "add", "arguments": {arguments}}}'
    expected = ("", [("add", arguments, True)])
    assert read(hermes(), list(f"<tool_call>{call}</tool_call>")) == expected
    assert read(llama3(), list(call)) == expected
    assert read(mistral(), list(f"[TOOL_CALLS][{call}]")) == expected
    assert read(mistral(), list(f"[TOOL_CALLS]add[ARGS]{arguments}")) == expected
