"""The interface of grammars that can walk along a draft and back."""

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.core.structured import Advance


@dataclass(frozen=True)
class GuidedDraft:
    """A draft after a grammar has changed it.

    Attributes:
        forced: which tokens the grammar put there.
        kept: how many leading tokens are still those of the drafter.
    """

    token_ids: list[int]
    forced: list[bool]
    kept: int


class DraftGuide:
    """The state of one sample in its grammar, which can walk along a draft and back.

    Attributes:
        problem: why a token was refused.
    """

    def __init__(self) -> None:
        self.problem = ""

    def advance(self, token: int) -> Advance:
        """Append a token of the output; there is no way back from it."""
        raise NotImplementedError

    def forced(self) -> list[int]:
        """The tokens that must come next, as far as there is only one possibility."""
        raise NotImplementedError

    def try_token(self, token: int) -> bool:
        """Walk ahead by this token if it is allowed; returns whether it is."""
        raise NotImplementedError

    def leave(self) -> None:
        """Walk back by one token."""
        raise NotImplementedError

    @property
    def complete(self) -> bool:
        """Whether the output is complete, so that nothing can follow."""
        raise NotImplementedError

    def enter(self, token: int) -> bool:
        """Walk ahead by this token; returns whether it was allowed and anything can follow it."""
        if not self.try_token(token):
            return False
        if self.complete:
            self.leave()
            return False
        return True

    def follow(self, guess: Sequence[int], room: int, certain: bool) -> GuidedDraft:
        """Take the drafter's token where the grammar leaves a choice, else the forced token.

        Whether a draft token is replaced depends only on the tokens before it. A sampled token is
        never dropped because of what it is, which would bias the output: one that the grammar does
        not allow stays in the draft, and verification rejects it.

        Args:
            guess: the drafter's tokens.
            room: maximum number of tokens.
            certain: the drafter's tokens were not sampled.
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
