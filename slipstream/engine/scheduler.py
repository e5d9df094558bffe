"""Plans steps: which requests take part, with how many tokens; and commits their results."""

import heapq
from bisect import insort_left, insort_right
from collections.abc import Sequence
from time import perf_counter

from slipstream.cache.block_manager import BlockManager
from slipstream.core.batch import Batch, Committed, DraftPlan, ScheduledRequest
from slipstream.core.errors import UsageError
from slipstream.core.request import FinishReason, Request, RequestStatus
from slipstream.core.spans import before_whole, longest_whole
from slipstream.core.step_form import StepLimits
from slipstream.engine.adapters import Adapters
from slipstream.engine.admission import check_fits
from slipstream.engine.draft_policy import Candidate, DraftPolicy, FixedPolicy
from slipstream.engine.invariants import check_gain, check_places, check_queues, order
from slipstream.engine.shares import (
    Budget,
    RequestShare,
    last_on_rank,
    room_for,
    scheduled,
    will_share,
)
from slipstream.engine.stop_conditions import NOT_FINITE, append_output


class Scheduler:
    """Continuous batching in order of priority, and of arrival among equals.

    Args:
        policy: decides how many tokens are drafted; None: always `limits.num_speculative_tokens`.
        adapters: LoRA adapters, for which requests wait until they are loaded; None: there are
            none.

    Prompt chunks, decoding and verification share one batch. A request is admitted when the cache
    has room for all its known tokens, so a prompt never runs out of blocks halfway. When blocks run
    out, the last running request in order is preempted, so the first one always makes progress. A
    running request is never preempted in favour of a waiting one.

    Each `schedule` is followed by the `commit` of its batch, or by `restart`; in between there may
    be one `schedule_ahead`. `finish`, `abort` and `add` may be called at any time.
    """

    def __init__(
        self,
        limits: StepLimits,
        block_manager: BlockManager,
        policy: DraftPolicy | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        self.limits, self.num_preemptions = limits, 0
        self.policy = policy or FixedPolicy(limits.num_speculative_tokens)
        self.block_manager = block_manager
        self._adapters = adapters or Adapters()
        self._requests: dict[str, Request] = {}  # waiting and running
        self._waiting: list[Request] = []  # both lists are in order
        self._running: list[Request] = []
        self._free_slots = list(range(limits.max_num_seqs))  # a heap: the smallest goes first

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> Sequence[Request]:
        """The waiting requests in order: a live view."""
        return self._waiting

    @property
    def running(self) -> Sequence[Request]:
        """The running requests in order: a live view."""
        return self._running

    # ------------------------------------------------------------------ requests come and go

    def add(self, request: Request) -> None:
        """Queue a request; UsageError when it could never run to its end."""
        check_fits(request, self.limits, self.block_manager)
        if request.request_id in self._requests:
            raise UsageError(
                f"request id {request.request_id!r} is in use by an unfinished request; "
                "choose another"
            )
        self._requests[request.request_id] = request
        insort_right(self._waiting, request, key=order)

    def finish(
        self, request: Request, reason: FinishReason, stop_reason: str | int | None = None
    ) -> None:
        """End a waiting or running request and free its slot and blocks; no effect on a finished
        one."""
        if request.finished:
            return
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
            self._give_back(request)
        else:
            self._waiting.remove(request)
        del self._requests[request.request_id]
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.stop_reason = stop_reason

    def set_aside(self, request: Request) -> None:
        """Take a waiting request out of the queue until `bring_back`."""
        self._waiting.remove(request)
        del self._requests[request.request_id]

    def bring_back(self, request: Request) -> None:
        """Queue a request again that was set aside."""
        self._requests[request.request_id] = request
        insort_right(self._waiting, request, key=order)

    def restart(self, requests: Sequence[Request]) -> None:
        """Start from scratch after a failed step, whatever state it left: these unfinished requests
        wait again, and the prefix cache is empty."""
        self.block_manager.reset()
        self._free_slots[:] = range(self.limits.max_num_seqs)
        self._running.clear()
        self._waiting[:] = sorted(requests, key=order)
        self._requests = {request.request_id: request for request in requests}

    # ------------------------------------------------------------------ planning a step

    def schedule(self) -> Batch:
        """Plan the next step.

        The rows of a step are given out in this order: one token to every running request, draft
        tokens to those that decode, further prompt tokens, and then prompts of waiting requests.
        """
        preempted = self._secure_known_tokens()
        while True:
            shares = [RequestShare.of(request) for request in self._running]
            budget = self._give_rows(shares)
            # A request that was just preempted must not come back at once, nor be overtaken.
            if not preempted:
                self._admit_waiting(shares, budget)
            if shares or not self._running:
                return self._batch(shares, preempted)
            preempted.append(self._preempt(self._running[-1]))  # all lack room for whole images

    def schedule_ahead(self, batch: Batch) -> Batch | None:
        """Plan the step after `batch`, whose results are not known yet; None if they are needed.

        A request whose prompt goes on has its next chunk, and any other one row and drafts. There
        must be blocks for the longest outputs that `batch` may give. Requests that are sure to end
        with `batch` are left out. If another one ends, what this step computes for it is discarded.
        """
        last = {it.request.request_id: it for it in batch.requests if not it.request.finished}
        shares = [RequestShare.of(it, last.get(it.request_id)) for it in self._running]
        shares = [share for share in shares if share.may_run(self.limits)]
        if not all([self._secure(it.request, it.most_known, it.num_uncomputed) for it in shares]):
            return None
        budget = self._give_rows(shares)
        if budget.lacks_blocks:  # `batch` may give some back
            return None
        self._admit_waiting(shares, budget, batch)
        return self._batch(shares) if shares else None

    def _batch(self, shares: list[RequestShare], preempted: Sequence[Request] = ()) -> Batch:
        shares.sort(key=lambda share: share.request.order)
        for share in shares:
            share.request.steps_in_flight += 1
        last = self.block_manager.take_last_checkpoints() if shares else ()  # else no step follows
        blocks, slot_of = self.block_manager, self._adapters.slot_of
        items = tuple(scheduled(share, blocks, slot_of(share.request)) for share in shares)
        return Batch(items, tuple(preempted), last)

    def _give_rows(self, shares: list[RequestShare]) -> Budget:
        """Give rows to running requests, which have blocks for their known tokens."""
        budget = Budget(self.limits.max_num_batched_tokens)
        del shares[budget.left :]
        for share in shares:
            share.num_new_tokens = budget.take(1)
        self._give_drafts(shares, budget)
        self._extend_chunks(shares, budget)
        return budget

    def _secure_known_tokens(self) -> list[Request]:
        """Get blocks for the known tokens of all running requests; returns the preempted ones.

        This comes before any draft gets a block, so drafts never cause a preemption.
        """
        preempted: list[Request] = []
        secured = 0
        while secured < len(self._running):
            request = self._running[secured]
            if self._secure(request, request.num_tokens, request.num_tokens - request.num_computed):
                secured += 1
            else:
                last = last_on_rank(self._running, request.request_id, self.block_manager)
                preempted.append(self._preempt(last))  # it is not secured yet
        return preempted

    def _secure(self, request: Request, most_known: int, num_uncomputed: int) -> bool:
        """Get blocks for the known tokens of a running request; False if there are not enough."""
        most = min(most_known, self.limits.max_model_len)
        # One row of a prompt, for layers with a window; `_extend_chunks` gives more.
        return self.block_manager.grow(request.request_id, most, most - num_uncomputed + 1)

    def _preempt(self, request: Request) -> Request:
        self._running.remove(request)
        self._give_back(request)
        request.lose_place()
        self.num_preemptions += 1
        insort_left(self._waiting, request, key=order)
        return request

    def _give_drafts(self, shares: Sequence[RequestShare], budget: Budget) -> None:
        """Give draft tokens to the requests that decode.

        While prompts wait for rows, drafts get at most half of the rows that are left: a long
        prompt must not stop speculation for all, nor speculation stop a prompt.
        """
        waits = self._waiting and self._free_slots
        prompts_wait = waits or any(share.num_uncomputed for share in shares)
        drafts = Budget(budget.left // (2 if prompts_wait else 1))
        decoding = [it for it in shares if it.is_decoding and not it.num_uncomputed]
        if decoding:
            budget.limit_prompts(self.limits.prompts_beside_decoding, len(shares) - len(decoding))
        drafting = decoding if self.limits.num_speculative_tokens else []
        for share, plan in zip(drafting, self._plans(drafting), strict=True):
            self._draft(share, drafts, plan)
            budget.take(share.num_draft_tokens)
        budget.lacks_blocks = drafts.lacks_blocks

    def _extend_chunks(self, shares: list[RequestShare], budget: Budget) -> None:
        """Give the remaining rows to prompts, and to tokens that a preemption has dropped."""
        for share in shares:
            if share.num_uncomputed:
                self._extend(share, budget)
                self._draft_at_prompt_end(share, budget)
        shares[:] = [share for share in shares if share.num_new_tokens]

    def _extend(self, share: RequestShare, budget: Budget) -> None:
        """Give a request as many further prompt rows as the budget and its blocks allow."""
        request, name = share.request, share.request.request_id
        done = share.start + share.num_new_tokens
        room = budget.room_for_prompt(share.rest_of_image, share.num_new_tokens)
        end, covered = min(share.known, done + room), self.block_manager.capacity(name)
        budget.lacks_blocks |= covered < end
        end = self.block_manager.chunk_end(name, share.start, min(end, covered))
        end = before_whole(request.spans, end)
        if end < done:  # an image begins here, and there is no room for all of it
            budget.left += share.num_new_tokens
            share.num_new_tokens = 0
            return
        share.num_new_tokens += budget.take_for_prompt(max(0, end - done))
        written = share.start + share.num_new_tokens
        grown = self.block_manager.grow(name, share.known, written)
        assert grown, "capacity promised the blocks"

    def _admit_waiting(
        self, shares: list[RequestShare], budget: Budget, in_flight: Batch | None = None
    ) -> None:
        while self._free_slots and budget.room_for_prompt():
            request = self._adapters.next_ready(self._waiting, self._running)
            if request is None or budget.left <= longest_whole(request.spans):
                return
            waits = in_flight and will_share(request, in_flight, self.block_manager, self.limits)
            if waits or not self._admit(request):
                return
            share = RequestShare.of(request)
            share.admitted = True
            self._extend(share, budget)
            if not share.num_new_tokens:
                self._preempt(request)
                return
            self._draft_at_prompt_end(share, budget)
            shares.append(share)

    def _admit(self, request: Request) -> bool:
        """Move a waiting request to a slot, with blocks for all its known tokens."""
        room = room_for(self.block_manager, request, self.limits.namespace(request))
        if room is None:
            return False
        first = request.num_preemptions == 0
        queried = request.num_tokens if first and request.uses_prefix_cache else 0
        name = request.request_id
        self.block_manager.admit(
            name, room.prefix, queried, request.num_tokens, room.num_shared, room.rank
        )
        request.num_computed = len(room.prefix) * self.block_manager.block_size
        grown = self.block_manager.grow(name, request.num_tokens, request.num_computed + 1)
        assert grown, "`room_for` promised the blocks"
        if first:
            request.num_cached_tokens = request.num_computed
            request.place_time = request.place_time or perf_counter()
        self._waiting.remove(request)
        insort_right(self._running, request, key=order)
        request.status = RequestStatus.RUNNING
        request.slot = heapq.heappop(self._free_slots)
        return True

    def _draft_at_prompt_end(self, share: RequestShare, budget: Budget) -> None:
        """Draft in the step that ends a prompt, if only its last token is left, or if the drafter
        can draft after a prompt that the target has not computed."""
        can = share.is_decoding or self.limits.drafts_at_prefill
        if can and not share.num_uncomputed:
            self._draft(share, budget, self._plans([share])[0])

    def _draft(self, share: RequestShare, budget: Budget, plan: DraftPlan) -> None:
        """Let a request that reaches its last known token verify draft tokens after it, as many
        as rows and blocks allow."""
        name, known, longest = share.request.request_id, share.most_known, self.limits.max_model_len
        wanted, covered = min(plan.num_tokens, budget.left), self.block_manager.capacity(name)
        room = wanted if covered >= min(known + wanted, longest) else max(0, covered - known)
        budget.lacks_blocks |= room < wanted
        num_drafts = budget.take(min(wanted, room))
        if num_drafts:
            grown = self.block_manager.grow(name, min(known + num_drafts, longest))
            assert grown, "capacity promised the blocks"
            share.num_draft_tokens, share.plan = num_drafts, plan

    def _plans(self, shares: Sequence[RequestShare]) -> Sequence[DraftPlan]:
        """How much each of these requests drafts, as the policy decides."""
        most = [self._most_drafts(it.request, it.known - it.request.num_tokens) for it in shares]
        pairs = zip(shares, most, strict=True)
        return self.policy.plan([Candidate(it.request, max(0, count)) for it, count in pairs])

    def _most_drafts(self, request: Request, surely_gained: int) -> int:
        """The most draft tokens that may be useful; one more token always follows accepted ones.

        Args:
            surely_gained: the fewest tokens that a step in flight will give the request.
        """
        limits = self.limits
        num_tokens = request.num_tokens + surely_gained
        return min(
            limits.max_model_len - num_tokens - 1,
            limits.drafts_for(request.max_tokens - request.num_output_tokens - surely_gained - 1),
            limits.drafter_max_model_len - num_tokens,
        )

    # ------------------------------------------------------------------ committing results

    def commit(self, batch: Batch, committed: Sequence[Committed]) -> None:
        """Append the tokens that a step gained to their requests, and apply stop conditions.

        Requests that ended since `schedule` are skipped.
        """
        for item, gain in zip(batch.requests, committed, strict=True):
            item.request.steps_in_flight -= 1
            if item.request.status is RequestStatus.RUNNING:
                self._commit_one(item, gain)

    def _commit_one(self, item: ScheduledRequest, gain: Committed) -> None:
        request = item.request
        check_gain(item, gain)
        ending = append_output(request, gain.token_ids, self.limits.max_model_len)
        if ending is None and gain.broken:
            ending = FinishReason.ERROR, NOT_FINITE
        # num_computed becomes num_tokens - 1, as the bonus or recovered token is not computed, but
        # less if a stop condition has cut the output among the accepted drafts.
        num_known = request.num_computed + item.num_new_tokens
        self.block_manager.commit_states(request.request_id, num_known, gain.num_accepted)
        request.num_computed = min(num_known + gain.num_accepted, request.num_tokens)
        request.num_steps += bool(gain.token_ids)
        request.drafter_computed = gain.drafter_computed
        if not gain.broken:
            self._index(request, gain.drafter_computed)
        if ending is not None:
            self.finish(request, *ending)
            return
        self.block_manager.slide(request.request_id, request.num_computed)
        if not request.steps_in_flight:  # else that step may still write to these blocks
            # Also blocks of a plan that was given up.
            name, next_row = request.request_id, request.num_computed + 1
            self.block_manager.rewind(name, request.num_tokens, next_row)

    def _index(self, request: Request, drafter_computed: int) -> None:
        """Put the full blocks that target and drafter have computed into the prefix index."""
        num_tokens = request.num_computed
        if self.limits.drafts(request):
            num_tokens = min(num_tokens, drafter_computed)
        name, namespace = request.request_id, self.limits.namespace(request)
        self.block_manager.index(name, namespace, request.token_ids, num_tokens, request.spans)

    # ------------------------------------------------------------------ common

    def _give_back(self, request: Request) -> None:
        self.block_manager.free(request.request_id, request.slot)
        heapq.heappush(self._free_slots, request.slot)
        request.slot = -1

    def check_invariants(self) -> None:
        """Raise AssertionError unless queues, slots, blocks and adapters agree."""
        check_queues(self._running, self._waiting, self._requests)
        check_places(self._running, self._free_slots, self.limits, self.block_manager)
        self._adapters.check_invariants(self._running)
