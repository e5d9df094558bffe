"""What the scheduler gives out while it plans a step."""

from dataclasses import dataclass

from slipstream.core.batch import DraftPlan
from slipstream.core.limits import StepLimits
from slipstream.core.request import Request

NO_DRAFT = DraftPlan(0)


@dataclass(slots=True, eq=False)
class Share:
    """The share of one request in the step that is being planned."""

    request: Request
    num_new_tokens: int
    num_draft_tokens: int = 0
    admitted: bool = False
    plan: DraftPlan = NO_DRAFT

    @property
    def num_uncomputed(self) -> int:
        """Known tokens that this step would leave uncomputed."""
        return self.request.num_tokens - self.request.num_computed - self.num_new_tokens

    @property
    def is_decoding(self) -> bool:
        return self.num_new_tokens == 1 and self.request.num_computed > 0


@dataclass(slots=True)
class Budget:
    """Rows of the target pass that are still to be given out."""

    left: int

    def take(self, wanted: int) -> int:
        taken = min(wanted, self.left)
        self.left -= taken
        return taken


def may_go_on(request: Request, limits: StepLimits) -> bool:
    """Whether one more token may still leave room for another."""
    if request.num_output_tokens + 1 >= request.max_tokens:
        return False
    return request.num_tokens + 1 < limits.max_model_len
