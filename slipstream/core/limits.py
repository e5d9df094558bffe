"""The numbers that bound a step, resolved once when the engine is built."""

from dataclasses import dataclass

from slipstream.core.request import Request


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
