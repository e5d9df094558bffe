"""How a command shows a text while it is generated, and its speed and acceptance in one line."""

import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, fields
from time import perf_counter
from typing import TYPE_CHECKING, Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.rule import Rule
from rich.text import Text

from slipstream.cli.page import Page, TokenColours
from slipstream.cli.parsed_answer import NewParser, ParsedAnswer
from slipstream.cli.terminal import QUIET_STYLE, shows_live
from slipstream.core.errors import counted
from slipstream.core.outputs import CompletionOutput, RequestMetrics
from slipstream.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from slipstream.engine.llm import LLM
    from slipstream.engine.metrics import EngineMetrics
    from slipstream.models.tokenizer import Tokenizer


_LEAST_REFUSED = 0.005  # of the time, which is told
_MANY = 8  # positions that are always shown


@dataclass(frozen=True)
class Status:
    """What the engine did during a command or an answer.

    Attributes:
        refused: the share of time in which tokens were drafted that were refused; a part of that of
            "draft" in `time_shares`.
    """

    num_tokens: int
    seconds: float
    speculation: RequestMetrics
    time_shares: Mapping[str, float]
    refused: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds if self.seconds > 0 else 0.0

    def line(self, width: int | None = None) -> str:
        """`42.0 tokens/s · AL 3.21 · accepted 0.85 0.71 0.60 · draft 31% (9% refused) target ..`.

        If it is wider than the terminal, the shares of time are left out, then the last positions
        of the acceptance.
        """
        shares = self._shares()
        lines = [self._line(shares)]
        lines += [self._line(self._first(shares, n), False) for n in range(len(shares), -1, -1)]
        return next((it for it in lines if width is None or len(it) <= width), lines[-1])

    def _line(self, shares: list[str], with_times: bool = True) -> str:
        parts = [f"{self.tokens_per_second:.1f} tokens/s"]
        if self.speculation.num_drafts:
            parts.append(f"AL {self.speculation.acceptance_length:.2f}")
        if shares:
            parts.append(f"accepted {' '.join(shares)}")
        speedup = self.speculation.estimated_speedup
        if speedup is not None:
            parts.append(f"K {self.speculation.mean_draft_tokens:.1f}")
            parts.append(f"{speedup:.2f}x plain")
        if with_times and any(self.time_shares.values()):
            times = {name: f"{name} {share:.0%}" for name, share in self.time_shares.items()}
            if not self.time_shares.get("draft"):
                times.pop("draft", None)
            elif self.refused >= _LEAST_REFUSED:
                times["draft"] += f" ({self.refused:.0%} refused)"
            parts.append(" ".join(times.values()))
        return " · ".join(parts)

    @staticmethod
    def _first(shares: list[str], count: int) -> list[str]:
        return shares if count == len(shares) else [*shares[:count], "…"] if count else []

    def _shares(self) -> list[str]:
        """Share of drafts accepted at each position; of long drafts up to the last accepted one."""
        shares = list(self.speculation.acceptance_per_position)
        whole = len(shares)
        while len(shares) > _MANY and shares[-1] == 0:
            shares.pop()
        return [f"{share:.2f}" for share in shares] + ["…"] * (len(shares) < whole)

    def summary(self) -> str:
        return f"{counted(self.num_tokens, 'token')} in {self.seconds:.2f} s · {self.line()}"


class Meter:
    """Measures an engine from the moment when the meter is made."""

    def __init__(self, llm: "LLM") -> None:
        self._llm, self._metrics_before, self._began = llm, deepcopy(llm.metrics), perf_counter()

    def read(self, num_tokens: int) -> Status:
        gained = _difference(self._llm.metrics, self._metrics_before)
        speculation, whole = gained.speculation, sum(gained.seconds.values())
        return Status(
            *(num_tokens, perf_counter() - self._began, speculation, gained.time_shares),
            refused=speculation.refused_drafting_seconds / whole if whole else 0.0,
        )


def _difference(now: "EngineMetrics", before: "EngineMetrics") -> "EngineMetrics":
    gained = deepcopy(now)
    for field in fields(gained):
        if field.name not in ("speculation", "adapters"):  # a command has one adapter
            setattr(gained, field.name, getattr(now, field.name) - getattr(before, field.name))
    gained.speculation.add(before.speculation, sign=-1)
    return gained


_REDRAW_SECONDS = 1 / 12  # smooth to the eye, at a negligible cost
_STATUS_ROWS = 3


