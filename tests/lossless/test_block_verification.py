"""Block verification accepts as many tokens as it should: never fewer than rejection."""

from itertools import product

import numpy as np
import pytest
import torch

from slipstream.core.sampling_params import SamplingParams, Verification
from slipstream.kernels.reference import SAMPLING as PLAIN
from tests.kernels.sampling_cases import BLOCK, LEAN, judge, make_batch, make_state
from tests.lossless.test_verifier_distribution import (
    DRAFT,
    PROMPT,
    TARGET,
    VOCAB,
    Case,
    oracle,
    run,
)


def expected_accepted(num_draft_tokens: int) -> tuple[float, float]:
    """The exact means of rejection and of block verification, from all drafts that there are."""
    params = SamplingParams()
    p, q = (
        np.stack([oracle(row, params, PROMPT) for row in table.double().cpu().numpy()])
        for table in (TARGET, DRAFT)
    )
    by_rejection = by_block = 0.0
    for length in range(1, num_draft_tokens + 1):
        for path in product(range(VOCAB), repeat=length):
            chance = product_of_ratios = weight = 1.0
            last = PROMPT[-1]
            for token in path:
                ratio = p[last, token] / q[last, token]
                chance *= q[last, token]
                product_of_ratios *= min(1.0, ratio)
                weight = min(1.0, weight * ratio)
                last = token
            # Prefix i or a longer one is accepted with this probability.
            by_rejection += chance * product_of_ratios
            by_block += chance * weight
    return by_rejection, by_block


@pytest.mark.parametrize("num_draft_tokens", [1, 3, 5])
def test_as_many_tokens_are_accepted_as_the_theory_says(num_draft_tokens: int) -> None:
    rounds = 4
    by_rejection, by_block = expected_accepted(num_draft_tokens)
    if num_draft_tokens == 1:
        assert by_block == pytest.approx(by_rejection)
    else:
        assert by_block > by_rejection + 0.05
    expected = {Verification.REJECTION: by_rejection, Verification.BLOCK: by_block}
    for verification, mean in expected.items():
        found = run(Case(num_draft_tokens, verification=verification), rounds).first_step - 1.0
        error = float(found.std()) / len(found) ** 0.5
        assert float(found.mean()) == pytest.approx(mean, abs=5 * error)


def test_a_draft_of_one_token_is_judged_as_by_rejection() -> None:
    states = [
        make_state(kinds, 37, torch.device("cpu")) for kinds in (LEAN, [k | BLOCK for k in LEAN])
    ]
    accepted = 0
    for seed in range(20):
        verdicts = []
        for state in states:
            verdicts.append(judge(PLAIN, *make_batch(state, 1, seed, bool(seed % 2), True), state))
        assert verdicts[0] == verdicts[1]
        accepted += sum(verdicts[0][2])
    assert accepted
