"""Chains that end by the drafter's confidence change no text and no distribution."""

from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream import SamplingParams
from slipstream.sampling import verification
from slipstream.speculative import draft_sampling
from slipstream.speculative.catalogue import METHODS
from tests import fake_drafters
from tests.lossless import test_sampled
from tests.lossless.counted_pair import Heads
from tests.lossless.test_greedy import AXES as GREEDY_AXES
from tests.lossless.test_greedy import (
    WAYS,
    make_llm,
    make_prompts,
    plain_tokens,
    remember,
    speculative_config,
    tokens,
)
from tests.lossless.test_sampled import (
    CASES,
    draw,
    exact_distribution,
    p_value,
)
from tests.padded_steps import use_packed_steps
from tests.pairwise import Case
from tests.stopping_policy import StoppingPolicy, TrimmingPolicy, use_stopping_policy

LOOKUPS = ("ngram", "suffix", "custom", "perfect", "wrong")
AXES: dict[str, list[Any]] = {
    "drafter": [name for name in GREEDY_AXES["drafter"] if name not in LOOKUPS],
    "k": [3, 7],
    "rows": [512, 24],
    "blocks": [400, 16],
    "prefix": [False, True],
    "window": [None, 48],  # of those that may have one
    "ended": ["stops", "trims"],
}
WINDOWED = ("draft_model", "self", "eagle3", "p-eagle", "pard", "mtp_modules")


KINDS = {"stops": StoppingPolicy, "trims": TrimmingPolicy}


def ended_by(kind: str, monkeypatch: pytest.MonkeyPatch) -> list[StoppingPolicy]:
    """Engines from here on follow such a policy: stops are of exact steps, trims of captured ones
    with few rows."""
    if kind == "trims":
        use_packed_steps(monkeypatch)
    else:
        monkeypatch.setattr("slipstream.engine.resolve.captures_graphs", lambda *_: False)
    return use_stopping_policy(monkeypatch, KINDS[kind])


ORDINARY = [name for name in AXES["drafter"] if name in (*WAYS, "self", "assistant")]


@pytest.mark.matrix(AXES, ordinary={"drafter": ORDINARY})
def test_greedy_output_is_the_plain_output(
    case: Case,
    tiny_target: str,
    tiny_draft: str,
    tiny_heads: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(METHODS, "fake", fake_drafters.METHOD)
    prompts = make_prompts(4)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    expected = plain_tokens(tiny_target, 4, params)
    remember(prompts, expected)
    policies = ended_by(case["ended"], monkeypatch)
    config = speculative_config(case, tiny_target, tiny_draft, tiny_heads)
    if case["window"] and case["drafter"] in WINDOWED:
        config["draft_window"] = case["window"]
    llm = make_llm(tiny_target, config, case)
    if case["prefix"]:
        llm.generate(prompts, params)
    outputs = llm.generate(prompts, params)
    assert tokens(outputs) == expected
    (policy,) = policies
    asked = policy.asked
    assert any(drafted < planned for planned, drafted in asked)
    if "combination" not in case["drafter"]:
        for item, gain in policy.seen:
            known = gain.num_draft_tokens if item.trim is None else item.num_draft_tokens
            assert len(gain.confidences) == known
    if case["drafter"] == "self" and "draft_window" not in config:
        assert all(gain.num_accepted == gain.num_draft_tokens for _, gain in policy.seen)


STOPPED = {
    **{name: CASES[name] for name in ("draft_model", "eagle3", "pard", "medusa", "assistant")},
    "host_combination": CASES["host_combination"],
    # Its verdict on a position depends on later ones, and so on their number.
    "block": {**CASES["draft_model"], "rejection_sample_method": "block"},
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, "stops") for name in STOPPED), ("draft_model", "trims"), ("block", "trims")],
)
def test_sampled_output_has_the_targets_distribution(
    name: str,
    kind: str,
    pair: tuple[str, str],
    heads: Heads,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert least_p_value(name, kind, pair, heads, monkeypatch) > 0.001


@pytest.mark.parametrize("kind", KINDS)
def test_the_statistic_sees_a_place_that_is_dropped_for_its_token(
    kind: str, pair: tuple[str, str], heads: Heads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ending a chain by the drawn token's probability biases the output, and is detected."""

    def sample_draft(*args: Any, **kwargs: Any) -> Tensor:
        picked = verification.sample_draft(*args, **kwargs)
        if kwargs["probs_out"] is not None:  # no graph for greedy requests
            chances = kwargs["probs_out"].gather(1, picked.unsqueeze(1))
            kwargs["confidence_out"].copy_(chances.squeeze(1))
        return picked

    monkeypatch.setattr(draft_sampling, "sample_draft", sample_draft)
    monkeypatch.setattr(test_sampled, "SAMPLES", 2 * test_sampled.SAMPLES)
    monkeypatch.setattr(test_sampled, "LOTS", 2 * test_sampled.LOTS)
    assert least_p_value("draft_model", kind, pair, heads, monkeypatch) < 1e-6


def least_p_value(
    name: str,
    kind: str,
    pair: tuple[str, str],
    heads: Heads,
    monkeypatch: pytest.MonkeyPatch,
) -> float:
    """The smallest p-value over pairs of tokens within a step and across steps."""
    case = STOPPED[name]
    params: dict[str, Any] = {"temperature": 1.0, **case.get("params", {})}
    exact = exact_distribution(pair[0], params)
    policies = ended_by(kind, monkeypatch)
    drawn = draw(pair, case, params, heads)
    drafted = torch.tensor([drafted for _, drafted in policies[-1].asked]).bincount()
    assert (drafted > 200).sum() >= 2, drafted
    return min(p_value(drawn, exact, places) for places in ((0, 1), (1, 2), (2, 3)))
