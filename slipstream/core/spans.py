"""Parts of a prompt whose embeddings come from elsewhere, such as those of images."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class Span:
    """An image within a prompt: tokens `start` to before `end`, which hold its placeholder.

    Attributes:
        digest: names what stands there, the image, its grid and how it was read: equal digests are
            taken for equal embeddings.
        grid: rows and columns of the image's tokens, `length` in all; (1, length) where the order
            is all that is known of their places.
        embedded: the embeddings, as the runner has them.
        whole: its tokens see each other, so that it is read in one pass.
    """

    start: int
    length: int
    digest: bytes
    grid: tuple[int, int]
    embedded: object
    whole: bool = False

    @property
    def end(self) -> int:
        return self.start + self.length


def end_of_spans(spans: Sequence[Span]) -> int:
    """The token behind the last span, which stand in order; 0 without any."""
    return spans[-1].end if spans else 0


def texts_between(spans: Sequence[Span], token_ids: Sequence[int]) -> list[Sequence[int]]:
    """The tokens before, between and behind spans."""
    starts = [0, *(span.end for span in spans)]
    ends = [*(span.start for span in spans), len(token_ids)]
    return [token_ids[start:end] for start, end in zip(starts, ends, strict=True)]


def content_beside(spans: Sequence[Span], first: int, end: int) -> bytes:
    """What tokens from `first` to before `end` are, apart from their ids: the spans that they are
    in, and where those began. Empty for tokens of text alone."""
    return b"".join(
        struct.pack("<q", span.start - first) + span.digest
        for span in spans
        if span.start < end and first < span.end
    )


def position_offset(spans: Sequence[Span]) -> int:
    """What is added to the place of a token behind these spans to have its position, where
    positions have several axes: an image takes as many of them as its longer side has tokens."""
    return sum(max(span.grid) - span.length for span in spans)


def before_whole(spans: Sequence[Span], end: int) -> int:
    """The last place up to `end` that is not within a span that is read in one pass."""
    inside = (span.start for span in spans if span.whole and span.start < end < span.end)
    return next(inside, end)


def longest_whole(spans: Sequence[Span]) -> int:
    """Tokens of the longest span that is read in one pass; 0 without any."""
    return max((span.length for span in spans if span.whole), default=0)
