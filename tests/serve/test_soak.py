"""What the soak of a server (`benchmarks.soak`) makes of answers."""

import json
from typing import Any

import pytest

from benchmarks.soak import MOST_GROWTH, Findings
from benchmarks.soak_clients import BrokenError, read_stream, text_of


def stream(*events: dict[str, Any], done: bool) -> str:
    lines = [f"data: {json.dumps(event)}" for event in events] + ["data: [DONE]"] * done
    return "\n\n".join(lines)


@pytest.mark.parametrize(
    "content",
    [
        stream({"choices": [{"text": "a"}]}, {"choices": [{"text": "b"}]}, done=True),
        stream({"choices": [{"delta": {"content": "ab"}}]}, {"choices": []}, done=True),
        stream(
            {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "ab"}},
            {"type": "message_stop"},
            done=False,
        ),
        stream(
            {"type": "response.output_text.delta", "delta": "ab"},
            {"type": "response.completed", "response": {}},
            done=False,
        ),
    ],
)
def test_streams_of_all_protocols_are_read(content: str) -> None:
    assert read_stream(content) == "ab"


@pytest.mark.parametrize(
    "answer",
    [
        {"choices": [{"text": "ab"}]},
        {"choices": [{"message": {"content": "ab"}}]},
        {"content": [{"type": "text", "text": "ab"}]},
        {"output": [{"type": "message", "content": [{"type": "output_text", "text": "ab"}]}]},
    ],
)
def test_answers_of_all_protocols_are_read(answer: dict[str, Any]) -> None:
    assert text_of(answer) == "ab"


@pytest.mark.parametrize(
    "content",
    [
        stream({"choices": [{"text": "a"}]}, done=False),
        stream({"choices": [{"text": "a"}]}, {"error": {"message": "it broke"}}, done=True),
        stream({"type": "error", "error": {}}, done=False),
        "",
    ],
)
def test_a_stream_without_its_end_is_broken(content: str) -> None:
    with pytest.raises(BrokenError):
        read_stream(content)


def test_memory_that_goes_up_and_down_is_no_growth() -> None:
    wandering = [(10.0 * number, (80, 100, 120)[number % 3]) for number in range(360)]
    assert Findings(memory=wandering).growth(600.0) == pytest.approx(0)
    assert Findings(memory=wandering[:100]).growth(600.0) == 0


def test_memory_that_goes_up_is_growth() -> None:
    leaking = Findings(memory=[(10.0 * number, 100 + number) for number in range(360)])
    assert leaking.growth(600.0) > leaking.peak(600.0) > MOST_GROWTH


def test_a_peak_is_of_a_minute_not_of_a_moment() -> None:
    steady = [(10.0 * number, 100) for number in range(120)]
    assert Findings(memory=[*steady, (1201.0, 500)]).peak(600.0) == pytest.approx(4)
    assert Findings(memory=[*steady, (1201.0, 100), (1202.0, 500), (1203.0, 100)]).peak(
        600.0
    ) == pytest.approx(0)
