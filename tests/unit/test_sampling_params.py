"""SamplingParams: what is refused, and with which words."""

from typing import Any

import pytest

from slipstream.core.errors import UsageError
from slipstream.core.sampling_params import SamplingParams

HUGE = 10**400  # no float holds it
NAN, INFINITY = float("nan"), float("inf")

REFUSED: dict[str, tuple[list[object], str]] = {
    "n": ([0, -1, 1.0, True, None], "n must be an integer of at least 1"),
    "temperature": ([-0.1, NAN, INFINITY, HUGE, "1", None, True], "temperature must be 0"),
    "top_k": ([-2, 1.5, True, None], "top_k must be an integer"),
    "top_p": ([0, 0.0, -0.1, 1.1, NAN, HUGE, None], "top_p must be above 0"),
    "min_p": ([-0.1, 1.1, NAN, None], "min_p must be between 0 and 1"),
    "presence_penalty": ([-2.1, 2.1, NAN, None], "presence_penalty must be between"),
    "frequency_penalty": ([-2.1, 2.1, NAN, None], "frequency_penalty must be between"),
    "repetition_penalty": ([0, -1.0, NAN, INFINITY, HUGE], "repetition_penalty must be above 0"),
    "logit_bias": (
        [{-1: 1.0}, {"5": 1.0}, {True: 1.0}, {1.5: 0.0}, {5: 100.5}, {5: NAN}, {5: None}, [5], 5],
        "logit_bias",
    ),
    "allowed_token_ids": ([[-1], ["a"], [True], "12", 5, []], "allowed_token_ids must"),
    "stop_token_ids": ([[-1], [1.0], "12", 5, [None]], "stop_token_ids must hold token ids"),
    "bad_words": ([[""], [5], "word", 5, [None]], "bad_words must hold non-empty strings"),
    "stop": (["", ["a", ""], [5], 5, [None]], "stop must hold non-empty strings"),
    "min_tokens": ([-1, 1.0, True, None, 17], "min_tokens"),
    "max_tokens": ([0, -1, 1.0, True], "max_tokens must be an integer"),
    "logprobs": ([-1, 1.0, True], "logprobs must be an integer"),
    "prompt_logprobs": ([-1, 1.0, True], "prompt_logprobs must be an integer"),
    "num_speculative_tokens": ([-1, 1.0, True], "num_speculative_tokens must be an integer"),
    "seed": ([1 << 64, -(1 << 63) - 1, 1.0, True, "1"], "seed must be a 64-bit integer"),
}

ACCEPTED: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"temperature": 1e-30, "top_p": 1e-6, "min_p": 1},
    {"top_k": -1},
    {"top_k": 10**30},
    {"presence_penalty": -2, "frequency_penalty": 2.0, "repetition_penalty": 1e300},
    {"logit_bias": {0: -100, 5: 100.0}},
    {"logit_bias": {}},
    {"allowed_token_ids": (3,)},
    {"stop_token_ids": {1, 2}},
    {"bad_words": ["a"], "stop": ("a", "b")},
    {"min_tokens": 16, "max_tokens": 16},
    {"min_tokens": 10**6, "max_tokens": None},
    {"seed": -(1 << 63)},
    {"seed": (1 << 64) - 1},
    {"logprobs": 0, "prompt_logprobs": 5, "num_speculative_tokens": 0},
]


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, (values, _) in REFUSED.items() for value in values]
)
def test_refused(name: str, value: object) -> None:
    with pytest.raises(UsageError, match=REFUSED[name][1]):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("arguments", ACCEPTED)
def test_accepted(arguments: dict[str, Any]) -> None:
    params = SamplingParams(**arguments)
    for name, value in arguments.items():
        assert getattr(params, name) == value


def test_greedy() -> None:
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams(temperature=-0.0).greedy
    assert not SamplingParams(temperature=1e-9).greedy


def test_stop_strings() -> None:
    assert SamplingParams(stop="ab").stop_strings == ("ab",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert SamplingParams().stop_strings == ()


def test_none_leaves_a_list_out() -> None:
    nothing: Any = None
    params = SamplingParams(stop=nothing, bad_words=nothing, stop_token_ids=nothing)
    assert params == SamplingParams()
    assert params.stop_strings == ()


def test_min_tokens_names_both_numbers() -> None:
    with pytest.raises(UsageError, match=r"min_tokens \(5\) must not exceed max_tokens \(4\)"):
        SamplingParams(min_tokens=5, max_tokens=4)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("max_token", "has no parameter max_token; did you mean max_tokens"),
        ("temprature", "did you mean temperature"),
        ("foo", "^SamplingParams has no parameter foo$"),
    ],
)
def test_a_name_that_is_no_parameter_is_refused(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SamplingParams(**{name: 1})
