"""The keys of a `speculative_config` that say how drafts are verified.

Where none is given requests with a seed are coupled, so that the seed gives the text of plain
decoding, and all others are verified by rejection, which accepts more.

Synthetic verification forces acceptance, for benchmarks alone: with random weights no draft is ever
accepted, so the verdict is drawn. All other work of the step is done as always; the output means
nothing.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from slipstream.core.errors import UsageError
from slipstream.core.verification import Verification
from slipstream.speculative.options import Options

_LOSSLESS = {
    "rejection": Verification.REJECTION,
    "standard": Verification.REJECTION,
    "block": Verification.BLOCK,
    "coupled": Verification.COUPLED,
}
_SYNTHETIC = "synthetic"


def read_verification(
    options: Options, count: int
) -> tuple[Verification | None, tuple[tuple[float, ...], ...]]:
    """How all requests are verified, None where it is by their seeds; and a benchmark's lists of
    conditional rates for `count` positions, none for lossless verification."""
    method = options.take_str("rejection_sample_method", None)
    length = options.take("synthetic_acceptance_length")
    rates = options.take("synthetic_acceptance_rates")
    if method == _SYNTHETIC:
        lists = _lists(length, rates, count)
        return Verification.REJECTION, tuple(conditional_rates(rates) for rates in lists)
    if method is not None and method not in _LOSSLESS:
        raise UsageError(
            f"speculative_config: rejection_sample_method {method!r} is not supported; use "
            f"{', '.join(_LOSSLESS)}, or {_SYNTHETIC} in a benchmark"
        )
    if length is not None or rates is not None:
        raise UsageError(
            "speculative_config: synthetic_acceptance_length and synthetic_acceptance_rates need "
            f'rejection_sample_method "{_SYNTHETIC}", which makes the output meaningless'
        )
    return None if method is None else _LOSSLESS[method], ()


def _lists(length: Any, rates: Any, count: int) -> list[tuple[float, ...]]:
    if (length is None) == (rates is None):
        raise UsageError(
            f'speculative_config: rejection_sample_method "{_SYNTHETIC}" needs either '
            "synthetic_acceptance_length or synthetic_acceptance_rates"
        )
    if rates is None:
        if not _is_number(length) or not 1 <= length <= count + 1:
            raise UsageError(
                f"speculative_config: synthetic_acceptance_length must be between 1 and "
                f"{count + 1} (num_speculative_tokens + 1), not {length!r}"
            )
        return [rates_for_length(float(length), count)]
    if isinstance(rates, list | tuple) and rates and isinstance(rates[0], list | tuple):
        return [_rates(one, count) for one in rates]
    return [_rates(rates, count)]


def _rates(rates: Any, count: int) -> tuple[float, ...]:
    if (
        not isinstance(rates, list | tuple)
        or len(rates) != count
        or not all(_is_number(rate) and 0 <= rate <= 1 for rate in rates)
        or any(later > earlier for earlier, later in pairwise(rates))
    ):
        raise UsageError(
            f"speculative_config: synthetic_acceptance_rates must be {count} numbers between 0 and "
            f"1 that never rise, one per position (or a list of such lists), not {rates!r}"
        )
    return tuple(float(rate) for rate in rates)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


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
