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


def test_memory_grows_by_what_comes_behind_the_first_minutes() -> None:
    flat = Findings(memory=[(1.0, 90), (9.0, 100), (11.0, 99), (30.0, 101)])
    assert flat.growth(10.0, 0.0) == pytest.approx(0.01)
    leaking = Findings(memory=[(1.0, 90), (9.0, 100), (11.0, 102), (30.0, 104)])
    assert leaking.growth(10.0, 0.0) > MOST_GROWTH
    assert Findings(memory=[(1.0, 90)]).growth(10.0, 0.0) == 0


def test_memory_is_the_median_of_a_minute() -> None:
    """Two large bodies that met for a moment are no growth; a minute of them is."""
    steady = [(2.0 * number, 100) for number in range(60)]
    assert Findings(memory=[*steady, (121.0, 100), (123.0, 150), (125.0, 100)]).growth(
        120.0, 60.0
    ) == pytest.approx(0)
    leaking = Findings(memory=[*steady, (121.0, 150), (123.0, 150), (125.0, 100)])
    assert leaking.growth(120.0, 60.0) == pytest.approx(0.5)
    assert leaking.growth(120.0, 0.0) == pytest.approx(0.5)
