"""Forced acceptance has the length that was asked for, and does the step's work."""

import pytest

from slipstream import LLM, SamplingParams
from slipstream.speculative.verification_options import conditional_rates, rates_for_length


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
