"""One turn of the engine, on one page."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from time import perf_counter

import torch
from torch import Tensor

from slipstream.core.batch import Batch, Committed
from slipstream.core.request import Request
from slipstream.engine.guidance import Guidance
from slipstream.engine.round import NUM_COUNTS, NUM_TIMES, Outcome, Proposal, Round, Steering
from slipstream.engine.scheduler import Scheduler
from slipstream.runner.device_batch import DeviceBatch, PackedBatch
from slipstream.runner.device_state import DeviceState
from slipstream.runner.graphs import GraphRunner
from slipstream.runner.model_runner import Forward
from slipstream.runner.transfer import Download, upload
from slipstream.sampling.state import SamplingState, Uses
from slipstream.speculative.drafter import Drafter


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step: drafting, the target's pass up to its logits, verification (sampling,
    the verdict, committing it, and what the drafter takes note of), the rest."""

    draft: float
    target: float
    verify: float
    rest: float


@dataclass(frozen=True)
class StepResult:
    """What one step did.

    Attributes:
        committed: per scheduled request, what it gained (before stop conditions cut it).
        live: per scheduled request, whether it had not ended before; if it had, the rest of what
            is here about it is surplus.
        logits: [N, V] float32, the target's raw logits; request r owns rows
            logit_starts[r] .. logit_starts[r] + its draft tokens.
        path: [R, W] int64, which of its rows gave each of a request's tokens; None: the first.
        forward: the target's pass.
    """

    batch: Batch
    committed: Sequence[Committed]
    live: Sequence[bool]
    logits: Tensor
    logit_starts: Sequence[int]
    path: Tensor | None
    forward: Forward
    times: StepTimes

    def logits_of(self, index: int, count: int) -> Tensor:
        """[count, V], what the first tokens that the request of batch index `index` gained were
        sampled from."""
        first = self.logit_starts[index]
        if self.path is None:
            return self.logits[first : first + count]
        return self.logits[first + self.path[index, :count]]


@dataclass(frozen=True, eq=False)
class Launched:
    """A step whose device work is under way."""

    batch: Batch
    outcome: Outcome
    numbers: Download
    began: float
    padded: bool  # every request has as many rows of logits


