"""Answers that begin with a thought, cut anywhere."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.core.errors import UsageError
from slipstream.models.chat_template import ChatTemplate
from slipstream.models.tokenizer import Tokenizer
from slipstream.serve.output.formats import choose_output_format
from slipstream.serve.output.parts import OutputPart, Reading
from slipstream.serve.output.thinking import ThinkingFormat
from slipstream.serve.token_texts import TokenTexts
from slipstream.serve.tools.call_format import Schemas
from slipstream.serve.tools.events import AnswerEvent, Arguments, CallBegun, Content, Reasoning
from slipstream.serve.tools.formats import FORMATS
from slipstream.serve.updates import Delta
from tests.serve.api.thinking_models import MARKS, TEMPLATE, write_thinking_tokenizer

NEW, OPENED = "<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n"
CLOSED = f"{OPENED}\n</think>\n\n"
CALL = '<tool_call>\n{"name": "now", "arguments": {"city": "Köln"}}\n</tool_call>'


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Tokenizer]:
    """Two tokenizers, by whether the marks of thinking are ordinary text."""
    folder = tmp_path_factory.mktemp("thinking")
    found = {
        as_text: Tokenizer(write_thinking_tokenizer(folder / str(as_text), as_text=as_text))
        for as_text in (False, True)
    }
    assert {id: found[False].id_to_token(id) for id in MARKS} == MARKS
    assert found[True].token_to_id("<think>") is None
    return found


def format_of(tokenizer: Tokenizer, name: str | None = None) -> ThinkingFormat:
    found = choose_output_format(name, None, ChatTemplate(tokenizer), tokenizer, (0, 2))
    assert isinstance(found, ThinkingFormat)
    return found


Told = tuple[str, str, list[str]]


def read(
    tokenizer: Tokenizer,
    text: str,
    prompt: str = NEW,
    name: str | None = None,
    cut: int = 0,
    by: int = 10**6,
    **reading: Any,
) -> tuple[Told, list[tuple[OutputPart, str]]]:
    """Reasoning, content and calls, and the parts with their texts.

    Args:
        cut, by: the tokens come as the first `cut`, and then by so many.
    """
    texts = TokenTexts(tokenizer)
    wanted = Reading(prompt=tokenizer.encode(prompt, False), **reading)
    if wanted.functions is not None:
        schemas: Schemas = {it: {} for it in wanted.functions}
        marks = [token for token, mark in MARKS.items() if "tool_call" in mark]
        parser_of_calls = FORMATS["hermes"].parser(schemas, ())
        wanted = replace(wanted, calls=parser_of_calls, call_marks=marks)
    parser = format_of(tokenizer, name).parser(texts, wanted)
    tokens = tokenizer.encode(text, False)
    events: list[AnswerEvent] = []
    parts: list[OutputPart] = []
    for some in [tokens[:cut], *(tokens[it : it + by] for it in range(cut, len(tokens), by))]:
        piece = parser.feed(Delta(0, "", some, None, [], None, None))
        events += piece.events
        parts += piece.parts or ()
        if piece.stop is not None:
            break
    events += parser.finish()
    calls: list[str] = []
    for event in events:
        if isinstance(event, CallBegun):
            calls.append(event.name)
        elif isinstance(event, Arguments):
            calls[-1] += event.text
    reasoning = "".join(it.text for it in events if isinstance(it, Reasoning))
    content = "".join(it.text for it in events if isinstance(it, Content))
    return (reasoning, content, calls), joined(parts, [texts.content(it) for it in tokens])


def joined(parts: Sequence[OutputPart], texts: Sequence[bytes]) -> list[tuple[OutputPart, str]]:
    """Texts of successive tokens of one part."""
    found: list[tuple[OutputPart, bytes]] = []
    for part, text in zip(parts, texts, strict=False):
        if found and found[-1][0] is part:
            found[-1] = part, found[-1][1] + text
        else:
            found.append((part, text))
    return [(part, text.decode(errors="replace")) for part, text in found]


THOUGHT = "<think>\nHm, 3 < 4 — ja.\n\nSo.\n</think>\n\n"
FULL = ("Hm, 3 < 4 — ja.\n\nSo.", "Grüße, <b>\n")
CASES: list[tuple[str, str, str | None, tuple[str, str]]] = [
    (NEW, THOUGHT + "Grüße, <b>\n", None, FULL),
    (NEW, "\n" + THOUGHT + "Grüße, <b>\n", "glm45", FULL),
    (NEW, THOUGHT + "Grüße, <b>\n", "deepseek_r1", FULL),
    (OPENED, THOUGHT.removeprefix("<think>\n") + "Grüße, <b>\n", None, FULL),
    (OPENED, THOUGHT + "Grüße, <b>\n", None, FULL),
    (NEW, THOUGHT.removeprefix("<think>\n") + "Grüße, <b>\n", "deepseek_r1", FULL),
    (CLOSED, "Grüße, <b>\n", None, ("", "Grüße, <b>\n")),
    (CLOSED.rstrip(), "\n\nGrüße", "deepseek_r1", ("", "Grüße")),
    (NEW, "\n<thin ice>\n", None, ("", "\n<thin ice>\n")),
    (NEW, "<thi", None, ("", "<thi")),
    (NEW, "Hello <think>a</think>", None, ("", "Hello <think>a</think>")),
    # Without the closing mark all is reasoning, if there is any.
    (NEW, "<think>\nHm.\n", None, ("Hm.", "")),
    (OPENED, "Hm. </thi", None, ("Hm. </thi", "")),
    (NEW, "Hm.", "deepseek_r1", ("Hm.", "")),
    (NEW, "Hm.", "glm45", ("", "Hm.")),
    (OPENED, "</think>Yes.", None, ("", "Yes.")),
    (NEW, "<think>a</think>b</think>c", None, ("a", "b</think>c")),
    (NEW, "[THINK]a</think>[/THINK]b", "mistral", ("a</think>", "b")),
]


@pytest.mark.parametrize("as_text", [False, True])
def test_texts_do_not_depend_on_cuts(tokenizers: dict[bool, Tokenizer], as_text: bool) -> None:
    tokenizer = tokenizers[as_text]
    for prompt, text, name, wanted in CASES:
        for cut in range(len(tokenizer.encode(text, False)) + 1):
            (reasoning, content, _), _ = read(tokenizer, text, prompt, name, cut)
            assert (reasoning, content) == wanted, (prompt, text, name, cut)
        assert read(tokenizer, text, prompt, name, by=1)[0][:2] == wanted


def test_parts_of_tokens(tokenizers: dict[bool, Tokenizer]) -> None:
    _, parts = read(tokenizers[False], THOUGHT + "Grüße\n")
    assert parts == [
        (OutputPart.MARKUP, "<think>"),
        (OutputPart.REASONING, "\nHm, 3 < 4 — ja.\n\nSo.\n"),
        (OutputPart.MARKUP, "</think>\n\n"),
        (OutputPart.CONTENT, "Grüße\n"),
    ]
    text = f"Hm.</think>\n\nSo: <i>{CALL}\n{CALL}\nEnd"
    _, parts = read(tokenizers[False], text, OPENED, functions=("now",))
    kinds = [OutputPart.REASONING, OutputPart.MARKUP, OutputPart.CONTENT]
    kinds += [
        OutputPart.MARKUP,
        OutputPart.CALL,
        OutputPart.MARKUP,
        OutputPart.CALL,
        OutputPart.MARKUP,
        OutputPart.CONTENT,
    ]
    assert [part for part, _ in parts] == kinds
    assert parts[2][1] == "So: <i>"
    assert parts[3][1].startswith('<tool_call>\n{"name')
    assert parts[4][1].endswith('{"city": "Köln"}}')
    assert parts[5][1].startswith("\n</tool_call>\n<tool_call>\n{")
    assert parts[8][1] == "End"


@pytest.mark.parametrize("as_text", [False, True])
def test_calls_behind_the_thought(tokenizers: dict[bool, Tokenizer], as_text: bool) -> None:
    text = f"{THOUGHT}Let me see.\n{CALL}\n{CALL}"
    wanted = (FULL[0], "Let me see.", ['now{"city": "Köln"}'] * 2)
    for cut in range(len(tokenizers[as_text].encode(text, False))):
        found, _ = read(tokenizers[as_text], text, cut=cut, functions=("now",))
        assert found == wanted, cut
    (_, content, calls), _ = read(tokenizers[as_text], text)
    assert (content, calls) == (text.partition("</think>\n\n")[2], [])


def test_stop_strings_are_looked_for_in_the_content(tokenizers: dict[bool, Tokenizer]) -> None:
    for tokenizer in tokenizers.values():
        text = "<think>a stop</think>b stop c"
        (reasoning, content, _), _ = read(tokenizer, text, stop=["stop"], by=1)
        assert (reasoning, content) == ("a stop", "b ")
        found = read(tokenizer, text, stop=["stop"], include_stop=True)[0]
        assert found[:2] == ("a stop", "b stop")
        found = read(tokenizer, text, stop=["stop"], min_tokens=99)[0]
        assert found[:2] == ("a stop", "b stop c")


def test_what_ended_an_output_is_no_text(tokenizers: dict[bool, Tokenizer]) -> None:
    tokenizer = tokenizers[False]
    for stop_reason, ending in ((None, 2), (65, 65)):
        parser = format_of(tokenizer).parser(
            TokenTexts(tokenizer), Reading(skip_special=False, prompt=[1])
        )
        tokens = [*tokenizer.encode("<think>a</think>b", False), ending]
        piece = parser.feed(Delta(0, "", tokens, None, [], "stop", stop_reason))
        assert [*piece.events] == [Reasoning("a"), Content("b")]
        assert (piece.parts or [])[-1] is OutputPart.MARKUP


def test_a_continued_message_is_where_its_thought_is(tokenizers: dict[bool, Tokenizer]) -> None:
    for tokenizer in tokenizers.values():
        for prompt, wanted in (
            (f"{OPENED}Hm, ", ("a", "b")),
            (f"{OPENED}Hm.\n</think>\n\nYes, ", ("", "a</think>b")),
            (f"{NEW}Yes, ", ("", "a</think>b")),
        ):
            for name in ("qwen3", "deepseek_r1"):
                found, _ = read(tokenizer, "a</think>b", prompt, name, continues=True)
                assert found[:2] == wanted


def test_the_format_is_found_or_named(tmp_path: Path, tokenizers: dict[bool, Tokenizer]) -> None:
    for tokenizer in tokenizers.values():
        assert format_of(tokenizer).name == "qwen3"
        assert format_of(tokenizer, "deepseek_r1").name == "deepseek_r1"
        template = ChatTemplate(tokenizer)
        assert choose_output_format("none", None, template, tokenizer) is None
        assert isinstance(choose_output_format(None, "hermes", template, tokenizer), ThinkingFormat)
        with pytest.raises(UsageError, match="goes with"):
            choose_output_format("qwen3", "openai", template, tokenizer)
        with pytest.raises(UsageError, match="does not fit"):
            choose_output_format("openai_gptoss", None, template, tokenizer)
    plain = write_thinking_tokenizer(tmp_path / "plain", "{{ messages[0].content }}")
    unnamed = Tokenizer(plain)
    assert choose_output_format(None, None, ChatTemplate(unnamed), unnamed) is None
    assert format_of(unnamed, "glm45").name == "glm45"


def test_earlier_thoughts_go_where_the_template_reads_them(
    tokenizers: dict[bool, Tokenizer], tmp_path: Path
) -> None:
    message: dict[str, Any] = {"role": "assistant", "content": "Yes."}
    assert format_of(tokenizers[False]).remember(message, "Hm.") == "reasoning_content"
    assert message == {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    template = TEMPLATE.replace("reasoning_content", "nothing")
    other = Tokenizer(write_thinking_tokenizer(tmp_path / "other", template))
    message = {"role": "assistant", "content": [{"type": "text", "text": "Yes."}]}
    assert format_of(other).remember(message, "Hm.") == "</think>"
    assert message["content"] == "<think>\nHm.\n</think>\n\nYes."
