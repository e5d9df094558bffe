"""Rows and blocks that the scheduler gives to requests while it plans a step."""

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.cache.block_manager import BlockManager
from slipstream.cache.state_places import NO_PLACE
from slipstream.core.batch import DraftPlan, ScheduledRequest
from slipstream.core.request import Request
from slipstream.core.spans import before_whole
from slipstream.core.step_form import StepLimits

NO_DRAFT = DraftPlan(0)


@dataclass(slots=True, eq=False)
class Share:
    """The share of one request in the step that is being planned."""

    request: Request
    num_new_tokens: int
    num_draft_tokens: int = 0
    admitted: bool = False
    plan: DraftPlan = NO_DRAFT

    @property
    def num_uncomputed(self) -> int:
        """Known tokens that this step would leave uncomputed."""
        return self.request.num_tokens - self.request.num_computed - self.num_new_tokens

    @property
    def is_decoding(self) -> bool:
        return self.num_new_tokens == 1 and self.request.num_computed > 0


@dataclass(slots=True)
class Budget:
    """The rows of the target's pass that are not given out yet."""

    left: int

    def take(self, wanted: int) -> int:
        taken = min(wanted, self.left)
        self.left -= taken
        return taken


def may_continue(request: Request, limits: StepLimits) -> bool:
    """Whether the request may need a further step after it gains one more token."""
    if request.num_output_tokens + 1 >= request.max_tokens:
        return False
    return request.num_tokens + 1 < limits.max_model_len


def scheduled(
    share: Share,
    blocks: BlockManager,
    adapter: int,
    reaches_end: bool,
    drafts_in_flight: int | None,
) -> ScheduledRequest:
    """The share as a `ScheduledRequest`; `drafts_in_flight` as in `StatePlaces.plan`."""
    request = share.request
    name, taken_in = request.request_id, request.num_computed + share.num_new_tokens
    return ScheduledRequest(
        request=request,
        start=request.num_computed,
        num_new_tokens=share.num_new_tokens,
        num_draft_tokens=share.num_draft_tokens,
        block_table=blocks.table(name),
        window_table=blocks.window_table(name),
        resumed=blocks.checkpoint(name) if share.admitted else NO_PLACE,
        saved=blocks.plan_checkpoint(name, taken_in, drafts_in_flight),
        admitted=share.admitted,
        reaches_end=reaches_end,
        stops=share.plan.stops,
        trim=share.plan.trim,
        adapter=adapter,
        rank=blocks.rank_of(name),
    )


def last_beside(running: Sequence[Request], name: str, blocks: BlockManager) -> Request:
    """The last of these requests whose blocks request `name` could have in its place, possibly
    itself."""
    beside = blocks.beside(name)
    return next(request for request in reversed(running) if request.request_id in beside)


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
