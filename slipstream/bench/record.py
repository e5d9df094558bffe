"""Times and tokens of one request, as its client saw them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

USAGE, TOKENIZER, CHUNKS = "usage", "tokenizer", "chunks"
"""How output tokens are counted: by the server, a tokenizer, or one per chunk."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One chunk of the stream with tokens.

    Attributes:
        time: seconds of the client's clock.
        num_tokens: None where the server does not give it.
    """

    time: float
    num_tokens: int | None = None


@dataclass(kw_only=True)
class Record:
    """One request. Times are seconds of the client's clock.

    Attributes:
        due: when it should have been sent; None in a closed loop.
        error: why it failed; None otherwise.
        num_tokens: output tokens, counted as `counted_by` says.
        usage: the server's usage at the end; empty if it sends none.
    """

    id: str
    sent: float
    due: float | None = None
    arrivals: list[Arrival] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    error: str | None = None
    usage: Mapping[str, Any] = field(default_factory=dict)
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    counted_by: str = CHUNKS

    @property
    def failed(self) -> bool:
        return self.error is not None

    @property
    def ended(self) -> float:
        return self.arrivals[-1].time if self.arrivals else self.sent

    @property
    def ttft(self) -> float:
        return self.arrivals[0].time - self.sent

    @property
    def latency(self) -> float:
        return self.ended - self.sent

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None for fewer than two tokens."""
        if self.num_tokens < 2:
            return None
        return (self.latency - self.ttft) / (self.num_tokens - 1)

    @property
    def queued(self) -> float:
        """Seconds that it waited in the client after it was due."""
        return 0.0 if self.due is None else max(0.0, self.sent - self.due)

    def chunk_gaps(self) -> list[float]:
        times = [arrival.time for arrival in self.arrivals]
        return [later - earlier for earlier, later in pairwise(times)]

    def tokens_per_chunk(self) -> list[int] | None:
        """The number of tokens of each chunk; None where it is unknown."""
        counts = [arrival.num_tokens for arrival in self.arrivals]
        known = [count for count in counts if count is not None]
        if len(known) == len(counts):
            return known
        if self.counted_by != CHUNKS and self.num_tokens == len(self.arrivals):
            return [1] * len(self.arrivals)
        return None

    def token_gaps(self) -> list[float] | None:
        """The times between tokens, 0 within a chunk; None where tokens per chunk are unknown."""
        counts = self.tokens_per_chunk()
        if counts is None:
            return None
        gaps: list[float] = []
        previous: float | None = None
        for arrival, count in zip(self.arrivals, counts, strict=True):
            if not count:
                continue
            if previous is not None:
                gaps.append(arrival.time - previous)
            gaps.extend([0.0] * (count - 1))
            previous = arrival.time
        return gaps

    def shares(self) -> list[tuple[float, float]]:
        """(time, tokens) of every chunk; equal shares where the counts are unknown."""
        counts = self.tokens_per_chunk()
        if counts is not None and sum(counts) == self.num_tokens:
            pairs = zip(self.arrivals, counts, strict=True)
            return [(arrival.time, float(count)) for arrival, count in pairs]
        each = self.num_tokens / max(1, len(self.arrivals))
        return [(arrival.time, each) for arrival in self.arrivals]
