"""`slipstream chat`: a conversation on the terminal, or one message per line of a pipe."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from slipstream.cli.drafter_flags import DrafterFlags
from slipstream.cli.errors import WRONG_USAGE, say
from slipstream.cli.flags import Given, RunFlags
from slipstream.cli.open_llm import open_llm, tell_cut, with_defaults
from slipstream.cli.parsed_answer import ParsedAnswer, parser_of
from slipstream.cli.prompts import decode, read_template, stdin_is_piped
from slipstream.cli.terminal import (
    QUIET_STYLE,
    interrupt_noted,
    stderr_console,
    stdout_console,
)
from slipstream.cli.views import Meter, PlainView, Status, View, view_on
from slipstream.core.config import EngineConfig
from slipstream.core.errors import UsageError
from slipstream.core.flags import flag, like
from slipstream.core.outputs import CompletionOutput
from slipstream.core.sampling_params import SamplingParams
from slipstream.serve.options import ServerOptions

if TYPE_CHECKING:
    from PIL.Image import Image

    from slipstream.engine.llm import LLM

_SAMPLING = SamplingParams(temperature=0.7, max_tokens=512)
_COMMANDS = {
    "/clear": "start a new conversation",
    "/exit": "leave (or press Ctrl-D)",
    "/help": "show these commands; Ctrl-C stops an answer",
}


@dataclass(frozen=True, kw_only=True)
class ChatFlags:
    """How the conversation begins."""

    system: str | None = flag(None, "The system prompt.")
    chat_template: str | None = like(ServerOptions, "chat_template", None)
    image: str | None = flag(
        None, "An image file to send with the first message.", metavar="<file>"
    )


def chat(
    *,
    flags: ChatFlags,
    drafter: DrafterFlags,
    sampling: SamplingParams = _SAMPLING,
    engine: EngineConfig,
    run: RunFlags,
    given: Given,
) -> None:
    """Chat on a terminal, or answer each line of a pipe.

    Reasoning before an answer is shown dimmed, if the model's format separates it; a pipe gets only
    the answers.
    """
    template = None if flags.chat_template is None else read_template(flags.chat_template)
    if template is None:
        _require_template(engine)
    llm, _ = open_llm(drafter.apply(engine), run.verbose)
    sampling = with_defaults(llm, sampling, given)
    image = None
    if flags.image is not None:
        llm.engine.images.require(1)
        image = open_image(Path(flags.image))
    conversation = Conversation(llm, sampling, flags.system, template, image)
    is_terminal = sys.stdin is None or sys.stdin.isatty()  # /dev/null is not
    if stdin_is_piped() or not is_terminal:
        _answer_lines(conversation, sampling)
    else:
        Session(conversation, llm, sampling).run()


class Conversation:
    """The messages so far; adds a user's message and the model's answer to it.

    Args:
        template: a chat template in place of the checkpoint's.

    Attributes:
        parser: makes parsers of the answers; None if answers are plain text.

    Raises UsageError if there is no chat template.
    """

    def __init__(
        self,
        llm: "LLM",
        params: SamplingParams,
        system: str | None,
        template: str | None = None,
        image: "Image | None" = None,
    ) -> None:
        from slipstream.models.chat_template import ChatTemplate

        self._llm, self._params, self._system, self._template = llm, params, system, template
        self._image, self._told_cut = image, False
        found = ChatTemplate(llm.tokenizer, template)
        if not found.exists:
            raise _no_template(llm.tokenizer.path)
        self.parser = parser_of(llm.tokenizer, found, params)
        if self.parser is not None:  # the parser finds stop strings, only in the content
            self._params = replace(params, stop=())
        self.clear()

    def clear(self) -> None:
        """Forget everything but the system prompt."""
        self.messages: list[dict[str, Any]] = []
        if self._system is not None:
            self.messages.append({"role": "system", "content": self._system})

    def ask(self, text: str, view: View) -> Status:
        """Stream the answer to a view; after Ctrl-C the conversation keeps the part that was shown.
        UsageError if it no longer fits the model: this message is dropped."""
        content: str | list[dict[str, Any]] = text
        if self._image is not None and not any(it["role"] == "user" for it in self.messages):
            content = [
                {"type": "image_pil", "image_pil": self._image},
                {"type": "text", "text": text},
            ]
        self.messages.append({"role": "user", "content": content})
        meter = Meter(self._llm)
        try:
            answer = self._answer(view, meter)
        except UsageError:
            del self.messages[-1]
            raise
        return meter.read(len(answer.token_ids) if answer else 0)

    def _answer(self, view: View, meter: Meter) -> CompletionOutput | None:
        outputs = self._llm.stream_chat(self.messages, self._params, self._template)
        answer: CompletionOutput | None = None
        parsed = None if self.parser is None else ParsedAnswer(self.parser())
        view.begin(None, "")
        with interrupt_noted() as interrupted:
            for output in outputs:
                answer = output.outputs[0]
                if parsed is not None:
                    parsed.take(answer)
                view.show(answer, partial(meter.read, len(answer.token_ids)))
                if interrupted() or (parsed is not None and parsed.stop is not None):
                    self._llm.abort(output.request_id)
                    break
        view.end()
        content = "" if answer is None else answer.text
        if answer is not None:
            self._told_cut = self._told_cut or tell_cut(self._llm, self._params, [output])
            output.require_sound()
        if parsed is not None:
            parsed.finish()
            content = parsed.content
        self.messages.append({"role": "assistant", "content": content})
        return answer


class Session:
    """Reads messages and commands from a terminal."""

    def __init__(self, conversation: Conversation, llm: "LLM", params: SamplingParams) -> None:
        self._conversation, self._llm, self._params = conversation, llm, params
        self._console = stdout_console()
        self._prompt = _prompt(self._console)

    def run(self) -> None:
        """Return when the user leaves."""
        self._quietly("Type a message; /help shows the commands.")
        for text in self._lines():
            if text == "/exit":
                return
            if text == "/clear":
                self._conversation.clear()
                self._quietly("A new conversation starts here.")
            elif text.startswith("/") and text[1:].isalpha():
                for command, meaning in _COMMANDS.items():
                    self._quietly(f"{command:8}{meaning}")
            else:
                self._ask(text)

    def _lines(self) -> Iterator[str]:
        while True:
            try:
                text = input(self._prompt).strip()
            except KeyboardInterrupt:
                print()
                self._quietly("/exit or Ctrl-D leaves.")
            except EOFError:
                print()
                return
            except UnicodeDecodeError:
                say("this line is not valid UTF-8; set the terminal to UTF-8")
            else:
                if text:
                    yield text

    def _ask(self, text: str) -> None:
        parser = self._conversation.parser
        try:
            with view_on(self._console, self._llm.tokenizer, self._params, parser) as view:
                status = self._conversation.ask(text, view)
        except UsageError as error:
            say(f"{error}; the last message is dropped (/clear starts a new conversation)")
            return
        self._quietly(f"{status.summary()}\n")

    def _quietly(self, text: str) -> None:
        self._console.print(text, style=QUIET_STYLE)


def _answer_lines(conversation: Conversation, params: SamplingParams) -> None:
    """Answer every line of stdin; exit at the end with an error if one was refused."""
    refused, read = False, 0
    errors = stderr_console()
    for line in sys.stdin.buffer:
        text = decode(line, "stdin", read).strip()
        read += len(line)
        if not text:
            continue
        try:
            with PlainView(params, conversation.parser) as view:
                status = conversation.ask(text, view)
        except UsageError as error:
            say(f"{error}; the message is dropped")
            refused = True
        else:
            errors.print(status.summary(), style=QUIET_STYLE, soft_wrap=True)
    if refused:
        raise typer.Exit(WRONG_USAGE)


def open_image(file: Path) -> "Image":
    from slipstream.engine.media import decode

    try:
        return decode(file.read_bytes())
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from error
    except UsageError as error:
        raise UsageError(f"{file}: {error}") from error


def _require_template(config: EngineConfig) -> None:
    """Raise UsageError, before loading, if a local model has no chat template."""
    name = config.tokenizer or config.model
    if not Path(name).exists():
        return
    from slipstream.models.chat_template import has_chat_template
    from slipstream.models.checkpoint import resolve_checkpoint
    from slipstream.models.tokenizer import has_tokenizer

    path = resolve_checkpoint(name)
    if has_tokenizer(path) and not has_chat_template(path):
        raise _no_template(path)


def _no_template(path: Path) -> UsageError:
    return UsageError(
        f"{path} has no chat template, so it cannot chat; give one by --chat-template, or use "
        "generate"
    )


def _prompt(console: Console) -> str:
    """The prompt of input(), which importing readline gives line editing and history."""
    try:
        import readline
    except ImportError:  # not on every platform
        return "you: "
    del readline
    if console.color_system is None:
        return "you: "
    # The marks tell readline which characters take no room.
    return "\x01\x1b[1m\x02you:\x01\x1b[0m\x02 "
