"""Requests of no user, for steps that are run to measure them or to compile their kernels.

They are put into the slots directly. The scheduler and the block manager do not know of them: their
block tables name blocks that no request uses yet, and the prefix index never gets these blocks.
Noise is keyed by a request's seed and step, so later output does not depend on this. The tokens
repeat in a cycle, so that drafters which look up text find matches, and differ from each other, so
that the rows of a mixture of experts do not all choose the same experts.
"""

from collections.abc import Sequence

from slipstream.core.adapters import NamedAdapter
from slipstream.core.batch import Batch, ScheduledRequest, Split, StepReport
from slipstream.core.request import Request, RequestStatus
from slipstream.core.sampling_params import SamplingParams
from slipstream.engine.launcher import Launcher
from slipstream.engine.resolve import Resolved
from slipstream.engine.step_results import Launched

_CYCLE = 24  # length of the cycle of tokens
GREEDY = SamplingParams(temperature=0, ignore_eos=True)


class ArtificialRequests:
    """Artificial requests by slot; none of a user may be running.

    Args:
        growth: the most tokens that a request gains before it is admitted again.

    Attributes:
        longest: the most tokens that a request may have.
    """

    def __init__(self, step: Launcher, resolved: Resolved, block_size: int, growth: int) -> None:
        self._step, self._resolved, self._growth = step, resolved, growth
        limits = resolved.limits
        self.longest = min(limits.max_model_len, limits.drafter_max_model_len)
        self._block_size = block_size
        self._requests: list[Request | None] = [None] * limits.max_num_seqs
        self._known = [0] * limits.max_num_seqs  # upper bounds of their numbers of tokens
        self._began = [0] * limits.max_num_seqs  # their numbers of tokens when they were admitted

    def admit(
        self,
        slots: Sequence[int],
        length: int,
        params: SamplingParams = GREEDY,
        adapted: bool = False,
    ) -> None:
        """Replace the requests in these slots by new ones of `length` tokens, whose steps are those
        of requests with adapters if they are `adapted`."""
        self._drop(slots)
        for slot in slots:
            request = self._requests[slot] = self._made(slot, length, params)
            # Their rows have no adapter, so nothing has to be loaded.
            request.adapter = NamedAdapter("artificial", 0, None) if adapted else None
            self._known[slot] = self._began[slot] = length

    def fits(self, slot: int, length: int) -> bool:
        """Whether the slot's request began with `length` tokens and may grow once more."""
        if self._requests[slot] is None or self._began[slot] != length:
            return False
        return self._known[slot] + self._growth <= min(4 * length, self.longest)

    def known(self, item: ScheduledRequest) -> int:
        """An upper bound of the request's number of tokens."""
        return self._known[item.request.slot]

    def batch(self, slots: Sequence[int], width: int = 0, admitted: bool = False) -> Batch:
        """A decode step of the requests in these slots, in which each drafts `width` tokens."""
        return Batch(tuple(self._scheduled(slot, width, admitted) for slot in slots))

    def with_prompts(self, batch: Batch, slots: Sequence[int]) -> Batch:
        """The step with the whole prompts of the requests in these slots in addition."""
        prompts = (self._scheduled(slot, 0, True, whole=True) for slot in slots)
        return Batch((*batch.requests, *prompts))

    def finish(self, launched: Launched) -> StepReport:
        """Wait for a step's results."""
        report = self._step.finish(launched).report
        for item, gain in zip(report.batch.requests, report.committed, strict=True):
            slot = item.request.slot
            before = item.start + item.num_new_tokens if item.admitted else self._known[slot]
            # Blocks that were never written may hold NaN. Then the logits are not finite, and the
            # report has fewer tokens than the device has added.
            gained = item.num_draft_tokens + 1 if gain.broken else len(gain.token_ids)
            self._known[slot] = before + gained
        return report

    def clear(self) -> None:
        """Free all that the device and the drafter hold of the requests."""
        self._drop(range(len(self._requests)))
        self._step.reset([request for request in self._requests if request is not None])

    def _made(self, slot: int, length: int, params: SamplingParams) -> Request:
        resolved = self._resolved
        spread = max(1, resolved.vocab_size // _CYCLE)
        tokens = [(slot + place) % _CYCLE * spread for place in range(length)]
        request = Request(
            request_id=f"artificial {slot}",
            token_ids=[it % resolved.vocab_size for it in tokens],
            params=params,
            seed=0,
            stop_token_ids=frozenset(),
            max_tokens=resolved.limits.max_model_len,
            num_speculative_tokens=resolved.limits.num_speculative_tokens,
            arrival=slot,
            verification=resolved.verification_of(params),
        )
        request.slot = slot
        return request

    def _scheduled(
        self, slot: int, width: int, admitted: bool, whole: bool = False
    ) -> ScheduledRequest:
        request, known = self._requests[slot], self._known[slot]
        assert request is not None
        covered = min(4 * self._began[slot], self.longest) + self._growth
        count = -(-min(covered, self._resolved.limits.max_model_len) // self._block_size)
        return ScheduledRequest(
            request=request,
            start=0 if whole else known - 1,
            num_new_tokens=known if whole else 1,
            num_draft_tokens=width,
            split=None if self._resolved.limits.lookup_passes is None else Split(0, width),
            block_table=_blocks(slot, count, self._resolved.num_blocks),
            admitted=admitted,
            reaches_end=True,
            window_table=_blocks(slot, count, self._resolved.num_window_blocks),
            rank=slot % self._step.division.num_parts,
        )

    def _drop(self, slots: Sequence[int]) -> None:
        """Make the drafter forget these requests."""
        gone = [request for request in map(self._requests.__getitem__, slots) if request]
        for request in gone:
            request.status = RequestStatus.FINISHED
        self._step.forget(gone)


def _blocks(slot: int, count: int, available: int) -> Sequence[int]:
    """A block table for a slot; slots share blocks only if there are too few."""
    return [(slot * count + index) % available for index in range(count)] if available else ()
