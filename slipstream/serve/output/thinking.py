"""Answers that begin with a thought between two marks, as Qwen3, GLM and DeepSeek R1 write them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

from slipstream.core.structured import StructuredOutput, Thought
from slipstream.models.chat_template import ChatTemplate
from slipstream.models.tokenizer import Tokenizer
from slipstream.serve.errors import bad_request
from slipstream.serve.output.parts import Reading, Wanted
from slipstream.serve.output.thinking_parser import Place, ThinkingParser
from slipstream.serve.token_texts import TokenTexts

_TAIL = 16  # tokens at the end of a prompt that may hold a mark and white space
_KEY = "reasoning_content"


@dataclass(frozen=True)
class ThinkingStyle:
    """What families that write thoughts between marks differ in.

    Attributes:
        name: in --reasoning-parser.
        opening, closing: the marks.
        unopened: an answer begins with a thought even where neither it nor the prompt opens one.
    """

    name: str
    opening: str = "<think>"
    closing: str = "</think>"
    unopened: bool = False


STYLES: Final = (
    ThinkingStyle("qwen3"),
    ThinkingStyle("glm45"),
    ThinkingStyle("deepseek_r1", unopened=True),
    ThinkingStyle("mistral", "[THINK]", "[/THINK]"),
    # Names that vLLM has for models which write as the first does.
    *map(ThinkingStyle, ("deepseek_v3", "glm47", "mimo")),
)


@dataclass(frozen=True)
class Thinking:
    """An `OutputFormat`, whose content may hold calls of any `ToolFormat`.

    Args:
        ends: end tokens of the model.
    """

    style: ThinkingStyle
    tokenizer: Tokenizer
    template: ChatTemplate
    ends: Sequence[int] = ()
    calls: None = None
    # A mark in a message cannot make it that of another role, and instructions on how to think
    # have to name the marks.
    marks: Sequence[int] = ()

    @property
    def name(self) -> str:
        return self.style.name

    @cached_property
    def tokens(self) -> tuple[int, int] | None:
        """The marks as tokens; None if the vocabulary lacks one, so that they are text."""
        opening = self.tokenizer.token_to_id(self.style.opening)
        closing = self.tokenizer.token_to_id(self.style.closing)
        return None if opening is None or closing is None else (opening, closing)

    def parser(self, texts: TokenTexts, reading: Reading) -> ThinkingParser:
        marks = (self.style.opening, self.style.closing)
        place = self._place(reading.prompt, reading.continues)
        return ThinkingParser(marks, self.tokens, place, texts, reading, self.ends)

    def framed(
        self, wanted: Wanted, prompt: Sequence[int], continues: bool
    ) -> StructuredOutput | None:
        content, place = wanted.content, self._place(prompt, continues)
        if wanted.calls is not None:
            content = StructuredOutput(grammar=wanted.calls)
        if place is Place.CONTENT or (content is None and wanted.budget is None):
            return content
        begun, tokens = place is Place.THOUGHT, self.tokens
        if tokens is not None:
            encoded = [self.tokenizer.encode("\n" * count, False) for count in range(1, 5)]
            spaces = [ids[0] for ids in encoded if len(ids) == 1]
            thought = Thought(
                opening=tokens[0],
                closing=tokens[1],
                begun=begun,
                spaces=spaces,
                budget=wanted.budget,
            )
            return (
                StructuredOutput(thought=thought)
                if content is None
                else replace(content, thought=thought)
            )
        opening, closing = self.style.opening, self.style.closing
        if wanted.budget is not None:
            raise bad_request(
                f"thinking_token_budget needs {opening} and {closing} as tokens, which the "
                "vocabulary of this model lacks; leave it out",
                "thinking_token_budget",
            )
        assert content is not None
        return replace(content, frame=_frame(opening, closing, begun))

    def remember(self, message: dict[str, Any], reasoning: str) -> str:
        if self.template.mentions(_KEY):
            message[_KEY] = reasoning
            return _KEY
        # Such templates take thoughts out of the content, as the model wrote them.
        content = message.get("content") or ""
        if not isinstance(content, str):
            content = "\n".join(part["text"] for part in content)
        style = self.style
        message["content"] = f"{style.opening}\n{reasoning}\n{style.closing}\n\n{content}"
        return style.closing

    def _place(self, prompt: Sequence[int], continues: bool) -> Place:
        """Where the answer to a prompt begins."""
        opening, closing = self.style.opening, self.style.closing
        if continues:  # earlier messages may hold thoughts, but none that is open
            return Place.THOUGHT if self._is_open(prompt) else Place.CONTENT
        text = self.tokenizer.decode(prompt[-_TAIL:], skip_special_tokens=False).rstrip()
        if text.endswith(closing):
            return Place.CONTENT
        opened = text.endswith(opening) or self.style.unopened
        return Place.THOUGHT if opened else Place.START

    def _is_open(self, prompt: Sequence[int]) -> bool:
        """Whether the last mark of a prompt opens a thought."""
        if self.tokens is None:
            text = self.tokenizer.decode(prompt, skip_special_tokens=False)
            return text.rfind(self.style.opening) > text.rfind(self.style.closing)
        return next((it for it in reversed(prompt) if it in self.tokens), None) == self.tokens[0]


def _frame(opening: str, closing: str, begun: bool) -> str:
    """A frame of `StructuredOutput` for marks that are texts: the rule `body` begins behind the
    thought."""
    gap = '("\\n" | "\\n\\n")?'
    first, last = (re.escape(mark).replace("/", "\\/") for mark in (opening, closing))
    start = f"thought {gap}" if begun else f"({gap} thought {gap})?"
    rule = f"thought[lazy]: /{'' if begun else first}(.|\\n)*{last}/"
    return f"start: {start} body\n{rule}"
