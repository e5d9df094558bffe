"""Log probabilities against float64 and a sort."""

import pytest
import torch

from slipstream.sampling.logits import token_logprobs


def test_against_float64() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 40, generator=generator) * 4
    tokens = torch.tensor([0, 39, 7, 7, 20])
    found = token_logprobs(logits, tokens, 6)
    expected = logits.double().log_softmax(-1)
    assert found.logprobs.dtype == torch.float32
    assert torch.equal(found.token_ids, tokens)
    torch.testing.assert_close(
        found.logprobs.double(), expected.gather(1, tokens[:, None])[:, 0], rtol=1e-5, atol=1e-6
    )
    order = expected.argsort(-1, descending=True)
    assert torch.equal(found.top_ids, order[:, :6])
    torch.testing.assert_close(
        found.top_logprobs.double(), expected.gather(1, order[:, :6]), rtol=1e-5, atol=1e-6
    )
    places = (order == tokens[:, None]).int().argmax(-1) + 1
    assert torch.equal(found.ranks, places)


def test_logits_in_their_place() -> None:
    logits = torch.tensor([[1.5, -3.0, 4.0, 0.25]])
    found = token_logprobs(logits, torch.tensor([0]), 2, normalised=False)
    assert (found.logprobs.item(), found.ranks.item()) == (1.5, 2)
    assert found.top_logprobs.tolist() == [[4.0, 1.5]]


def test_ties_share_the_better_rank() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0]])
    ranks = [token_logprobs(logits, torch.tensor([token]), 0).ranks.item() for token in range(4)]
    assert ranks == [3, 1, 1, 4]


@pytest.mark.parametrize("num_top", [0, 1, 4, 9])
def test_number_of_rivals(num_top: int) -> None:
    found = token_logprobs(torch.zeros(2, 4), torch.tensor([1, 2]), num_top)
    assert found.top_ids.shape == found.top_logprobs.shape == (2, min(num_top, 4))


def test_a_sure_token_has_no_positive_logprob() -> None:
    logits = torch.tensor([[31.7, 3.0, -8.0]])
    found = token_logprobs(logits, torch.tensor([0]), 1)
    assert found.logprobs.item() <= 0
    assert found.logprobs.item() == pytest.approx(-3.4e-13, abs=1e-7)


def test_low_precision_logits_and_no_rows() -> None:
    half = token_logprobs(torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16), torch.tensor([1]), 1)
    assert half.logprobs.dtype == half.top_logprobs.dtype == torch.float32
    none = token_logprobs(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), 2)
    assert none.logprobs.shape == (0,)
    assert none.top_ids.shape == (0, 2)
