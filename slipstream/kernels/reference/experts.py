"""Mixtures of experts in plain torch; see `kernels/experts.py` and `ExpertsParts`."""

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.experts import ClampedGate, Router, Routing, Scores
from slipstream.kernels.formats.weight import Weight
from slipstream.kernels.norm import Activation
from slipstream.kernels.reference.dense import activated
from slipstream.kernels.table import ExpertsParts, SharedExpert


def experts(x: Tensor, parts: ExpertsParts) -> Tensor:
    """x [T, H], after the norm -> the weighted sum of each row's experts [T, H], rounded once."""
    chosen, weights = route(x, parts.router)
    outputs = x.new_zeros((*chosen.shape, x.shape[1]), dtype=torch.float32)
    for expert in sorted(set(chosen.flatten().tolist())):
        rows, places = (chosen == expert).nonzero(as_tuple=True)
        outputs[rows, places] = _expert(x[rows], parts, expert)
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for place in range(chosen.shape[1]):  # in the order of choice, so that sums have one order
        total += outputs[:, place] * weights[:, place, None]
    if parts.shared is not None:
        total += _shared_expert(x, parts.shared)
    return total.to(x.dtype)


def route(x: Tensor, router: Router) -> tuple[Tensor, Tensor]:
    """x [T, H] -> each row's experts [T, k] int64, the first choice first, and their weights
    [T, k] float32."""
    logits = F.linear(x.float(), router.weight.float())
    if router.bias is not None:
        logits = logits + router.bias.float()
    chosen, weights = choose(logits, router.routing, router.correction)
    return chosen, weights if router.gains is None else weights * router.gains[chosen]


def choose(logits: Tensor, routing: Routing, correction: Tensor | None) -> tuple[Tensor, Tensor]:
    """logits [T, E] float32 -> like `route`. Among equal values the lower index comes first."""
    scores = logits
    if routing.scores is Scores.SOFTMAX:
        scores = logits.softmax(-1)
    elif routing.scores is Scores.SIGMOID:
        scores = logits.sigmoid()
    preferred = scores if correction is None else scores + correction
    if routing.num_groups > 1:
        preferred = _within_groups(preferred, routing)
    order = preferred.argsort(dim=-1, descending=True, stable=True)
    chosen = order[:, : routing.num_chosen]
    weights = scores.gather(-1, chosen)
    if routing.scores is Scores.CHOSEN_SOFTMAX:
        weights = weights.softmax(-1)
    if routing.normalised:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)  # sigmoids may all be 0
    return chosen, weights * routing.scale


def _within_groups(preferred: Tensor, routing: Routing) -> Tensor:
    """`preferred` [T, E] with minus infinity for the experts of groups that a row does not keep."""
    grouped = preferred.view(len(preferred), routing.num_groups, -1)
    best = grouped.topk(2, dim=-1).values.sum(-1)
    order = best.argsort(dim=-1, descending=True, stable=True)
    dropped = torch.ones_like(best, dtype=torch.bool)
    dropped.scatter_(-1, order[:, : routing.kept_groups], False)
    return grouped.masked_fill(dropped.unsqueeze(-1), -torch.inf).flatten(1)


def _expert(x: Tensor, parts: ExpertsParts, expert: int) -> Tensor:
    """One expert's rows x [n, H] -> [n, H] float32, not weighted yet."""
    gate_up_bias = None if parts.gate_up_bias is None else parts.gate_up_bias[expert]
    gate_up = _product(x, _of_expert(parts.gate_up, expert, parts), gate_up_bias)
    gate, up = gate_up.chunk(2, -1)
    active = gated(gate, up, parts.clamp, parts.activation).to(x.dtype)
    down_bias = None if parts.down_bias is None else parts.down_bias[expert]
    return _product(active, _of_expert(parts.down, expert, parts), down_bias)


def gated(
    gate: Tensor, up: Tensor, clamp: ClampedGate | None, activation: Activation = Activation.SILU
) -> Tensor:
    """The input of an expert's second matrix, in float32."""
    if clamp is None:
        return activated(gate, activation) * up
    gate = gate.clamp(max=clamp.limit)
    up = up.clamp(-clamp.limit, clamp.limit)
    return (up + 1) * gate * torch.sigmoid(clamp.alpha * gate)


def _of_expert(stacked: Weight, expert: int, parts: ExpertsParts) -> Weight:
    rows = stacked.shape[0] // parts.router.routing.num_experts
    return stacked.rows(expert * rows, (expert + 1) * rows)


def _product(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """[n, N] float32, without rounding to a smaller dtype."""
    product = weight.logits(x)
    return product if bias is None else product + bias.float()


def _shared_expert(x: Tensor, shared: SharedExpert) -> Tensor:
    gate, up = _product(x, *shared.gate_up).chunk(2, -1)
    output = _product((F.silu(gate) * up).to(x.dtype), *shared.down)
    if shared.gate is None:
        return output
    return output * torch.sigmoid(F.linear(x.float(), shared.gate.float()))
