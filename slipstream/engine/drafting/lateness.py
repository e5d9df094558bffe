"""Requests that end too soon for a drafter that lacks their prompts.

A draft model with a window, or without shared prefixes, computes a prompt (what its window sees of
it) in the first step in which the request drafts. A request with few tokens left gains less.
"""

from collections.abc import Sequence

from slipstream.core.request import Request
from slipstream.engine.drafting.acceptance import Acceptance, survivals
from slipstream.engine.drafting.choice import CostTable, StepCosts


class Lateness:
    """Keeps requests from drafting whose gain is less than the time for their prompts.

    Args:
        tokens: the most tokens of a prompt that the drafter computes when a request first drafts; 0
            if it computes prompts with the target.
    """

    def __init__(self, acceptance: Acceptance, costs: StepCosts, tokens: int) -> None:
        self._acceptance, self._costs, self._tokens = acceptance, costs, tokens
        self._plain = 0.0  # seconds of a plain step for each of its tokens

    def bounds(self, requests: Sequence[Request], bounds: list[int], table: CostTable) -> list[int]:
        """The bounds of draft tokens for a new choice: 0 for requests that end too soon."""
        if not self._tokens:
            return bounds
        self._plain = table.plain / len(requests)
        return [self.bound(*pair) for pair in zip(requests, bounds, strict=True)]

    def bound(self, request: Request, bound: int) -> int:
        """The bound of a request; 0 if it ends too soon."""
        if not (self._tokens and bound):
            return bound
        history = self._acceptance.of(request)
        # As though drafts and their rows took no time.
        chances = history.traffic.chances
        gained = sum(survivals(chances, len(chances)))
        left = request.max_tokens - request.num_output_tokens
        saved = left * self._plain * gained / (1 + gained)
        prompt = self._costs.prompt_seconds(min(request.num_tokens, self._tokens))
        history.ends_soon = not history.has_drafted and saved < prompt
        return 0 if history.ends_soon else bound
