"""Forced acceptance, for benchmarks alone: the output means nothing, the work is real.

With random weights no draft is ever accepted, so a benchmark draws the verdict instead. Everything
else of the step, the target's distributions included, is computed as always.
"""

from collections.abc import Sequence
from itertools import pairwise


def rates_for_length(acceptance_length: float, num_speculative_tokens: int) -> tuple[float, ...]:
    """Unconditional acceptance rates per position whose sum is acceptance_length - 1.

    The schedule of least variance: the first positions always, one now and then, the rest never.
    `acceptance_length` lies between 1 and num_speculative_tokens + 1.
    """
    left = acceptance_length - 1
    return tuple(min(1.0, max(0.0, left - place)) for place in range(num_speculative_tokens))


def conditional_rates(rates: Sequence[float]) -> tuple[float, ...]:
    """The chance that each position is accepted when all before it were.

    Args:
        rates: unconditional, so they never rise.
    """
    return tuple(rate / before if before > 0 else 0.0 for before, rate in pairwise((1.0, *rates)))
