"""Routing of mixtures of experts, and the activation of experts."""

from dataclasses import dataclass
from enum import Enum

from torch import Tensor


class Scores(Enum):
    """How a row's scores follow from its router logits, in float32.

    SOFTMAX: the softmax over all experts; the experts with the largest scores are chosen.
    CHOSEN_SOFTMAX: the experts with the largest logits are chosen; the softmax over only these.
    SIGMOID: the sigmoid of each logit. The experts with the largest score + correction are chosen
        within the kept groups. A group is ranked by the sum of its two largest score + correction
        (DeepSeek-V3, arXiv:2412.19437, equation 16).
    """

    SOFTMAX = "softmax"
    CHOSEN_SOFTMAX = "chosen_softmax"
    SIGMOID = "sigmoid"


@dataclass(frozen=True)
class Routing:
    """How a row's experts and their weights follow from its router logits.

    Attributes:
        num_chosen: number of experts of a row (top-k).
        normalised: the weights of a row are divided by their sum.
        scale: factor of the weights, applied last.
        num_groups: number of groups, of equally many experts each.
        kept_groups: number of groups in which a row chooses its experts.
    """

    num_experts: int
    num_chosen: int
    scores: Scores
    normalised: bool = False
    scale: float = 1.0
    num_groups: int = 1
    kept_groups: int = 1


@dataclass(frozen=True, eq=False)
class Router:
    """Computes router logits x W^T + bias of normed rows x [T, H], accumulated in float32.

    Attributes:
        weight: [E, H] in the model's dtype.
        bias: [E] in the model's dtype; None: there is none.
        correction: [E] float32, added to the scores when experts are chosen, but not in their
            weights (`e_score_correction_bias`); None: there is none.
        gains: [E] float32, factors of the experts' weights, applied last; None: all 1.
    """

    routing: Routing
    weight: Tensor
    bias: Tensor | None = None
    correction: Tensor | None = None
    gains: Tensor | None = None


@dataclass(frozen=True)
class ClampedGate:
    """The activation of gpt-oss for gate g and up u: (u + 1) g sigmoid(alpha g), computed from
    g = min(g, limit) and u = clamp(u, -limit, limit)."""

    limit: float
    alpha: float
