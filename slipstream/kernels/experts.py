"""How the rows of a mixture choose their experts, and what an expert does between its matrices."""

from dataclasses import dataclass
from enum import Enum

from torch import Tensor


class Scores(Enum):
    """What a row's router logits become, in float32.

    SOFTMAX: probabilities over all experts, the largest of which are chosen.
    CHOSEN_SOFTMAX: the largest logits are chosen; probabilities over these alone.
    SIGMOID: of each logit. Chosen are the largest of score plus correction within the kept groups,
        those whose two largest sums are largest (DeepSeek-V3, arXiv:2412.19437, equation 16).
    """

    SOFTMAX = "softmax"
    CHOSEN_SOFTMAX = "chosen_softmax"
    SIGMOID = "sigmoid"


@dataclass(frozen=True)
class Routing:
    """How a row's experts and their weights follow from its logits.

    Attributes:
        num_chosen: experts of a row.
        normalised: weights are divided by their sum.
        scale: that weights are multiplied by at the end.
        num_groups: of equally many experts each.
        kept_groups: groups that a row may choose from.
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
    """Makes logits of normed rows x [T, H], accumulated in float32: x W^T + bias.

    Attributes:
        weight: [E, H] in the model's dtype.
        bias: [E] in the model's dtype; None without one.
        correction: [E] float32, what is added to scores before experts are chosen; None: nothing.
        gains: [E] float32, what the weights of chosen experts are multiplied by at the end; None:
            nothing.
    """

    routing: Routing
    weight: Tensor
    bias: Tensor | None = None
    correction: Tensor | None = None
    gains: Tensor | None = None


@dataclass(frozen=True)
class ClampedGate:
    """gpt-oss's activation of gate g and up u.

    g = min(g, limit), u = clamp(u, -limit, limit), and out comes (u + 1) g sigmoid(alpha g).
    """

    limit: float
    alpha: float
