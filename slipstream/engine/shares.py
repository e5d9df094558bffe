"""Rows and blocks that the scheduler gives to requests while it plans a step."""

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.cache.block_manager import BlockManager
from slipstream.cache.state_places import NO_PLACE
from slipstream.core.batch import Batch, DraftPlan, ScheduledRequest
from slipstream.core.request import Request
from slipstream.core.spans import before_whole, end_of_whole
from slipstream.core.step_form import StepLimits

NO_DRAFT = DraftPlan(0)


@dataclass(slots=True, eq=False)
class RequestShare:
    """The share of one request in the step that is being planned.

    Attributes:
        start, known: its computed and its known tokens when the step begins: the fewest that there
            may be, if a step in flight may accept drafts.
        drafts_in_flight: how many more of both there may be; None: no step in flight has it.
    """

    request: Request
    start: int
    known: int
    drafts_in_flight: int | None = None
    num_new_tokens: int = 0
    num_draft_tokens: int = 0
    admitted: bool = False
    plan: DraftPlan = NO_DRAFT

    @classmethod
    def of(cls, request: Request, last: ScheduledRequest | None = None) -> "RequestShare":
        """An empty share that follows the request's share `last` of a step in flight."""
        start, known = request.num_computed, request.num_tokens
        if last is None:
            return cls(request, start, known)
        return cls(
            request, start + last.num_new_tokens, known + last.reaches_end, last.num_draft_tokens
        )

    @property
    def most_known(self) -> int:
        return self.known + (self.drafts_in_flight or 0)

    @property
    def num_uncomputed(self) -> int:
        """Known tokens that this step would leave uncomputed."""
        return self.known - self.start - self.num_new_tokens

    @property
    def rest_of_image(self) -> int:
        """Further rows of an image that is read in one pass, if the first row belongs to one."""
        end = end_of_whole(self.request.spans, self.start)
        return max(0, end - self.start - self.num_new_tokens)

    @property
    def is_decoding(self) -> bool:
        return self.num_new_tokens == 1 and self.start > 0

    def may_run(self, limits: StepLimits) -> bool:
        """Whether the request may still be running when the step begins."""
        if self.known >= limits.max_model_len:
            return False
        return self.known - self.request.num_prompt_tokens < self.request.max_tokens


@dataclass(slots=True)
class Budget:
    """The rows of the target's pass that are not given out yet.

    Attributes:
        prompts: the rows among them that prompts may have; None: all.
        lacks_blocks: a running request got fewer rows than there were, for want of blocks.
    """

    left: int
    prompts: int | None = None
    lacks_blocks: bool = False

    def take(self, wanted: int) -> int:
        taken = min(wanted, self.left)
        self.left -= taken
        return taken

    def limit_prompts(self, most: int | None, num_given: int) -> None:
        """Bound the rows of prompts, of which some have been given out already."""
        self.prompts = None if most is None else most - num_given

    def room_for_prompt(self, least: int = 0, given: int = 0) -> int:
        """Rows that a prompt may have besides those that it was given. It has to get `least` at
        once or none, and gets them unless the rows of other prompts are as many as they may be."""
        if self.prompts is None:
            return self.left
        return min(self.left, max(self.prompts, least)) if self.prompts + given > 0 else 0

    def take_for_prompt(self, wanted: int) -> int:
        taken = self.take(wanted)
        if self.prompts is not None:
            self.prompts -= taken
        return taken


def scheduled(share: RequestShare, blocks: BlockManager, adapter: int) -> ScheduledRequest:
    request, in_flight = share.request, share.drafts_in_flight
    name, most = request.request_id, share.start + share.num_new_tokens + (in_flight or 0)
    return ScheduledRequest(
        request=request,
        start=share.start,
        num_new_tokens=share.num_new_tokens,
        num_draft_tokens=share.num_draft_tokens,
        block_table=blocks.table(name),
        window_table=blocks.window_table(name),
        resumed=blocks.checkpoint(name) if share.admitted else NO_PLACE,
        saved=blocks.plan_checkpoint(name, most, None if in_flight is None else share.start),
        admitted=share.admitted,
        reaches_end=share.num_uncomputed == 0,
        stops=share.plan.stops,
        trim=share.plan.trim,
        split=share.plan.split,
        adapter=adapter,
        rank=blocks.rank_of(name),
    )


def last_on_rank(running: Sequence[Request], name: str, blocks: BlockManager) -> Request:
    """The last of these requests with blocks in the same cache as those of request `name`, possibly
    itself."""
    cached_there = blocks.in_same_cache(name)
    return next(request for request in reversed(running) if request.request_id in cached_there)


def will_share(request: Request, batch: Batch, blocks: BlockManager, limits: StepLimits) -> bool:
    """Whether the request finds more of its prefix once `batch`, which is in flight, is
    committed."""
    if not (blocks.enable_prefix_caching and request.uses_prefix_cache):
        return False
    own, size, namespace = request.token_ids, blocks.block_size, limits.namespace(request)
    for item in batch.requests:
        other = item.request.token_ids
        first = item.start // size * size  # of the first block that it may fill
        end = first + size
        fills = end <= item.start + item.num_new_tokens and not item.request.finished
        is_equal = own[first:end] == other[first:end] and own[:first] == other[:first]
        if fills and end < len(own) and is_equal and limits.namespace(item.request) == namespace:
            return True
    return False


@dataclass(frozen=True)
class Room:
    """Room for a request that is to be admitted.

    Attributes:
        rank: see `BlockManager.places`.
        prefix: its blocks that are cached there, from which it resumes.
        num_shared: number of cached blocks, also of those from which it cannot.
    """

    rank: int
    prefix: list[int]
    num_shared: int


def room_for(manager: BlockManager, request: Request, namespace: str) -> Room | None:
    """The best place with blocks for all known tokens of the request; None: it has to wait."""

    def look_up(blocks: BlockManager) -> list[int]:
        if not request.uses_prefix_cache:
            return []
        return blocks.match_prefix(namespace, request.token_ids, request.spans)

    for rank, blocks, shared in manager.places(look_up):
        prefix = _resumable(blocks, request, shared)
        # Leave one block for each request that runs there: it may need one in the next step, and
        # would then have this request preempted at once.
        if blocks.can_admit(prefix, request.num_tokens, reserve=len(blocks.request_ids)):
            return Room(rank, prefix, len(shared))
    return None


def _resumable(blocks: BlockManager, request: Request, shared: Sequence[int]) -> list[int]:
    """The longest prefix of these cached blocks at whose end the request can resume.

    Recurrent states resume at checkpoints only, and an image that is read whole is not cut.
    """
    size = blocks.block_size
    prefix = blocks.resumable(shared)
    while (end := before_whole(request.spans, len(prefix) * size)) < len(prefix) * size:
        prefix = blocks.resumable(prefix[: end // size])
    return prefix
