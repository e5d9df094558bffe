"""Spans of a prompt whose embeddings replace those of its tokens: images."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class Span:
    """An image within a prompt: the tokens from `start` to before `end`.

    Attributes:
        digest: digest of the image, its grid and the processor's settings; equal digests mean equal
            embeddings.
        grid: (rows, columns) of the image's tokens; (1, length) if only their order is known.
        embedded: the embeddings, in the runner's form.
        whole: attention within the image is bidirectional, so it must be computed in one pass.
        row_ends: after each row of the grid there is one more token, whose embedding stays.
    """

    start: int
    length: int
    digest: bytes
    grid: tuple[int, int]
    embedded: object
    whole: bool = False
    row_ends: bool = False

    @property
    def end(self) -> int:
        return self.start + self.length


def end_of_spans(spans: Sequence[Span]) -> int:
    """The end of the last span; spans are in order. 0 if there are none."""
    return spans[-1].end if spans else 0


def texts_between(spans: Sequence[Span], token_ids: Sequence[int]) -> list[Sequence[int]]:
    starts = [0, *(span.end for span in spans)]
    ends = [*(span.start for span in spans), len(token_ids)]
    return [token_ids[start:end] for start, end in zip(starts, ends, strict=True)]


def extra_key(spans: Sequence[Span], first: int, end: int) -> bytes:
    """The part of a block's key in the prefix cache that token ids lack: the digests of the spans
    that overlap tokens `first` to before `end`, and where these begin. Empty for text."""
    return b"".join(
        struct.pack("<q", span.start - first) + span.digest
        for span in spans
        if span.start < end and first < span.end
    )


def position_offset(spans: Sequence[Span]) -> int:
    """The difference between the M-RoPE position and the index of a token after these spans: an
    image takes as many positions as its longer side has tokens."""
    return sum(max(span.grid) - span.length for span in spans)


def before_whole(spans: Sequence[Span], end: int) -> int:
    """The last index up to `end` at which a prompt may be split: not within a `whole` span."""
    inside = (span.start for span in spans if span.whole and span.start < end < span.end)
    return next(inside, end)


def end_of_whole(spans: Sequence[Span], index: int) -> int:
    """The end of the `whole` span that has this index; the index if none has it."""
    return next((it.end for it in spans if it.whole and it.start <= index < it.end), index)


def longest_whole(spans: Sequence[Span]) -> int:
    """Number of tokens of the longest `whole` span; 0 if there is none."""
    return max((span.length for span in spans if span.whole), default=0)
