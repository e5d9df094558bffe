"""Guides, which follow one sample's output through what it must be, and look ahead along drafts."""

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.core.structured import Advance


@dataclass(frozen=True)
class GuidedDraft:
    """A draft as a grammar leaves it.

    Attributes:
        forced: which tokens are the grammar's own.
        kept: how many of the first are what the drafter guessed.
    """

    token_ids: list[int]
    forced: list[bool]
    kept: int


class DraftGuide:
    """A `Guide` that can go ahead along a draft, and back.

    Args:
        ends: tokens behind which nothing follows.

    Attributes:
        problem: why a token was refused.
    """

    def __init__(self, ends: frozenset[int]) -> None:
        self._ends = ends
        self.problem = ""

    def advance(self, token: int) -> Advance:
        """Take in a token of the output."""
        raise NotImplementedError

    def forced(self) -> list[int]:
        """The only tokens that may follow, as far as they are certain."""
        raise NotImplementedError

    def try_token(self, token: int) -> bool:
        """Go one token ahead, if it is allowed; whether it is."""
        raise NotImplementedError

    def leave(self) -> None:
        """Go back by one token."""
        raise NotImplementedError

    @property
    def complete(self) -> bool:
        """Whether nothing can follow."""
        raise NotImplementedError

    def enter(self, token: int) -> bool:
        """Go one token ahead; whether there is anything to allow behind it."""
        if not self.try_token(token):
            return False
        if token in self._ends:
            self.leave()
            return False
        return True

    def follow(self, guess: Sequence[int], room: int, certain: bool) -> GuidedDraft:
        """Where the grammar leaves a choice take the guess, elsewhere its own tokens.

        Whether a guess is replaced depends on the tokens before it alone. So a sampled one is
        never dropped because of what it is: one that the grammar refuses stays, to be refused.

        Args:
            room: tokens at most.
            certain: the guess was not sampled.
        """
        path = GuidedDraft([], [], 0)
        tokens, own, kept, walked = path.token_ids, True, 0, 0
        while len(tokens) < room:
            forced = self.forced()[: room - len(tokens)]
            if not forced and not (own and len(tokens) < len(guess)):
                break
            for token in forced or [guess[len(tokens)]]:
                place = len(tokens)
                own = own and place < len(guess) and guess[place] == token
                kept += own
                allowed = self.try_token(token)
                walked += allowed
                if allowed or not (certain or forced):
                    tokens.append(token)
                    path.forced.append(bool(forced))
                if not allowed:
                    break
            if not allowed or self.complete:
                break
        for _ in range(walked):
            self.leave()
        return GuidedDraft(tokens, path.forced, min(kept, len(tokens)))
