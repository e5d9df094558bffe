"""Forced acceptance has the length that was asked for, and does the step's work."""

from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.core.errors import UsageError
from slipstream.speculative.options import conditional_rates, rates_for_length
from tests import stopping_policy
from tests.stopping_policy import use_stopping_policy


@pytest.mark.parametrize("length", [1.0, 1.4, 2.8, 4.0, 5.0])
def test_the_rates_add_up_to_the_length(length: float) -> None:
    rates = rates_for_length(length, 4)
    assert 1 + sum(rates) == pytest.approx(length)
    assert list(rates) == sorted(rates, reverse=True)
    assert sum(0 < rate < 1 for rate in rates) <= 1  # the least variance


def test_conditional_rates_multiply_to_the_unconditional_ones() -> None:
    rates = (0.8, 0.6, 0.6, 0.0, 0.0)
    product, products = 1.0, []
    for rate in conditional_rates(rates):
        product *= rate
        products.append(product)
    assert products == pytest.approx(rates)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("option", "per_position"),
    [
        ({"synthetic_acceptance_length": 2.8}, [1.0, 0.8, 0.0, 0.0]),
        ({"synthetic_acceptance_rates": [0.7, 0.5, 0.5, 0.1]}, [0.7, 0.5, 0.5, 0.1]),
    ],
)
def test_the_engine_accepts_as_often_as_it_was_told(
    option: dict[str, object],
    per_position: list[float],
    temperature: float,
    tiny_target: str,
    tiny_draft: str,
) -> None:
    llm = LLM(
        tiny_target,
        speculative_config={
            "model": tiny_draft,
            "num_speculative_tokens": 4,
            "rejection_sample_method": "synthetic",
            **option,
        },
        skip_tokenizer_init=True,
        num_kv_blocks=400,
    )
    params = SamplingParams(temperature=temperature, max_tokens=100, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": [3, 4, 5]}] * 30, params)
    assert all(len(output.outputs[0].token_ids) == 100 for output in outputs)
    speculation = llm.metrics.speculation
    assert speculation.acceptance_per_position == pytest.approx(per_position, abs=0.05)


LISTS = [[0.9, 0.81, 0.729, 0.0], [0.1, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]]


def engine(target: str, draft: str, rates: Any) -> LLM:
    speculative = {
        "model": draft,
        "num_speculative_tokens": 4,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": rates,
    }
    return LLM(target, speculative_config=speculative, skip_tokenizer_init=True, num_kv_blocks=200)


@pytest.mark.parametrize("stops", [False, True])
def test_each_request_takes_the_list_of_its_seed(
    stops: bool, tiny_target: str, tiny_draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its confidences are the rates of its places."""
    policies = use_stopping_policy(monkeypatch)
    if not stops:
        monkeypatch.setattr(stopping_policy, "stops_of", lambda number: None)
    llm = engine(tiny_target, tiny_draft, LISTS)
    seeds = [*range(30), 2**63 + 5, 2**64 - 1]
    params = [SamplingParams(max_tokens=60, ignore_eos=True, seed=seed) for seed in seeds]
    llm.generate([{"prompt_token_ids": [3, 4, 5]}] * len(seeds), params)
    totals = torch.zeros(3, 2)
    for item, gain in policies[0].seen:
        number = (item.request.seed & (2**63 - 1)) % 3
        rates = conditional_rates(LISTS[number])
        assert gain.confidences == pytest.approx(rates[: gain.num_draft_tokens])
        if gain.num_draft_tokens:
            totals[number] += torch.tensor([gain.num_accepted > 0, 1])
    expected = [first for first, *_ in LISTS]
    accepted, drafted = totals.T
    assert (accepted / drafted).tolist() == pytest.approx(expected, abs=0.06)


@pytest.mark.parametrize("rates", [[[0.5] * 4, [0.5] * 3], [[]], [], [[0.5] * 4, 0.5]])
def test_lists_that_are_none_are_refused(rates: Any, tiny_target: str, tiny_draft: str) -> None:
    with pytest.raises(UsageError, match="4 numbers between 0 and 1"):
        engine(tiny_target, tiny_draft, rates)
