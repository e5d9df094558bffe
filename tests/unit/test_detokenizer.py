"""Text comes out whole, in order, and cut at the first stop string."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.engine.detokenizer import Detokenizer
from slipstream.models.checkpoint import resolve_checkpoint
from slipstream.models.tokenizer import Tokenizer

TOKENIZER = Tokenizer(resolve_checkpoint("demo"))


def detokenizer(
    stop: tuple[str, ...] = (), include_stop: bool = False, min_tokens: int = 0
) -> Detokenizer:
    return Detokenizer(TOKENIZER, True, stop, include_stop, min_tokens)


@given(st.text(max_size=40))
def test_the_text_is_that_of_all_tokens_at_once(text: str) -> None:
    ids = TOKENIZER.encode(text)
    running = detokenizer()
    seen = ""
    for token in ids:
        assert running.push(token) is None
        assert running.text.startswith(seen)
        seen = running.text
    running.finish()
    assert running.text == TOKENIZER.decode(ids)


@given(st.text(max_size=40), st.integers(1, 6))
def test_several_tokens_at_once_give_the_text_that_single_ones_give(text: str, step: int) -> None:
    ids = TOKENIZER.encode(text)
    at_once, one_by_one = detokenizer(), detokenizer()
    for start in range(0, len(ids), step):
        at_once.extend(ids[start : start + step])
        for token in ids[start : start + step]:
            one_by_one.push(token)
        assert at_once.text == one_by_one.text
    at_once.finish()
    assert at_once.text == TOKENIZER.decode(ids)


def test_half_a_character_is_held_back() -> None:
    ids = TOKENIZER.encode("a🚀")
    assert len(ids) > 2
    running = detokenizer()
    for token in ids[:-1]:
        running.push(token)
    assert running.text == "a"
    running.push(ids[-1])
    assert running.text == "a🚀"


def test_an_unfinished_character_comes_out_at_the_end() -> None:
    ids = TOKENIZER.encode("🚀")[:-1]
    running = detokenizer()
    for token in ids:
        running.push(token)
    running.finish()
    assert running.text == TOKENIZER.decode(ids)
    assert running.text


@pytest.mark.parametrize("include_stop", [False, True])
def test_a_stop_string_that_spans_tokens_cuts_the_text(include_stop: bool) -> None:
    stop = "):\n    re"
    ids = TOKENIZER.encode("def f(x):\n    return x")
    running = detokenizer((stop,), include_stop)
    found = next(place for place, token in enumerate(ids) if running.push(token) == stop)
    assert running.text == "def f(x" + (stop if include_stop else "")
    assert found < len(ids) - 1


def test_the_stop_string_that_comes_first_in_the_text_wins() -> None:
    running = detokenizer(("return", "def"))
    found = [running.push(token) for token in TOKENIZER.encode("x def return")]
    assert next(stop for stop in found if stop) == "def"


def test_stop_strings_wait_for_min_tokens() -> None:
    ids = TOKENIZER.encode("a, b, c, d, e")
    running = detokenizer((",",), min_tokens=4)
    found = [running.push(token) for token in ids]
    assert found.index(",") >= 4


def test_special_tokens_are_left_out() -> None:
    end = TOKENIZER.token_to_id("<|im_end|>")
    assert end is not None
    running = detokenizer()
    for token in [*TOKENIZER.encode("ok"), end]:
        running.push(token)
    running.finish()
    assert running.text == "ok"


def test_what_may_begin_a_stop_string_is_not_shown_yet() -> None:
    running = detokenizer(("return x",))
    shown: list[str] = []
    for token in TOKENIZER.encode("def f():\n    return y"):
        running.push(token)
        assert running.text.startswith(running.settled_text)
        assert all(running.settled_text.startswith(before) for before in shown)
        shown.append(running.settled_text)
    assert not any(text.endswith("return ") for text in shown)
    running.finish()
    assert running.settled_text == "def f():\n    return y"
