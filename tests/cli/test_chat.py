"""Conversations."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slipstream.cli.chat import Conversation
from slipstream.cli.parsed_answer import ParsedAnswer, parser_of
from slipstream.cli.terminal import interrupt_noted
from slipstream.cli.views import PlainView
from slipstream.core.config import EngineConfig
from slipstream.core.outputs import CompletionOutput, RequestMetrics, RequestOutput
from slipstream.core.sampling_params import SamplingParams
from slipstream.models.chat_template import ChatTemplate
from slipstream.models.tokenizer import Tokenizer
from tests.cli.conftest import CommandLine
from tests.cli.fake_llm import ByteTokenizer, FakeLLM
from tests.serve.api.harmony_models import write_harmony_tokenizer
from tests.serve.api.thinking_models import TEMPLATE as THINKING
from tests.serve.api.thinking_models import write_thinking_tokenizer
from tests.tokenizers import write_tokenizer


@pytest.fixture(autouse=True)
def short_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeLLM, "reply", "a reply")


def typed(monkeypatch: pytest.MonkeyPatch, *lines: str | BaseException) -> None:
    """Lines that a person types, then Ctrl-D."""
    left = iter(lines)

    def read(_: str = "") -> str:
        line = next(left, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", read)


def said(fake_llm: type[FakeLLM]) -> list[list[str]]:
    """The messages of each conversation that was sent, as role initial and content."""
    return [
        [f"{message['role'][0]}:{message['content']}" for message in conversation]
        for conversation in fake_llm.made[-1].conversations
    ]


def test_each_line_of_a_pipe_is_a_message(slipstream: CommandLine, fake_llm: type[FakeLLM]) -> None:
    ran = slipstream("chat", "--system", "be brief", stdin=b"hello\n\n/help\n")
    assert ran.code == 0
    assert ran.out == "a reply\na reply\n"
    assert said(fake_llm) == [
        ["s:be brief", "u:hello"],
        ["s:be brief", "u:hello", "a:a reply", "u:/help"],
    ]
    assert ran.err.count("tokens/s") == 2


def test_a_model_without_images_says_so_before_one_is_read(
    slipstream: CommandLine, tmp_path: Path
) -> None:
    (tmp_path / "broken.png").write_bytes(b"no image")
    ran = slipstream("chat", "demo", "--image", str(tmp_path / "broken.png"), stdin=b"hello\n")
    assert (ran.code, ran.out) == (2, "")
    assert "this model reads text only; leave images out" in ran.err
    assert "broken" not in ran.err


def test_a_status_counts_its_own_answer_only(
    slipstream: CommandLine, fake_llm: type[FakeLLM]
) -> None:
    ran = slipstream("chat", stdin=b"one\ntwo\n")
    for line in ran.err.splitlines():
        assert line.startswith("7 tokens in")
        assert "AL 4.00 · accepted 1.00 1.00 1.00 0.00" in line


def test_a_refused_message_is_dropped_and_the_talk_goes_on(
    slipstream: CommandLine, fake_llm: type[FakeLLM]
) -> None:
    ran = slipstream("chat", stdin=b"hello\n" + b"x" * 50 + b"\nbye\n")
    assert ran.code == 2
    assert "max_model_len" in ran.err
    assert said(fake_llm)[-1] == ["u:hello", "a:a reply", "u:bye"]


def test_invalid_utf8_names_the_byte(slipstream: CommandLine, fake_llm: type[FakeLLM]) -> None:
    ran = slipstream("chat", stdin=b"hello\nab\xff\n")
    assert ran.code == 2
    assert "byte 8" in ran.err


def test_commands(
    slipstream: CommandLine, fake_llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed(monkeypatch, "hi", "/help", " ", "/clear", "/etc/hosts, what is it?", "/exit", "never")
    ran = slipstream("chat")
    assert ran.code == 0
    assert "/clear" in ran.out
    assert said(fake_llm) == [["u:hi"], ["u:/etc/hosts, what is it?"]]


def test_ctrl_c_at_the_prompt_stays_and_ctrl_d_leaves(
    slipstream: CommandLine, fake_llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed(monkeypatch, KeyboardInterrupt(), "hi", "y" * 50)
    ran = slipstream("chat")
    assert ran.code == 0
    assert said(fake_llm)[0] == ["u:hi"]
    assert "max_model_len" in ran.err


def test_ctrl_c_ends_the_answer_and_keeps_what_was_said(
    slipstream: CommandLine, fake_llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_run = FakeLLM._run

    def interrupted_run(self: FakeLLM, *arguments: Any) -> Iterator[RequestOutput]:
        for output in plain_run(self, *arguments):
            if len(self.conversations) == 1:
                os.kill(os.getpid(), signal.SIGINT)
            yield output

    monkeypatch.setattr(FakeLLM, "_run", interrupted_run)
    typed(monkeypatch, "hi", "go on")
    ran = slipstream("chat")
    assert ran.code == 0
    assert fake_llm.made[-1].aborted == ["0"]
    assert said(fake_llm)[1] == ["u:hi", "a:a rep", "u:go on"]


def test_a_second_ctrl_c_interrupts() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background
    with interrupt_noted() as interrupted:
        assert not interrupted()
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupted()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


def test_a_model_without_chat_template_is_told_at_once(
    slipstream: CommandLine, fake_llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ByteTokenizer, "settings", {})
    ran = slipstream("chat", stdin=b"hi\n")
    assert ran.code == 2
    assert "chat template" in ran.err
    assert said(fake_llm) == []


def test_the_demo_chats(slipstream: CommandLine) -> None:
    line = ["chat", "--max-tokens", "8", "--temperature", "0", "--max-model-len", "64"]
    ran = slipstream(*line, stdin=b"Add numbers.\n" + b"much too long " * 30 + b"\nAnd now?\n")
    assert ran.code == 2
    assert "max_model_len" in ran.err
    assert ran.err.count("tokens/s") == 2


def test_a_model_without_a_template_is_refused_before_it_is_loaded(
    slipstream: CommandLine, fake_llm: type[FakeLLM], tmp_path: Path
) -> None:
    folder = write_tokenizer(tmp_path / "base", ["w0", "w1"])
    ran = slipstream("chat", str(folder), stdin=b"hello\n")
    assert ran.code == 2
    assert "has no chat template, so it cannot chat; give one by --chat-template" in ran.err
    broken = slipstream("chat", str(folder), "--chat-template", "{% if %}", stdin=b"hello\n")
    assert "--chat-template is not valid: line 1" in broken.err
    assert fake_llm.made == []


def test_a_template_is_given_to_the_model(
    slipstream: CommandLine, fake_llm: type[FakeLLM], tmp_path: Path
) -> None:
    (tmp_path / "mine.jinja").write_text("{{ messages[0].content }}")
    ran = slipstream("chat", "--chat-template", str(tmp_path / "mine.jinja"), stdin=b"hello\n")
    assert ran.code == 0, ran.err
    assert fake_llm.made[-1].templates == ["{{ messages[0].content }}"]


def test_nobody_is_not_greeted() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "slipstream", "chat"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
    )
    assert ran.stdout == b""


def test_reasoning_is_no_part_of_the_conversation(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_harmony_tokenizer(tmp_path / "harmony"))
    think, say = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
    llm = FakeLLM(EngineConfig())
    llm.tokenizer = tokenizer  # type: ignore[assignment]
    ids = tokenizer.encode(
        f"{think}Hm.<|end|><|start|>assistant{say}It is hot, they say.<|return|>"
    )
    llm._run = lambda *_: answers(ids)  # type: ignore[method-assign]
    params = SamplingParams(stop=[" they"])
    conversation = Conversation(llm, params, None)  # type: ignore[arg-type]
    view = PlainView(params, conversation.parser)
    conversation.ask("hello", view)
    assert conversation.messages[-1] == {"role": "assistant", "content": "It is hot,"}
    assert llm.params is not None
    assert llm.params.stop_strings == ()
    assert llm.aborted == ["0"]


@pytest.mark.parametrize("opened", [True, False])
def test_a_thought_that_the_prompt_opens_is_reasoning(tmp_path: Path, opened: bool) -> None:
    template = THINKING if not opened else THINKING.replace("elif opens", "else")
    tokenizer = Tokenizer(write_thinking_tokenizer(tmp_path / "thinking", template))
    parser = parser_of(tokenizer, ChatTemplate(tokenizer), SamplingParams())
    assert parser is not None
    parsed = ParsedAnswer(parser())
    ids = tokenizer.encode("Hm.</think>\n\nIt is hot." if opened else "It is hot.")
    for output in answers(ids):
        parsed.take(output.outputs[0])
    parsed.finish()
    assert parsed.content == "It is hot."
    assert parsed.text == ("Hm.\n\nIt is hot." if opened else "It is hot.")
    assert parsed.quiet == ([(0, 3)] if opened else [])


def answers(ids: list[int]) -> Iterator[RequestOutput]:
    for length in range(1, len(ids) + 1):
        sample = CompletionOutput(
            index=0,
            text="",
            token_ids=ids[:length],
            cumulative_logprob=None,
            logprobs=None,
            from_draft=[False] * length,
            finish_reason=None,
            stop_reason=None,
        )
        yield RequestOutput("0", "", [], None, [sample], False, RequestMetrics())
