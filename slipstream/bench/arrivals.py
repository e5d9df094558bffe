"""When requests are sent."""

from collections.abc import Sequence

from slipstream.core.errors import UsageError


def arrival_times(
    count: int, rate: float, burstiness: float = 1.0, seed: int = 0
) -> Sequence[float] | None:
    """Seconds from the start at which each request is due; None: as soon as it may.

    The gaps between requests have a gamma distribution of this shape: 1 makes arrivals a Poisson
    process, less makes bursts, more makes them regular. They are scaled so that the last request
    is due at (count - 1) / rate: the rate that was asked for is the one that is measured.

    Args:
        rate: requests a second; infinite for a closed loop.

    Raises:
        UsageError: a rate or burstiness that is no positive number.
    """
    import numpy

    if not rate > 0:
        raise UsageError(f"--request-rate must be above 0 (inf sends at once), not {rate:g}")
    if not (burstiness > 0 and burstiness != float("inf")):
        raise UsageError(f"--burstiness must be a number above 0, not {burstiness:g}")
    if rate == float("inf"):
        return None
    gaps = numpy.random.default_rng(seed).gamma(burstiness, 1 / burstiness, max(0, count - 1))
    ends = numpy.concatenate(([0.0], numpy.cumsum(gaps)))
    if ends[-1] > 0:
        ends *= (count - 1) / rate / ends[-1]
    return [float(end) for end in ends[:count]]
