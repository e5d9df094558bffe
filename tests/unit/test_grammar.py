"""Guides through grammars, and what a request may ask for."""

import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from slipstream.core.errors import UsageError
from slipstream.core.request import FinishReason, Request
from slipstream.core.sampling_params import SamplingParams
from slipstream.core.structured import Advance, StructuredOutput
from slipstream.engine import grammar
from slipstream.engine.grammar import GrammarGuide, Grammars
from slipstream.engine.stop_conditions import COMPLETE_EARLY, append_output
from slipstream.models.tokenizer import Tokenizer
from tests.tokenizers import write_byte_tokenizer, write_tokenizer

pytest.importorskip("llguidance")

PIECES = [*'abc0123456789{}[]":, -/\n', "ab", "bc"]
END = 0
VOCAB = 70  # more than there are tokens: a mask of three words


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_byte_tokenizer(tmp_path_factory.mktemp("words"), PIECES))


@pytest.fixture
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, VOCAB, (END,))


def ids(text: str) -> list[int]:
    """One token a character."""
    return [PIECES.index(letter) + 1 for letter in text]


def guide_of(grammars: Grammars, *ends: int, **wish: Any) -> Any:
    return grammars.guide(StructuredOutput(**wish), frozenset(ends or (END,)))


def allowed(grammars: Grammars, guide: GrammarGuide, tokens: list[int]) -> list[set[str]]:
    """The allowed next tokens at first and after each of the tokens; "" is the end."""
    masks = grammars.masks(len(tokens) + 1)
    assert masks.shape[1] == 3
    grammars.fill(masks, [(guide, 0, tokens)])
    texts = ["", *PIECES, *["?"] * (VOCAB - len(PIECES) - 1)]
    rows = [
        sum((word & 0xFFFFFFFF) << 32 * i for i, word in enumerate(row)) for row in masks.tolist()
    ]
    return [{text for token, text in enumerate(texts) if row >> token & 1} for row in rows]


