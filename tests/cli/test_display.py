"""What a terminal shows while a text is written."""

import io
from collections.abc import Sequence

import pytest
from rich.console import Console
from rich.text import Text

from slipstream.cli.generate import Player
from slipstream.cli.page import Page, TokenColours
from slipstream.cli.parsed_answer import ParsedAnswer
from slipstream.cli.views import LiveView, Meter, PlainView, Status, held_back
from slipstream.core.config import EngineConfig
from slipstream.core.outputs import CompletionOutput, RequestMetrics
from slipstream.core.sampling_params import SamplingParams
from slipstream.serve.output.parts import ParsedOutput
from slipstream.serve.tools.events import AnswerEvent, Content, Reasoning
from slipstream.serve.updates import Delta
from tests.cli.fake_llm import ByteTokenizer, FakeLLM

PARAMS = SamplingParams(max_tokens=500)


def sample(text: str, drafted: str = "", reason: str | None = None) -> CompletionOutput:
    """One byte a token; `drafted` has a d for each that a drafter guessed."""
    ids = list(text.encode())
    return CompletionOutput(
        index=0,
        text=text,
        token_ids=ids,
        cumulative_logprob=None,
        logprobs=None,
        from_draft=[mark == "d" for mark in drafted.ljust(len(ids))],
        finish_reason=reason,
        stop_reason=None,
    )


def page(prompt: str = "", held: int = 0) -> Page:
    return Page(TokenColours(ByteTokenizer(), PARAMS), prompt, held)


def green(text: Text | None) -> str:
    """The accepted characters, the others as dots."""
    assert text is not None
    marks = ["."] * len(text.plain)
    for span in text.spans:
        if "green" in str(span.style):
            marks[span.start : span.end] = text.plain[span.start : span.end]
    return "".join(marks)


def test_accepted_tokens_are_coloured() -> None:
    shown = page()
    shown.take(sample("abc", "d d"))
    assert green(shown.rows(80)[0]) == "a.c"
    shown.take(sample("abcdef", "d ddd"))
    assert green(shown.take_rest()) == "a.cde."


def test_a_character_belongs_to_the_token_that_completes_it() -> None:
    shown = page()
    shown.take(sample("ä€b", "d  d d"))
    assert green(shown.take_rest()) == "..b"
    shown = page()
    shown.take(sample("ä€b", " d  d"))
    assert green(shown.take_rest()) == "ä€."


def test_lines_are_handed_out_once_and_colours_stay_in_place() -> None:
    shown = page(prompt="say: ")
    shown.take(sample("one\ntw", "dddddd"))
    lines = shown.take_lines()
    assert lines is not None
    assert lines.plain == "say: one"
    assert green(lines) == ".....one"
    assert shown.take_lines() is None
    shown.take(sample("one\ntwo\nthree", "dddddd"))
    assert green(shown.take_lines()) == "tw."
    assert green(shown.take_rest()) == "....."
    assert shown.take_rest() is None


def test_a_stop_string_can_take_back_what_is_held() -> None:
    params = SamplingParams(stop=("b\nc", "x"))
    assert held_back(params) == 2
    assert held_back(SamplingParams(stop="abc", include_stop_str_in_output=True)) == 0
    shown = page(held=2)
    shown.take(sample("ab\n"))
    assert shown.take_lines() is None
    shown.take(sample("a", reason="stop"))
    rest = shown.take_rest()
    assert rest is not None
    assert rest.plain == "a"


def test_control_characters_cannot_steer_the_terminal() -> None:
    shown = page()
    shown.take(sample("\x1b[31mred\x07\r\x9b[bold]\x7f"))
    rest = shown.take_rest()
    assert rest is not None
    assert rest.plain == "␛[31mred␇␍\ufffd[bold]␡"


def test_rows_are_cut_where_the_terminal_breaks_them() -> None:
    shown = page()
    shown.take(sample("abcdefg"))
    assert [row.plain for row in shown.rows(3)] == ["abc", "def", "g"]
    first = shown.take_rows(3, 2)
    assert first is not None
    assert first.plain == "abcdef"
    assert [row.plain for row in shown.rows(3)] == ["g"]
    shown = page()
    shown.take(sample("日本語"))
    assert [row.plain for row in shown.rows(4)] == ["日本", "語"]