class Step:
    """Schedule, propose, forward, verify, commit. Plain decoding is the same with empty drafts.

    Where graphs are captured, the step of a decoding batch is one replay, and the next such step
    may be launched before the last one's results are here.

    Args:
        graphs: of rounds; None where nothing is captured.
        guidance: between proposal and verdict, for requests that follow a grammar.
        runs_ahead: whether to launch steps early; needs a drafter that needs nothing of the host.
        rereads: the drafter wants features of the last cached token of a prefix hit.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        round: Round,
        drafter: Drafter,
        state: DeviceState,
        sampling: SamplingState,
        graphs: GraphRunner | None,
        guidance: Guidance,
        runs_ahead: bool,
        rereads: bool,
    ) -> None:
        self._scheduler, self._round, self._drafter = scheduler, round, drafter
        self._state, self._sampling, self._graphs = state, sampling, graphs
        self._guidance = guidance
        self._steered: tuple[Proposal, Steering] | None = None
        self._runs_ahead, self._rereads = runs_ahead, rereads
        self._ended = 0.0

    @torch.inference_mode()
    def launch(self, batch: Batch) -> Launched:
        """Put the step's work on the device."""
        began = perf_counter()
        self._drafter.forget(batch.preempted)
        self._state.apply(batch)
        for item in batch.requests:
            if item.admitted:
                self._sampling.admit(item.request.slot, item.request)
        plan = self._plan(batch)
        outcome, padded = self._run(batch, plan)
        numbers = outcome.numbers[: len(batch.requests)]
        if any(item.is_prompt_chunk for item in batch.requests):
            self._drafter.read_prompts(batch, outcome.forward)
            slots = upload(plan.slots, self._state.device)
            numbers[:, -NUM_TIMES - 1] = self._drafter.cached_tokens(slots)
        return Launched(batch, outcome, Download(numbers), began, padded)

    def launch_ahead(self, last: Launched) -> Launched | None:
        """Launch the step behind `last`, whose results are not here yet; None if that needs them
        (or the host needs what a further step would overwrite)."""
        if not (last.padded and self._runs_ahead):
            return None
        requests = [item.request for item in last.batch.requests]
        if any(it.params.logprobs is not None or it.guide is not None for it in requests):
            return None
        batch = self._scheduler.schedule_ahead(last.batch)
        return None if batch is None else self.launch(batch)

    def finish(self, launched: Launched) -> StepResult:
        """Wait for the step's results and take them in."""
        batch = launched.batch
        live = [not item.request.finished for item in batch.requests]
        rows = launched.numbers.wait()
        longest = self._scheduler.limits.tree_depth
        committed = [_committed(row[:-NUM_TIMES], longest) for row in rows]
        self._scheduler.commit(batch, committed)
        times = self._times(launched, rows[0][-NUM_TIMES:])
        starts = _logit_starts(committed, launched)
        outcome = launched.outcome
        return StepResult(
            batch, committed, live, outcome.logits, starts, outcome.path, outcome.forward, times
        )

    def forget(self, requests: Sequence[Request]) -> None:
        """Tell the drafter of requests that ended."""
        self._drafter.forget(requests)

    def reset(self, running: Sequence[Request]) -> None:
        """A step was broken off: these requests have nothing on the device any more."""
        self._drafter.forget(running)
        for request in running:
            request.lose_place()
        self._state.reset()
        self._sampling.reset()

    def _times(self, launched: Launched, stamps: Sequence[int]) -> StepTimes:
        """The step's time runs from its launch, or from the end of the one before, to its end."""
        ended = perf_counter()
        seconds = ended - max(launched.began, self._ended)
        self._ended = ended
        draft, target, verify = ((end - begin) / 1e9 for begin, end in pairwise(stamps))
        rest = max(0.0, seconds - draft - target - verify)
        return StepTimes(draft, target, verify, rest)

    def _plan(self, batch: Batch) -> PackedBatch:
        """The batch in numbers, with the guesses of a drafter that runs on the host."""
        items = batch.requests
        guesses = self._drafter.prepare(batch)
        drafts = [item.num_draft_tokens for item in items]
        if guesses is not None:
            pairs = zip(guesses, drafts, strict=True)
            drafts = [most if guess is None else len(guess) for guess, most in pairs]
        slots = [item.request.slot for item in items]
        uses = self._sampling.uses(slots)
        width = max(drafts)
        if Uses.GRAMMAR in uses:  # which may have something to say where a drafter has not
            width = max(item.num_draft_tokens for item in items)
        return PackedBatch(
            slots=slots,
            num_new_tokens=[item.num_new_tokens for item in items],
            num_draft_tokens=drafts,
            at_end=[item.reaches_end for item in items],
            width=width,
            uses=uses,
            guesses=guesses,
            rereads=[int(self._rereads and item.admitted and item.start > 0) for item in items],
        )

    def _run(self, batch: Batch, plan: PackedBatch) -> tuple[Outcome, bool]:
        """The round, and whether it was a replay."""
        if Uses.GRAMMAR in plan.uses:
            return self._run_guided(batch, plan)
        if self._graphs is None or Uses.BAD_WORDS in plan.uses:
            return self._round(plan.on(self._state.device)), False
        if batch.is_decode:
            return self._graphs.run("round", self._round, plan), True
        # Prompt chunks have all sizes; the drafts beside them need not wait for their launches.
        turn = plan.on(self._state.device)
        if not plan.width or plan.guesses is not None:
            return self._round(turn), False
        proposal = self._graphs.run("propose", self._round.propose, plan)
        return self._round.judge(turn, _first(proposal, turn.num_requests)), False

    def _run_guided(self, batch: Batch, plan: PackedBatch) -> tuple[Outcome, bool]:
        """The same with the host between proposal and verdict: grammars live there."""
        guidance, round, graphs = self._guidance, self._round, self._graphs
        guidance.open(batch)
        turn = plan.on(self._state.device)
        if graphs is None or Uses.BAD_WORDS in plan.uses:
            proposal = round.propose(turn)
        elif batch.is_decode or (plan.width and plan.guesses is None):
            proposal = graphs.run("propose", round.propose, plan)
            if batch.is_decode:
                self._steered = proposal, guidance.steer_padded(batch, plan, proposal.draft)
                return graphs.run("judge", self._judge_steered, plan), True
            proposal = _first(proposal, turn.num_requests)
        else:
            proposal = round.propose(turn)
        steering = guidance.steer(batch, plan, proposal.draft)
        return round.judge(turn, proposal, steering), False

    def _judge_steered(self, turn: DeviceBatch) -> Outcome:
        """What a graph is made of: the tensors it finds here are there in every replay."""
        assert self._steered is not None
        proposal, steering = self._steered
        return self._round.judge(turn, proposal, steering)


def _first(proposal: Proposal, requests: int) -> Proposal:
    """The rows of so many requests, without the padding of a captured batch."""
    draft = proposal.draft
    kept = replace(
        draft,
        token_ids=draft.token_ids[:requests],
        num_tokens=draft.num_tokens[:requests],
        one_hot=draft.one_hot[:requests],
        probs=None if draft.probs is None else draft.probs[:requests],
        tree=None if draft.tree is None else draft.tree.first(requests),
    )
    return replace(proposal, draft=kept)


def _committed(row: Sequence[int], tree_depth: int | None) -> Committed:
    """One request's share of `Outcome.numbers`, without times."""
    *tokens, count, accepted, drafts, cached = row
    positions = None if tree_depth is None else min(drafts, tree_depth)
    return Committed(tuple(tokens[:count]), drafts, accepted, cached, positions)


def _logit_starts(committed: Sequence[Committed], launched: Launched) -> list[int]:
    """The first row of logits of each request."""
    if launched.padded:
        width = launched.outcome.numbers.shape[1] - NUM_COUNTS - NUM_TIMES
        return [index * width for index in range(len(committed))]
    starts = [0]
    for gain in committed:
        starts.append(starts[-1] + gain.num_draft_tokens + 1)
    return starts[:-1]
