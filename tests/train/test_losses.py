"""The loss of drafts and its gradient, and the functions that GPUs compile."""

import logging

import pytest
import torch
from torch import Tensor

from slipstream.train import losses
from slipstream.train.compiled import fused
from slipstream.train.losses import distillation
from slipstream.train.target import TargetDistribution

ROWS, TOKENS = 13, 37


def _case(seed: int) -> tuple[Tensor, TargetDistribution, Tensor]:
    """Logits, a target with a row whose top token is not drafted, and weights with zeros."""
    generator = torch.Generator().manual_seed(seed)
    logits, wanted = (3 * torch.randn(2, ROWS, TOKENS, generator=generator)).unbind()
    top = wanted.argmax(-1)
    top[3] = -1
    weight = (torch.rand(ROWS, generator=generator) > 0.3).float()
    return logits, TargetDistribution(top, wanted.bfloat16(), wanted.logsumexp(-1)), weight


def _by_autograd(
    logits: Tensor, target: TargetDistribution, weight: Tensor, argmax_weight: float
) -> Tensor:
    logs, p = torch.log_softmax(logits, -1), torch.softmax(target.logits.float(), -1)
    divergence = torch.nn.functional.kl_div(logs, p, reduction="none").sum(-1)
    first = torch.nn.functional.nll_loss(logs, target.top.clamp_min(0), reduction="none")
    weight = weight * (target.top >= 0)
    mixed = (1 - argmax_weight) * divergence + argmax_weight * first
    return (mixed * weight).sum() / weight.sum().clamp_min(1)


@pytest.mark.parametrize("argmax_weight", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_loss_and_gradient_are_those_of_the_formula(argmax_weight: float, share: float) -> None:
    logits, target, weight = _case(1)
    found, expected = (logits.clone().requires_grad_() for _ in range(2))
    one = distillation(found, target, share * weight, argmax_weight)
    other = _by_autograd(expected, target, share * weight, argmax_weight)
    torch.testing.assert_close(one, other)
    (3 * one).backward()
    (3 * other).backward()
    torch.testing.assert_close(found.grad, expected.grad)
    assert found.grad is not None
    assert bool(found.grad.any()) == (share > 0)
    assert not found.grad[3].any()


def test_the_loss_compiles_as_one_graph() -> None:
    logits, target, weight = _case(2)
    plain = losses._loss_and_gradient.__wrapped__  # type: ignore[attr-defined]
    arguments = (logits, target.logits, target.top.clamp_min(0), weight, 0.5)
    compiled = torch.compile(plain, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*arguments), plain(*arguments))


class _OnGpu(Tensor):
    is_cuda = True


def test_what_cannot_be_compiled_runs_as_it_stands(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    attempts = []

    def refuse(function: object) -> object:
        def compiled(x: Tensor) -> Tensor:
            attempts.append(x)
            raise RuntimeError("no compiler")

        return compiled

    monkeypatch.setattr(torch, "compile", refuse)
    doubled = fused(lambda x: 2 * x)
    ones = torch.ones(2).as_subclass(_OnGpu)
    with caplog.at_level(logging.WARNING):
        assert [doubled(ones).tolist() for _ in range(2)] == [[2.0, 2.0]] * 2
    assert len(attempts) == 1
    assert "no compiler" in caplog.text
    assert doubled(torch.ones(1)).tolist() == [2.0]