@pytest.mark.parametrize(
    ("wish", "right", "wrong"),
    [
        ({"regex": "a/b|(?:\n|c)"}, ["a/b", "\n", "c"], ["a", "ab"]),
        ({"regex": r"a\/b"}, ["a/b"], ["a"]),
        ({"choice": ["ab", "bc"]}, ["ab", "bc"], ["a", "abbc"]),
        ({"grammar": "start: n n\nn: /[0-9]/ // a digit"}, ["12"], ["1", "123"]),
        ({"json_schema": {"const": [1]}}, ["[1]"], ["1"]),
        ({"json_schema": True}, ["[1]", "{}"], ["]"]),
        ({"json_object": True}, ["{}", '{"a": 1}'], ["[]", ""]),
    ],
)
def test_a_frame_is_around_every_kind(
    grammars: Grammars, wish: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    frame = 'start: "c"* "-" body'
    for text in (*right, *wrong):
        for before in ("-", "ccc-", ""):
            guide = guide_of(grammars, frame=frame, **wish)
            tokens = ids(before + text)
            fits = guide.matcher.try_consume_tokens(tokens) == len(tokens)
            whole = fits and guide.matcher.is_accepting()
            assert whole == (text in right and before != ""), before + text
    assert guide_of(grammars, frame='start: "-" body', **wish).matcher.compute_ff_tokens()[:1] == [
        PIECES.index("-") + 1
    ]


def test_masks_say_what_may_come(grammars: Grammars) -> None:
    guide = guide_of(grammars, regex="[ab]{1,2}c?")
    rows = allowed(grammars, guide, ids("ab"))
    assert rows == [{"a", "b", "ab", "bc"}, {"", "a", "b", "c", "bc"}, {"", "c"}]
    assert allowed(grammars, guide, ids("ca"))[0] == rows[0]  # what is refused moves nobody


def test_an_end_that_does_not_end_the_request_is_not_allowed(grammars: Grammars) -> None:
    guide = guide_of(grammars, 7, regex="a+")
    assert allowed(grammars, guide, ids("a")) == [{"a"}, {"a"}]
    assert guide.advance(END) is Advance.REFUSED


def test_a_guide_advances_to_the_end(grammars: Grammars) -> None:
    guide = guide_of(grammars, choice=["ab", "abc1"])
    first, second = ids("ab")
    assert guide.advance(first) is Advance.OPEN
    assert guide.advance(second) is Advance.OPEN
    assert guide.advance(END) is Advance.COMPLETE
    guide = guide_of(grammars, choice=["ab"])
    assert [guide.advance(token) for token in ids("ab")] == [Advance.OPEN, Advance.COMPLETE]
    assert guide.advance(first) is Advance.REFUSED
    assert guide.problem


def test_guides_of_one_grammar_know_nothing_of_each_other(grammars: Grammars) -> None:
    first, second = (guide_of(grammars, regex="ab?c") for _ in range(2))
    first.advance(ids("a")[0])
    assert allowed(grammars, second, []) == [{"a", "ab"}]
    assert allowed(grammars, first, []) == [{"b", "c", "bc"}]


# ---------------------------------------------------------------------- drafts

SCHEMA = {"type": "object", "properties": {"abc": {"type": "integer"}}, "required": ["abc"]}


def test_a_guess_is_taken_as_far_as_it_is_allowed(grammars: Grammars) -> None:
    guide = guide_of(grammars, regex="[ab]+[0-9]")
    path = guide.follow(ids("ab1"), 3, certain=True)
    assert (path.token_ids, path.forced, path.kept) == (ids("ab1"), [False] * 3, 3)
    assert guide.follow(ids("abcab"), 5, certain=True).token_ids == ids("ab")
    # One that was sampled stays, to be refused, but nothing after it.
    path = guide.follow(ids("abcab"), 5, certain=False)
    assert (path.token_ids, path.kept) == (ids("abc"), 3)
    assert allowed(grammars, guide, []) == [{"a", "b", "ab"}]  # nothing has moved


@pytest.mark.parametrize("certain", [False, True])
def test_what_a_grammar_forces_takes_the_place_of_guesses(
    certain: bool, grammars: Grammars
) -> None:
    guide = guide_of(grammars, regex='[12]": a0[ab]')
    forced = ids('": a0')
    path = guide.follow(ids("1bb"), 7, certain)
    assert path.token_ids == [*ids("1"), *forced]
    assert path.forced == [False, *[True] * 5]
    assert path.kept == 1
    path = guide.follow(ids('1": a0b'), 7, certain)
    assert (path.token_ids, path.kept) == (ids('1": a0b'), 7)
    assert guide.follow(ids("1"), 3, certain).token_ids == ids('1":')
    assert guide.follow([], 7, certain).token_ids == []
    guide.advance(ids("2")[0])
    assert guide.follow([], 7, certain).token_ids == forced
    assert guide.follow([], 0, certain).token_ids == []


def test_forced_tokens_are_all_that_is_allowed(grammars: Grammars) -> None:
    """So a draft of forced tokens is always accepted."""
    guide = guide_of(grammars, regex="[12]abca0[ab]")
    path = guide.follow(ids("1"), 9, certain=True)
    rows = allowed(grammars, guide, path.token_ids)
    for token, forced, row in zip(path.token_ids, path.forced, rows, strict=False):
        if forced:
            assert row == {PIECES[token - 1]}


def test_nothing_follows_a_guessed_end(grammars: Grammars) -> None:
    guide = guide_of(grammars, regex="a+")
    assert guide.follow([*ids("a"), END, *ids("a")], 3, certain=True).token_ids == [*ids("a"), END]
    assert not guide.enter(ids("b")[0])
    assert guide.enter(ids("a")[0])
    assert not guide.enter(END)
    guide.leave()
    withheld = guide_of(grammars, 9, regex="a+")
    assert withheld.follow([*ids("a"), END], 2, certain=True).token_ids == ids("a")


# ---------------------------------------------------------------------- outputs


def request(guide: GrammarGuide, **params: Any) -> Request:
    return Request(
        request_id="a",
        token_ids=[1, 2],
        params=SamplingParams(**params),
        seed=0,
        stop_token_ids=frozenset({END}),
        max_tokens=params.get("max_tokens", 16),
        num_speculative_tokens=4,
        arrival=0,
        guide=guide,
    )


def test_an_output_ends_with_its_grammar(grammars: Grammars) -> None:
    done = request(guide_of(grammars, regex="ab"), max_tokens=2)
    assert append_output(done, ids("abc"), 100) == (FinishReason.STOP, None)
    assert done.output_token_ids == ids("ab")


def test_an_output_that_is_complete_before_min_tokens_says_so(grammars: Grammars) -> None:
    done = request(guide_of(grammars, regex="ab"), min_tokens=3)
    assert append_output(done, ids("ab"), 100) == (FinishReason.STOP, COMPLETE_EARLY)
    enough = request(guide_of(grammars, regex="ab"), min_tokens=2)
    assert append_output(enough, ids("ab"), 100) == (FinishReason.STOP, None)


def test_a_grammar_that_breaks_says_at_what(grammars: Grammars) -> None:
    items = " | ".join(f'"a{number}"' for number in range(2100))
    failed = request(guide_of(grammars, grammar=f"start: {items}"))
    ending = append_output(failed, ids("a"), 100)
    assert ending is not None
    assert ending[0] is FinishReason.ERROR
    assert "max is 2000" in str(ending[1])


@pytest.mark.parametrize("number", [1, 2100, 10_000])
def test_one_of_many_choices(number: int, grammars: Grammars) -> None:
    texts = [*(f"ab{place}" for place in range(number)), "ab", 'a"]']
    for text in (texts[0], texts[number - 1], 'a"]'):
        guide = guide_of(grammars, choice=texts)
        *steps, last = [guide.advance(token) for token in ids(text)]
        assert set(steps) == {Advance.OPEN}
        assert last is Advance.COMPLETE
    guide = guide_of(grammars, choice=texts)  # the beginning of another one
    assert [guide.advance(token) for token in [*ids("ab"), END]][1:] == [
        Advance.OPEN,
        Advance.COMPLETE,
    ]
    assert guide_of(grammars, choice=texts).advance(ids("b")[0]) is Advance.REFUSED


def test_a_token_that_is_not_allowed_ends_the_output_before_it(grammars: Grammars) -> None:
    failed = request(guide_of(grammars, regex="ab"))
    ending = append_output(failed, ids("aa"), 100)
    assert ending is not None
    assert ending[0] is FinishReason.ERROR
    assert "leaves no token" in str(ending[1])
    assert failed.output_token_ids == ids("a")
    early = request(guide_of(grammars, regex="ab"))
    assert append_output(early, [END], 100) == (FinishReason.ERROR, grammar.NOTHING_LEFT)


# ---------------------------------------------------------------------- compiling


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ({"regex": "["}, "this regex cannot be used"),
        ({"regex": "(?=a)b"}, "look-ahead"),
        ({"json_schema": {"type": "what"}}, "this json_schema cannot be used"),
        ({"json_schema": {"$ref": "#/nowhere"}}, "nowhere"),
        ({"json_schema": {"type": "string", "minLength": 3, "maxLength": 1}}, "minLength"),
        ({"grammar": "start: missing"}, "missing"),
        ({"regex": "é"}, "no sequence of the model's tokens"),
        ({"json_schema": {"$ref": "#"}}, "refers to itself without end"),
    ],
)
def test_a_bad_grammar_is_refused(wish: dict[str, Any], words: str, grammars: Grammars) -> None:
    for _ in range(2):
        with pytest.raises(UsageError, match=words):
            grammars.compile(StructuredOutput(**wish))
    grammars.compile(StructuredOutput(regex="a"))


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"regex": "a", "choice": ["b"]},
        {"regex": ""},
        {"regex": 3},
        {"grammar": ["a"]},
        {"choice": []},
        {"choice": "abc"},
        {"choice": ["a", ""]},
        {"choice": [1]},
        {"json_object": 1},
        {"json_schema": "{"},
        {"json_schema": "[1]"},
        {"json_schema": 5},
        {"json_schema": False},
        {"json_schema": {"a": {1, 2}}},
        {"json_schema": {"maximum": float("nan")}},
    ],
)
def test_what_is_no_wish_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        StructuredOutput(**given)
    with pytest.raises(UsageError, match="structured must be"):
        SamplingParams(structured="json")  # type: ignore[arg-type]


