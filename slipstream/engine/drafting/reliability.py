"""How well the policy predicts whether draft tokens are accepted."""

from dataclasses import dataclass, field

from slipstream.core.batch import NUM_BINS


@dataclass(frozen=True)
class Bin:
    """Draft tokens whose predicted chances are in one range.

    Attributes:
        predicted: the sum of their predicted chances.
        accepted: how many of the `count` tokens were accepted.
    """

    predicted: float = 0.0
    accepted: int = 0
    count: int = 0


@dataclass(eq=False)
class Reliability:
    """How well chances are predicted: verified tokens of one request in every eighth step, in bins
    by predicted chance."""

    _sums: list[list[float]] = field(
        default_factory=lambda: [[0.0, 0.0, 0.0] for _ in range(NUM_BINS)]
    )

    def add(self, predicted: float, accepted: float) -> None:
        sums = self._sums[int(predicted * NUM_BINS) if predicted < 1.0 else NUM_BINS - 1]
        sums[0] += predicted
        sums[1] += accepted
        sums[2] += 1

    @property
    def bins(self) -> tuple[Bin, ...]:
        """All bins by predicted chance, from 0 to 1."""
        return tuple(Bin(sums[0], int(sums[1]), int(sums[2])) for sums in self._sums)
