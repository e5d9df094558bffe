"""Outputs that go round in circles, and when to end them."""

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.core.errors import UsageError

MOST_PATTERN = 128  # tokens; every size is looked for behind every token
MOST_REPEATS = 64


@dataclass(frozen=True, kw_only=True)
class RepetitionDetection:
    """Ends an output whose last tokens are one pattern, over and over.

    Args:
        max_pattern_size, min_pattern_size: tokens in the pattern; 0 as the smallest is 1, and 0 as
            the largest looks for nothing.
        min_count: how often it comes, the first time included.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.min_pattern_size <= self.max_pattern_size <= MOST_PATTERN:
            raise UsageError(
                "repetition_detection needs 0 <= min_pattern_size <= max_pattern_size <= "
                f"{MOST_PATTERN}"
            )
        if self.max_pattern_size and not 2 <= self.min_count <= MOST_REPEATS:
            raise UsageError(f"repetition_detection needs a min_count from 2 to {MOST_REPEATS}")

    @property
    def most_tokens(self) -> int:
        """Tokens at the end that `found` looks at."""
        return self.max_pattern_size * self.min_count

    def found(self, tokens: Sequence[int]) -> bool:
        """Whether these tokens end so."""
        last = len(tokens) - 1
        for size in range(max(1, self.min_pattern_size), self.max_pattern_size + 1):
            repeated = size * (self.min_count - 1)
            if repeated + size > len(tokens):
                return False  # as are larger ones
            if tokens[last] == tokens[last - size] and (
                tokens[-repeated:] == tokens[-repeated - size : -size]
            ):
                return True
        return False