def test_only_the_end_of_a_long_prompt_is_shown() -> None:
    rows = page(prompt="\n".join(map(str, range(100)))).rows(10)
    assert [row.plain for row in rows] == ["…", *map(str, range(88, 100))]


@pytest.fixture
def terminal() -> Console:
    return Console(
        file=io.StringIO(),
        force_terminal=True,
        width=40,
        height=10,
        color_system=None,
        markup=False,
    )


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_live_view_leaves_the_text_in_the_scrollback(terminal: Console) -> None:
    llm = FakeLLM(EngineConfig())
    reply = "\n".join(f"line {number} [bold] :smile:" for number in range(30)) + "\nend"
    llm.reply = reply
    with LiveView(terminal, llm.tokenizer, PARAMS) as view:
        player = Player(["p>", "q>"], 1, view, Meter(llm))
        player.play(llm.stream(["p>", "q>"], SamplingParams(max_tokens=None)))
    screen = Screen()
    screen.feed(written(terminal))
    text = screen.text()
    for prompt, number in (("p>", 1), ("q>", 2)):
        assert prompt + reply in text
        assert f"prompt {number} of 2" in text
    assert "tokens/s" not in text  # the status line is gone; the caller prints a summary


def test_a_line_longer_than_the_screen(terminal: Console) -> None:
    llm = FakeLLM(EngineConfig())
    llm.reply = "abcdefghij" * 100
    with LiveView(terminal, llm.tokenizer, PARAMS) as view:
        view.begin(None, "")
        for length in range(5, 1001, 5):
            view._next_draw = 0.0  # draw every time
            view.show(sample(llm.reply[:length]), lambda: Meter(llm).read(1))
    screen = Screen()
    screen.feed(written(terminal))
    assert screen.text().replace("\n", "").strip() == llm.reply


def test_an_interrupted_view_keeps_what_it_showed(terminal: Console) -> None:
    llm = FakeLLM(EngineConfig())

    def interrupted() -> None:
        with LiveView(terminal, llm.tokenizer, PARAMS) as view:
            view.begin(None, "")
            for text in ("begun", "begun, not"):  # the second comes too early to be drawn
                view.show(sample(text), lambda: Meter(llm).read(1))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    screen = Screen()
    screen.feed(written(terminal))
    assert screen.text().strip() == "begun, not"


class Screen:
    """Enough of a terminal to replay what a live display writes."""

    def __init__(self) -> None:
        self._lines: list[str] = [""]
        self._row = 0

    def feed(self, output: str) -> None:
        place = 0
        while place < len(output):
            if output.startswith("\x1b[", place):
                end = next(i for i in range(place + 2, len(output)) if output[i].isalpha())
                self._control(output[place + 2 : end], output[end])
                place = end + 1
                continue
            self._write(output[place])
            place += 1

    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self._lines)

    def _control(self, argument: str, kind: str) -> None:
        if kind == "A":
            self._row -= int(argument or 1)
        elif kind == "K":
            self._lines[self._row] = ""

    def _write(self, character: str) -> None:
        if character == "\n":
            self._row += 1
            if self._row == len(self._lines):
                self._lines.append("")
        elif character != "\r":
            self._lines[self._row] += character


def test_places_of_a_tree_that_were_never_accepted_are_not_told() -> None:
    def told(places: int, accepted: int) -> str:
        metrics = RequestMetrics()
        metrics.count_draft(places, accepted)
        return Status(2, 1.0, metrics, {}).line().partition("accepted ")[2]

    assert told(59, 2) == "1.00 1.00" + " 0.00" * 6 + " …"
    assert told(59, 10) == " ".join(["1.00"] * 10) + " …"
    assert told(4, 0) == "0.00 0.00 0.00 0.00"


def test_drafting_has_no_share_where_nothing_drafts() -> None:
    def told(draft: float) -> str:
        return Status(2, 1.0, RequestMetrics(), {"draft": draft, "target": 1 - draft}).line()

    assert told(0.0) == "2.0 tokens/s · target 100%"
    assert told(0.001) == "2.0 tokens/s · draft 0% target 100%"


def test_drafting_for_nothing_is_told() -> None:
    shares = {"draft": 0.31, "target": 0.69}
    line = Status(2, 1.0, RequestMetrics(), shares, refused=0.12).line()
    assert line == "2.0 tokens/s · draft 31% (12% refused) target 69%"
    assert "refused" not in Status(2, 1.0, RequestMetrics(), shares, refused=0.001).line()


