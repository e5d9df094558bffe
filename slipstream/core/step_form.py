"""The numbers that bound a step, resolved once when the engine is built, and how many rows the
target's pass of a decode step has: what a step costs follows from them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Protocol

from slipstream.core.request import Request

# Rows that are left out of a smaller pass would hardly have cost anything.
FEWEST_TO_PACK = 64
TILE_ROWS = 16
PARTS = 4


class StepForm(Protocol):
    """What steps without prompts look like on this engine."""

    def rows(self, requests: int, width: int, num_drafts: int) -> int:
        """Rows that the target's pass computes.

        Args:
            requests: that decode.
            width: the most tokens that any of them drafts.
            num_drafts: tokens that all of them draft together.
        """

    @property
    def ends_chains(self) -> bool:
        """Whether a pass of the drafter is for those requests alone that draft so far, and chains
        may end before their plan does."""


@dataclass(frozen=True)
class ExactForm:
    """Each request has as many rows as it needs."""

    ends_chains = True

    def rows(self, requests: int, width: int, num_drafts: int) -> int:
        return requests + num_drafts


@dataclass(frozen=True)
class CapturedForm:
    """Steps of a few sizes, for each of which a graph is captured.

    A step is padded to a bucket of requests, a width of drafts, and a total of rows.

    Attributes:
        max_requests: the largest bucket.
        widths: numbers of draft tokens, rising.
        packs: whether there are totals below bucket * (width + 1), for requests that draft
            different numbers of tokens.
        sizes: the buckets but for the largest; None: those that `bucket_sizes` gives.
    """

    max_requests: int
    widths: tuple[int, ...]
    packs: bool
    sizes: tuple[int, ...] | None = None
    ends_chains = False

    @cached_property
    def buckets(self) -> Sequence[int]:
        """Numbers of requests, rising."""
        if self.sizes is None:
            return bucket_sizes(self.max_requests)
        smaller = {size for size in self.sizes if size < self.max_requests}
        return [*sorted(smaller), self.max_requests]

    def bucket(self, requests: int) -> int:
        return next(size for size in self.buckets if size >= requests)

    def width(self, most_drafts: int) -> int:
        return next(width for width in self.widths if width >= most_drafts)

    def rows(self, requests: int, width: int, num_drafts: int) -> int:
        totals = self.totals(self.bucket(requests), self.width(width))
        return next(rows for rows in totals if rows >= requests + num_drafts)

    def totals(self, bucket: int, width: int) -> Sequence[int]:
        """Numbers of rows for so many requests and this width, rising up to all."""
        return row_totals(bucket, width) if self.packs else (bucket * (width + 1),)


def bucket_sizes(most: int) -> list[int]:
    """The numbers of requests that graphs are captured for, up to `most`."""
    sizes = [1, 2, 4, *range(8, 32, 8), *range(32, 64, 16), *range(64, 256, 32)]
    sizes.extend(range(256, most, 128))
    return [*(size for size in sizes if size < most), most]


@cache
def row_totals(bucket: int, width: int) -> tuple[int, ...]:
    """The totals of rows for so many requests that draft up to `width` tokens, rising: with a
    quarter of the draft tokens that there can be, a half, three quarters, all."""
    full = bucket * (width + 1)
    if full < FEWEST_TO_PACK:
        return (full,)
    parts = [bucket + -(-bucket * width * part // PARTS) for part in range(1, PARTS)]
    tiled = {-(-rows // TILE_ROWS) * TILE_ROWS for rows in parts}
    return (*sorted(rows for rows in tiled if rows < full), full)


@dataclass(frozen=True)
class StepLimits:
    """What the scheduler may plan.

    Attributes:
        max_num_seqs: requests running at once, which is also the number of slots.
        max_num_batched_tokens: rows of one target pass, draft tokens included.
        max_model_len: tokens of one request, prompt and output.
        drafter_max_model_len: beyond this many tokens a request runs without drafts.
        num_speculative_tokens: the engine's K; no request drafts more.
        drafts_at_prefill: the drafter can guess behind a prompt that the target has not seen
            yet, so the step that ends a prompt may verify drafts as well.
        cache_identity: what the blocks of drafting requests hold besides the target's layers
            (the drafter's identity); keys the prefix index, so that blocks without a drafter's
            layers are never taken for blocks with them.
        adaptive: K is "auto": the engine chooses how much it drafts, up to that K.
        tree_depth: of drafts that are trees, their depth: at most so many tokens are accepted;
            None where drafts are chains.
        by_priority: requests may have priorities; otherwise they go in order of arrival.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    drafter_max_model_len: int
    num_speculative_tokens: int
    drafts_at_prefill: bool
    cache_identity: str
    tree_depth: int | None = None
    by_priority: bool = False
    adaptive: bool = False

    @property
    def drafts_trees(self) -> bool:
        """Whether drafts are trees."""
        return self.tree_depth is not None

    @property
    def num_positions(self) -> int:
        """Places that a draft token may have."""
        most = self.num_speculative_tokens
        return most if self.tree_depth is None else min(most, self.tree_depth)

    def drafts_for(self, acceptable: int) -> int:
        """Draft tokens that are of use where so many may be accepted: a tree is to be whole."""
        return self.num_speculative_tokens if self.drafts_trees and acceptable > 0 else acceptable

    def drafts(self, request: Request) -> bool:
        """Whether anything is ever drafted for this request."""
        return min(request.num_speculative_tokens, self.num_speculative_tokens) > 0

    def namespace(self, request: Request) -> str:
        """What is stored per token of this request, and whose it is. The salt comes last, as it
        alone may hold NULs, and must not be taken for an adapter."""
        identity = self.cache_identity if self.drafts(request) else ""
        if request.adapter is None and not request.cache_salt:
            return identity
        serial = "" if request.adapter is None else request.adapter.serial
        return f"{identity}\0{serial}\0{request.cache_salt}"
