"""Where a context is cut so that many programs can read it at once.

The cuts stand at fixed tokens, whatever the batch: a row's numbers are added up in one order only.
Splits grow with the context, so that a short one still keeps the machine busy and a long one does
not leave too many parts to add up: 8 of 128 tokens, 8 of 256, 16 of 512, then 1024 each.
"""

import triton
import triton.language as tl

SMALLEST = 128  # every cut is a multiple of it


@triton.jit
def split_start(split: tl.tensor) -> tl.tensor:
    """The first token of a split: the largest of four lines, one for each length."""
    return max(max(split * 128, split * 256 - 1024), max(split * 512 - 5120, split * 1024 - 21504))


@triton.jit
def split_of(token: tl.tensor) -> tl.tensor:
    """The split that holds a token: the inverse of `split_start`."""
    return min(
        min(token // 128, (token + 1024) // 256),
        min((token + 5120) // 512, (token + 21504) // 1024),
    )


def most_splits(tokens: int) -> int:
    """How many splits a context of at most `tokens` has."""
    last: int = split_of.fn(max(tokens, 1) - 1)
    return last + 1