def test_chosen_k_and_speed_up_are_told_where_costs_are_known() -> None:
    metrics = RequestMetrics(decode_seconds=2.0, plain_seconds=3.8)
    for drafted in (4, 3, 0):
        metrics.count_draft(drafted, 0)
    assert Status(3, 1.0, metrics, {}).line().endswith(" · K 2.3 · 1.90x plain")
    metrics.decode_seconds = 0.0
    assert "K " not in Status(3, 1.0, metrics, {}).line()


class Thinking:
    """A parser: text in brackets is reasoning; a star ends the content."""

    def __init__(self) -> None:
        self._quiet = False

    def feed(self, delta: Delta) -> ParsedOutput:
        letters = bytes(delta.token_ids).decode()
        events: list[AnswerEvent] = []
        for letter in letters:
            if letter in "[]":
                self._quiet = letter == "["
            elif letter != "*":
                events.append(Reasoning(letter) if self._quiet else Content(letter))
        return ParsedOutput(events, stop="*" if "*" in letters else None)

    def finish(self) -> Sequence[AnswerEvent]:
        return [Content("!")]


def test_a_narrow_terminal_has_the_parts_that_matter_most() -> None:
    metrics = RequestMetrics(decode_seconds=2.0, plain_seconds=3.8)
    metrics.count_draft(4, 3)
    status = Status(42, 1.0, metrics, {"draft": 0.31, "target": 0.69})
    accepted = ["accepted 1.00 1.00 1.00 0.00", "accepted 1.00 1.00 …", "accepted 1.00 …"]
    ends = " · K 4.0 · 1.90x plain"
    whole = f"42.0 tokens/s · AL 4.00 · {accepted[0]}{ends} · draft 31% target 69%"
    assert status.line() == status.line(len(whole)) == whole
    assert status.line(80) == f"42.0 tokens/s · AL 4.00 · {accepted[0]}{ends}"
    assert status.line(70) == f"42.0 tokens/s · AL 4.00 · {accepted[1]}{ends}"
    assert status.line(63) == f"42.0 tokens/s · AL 4.00 · {accepted[2]}{ends}"
    assert status.line(62) == status.line(1) == f"42.0 tokens/s · AL 4.00{ends}"


def test_reasoning_stands_apart(terminal: Console) -> None:
    text = "[so\nmany]ab[hm]c*d"
    parsed = ParsedAnswer(Thinking())
    added = [span for length in (3, 12, len(text)) for span in parsed.take(sample(text[:length]))]
    parsed.finish()
    assert parsed.text == "so\nmany\n\nab\n\nhm\n\nc!"
    assert [parsed.text[begin:end] for begin, end in parsed.quiet] == ["so\nmany", "hm"]
    assert (parsed.content, parsed.stop) == ("abc!", "*")
    assert [index for index, _ in added] == list(range(text.index("*") + 1))
    with LiveView(terminal, ByteTokenizer(), PARAMS, Thinking) as view:
        view.begin(None, "")
        for length in range(1, len(text) + 1):
            view._next_draw = 0.0
            view.show(sample(text[:length]), lambda: Meter(FakeLLM(EngineConfig())).read(1))
    screen = Screen()
    screen.feed(written(terminal))
    assert screen.text().split() == ["so", "many", "ab", "hm", "c!"]
    shown = Page(TokenColours(ByteTokenizer(), PARAMS, ParsedAnswer(Thinking())), "", 0)
    shown.take(sample(text))
    styles = [
        [(span.start, span.end, str(span.style)) for span in it.spans] for it in shown.rows(9)
    ]
    assert styles == [[(0, 2, "dim")], [(0, 4, "dim")], [], [], [], [(0, 2, "dim")], [], []]


def test_a_pipe_gets_the_content(capsys: pytest.CaptureFixture[str]) -> None:
    view = PlainView(PARAMS, Thinking)
    for text in ("[so]a", "b[c]"):
        view.begin(None, "")
        for length in range(1, len(text) + 1):
            view.show(sample(text[:length]), lambda: Meter(FakeLLM(EngineConfig())).read(1))
        view.end()
    assert capsys.readouterr().out == "a!\nb!\n"
