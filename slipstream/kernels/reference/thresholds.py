"""The thresholds of top_k and top_p, found exactly.

On asynchronous devices the cost depends only on shapes, and the host never waits.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from slipstream.kernels.columns import ALL_COLUMNS, Columns

# top_p counts probability in integers, so that sums are exact in any order and on any device:
# 2^43 units for the most probable token leave room for 2^20 tokens in an int64.
MASS_UNITS = 2.0**43
# Four digits of a radix search hold the 32 bits of a float. Ranks exchange a count of each digit.
DIGIT_BITS = 8
DIGITS = 1 << DIGIT_BITS
NUM_DIGITS = 4
# How many of the largest values are tried first on synchronous devices.
FEW_LARGEST = (128, 4096)


Mass = Callable[[Tensor], Tensor]


def kth_largest(logits: Tensor, top_k: Tensor, columns: Columns = ALL_COLUMNS) -> Tensor:
    """[N, 1]: the k-th largest of each row of logits [N, v]; -inf if top_k [N] keeps all.

    Args:
        columns: columns of the logits: all V tokens, or this rank's share.
    """
    vocab_size = logits.shape[-1] * columns.num_ranks
    restricts = (top_k > 0) & (top_k < vocab_size)
    wanted = torch.where(restricts, top_k, 1).unsqueeze(-1)
    threshold = _search(logits, count_ones, wanted, columns)
    return torch.where(restricts.unsqueeze(-1), threshold, -torch.inf)


def nucleus_threshold(weights: Tensor, top_p: Tensor, columns: Columns = ALL_COLUMNS) -> Tensor:
    """[N, 1]: the largest threshold that keeps a share of at least top_p [N]; 0 for top_p = 1.

    Weights [N, v] are in [0, 1], for all V tokens or this rank's share.
    """
    restricts = top_p.unsqueeze(-1) < 1
    share = torch.where(restricts, top_p.unsqueeze(-1), 0.0).double()
    wanted = (columns.total(mass_units(weights)) * share).ceil_().to(torch.int64)
    return torch.where(restricts, _search(weights, mass_units, wanted, columns), 0.0)


def count_ones(values: Tensor) -> Tensor:
    """A mass of 1 for each value, int64."""
    return torch.ones_like(values, dtype=torch.int64)


def mass_units(weights: Tensor) -> Tensor:
    """The mass of weights in [0, 1], in integer units, int64."""
    return (weights * MASS_UNITS).to(torch.int64)


def _search(values: Tensor, mass: Mass, wanted: Tensor, columns: Columns) -> Tensor:
    """The largest value of each row such that all values not below it have the mass `wanted`.

    Args:
        values: [N, v] float32.
        mass: maps values [N, n] to their masses [N, n] int64, never negative.
        wanted: [N, 1] int64, at most the whole mass of the row.

    Returns:
        [N, 1] float32, undefined where `wanted` is 0.
    """
    if reads_are_free(values.device):
        # Histograms are smaller than many candidates for ranks to exchange.
        for count in FEW_LARGEST if columns.gather is None else FEW_LARGEST[:1]:
            found = _search_largest(values, mass, wanted, count, columns)
            if found is not None:
                return found
    # With few columns a histogram would be larger than the values.
    if values.shape[-1] <= DIGITS and columns.gather is None:
        return _search_order(values, mass, wanted)
    return _search_bits(values, mass, wanted, columns)


def _search_order(values: Tensor, mass: Mass, wanted: Tensor) -> Tensor:
    ordered = values.sort(-1, descending=True).values
    reached = mass(ordered).cumsum_(-1) >= wanted
    # Equal values may precede the first one that reaches it; the threshold is the same.
    place = (~reached).sum(-1, keepdim=True).clamp_max_(values.shape[-1] - 1)
    return ordered.gather(-1, place)


def _search_largest(
    values: Tensor, mass: Mass, wanted: Tensor, count: int, columns: Columns = ALL_COLUMNS
) -> Tensor | None:
    """`_search` among the `count` largest values; None if in some row their mass is too small."""
    ordered = columns.top_values(values, count)
    reached = mass(ordered).cumsum_(-1) >= wanted
    if not reached[:, -1].all():
        return None
    return ordered.gather(-1, (~reached).sum(-1, keepdim=True))


def _search_bits(
    values: Tensor, mass: Mass, wanted: Tensor, columns: Columns = ALL_COLUMNS
) -> Tensor:
    """A radix search over the bits of floats.

    The highest digit of the threshold is the largest one such that values with that digit or a
    higher one have the mass `wanted`. The next digit is found in the same way among the values with
    that highest digit, and so on.
    """
    keys, masses = _ordered_bits(values), mass(values)
    found = torch.zeros_like(wanted)
    for place in reversed(range(NUM_DIGITS)):
        digits = (keys >> (place * DIGIT_BITS)) & (DIGITS - 1)
        digit, above = _search_digit(digits, masses, wanted, columns)
        found = (found << DIGIT_BITS) | digit
        masses, wanted = torch.where(digits == digit, masses, 0), wanted - above
    return _from_ordered_bits(found)


def _ordered_bits(values: Tensor) -> Tensor:
    """int64 in [0, 2^32), ordered as the float32 values are (and -0 equal to 0)."""
    bits = (values + 0.0).view(torch.int32)
    signed = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return signed.to(torch.int64) + (1 << 31)


def _from_ordered_bits(keys: Tensor) -> Tensor:
    signed = (keys - (1 << 31)).to(torch.int32)
    return (signed ^ ((signed >> 31) & 0x7FFFFFFF)).view(torch.float32)


def _search_digit(
    digits: Tensor, mass: Tensor, wanted: Tensor, columns: Columns
) -> tuple[Tensor, Tensor]:
    """The largest digit [N, 1] that reaches `wanted`, and the mass [N, 1] of higher digits."""
    histogram = mass.new_zeros(mass.shape[0], DIGITS + 1)  # the last one stays empty
    histogram.scatter_add_(-1, digits, mass)
    at_least = columns.combined(histogram).flip(-1).cumsum(-1).flip(-1)  # falls as the digit grows
    digit = ((at_least >= wanted).sum(-1, keepdim=True) - 1).clamp_(0, DIGITS - 1)
    return digit, at_least.gather(-1, digit + 1)


def reads_are_free(device: torch.device) -> bool:
    """Whether the host can read numbers on `device` without waiting."""
    return device.type == "cpu"
