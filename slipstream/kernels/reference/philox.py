"""Philox4x32-10, a counter-based random generator (Salmon et al. 2011, "Parallel Random Numbers").

A word depends on its counter and key alone: no state to keep, no order to respect, and the same
bits on every device.
"""

from torch import Tensor

WORD_BITS = 32
WORD_MASK = (1 << WORD_BITS) - 1

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # golden ratio, sqrt(3) - 1

Words4 = tuple[Tensor, Tensor, Tensor, Tensor]
Words2 = tuple[Tensor, Tensor]


def philox(counter: Words4, key: Words2) -> Words4:
    """Four random words for each counter.

    Args:
        counter: four int64 tensors of words in [0, 2^32), of shapes that broadcast.
        key: two such tensors.

    Returns:
        Four int64 tensors of words in [0, 2^32), of the broadcast shape.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # int64 wraps modulo 2^64, so both halves of the product keep every bit.
        low = c0 * MULTIPLIERS[0]
        high = c2 * MULTIPLIERS[1]
        c0 = ((high >> WORD_BITS) ^ c1 ^ k0) & WORD_MASK
        c2 = ((low >> WORD_BITS) ^ c3 ^ k1) & WORD_MASK
        # Only their low words count. They are not cut yet: the next round's masks do that.
        c1, c3 = high, low
        k0 = (k0 + KEY_STEPS[0]) & WORD_MASK
        k1 = (k1 + KEY_STEPS[1]) & WORD_MASK
    return c0, c1 & WORD_MASK, c2, c3 & WORD_MASK


def split_words(values: Tensor) -> Words2:
    """The low and high 32-bit words of int64 `values`, each in [0, 2^32)."""
    return values & WORD_MASK, (values >> WORD_BITS) & WORD_MASK
