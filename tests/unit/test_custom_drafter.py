"""A user's class drafts; what it does wrong is told by its name and leaves the engine as it was."""

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import slipstream
from slipstream import LLM, SamplingParams, UsageError
from tests.padded_steps import use_padded_steps
from tests.user_drafters import Scripted

ROOT = Path(slipstream.__file__).parents[1]
SCRIPTED = "tests.user_drafters:Scripted"
PROMPTS = [{"prompt_token_ids": [5, 9, 14, 33, 5, 9]}, {"prompt_token_ids": [7] * 20}]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("seen", "forgotten"):
        monkeypatch.setattr(Scripted, name, [])


def make(target: str, model: Any = SCRIPTED, **keys: Any) -> LLM:
    config = {"method": "custom", "model": model, **keys}
    return LLM(
        target,
        speculative_config=config,
        skip_tokenizer_init=True,
        num_kv_blocks=16,
        block_size=8,
        max_model_len=64,
    )


def plain(target: str) -> list[list[int]]:
    return tokens(LLM(target, skip_tokenizer_init=True, num_kv_blocks=16).generate(PROMPTS, GREEDY))


def tokens(outputs: Any) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def answer_with(monkeypatch: pytest.MonkeyPatch, answer: Callable[[Any], Any]) -> None:
    monkeypatch.setattr(Scripted, "answer", staticmethod(answer))


def test_a_class_sees_the_requests_and_its_guesses_are_verified(
    tiny_target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = plain(tiny_target)
    whole = {
        tuple(p["prompt_token_ids"]): p["prompt_token_ids"] + text
        for p, text in zip(PROMPTS, expected, strict=True)
    }

    def know(requests: Any) -> Any:
        rows = []
        for one in requests:
            text = whole[one.token_ids[: one.num_prompt_tokens]]
            assert list(one.token_ids) == text[: len(one.token_ids)]
            assert 1 <= one.most_tokens <= 4
            rows.append(text[len(one.token_ids) :])  # more than can be used: cut
        return rows

    answer_with(monkeypatch, know)
    llm = make(tiny_target)
    outputs = llm.generate(PROMPTS, GREEDY)
    assert tokens(outputs) == expected
    assert llm.metrics.num_steps == 3  # 12 tokens, 5 a step
    llm.generate(PROMPTS[0], GREEDY)  # before its first guess it hears of those that ended
    assert sorted(Scripted.forgotten) == ["0", "1"]


@pytest.mark.parametrize(
    "keys",
    [
        {"model": "tests.user_drafters.LastFollower"},
        {"method": "custom_class"},
        {"model": "tests.user_drafters:Choosy", "options": {"flavour": "sweet"}},
        {"model": "tests.user_drafters:Tensors"},
    ],
    ids=str,
)
def test_other_ways_to_name_a_class_and_to_answer(keys: dict[str, Any], tiny_target: str) -> None:
    llm = make(tiny_target, **{"model": "tests.user_drafters:LastFollower", **keys})
    outputs = llm.generate(PROMPTS, GREEDY)
    assert tokens(outputs) == plain(tiny_target)
    assert all(output.metrics.num_drafts for output in outputs)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model": None}, "method custom needs model; give the class as package.module:Class"),
        ({"model": "Class"}, "'Class' names no class; give the class as package.module:Class"),
        ({"model": "no_such.module:Class"}, "no module no_such; set PYTHONPATH"),
        ({"model": "tests.no_such:Class"}, "no module tests.no_such; set PYTHONPATH"),
        (
            {"model": "tests.broken_user_drafters:Class"},
            "importing tests.broken_user_drafters: RuntimeError: the licence server is asleep",
        ),
        ({"model": "tests.user_drafters:No"}, "has no class No; it has LastFollower, Scripted"),
        ({"model": "tests.user_drafters:not_a_class"}, "has no class not_a_class"),
        ({"model": "tests.user_drafters:WithoutGuess"}, r"has no method guess\(requests\)"),
        (
            {"model": "tests.user_drafters:Choosy", "options": {"flavour": "sour"}},
            "Choosy cannot be made with options .*sour.*: ValueError: no sour",
        ),
        ({"model": "tests.user_drafters:Choosy"}, "Choosy cannot be made .*TypeError.*flavour"),
        ({"options": [1]}, "options must be a mapping of keyword arguments"),
        ({"prompt_lookup_max": 3}, "unknown key prompt_lookup_max for method custom"),
    ],
    ids=str,
)
def test_a_class_that_cannot_be_made_is_refused(
    keys: dict[str, Any], message: str, tiny_target: str
) -> None:
    with pytest.raises(UsageError, match=message):
        make(tiny_target, **keys)


def fail(requests: Any) -> Any:
    raise KeyError("shelf")


@pytest.mark.breaks_steps
@pytest.mark.parametrize("steps", ["exact", "padded"])
@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (fail, "failed in guess: KeyError: 'shelf'"),
        (lambda requests: None, "returned None for [123] requests"),
        (lambda requests: [[1]] * 4, r"returned \[\[1\].* for [123] requests"),
        (lambda requests: "abcd", "returned 'abcd' for [123] requests"),
        (lambda requests: [1 for _ in requests], "returned 1 for request [0-9]"),
        (lambda requests: [None for _ in requests], "returned None for request [0-9]"),
        (lambda requests: ["a" for _ in requests], "returned 'a' for request [0-9]"),
        (lambda requests: [[1.5] for _ in requests], r"returned \[1.5\] for request [0-9]"),
        (lambda requests: [[1, 96] for _ in requests], "guessed token 96 .* ids from 0 to 95"),
        (lambda requests: [[-1] for _ in requests], "guessed token -1"),
    ],
)
def test_wrong_guesses_are_told_and_change_nothing(
    answer: Callable[[Any], Any],
    message: str,
    steps: str,
    tiny_target: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also for guesses in the middle of a text, beside another running request."""
    expected = plain(tiny_target)
    if steps == "padded":
        use_padded_steps(monkeypatch)
    llm = make(tiny_target)
    for good_calls in (0, 3):
        Scripted.seen.clear()

        def late(requests: Any, good: int = good_calls) -> Any:
            other = any(it.token_ids[:2] == (7, 7) for it in requests)  # the second prompt
            good_call = len(Scripted.seen) <= good or not other
            return [[1, 2]] * len(requests) if good_call else answer(requests)

        answer_with(monkeypatch, late)
        stream = llm.stream(PROMPTS[0], GREEDY)
        if good_calls:
            next(stream)
        with pytest.raises(UsageError, match=f"custom drafter {SCRIPTED}.*{message}") as error:
            llm.generate(PROMPTS, GREEDY)
        assert "\n" not in str(error.value)
        llm.engine.scheduler.check_invariants()
        answer_with(monkeypatch, lambda requests: [[1, 2]] * len(requests))
        *_, last = stream
        assert tokens([last]) == expected[:1]
        assert tokens(llm.generate(PROMPTS, GREEDY)) == expected
        blocks = llm.engine.scheduler.block_manager
        assert blocks.num_available == blocks.num_blocks


def test_the_example_runs_and_is_short(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = ROOT / "examples" / "custom_drafter.py"
    assert len(example.read_text().splitlines()) <= 40
    monkeypatch.setattr(sys, "path", [str(example.parent), *sys.path])
    runpy.run_path(str(example), run_name="__main__")
    printed = capsys.readouterr().out
    words = printed.split()
    assert int(words[3]) < int(words[0]) / 3, printed
