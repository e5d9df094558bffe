"""Separates reasoning from content for the terminal, if the model's format marks it."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from slipstream.core.outputs import CompletionOutput
from slipstream.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from slipstream.models.chat_template import ChatTemplate
    from slipstream.models.tokenizer import Tokenizer
    from slipstream.serve.output.parts import AnswerParser
    from slipstream.serve.tools.events import AnswerEvent

Span = tuple[int, int]  # [start, end) of characters
NewParser = Callable[[], "AnswerParser"]


def parser_of(
    tokenizer: "Tokenizer", template: "ChatTemplate", params: SamplingParams
) -> NewParser | None:
    """A function that makes parsers of chat answers; None if the model's answers are plain text."""
    from slipstream.serve.output.formats import choose_output_format
    from slipstream.serve.output.parts import Reading
    from slipstream.serve.token_texts import TokenTexts

    format = choose_output_format(None, None, template, tokenizer)
    if format is None:
        return None
    texts = TokenTexts(tokenizer)
    # All prompts end in the same way, which may open the reasoning.
    prompt = template.render([{"role": "user", "content": "Hello"}])
    reading = Reading(
        prompt=tokenizer.encode(prompt, add_special_tokens=False),
        skip_special=params.skip_special_tokens,
        stop=params.stop_strings,
        include_stop=params.include_stop_str_in_output,
        min_tokens=params.min_tokens,
    )
    return lambda: format.parser(texts, reading)


class ParsedAnswer:
    """One answer, parsed as it is generated.

    Attributes:
        text: reasoning and content in their order, an empty line between them.
        quiet: spans of `text` that are reasoning, ascending.
        content: the content alone.
        stop: the stop string that ended the content.
    """

    def __init__(self, parser: "AnswerParser") -> None:
        self.text = self.content = ""
        self.quiet: list[Span] = []
        self.stop: str | None = None
        self._parser = parser
        self._num_tokens = self._num_characters = 0

    def take(self, sample: CompletionOutput) -> list[tuple[int, Span]]:
        """Take a later snapshot; returns the index of each new token and the span that it added."""
        from slipstream.serve.updates import Delta

        text = sample.text[self._num_characters :]
        self._num_characters = len(sample.text)
        added: list[tuple[int, Span]] = []
        for index in range(self._num_tokens, len(sample.token_ids)):
            if self.stop is not None:
                break
            last = index + 1 == len(sample.token_ids)
            delta = Delta(
                index=sample.index,
                text=text if last else "",
                token_ids=sample.token_ids[index : index + 1],
                logprobs=None,
                origins=(),
                finish_reason=sample.finish_reason if last else None,
                stop_reason=sample.stop_reason if last else None,
            )
            piece, start = self._parser.feed(delta), len(self.text)
            self._num_tokens, self.stop = index + 1, piece.stop
            self._write(piece.events)
            added.append((index, (start, len(self.text))))
        return added

    def finish(self) -> None:
        """Add the text that was held back, when the answer has ended."""
        self._write(self._parser.finish())

    def _write(self, events: "Sequence[AnswerEvent]") -> None:
        from slipstream.serve.tools.events import Content, Reasoning

        for event in events:
            if not isinstance(event, Content | Reasoning):
                continue  # no tools are offered
            quiet = isinstance(event, Reasoning)
            was_quiet = bool(self.quiet) and self.quiet[-1][1] == len(self.text)
            if self.text and quiet != was_quiet:
                self.text += "\n\n"
            start = len(self.text)
            self.text += event.text
            if quiet:
                if was_quiet:
                    start, _ = self.quiet.pop()
                self.quiet.append((start, len(self.text)))
            else:
                self.content += event.text