class View(Protocol):
    """Shows one text after another."""

    def begin(self, heading: str | None, prompt: str) -> None:
        """Start a new text."""

    def show(self, sample: CompletionOutput, status: Callable[[], Status]) -> None:
        """Show the text so far."""

    def end(self) -> None:
        """End the text; no more of it will come."""


class PlainView:
    """Writes the text alone, for pipes and files; of answers that are parsed, the content."""

    def __init__(self, params: SamplingParams, parser: NewParser | None = None) -> None:
        self._held_back, self._parser = held_back(params), parser
        self._parsed: ParsedAnswer | None = None
        self._written, self._text = 0, ""
        self._first = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is not None and self._written:  # an error message starts on a line of its own
            with suppress(OSError):
                print(flush=True)

    def begin(self, heading: str | None, prompt: str) -> None:
        if heading is not None:
            print("" if self._first else "\n", f"== {heading} ==", sep="")
        self._written, self._text, self._first = 0, "", False
        self._parsed = None if self._parser is None else ParsedAnswer(self._parser())

    def show(self, sample: CompletionOutput, status: Callable[[], Status]) -> None:
        self._text = sample.text
        if self._parsed is not None:
            self._parsed.take(sample)
            self._text = self._parsed.content
        self._write(len(self._text) - self._held_back)

    def end(self) -> None:
        if self._parsed is not None:
            self._parsed.finish()
            self._text = self._parsed.content
        self._write(len(self._text))
        self._written = 0
        print(flush=True)

    def _write(self, end: int) -> None:
        if end > self._written:
            sys.stdout.write(self._text[self._written : end])
            sys.stdout.flush()
            self._written = end


class LiveView:
    """Prints complete lines; redraws only the last line and a status line below them.

    So a redraw costs the same for any length of text, and the text stays in the scrollback.
    """

    def __init__(
        self,
        console: Console,
        tokenizer: "Tokenizer",
        params: SamplingParams,
        parser: NewParser | None = None,
    ) -> None:
        self._parser = parser
        self._console, self._tokenizer, self._params = console, tokenizer, params
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._page: Page | None = None
        self._skipped: CompletionOutput | None = None  # the latest snapshot, if it was not drawn
        self._next_draw = 0.0

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self._live.stop()

    def begin(self, heading: str | None, prompt: str) -> None:
        if heading is not None:
            self._console.print(Rule(Text(heading), style=QUIET_STYLE))
        parsed = None if self._parser is None else ParsedAnswer(self._parser())
        colours = TokenColours(self._tokenizer, self._params, parsed)
        self._page = Page(colours, prompt, held_back(self._params))
        self._draw(self._page, "")

    def show(self, sample: CompletionOutput, status: Callable[[], Status]) -> None:
        if self._page is None:
            return
        if perf_counter() < self._next_draw:
            self._skipped = sample
            return
        self._skipped = None
        self._page.take(sample)
        self._draw(self._page, status().line(self._console.width))
        self._next_draw = perf_counter() + _REDRAW_SECONDS

    def end(self) -> None:
        if self._page is not None:
            if self._skipped is not None:
                self._page.take(self._skipped)
            self._live.update(Group())
            self._scroll(self._page.take_rest())
            self._live.refresh()
            self._page = self._skipped = None

    def _draw(self, page: Page, status: str) -> None:
        width = self._console.width
        room = max(self._console.height - _STATUS_ROWS, 1)
        done = page.take_lines()
        rows = page.rows(width)
        surplus = page.take_rows(width, len(rows) - room) if len(rows) > room else None
        line = Text(status, style=QUIET_STYLE, no_wrap=True)
        line.truncate(width, overflow="ellipsis")
        self._live.update(Group(*rows[-room:], Text(""), line))
        for text in (done, surplus):
            self._scroll(text)
        self._live.refresh()

    def _scroll(self, text: Text | None) -> None:
        """Print above the live part; the terminal breaks long lines, so they can be copied."""
        if text is not None:
            self._console.print(text, soft_wrap=True)


def view_on(
    console: Console,
    tokenizer: "Tokenizer",
    params: SamplingParams,
    parser: NewParser | None = None,
) -> LiveView | PlainView:
    """A view of texts on stdout: live on a terminal, else the text alone."""
    if shows_live(console):
        return LiveView(console, tokenizer, params, parser)
    return PlainView(params, parser)


def held_back(params: SamplingParams) -> int:
    """Characters at the end of a text that a stop string may still remove."""
    if params.include_stop_str_in_output:
        return 0
    return max((len(stop) - 1 for stop in params.stop_strings), default=0)
