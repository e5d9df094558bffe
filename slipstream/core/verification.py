"""How the target judges drafts: ways that differ in which tokens they accept, never in the
distribution of the output."""

from enum import IntEnum


class Verification(IntEnum):
    """A request's way of verification. The values are known to all backends."""

    # A draft token is accepted with probability min(1, p / q); behind a refusal max(p - q, 0) is
    # sampled. Which tokens are drafted decides which text a seed gives.
    REJECTION = 0
    # The target samples every place with noise of (seed, position) alone, and a draft token is
    # accepted where it is that sample: the text is that of plain decoding, whatever is drafted.
    COUPLED = 1
    # All tokens of a draft are judged together: more of them are accepted than by rejection.
    BLOCK = 2
