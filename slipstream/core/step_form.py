"""The limits of a step, which are resolved when the engine is built, and the number of rows of the
target's pass in a decode step, which determines the step's cost."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from slipstream.core.request import Request

# Smaller passes are not packed, since it would not pay.
FEWEST_TO_PACK = 64
TILE_ROWS = 16
PARTS = 4


@dataclass(frozen=True)
class ExactForm:
    """Each request has as many rows as it needs, without padding.

    Attributes:
        ends_chains: whether passes of the drafter have rows only for requests that still draft, so
            that it saves time to end chains before their planned length.
    """

    ends_chains = True

    def rows(self, requests: int, width: int, num_drafts: int) -> int:
        """Number of rows of the target's pass, if no request drafts more than `width` tokens, and
        all together draft `num_drafts`."""
        return requests + num_drafts


@dataclass(frozen=True)
class CapturedForm:
    """Steps are padded to a few sizes, each of which is captured as a CUDA graph.

    A step is padded to a bucket of requests, a width of drafts, and a total of rows.

    Attributes:
        max_requests: the largest bucket.
        widths: numbers of draft tokens, rising.
        packs: whether steps are also captured with fewer rows than bucket * (width + 1), for
            requests with different numbers of draft tokens.
        sizes: the buckets except the largest; None: as `bucket_sizes` chooses.
        ends_chains: see `ExactForm`.
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
        return self.buckets[bisect_left(self.buckets, requests)]

    def width(self, most_drafts: int) -> int:
        return self.widths[bisect_left(self.widths, most_drafts)]

    def rows(self, requests: int, width: int, num_drafts: int) -> int:
        """See `ExactForm`; with padding."""
        totals = self.totals(self.bucket(requests), self.width(width))
        return totals[bisect_left(totals, requests + num_drafts)]

    def totals(self, bucket: int, width: int) -> Sequence[int]:
        """The numbers of rows that steps of this bucket and width are captured with, rising."""
        return row_totals(bucket, width) if self.packs else (bucket * (width + 1),)


# How the engine lays out the rows of steps without prompts.
StepForm = ExactForm | CapturedForm


def bucket_sizes(most: int) -> list[int]:
    """The numbers of requests that graphs are captured for, up to `most`."""
    sizes = [1, 2, 4, *range(8, 32, 8), *range(32, 64, 16), *range(64, 256, 32)]
    sizes.extend(range(256, most, 128))
    return [*(size for size in sizes if size < most), most]


@cache
def row_totals(bucket: int, width: int) -> tuple[int, ...]:
    """The numbers of rows, rising, that steps of `bucket` requests with up to `width` draft tokens
    each are captured with: for a quarter, a half, three quarters and all of the draft tokens."""
    full = bucket * (width + 1)
    if full < FEWEST_TO_PACK:
        return (full,)
    parts = [bucket + -(-bucket * width * part // PARTS) for part in range(1, PARTS)]
    tiled = {-(-rows // TILE_ROWS) * TILE_ROWS for rows in parts}
    return (*sorted(rows for rows in tiled if rows < full), full)


@dataclass(frozen=True)
class StepLimits:
    """The limits within which the scheduler plans.

    Attributes:
        max_num_seqs: maximum number of running requests, which is the number of slots.
        max_num_batched_tokens: maximum number of rows of a target pass, draft tokens included.
        prompts_beside_decoding: maximum number of prompt tokens of a step in which other requests
            decode; None: no limit.
        max_model_len: maximum number of tokens of a request, prompt and output.
        cache_bounds_length: max_model_len was reduced to the capacity of the KV cache.
        drafter_max_model_len: requests with more tokens than this run without drafts.
        num_speculative_tokens: the engine's K, the maximum number of draft tokens of a request.
        drafts_at_prefill: see `DrafterLimits`; the step that ends a prompt may then verify drafts.
        cache_identity: see `DrafterLimits`; a part of the keys of the prefix index, so that blocks
            without the drafter's layers are never used as blocks with them.
        adaptive: K is "auto": the engine chooses the number of draft tokens, up to K.
        drafts_at_once: one pass of the drafter yields all draft tokens of a request, so that chains
            cannot end before they are drafted.
        tree_depth: depth of the token trees, which is the maximum number of accepted tokens; None
            if drafts are chains.
        lookup_passes: see `DrafterLimits`.
        by_priority: requests are served by priority; otherwise in order of arrival.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    drafter_max_model_len: int
    num_speculative_tokens: int
    drafts_at_prefill: bool
    cache_identity: str
    tree_depth: int | None = None
    lookup_passes: int | None = None
    by_priority: bool = False
    adaptive: bool = False
    cache_bounds_length: bool = False
    drafts_at_once: bool = False
    prompts_beside_decoding: int | None = None

    @property
    def drafts_trees(self) -> bool:
        return self.tree_depth is not None

    @property
    def num_positions(self) -> int:
        """Number of different positions that draft tokens may have."""
        most = self.num_speculative_tokens
        return most if self.tree_depth is None else min(most, self.tree_depth)

    def drafts_for(self, acceptable: int) -> int:
        """Number of tokens to draft if at most `acceptable` may be accepted; a tree has a fixed
        size."""
        return self.num_speculative_tokens if self.drafts_trees and acceptable > 0 else acceptable

    def drafts(self, request: Request) -> bool:
        return min(request.num_speculative_tokens, self.num_speculative_tokens) > 0

    def namespace(self, request: Request) -> str:
        """The namespace of this request's blocks in the prefix cache: the drafter, the adapter and
        the salt. The salt comes last, since only it may contain NUL, and must not be mistaken for
        an adapter."""
        identity = self.cache_identity if self.drafts(request) else ""
        if request.adapter is None and not request.cache_salt:
            return identity
        serial = "" if request.adapter is None else request.adapter.serial
        return f"{identity}\0{serial}\0{request.cache_salt}"
