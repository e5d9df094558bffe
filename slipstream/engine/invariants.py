"""Invariants of the scheduler, which hold between two calls."""

from collections.abc import Mapping, Sequence

from slipstream.cache.block_manager import BlockManager
from slipstream.core.batch import Committed, ScheduledRequest
from slipstream.core.request import Request, RequestStatus
from slipstream.core.step_form import StepLimits


def order(request: Request) -> tuple[int, int]:
    """The sort key of every queue: priority, then arrival."""
    return request.order


def check_queues(
    running: Sequence[Request], waiting: Sequence[Request], requests: Mapping[str, Request]
) -> None:
    """Each request is in one queue, and both queues are sorted."""
    everyone = [*running, *waiting]
    assert {request.request_id: request for request in everyone} == requests
    assert len(everyone) == len(requests), "a request is queued twice"
    for queue in (running, waiting):
        assert list(queue) == sorted(queue, key=order), "a queue is not in order"
    for request in waiting:
        assert request.status is RequestStatus.WAITING, f"{request.request_id}: status"
        assert request.slot == -1, f"{request.request_id}: waits with a slot"
        assert request.num_computed == 0, f"{request.request_id}: waits with computed tokens"


def check_places(
    running: Sequence[Request], free_slots: Sequence[int], limits: StepLimits, blocks: BlockManager
) -> None:
    """Every running request has its own slot and blocks, and tokens left to compute."""
    blocks.check_invariants()
    slots = [request.slot for request in running]
    assert sorted([*slots, *free_slots]) == list(range(limits.max_num_seqs)), (
        "a slot is lost or held twice"
    )
    assert blocks.request_ids == {request.request_id for request in running}, (
        "exactly the running requests have a table"
    )
    for request in running:
        _check_running(request, limits, blocks)


def _check_running(request: Request, limits: StepLimits, blocks: BlockManager) -> None:
    name = request.request_id
    assert request.status is RequestStatus.RUNNING, f"{name}: status"
    assert 0 <= request.num_computed < request.num_tokens, f"{name}: nothing left to compute"
    assert request.num_tokens < limits.max_model_len, f"{name}: no room for a token"
    assert request.num_output_tokens < request.max_tokens, f"{name}: ran past max_tokens"
    covered = len(blocks.table(name)) * blocks.block_size
    assert request.num_computed <= covered, f"{name}: computed tokens without a block"
    # The next row goes to position num_computed, after every block that others may read.
    assert blocks.num_final_tokens(name) <= request.num_computed, (
        f"{name}: a final block would be written again"
    )


def check_gain(item: ScheduledRequest, gain: Committed) -> None:
    """A step that reaches the end gains its accepted drafts and one token more, others nothing,
    and where logits are not finite it gains less."""
    assert gain.num_accepted <= gain.num_draft_tokens <= item.num_draft_tokens, (
        f"{item.request.request_id}: {gain} does not fit {item.num_draft_tokens} planned drafts"
    )
    gained = gain.num_accepted + 1 if item.reaches_end else 0
    assert len(gain.token_ids) == gained or (gain.broken and len(gain.token_ids) < gained), (
        f"{item.request.request_id}: {gain} should hold {gained} tokens"
    )