def test_a_schema_that_changes_later_changes_nothing() -> None:
    schema: dict[str, Any] = {"type": "object"}
    wish = StructuredOutput(json_schema=schema)
    schema["type"] = "array"
    assert (wish.kind, json.loads(wish.text)) == ("json_schema", {"type": "object"})
    assert StructuredOutput(json_schema='{"type":"object"}').text == wish.text


def test_the_latest_grammars_are_kept(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    compiled = grammar._compile

    def noted(backend: Any, wish: StructuredOutput, words: Any) -> Any:
        made.append(wish.text)
        return compiled(backend, wish, words)

    monkeypatch.setattr(grammar, "_compile", noted)
    monkeypatch.setattr(grammar, "MOST_COMPILED", 2)
    for text in ("a", "b", "a", "c", "a", "b"):
        grammars.compile(StructuredOutput(regex=text))
    assert made == ["a", "b", "c", "b"]
    guide_of(grammars, regex="b")
    assert made == ["a", "b", "c", "b"]


def test_threads_may_compile_side_by_side(grammars: Grammars) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for index in range(20):
                grammars.compile(StructuredOutput(regex=f"[ab]{{{1 + (index + number) % 7}}}c"))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        assert allowed(grammars, guide_of(grammars, regex="[ab]c"), []) == [{"a", "b", "bc"}]
    for thread in threads:
        thread.join()
    assert not failures


def test_without_the_package_the_error_names_the_extra(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UsageError, match=r"slipstream\[structured\]"):
        grammars.compile(StructuredOutput(regex="a"))


def test_without_a_tokenizer_there_are_no_grammars(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="skip_tokenizer_init"):
        Grammars(None, VOCAB, (END,)).compile(StructuredOutput(regex="a"))
    words = Tokenizer(write_tokenizer(tmp_path / "words", ["<unk>", "one", "two"]))
    with pytest.raises(UsageError, match="byte-level"):
        Grammars(words, 3, ()).compile(StructuredOutput(regex="a"))


def test_what_is_wrong_is_told_in_one_line(grammars: Grammars) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"regex": "("}, "this regex cannot be used: unclosed group"),
        ({"grammar": "start: missing"}, "missing"),
        ({"grammar": "start: /(/"}, "unclosed group"),
    ]
    for wish, reason in cases:
        with pytest.raises(UsageError) as raised:
            grammars.compile(StructuredOutput(**wish))
        assert reason in str(raised.value)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("regex", ["(a{1000}){1000}", "((a{100}){100}){100}"])
def test_a_grammar_that_takes_too_much_work_is_refused(grammars: Grammars, regex: str) -> None:
    with pytest.raises(UsageError, match="too much work for one token; give its repetitions"):
        grammars.compile(StructuredOutput(regex=regex))
