"""How many tokens each request drafts."""

from dataclasses import dataclass
from typing import Protocol

from slipstream.core.request import Request


class DraftPolicy(Protocol):
    """Is asked by the scheduler for every request of every step that may draft."""

    @property
    def widths(self) -> tuple[int, ...]:
        """Numbers of draft tokens, rising from 0, that captured steps are padded to: each step to
        the smallest that none of its requests exceeds. The last is the most that the policy gives.
        """

    def num_draft_tokens(self, request: Request, most: int) -> int:
        """From 0 to `most`, which is what lengths leave room for; rows and blocks that are short
        may cut it further."""


@dataclass(frozen=True)
class FixedPolicy:
    """As many as can be of use, up to the request's own number and the engine's K."""

    num_speculative_tokens: int

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(sorted({0, self.num_speculative_tokens}))

    def num_draft_tokens(self, request: Request, most: int) -> int:
        return min(most, request.num_speculative_tokens, self.num_speculative_tokens)
