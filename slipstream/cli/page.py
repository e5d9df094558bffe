"""Text of one sample for a terminal: coloured, and split into lines."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.cells import chop_cells
from rich.text import Text

from slipstream.cli.parsed_answer import ParsedAnswer, Span
from slipstream.cli.terminal import ACCEPTED_STYLE, QUIET_STYLE
from slipstream.core.outputs import CompletionOutput
from slipstream.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from slipstream.models.tokenizer import Tokenizer

_TAB = 8
_PROMPT_LINES = 12

# A model's text must not control the terminal: control characters become visible symbols.
_VISIBLE = {
    **{code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"},
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
}


class TokenColours:
    """Which characters of a sample's text came from accepted draft tokens.

    A character belongs to the token that completed it.

    Args:
        parsed: reads the text that is shown, in place of the sample's own.
    """

    def __init__(
        self, tokenizer: "Tokenizer", params: SamplingParams, parsed: ParsedAnswer | None = None
    ) -> None:
        from slipstream.engine.detokenizer import Detokenizer

        # The engine handles stop strings: its text is shown.
        self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens, (), False, 0)
        self._num_tokens = 0
        self.parsed = parsed
        self.drafted: list[Span] = []  # ascending

    @property
    def quiet(self) -> Sequence[Span]:
        """Which characters are reasoning."""
        return () if self.parsed is None else self.parsed.quiet

    def take(self, sample: CompletionOutput) -> None:
        """Add the tokens since the last call."""
        for index, (start, end) in self._added(sample):
            if sample.from_draft[index] and end > start:
                if self.drafted and self.drafted[-1][1] == start:
                    start, _ = self.drafted.pop()
                self.drafted.append((start, end))

    def _added(self, sample: CompletionOutput) -> Iterator[tuple[int, Span]]:
        """The indices of new tokens and the text that each adds."""
        if self.parsed is not None:
            yield from self.parsed.take(sample)
            return
        for index in range(self._num_tokens, len(sample.token_ids)):
            start = len(self._detokenizer.text)
            self._detokenizer.push(sample.token_ids[index])
            yield index, (start, len(self._detokenizer.text))
        self._num_tokens = len(sample.token_ids)

    def forget(self, before: int) -> None:
        """Drop the spans that end before this character."""
        self.drafted = [span for span in self.drafted if span[1] > before]


class Page:
    """Prompt and answer as one text: complete lines, and a last line that may still grow.

    Args:
        prompt: its last lines are shown dimmed before the answer; may be empty.
        held_back: characters at the end that a stop string may still remove.
    """

    def __init__(self, colours: TokenColours, prompt: str, held_back: int) -> None:
        self._colours, self._held_back = colours, held_back
        self._prompt = _last_lines(prompt)
        self._text = self._prompt
        self._done = 0

    def take(self, sample: CompletionOutput) -> None:
        """Replace the text by a later snapshot of the sample."""
        self._colours.take(sample)
        parsed = self._colours.parsed
        self._text = self._prompt + (sample.text if parsed is None else parsed.text)

    def take_lines(self) -> Text | None:
        """The lines completed since the last call; None if there are none."""
        end = self._text.rfind("\n", self._done, max(self._done, len(self._text) - self._held_back))
        if end < 0:
            return None
        lines = self._styled(end)
        self._settle(end + 1)
        return lines

    def rows(self, width: int) -> list[Text]:
        """The rest of the text, wrapped as a terminal of this width would."""
        return [
            row
            for line in self._styled(len(self._text)).split("\n", allow_blank=True)
            for row in _folded(line, width)
        ]

    def take_rows(self, width: int, count: int) -> Text | None:
        """The first `count` rows of the rest, as one line that fills them exactly."""
        if "\n" in self._text[self._done :] or "\t" in self._text[self._done :]:
            return None  # the rows are unknown; such a rest is short
        pieces = chop_cells(self._text[self._done :].translate(_VISIBLE), width)
        end = self._done + sum(map(len, pieces[:count]))
        line = self._styled(end)
        self._settle(end)
        return line

    def take_rest(self) -> Text | None:
        """The rest of the text, when no more will come."""
        if self._colours.parsed is not None:
            self._colours.parsed.finish()
            self._text = self._prompt + self._colours.parsed.text
        rest = self._styled(len(self._text)) if self._done < len(self._text) else None
        self._settle(len(self._text))
        return rest

    def _settle(self, end: int) -> None:
        self._done = end
        self._colours.forget(end - len(self._prompt))

    def _styled(self, end: int) -> Text:
        """The text up to `end` that is not settled."""
        start = self._done
        text = Text(self._text[start:end].translate(_VISIBLE), tab_size=_TAB)
        offset = len(self._prompt)
        if start < offset:
            text.stylize(QUIET_STYLE, 0, offset - start)
        styles = ((QUIET_STYLE, self._colours.quiet), (ACCEPTED_STYLE, self._colours.drafted))
        for style, spans in styles:
            for begin, stop in spans:
                if stop + offset > start and begin + offset < end:
                    text.stylize(style, max(begin + offset - start, 0), stop + offset - start)
        return text


def _last_lines(prompt: str) -> str:
    lines = prompt.split("\n")
    if len(lines) <= _PROMPT_LINES:
        return prompt
    return "\n".join(["…", *lines[-_PROMPT_LINES:]])


def _folded(line: Text, width: int) -> list[Text]:
    line = line.copy()
    line.expand_tabs(_TAB)
    offsets, end = [], 0
    for piece in chop_cells(line.plain, width)[:-1]:
        end += len(piece)
        offsets.append(end)
    return list(line.divide(offsets))
