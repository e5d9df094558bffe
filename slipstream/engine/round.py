"""The device's part of a step: propose, forward, verify, commit, observe. No host decisions."""

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from slipstream.core.limits import StepLimits
from slipstream.kernels.devices import label
from slipstream.kernels.preparation import preparation_for
from slipstream.kernels.timestamp import timestamp_for
from slipstream.runner.device_batch import DeviceBatch
from slipstream.runner.device_state import DeviceState
from slipstream.runner.model_runner import Forward, ModelRunner, Rows
from slipstream.runner.tree_rows import TreeRows
from slipstream.sampling.rows import SampleRows
from slipstream.sampling.state import SamplingState
from slipstream.sampling.tree_verification import DraftedTrees, verify_trees
from slipstream.sampling.verification import Verdict, Verification, verify
from slipstream.speculative.drafter import Draft, Drafter

# What a profiler's trace calls the parts of a round.
PART_LABELS = {
    "slipstream: draft": "draft",
    "slipstream: target": "target",
    "slipstream: verify": "verify",
}
_DRAFT, _TARGET, _VERIFY = PART_LABELS

# Numbers of a request behind its tokens in `Outcome.numbers`.
NUM_COUNTS, NUM_TIMES = 4, 4


@dataclass(frozen=True, eq=False)
class Proposal:
    """A draft, when the round began and when it was there."""

    draft: Draft
    began: Tensor
    drafted: Tensor


@dataclass(frozen=True, eq=False)
class Steering:
    """What the host made of a draft that grammars have a say in; tensors on the device.

    Attributes:
        token_ids: [R, K] int64, in place of the draft's.
        num_tokens: [R] int64.
        certain: [R, K] bool, tokens of which the grammar was certain.
        kept: [R] int64, how many of the first are what the drafter proposed.
        allowed: [N, ceil(V / 32)] int32, see `SampleRows`; a request's first row is filled in from
            the sampling state.
    """

    token_ids: Tensor
    num_tokens: Tensor
    certain: Tensor
    kept: Tensor
    allowed: Tensor

    def steer(self, batch: DeviceBatch, draft: Draft) -> tuple[DeviceBatch, Draft]:
        """The batch and the draft as the grammars have them."""
        probs = draft.probs
        missing = self.token_ids.shape[1] - draft.token_ids.shape[1]
        if probs is not None and missing:
            probs = pad(probs, (0, 0, 0, missing))
        # Of padding nothing is known here.
        num_tokens = torch.where(batch.at_end, self.num_tokens, 0)
        steered = replace(
            draft,
            token_ids=self.token_ids,
            num_tokens=num_tokens,
            probs=probs,
            certain=None if probs is None else self.certain,
        )
        return replace(batch, kept=self.kept), steered


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a round gave.

    Attributes:
        numbers: [R, K + 9] int64, for the host: the K + 1 places of the verdict's tokens; how many
            tokens, accepted and draft tokens there are, and what the drafter has cached; and when
            the round began, had its drafts, had the target's logits, and ended, in nanoseconds.
        logits: [N, V] float32, the target's raw logits.
        forward: the target's pass.
        path: [R, W] int64, which of a request's rows of logits gave each token; None: the first.
    """

    numbers: Tensor
    logits: Tensor
    forward: Forward
    path: Tensor | None


class Round:
    """Holds the models and the state; called with a batch, it does the whole of it.

    Runs in inference mode, which a step sets once. Nothing in it looks at the host, and it waits
    for the device only where a batch is exact, so a call over fixed tensors can be captured in a
    graph and replayed.
    """

    def __init__(
        self,
        runner: ModelRunner,
        drafter: Drafter,
        state: DeviceState,
        sampling: SamplingState,
        verification: Verification,
        limits: StepLimits,
    ) -> None:
        self._runner, self._drafter = runner, drafter
        self._state, self._sampling = state, sampling
        self._verification = verification
        self._preparation = preparation_for(state.device)
        self._now = partial(timestamp_for(state.device), state.device)
        self._limits = limits

    def __call__(self, batch: DeviceBatch) -> Outcome:
        with label(_DRAFT):
            proposal = self.propose(batch)
        with label(_TARGET):
            return self.judge(batch, proposal)

    def propose(self, batch: DeviceBatch) -> Proposal:
        """The drafter's guesses, which become the tentative tail of every request's tokens."""
        began = self._now()
        if not batch.exact:
            # The host may have planned before it knew the last step's tokens. With them it would
            # have planned as many as are left here: a seed's text must not depend on when it did.
            room = self._room(batch.slots)
            batch = replace(batch, num_draft_tokens=torch.minimum(batch.num_draft_tokens, room))
        draft = self._drafter.propose(batch)
        if not draft.written:
            self._preparation.write_tokens(
                self._state.tables, batch.slots, draft.token_ids, draft.num_tokens
            )
        return Proposal(draft, began, self._now())

    def judge(
        self, batch: DeviceBatch, proposal: Proposal, steering: Steering | None = None
    ) -> Outcome:
        """One pass of the target over known and draft tokens, the verdict, and what follows."""
        draft = proposal.draft
        if steering is not None:
            batch, draft = steering.steer(batch, draft)
            tables = self._state.tables
            self._preparation.write_tokens(tables, batch.slots, draft.token_ids, draft.num_tokens)
        forward = self._forward(batch, draft)
        num_rows = None
        hidden = forward.hidden
        if batch.exact:
            num_rows = batch.num_requests + int(draft.num_tokens.sum())
            hidden = forward.ends(draft.num_tokens + 1, num_rows)
        logits = self._runner.logits(hidden)
        computed = self._now()
        with label(_VERIFY):
            allowed = None if steering is None else steering.allowed
            verdict = self._verify(batch, draft, logits, num_rows, allowed)
            if verdict.path is not None:
                self._runner.keep_path(batch.slots, verdict.path, verdict.num_accepted)
            verdict = self._commit(batch, verdict)
            self._drafter.observe(batch, verdict, forward)
        counts = (
            verdict.num_tokens,
            verdict.num_accepted,
            draft.num_tokens,
            self._drafter.cached_tokens(batch.slots),
        )
        times = torch.stack((proposal.began, proposal.drafted, computed, self._now()))
        rows = times.expand(batch.num_requests, NUM_TIMES)
        numbers = torch.cat((verdict.token_ids, torch.stack(counts, 1), rows), 1)
        return Outcome(numbers, logits, forward, verdict.path)

    def _room(self, slots: Tensor) -> Tensor:
        """[R] int64, how many draft tokens can be of use; see `Scheduler._most_drafts`."""
        limits, acceptable = self._limits, self._acceptable(slots)
        if not limits.drafts_trees:
            return acceptable
        longest = min(limits.drafter_max_model_len, limits.max_model_len - 1)
        places = (longest - self._state.num_tokens[slots]).clamp_min(0)
        return torch.where(acceptable > 0, places, 0)

    def _acceptable(self, slots: Tensor) -> Tensor:
        """[R] int64, how many draft tokens may be accepted."""
        most = self._state.most_drafted[slots].clamp_max(self._limits.drafter_max_model_len)
        return (most - self._state.num_tokens[slots]).clamp_min(0)

    def _forward(self, batch: DeviceBatch, draft: Draft) -> Forward:
        """Prompt chunks, last tokens and draft tokens."""
        starts = self._state.num_computed[batch.slots]
        lengths = batch.num_new_tokens + draft.num_tokens
        most = batch.most_rows(draft.token_ids.shape[1] + 1)
        tree = None
        if draft.tree is not None:
            tree = TreeRows(draft.tree, starts, 0, draft.num_tokens > 0)
        if most is not None:
            return self._runner.forward(Rows(batch.slots, starts, lengths, most, tree=tree))
        starts, lengths = starts - batch.rereads, lengths + batch.rereads
        rows = Rows(batch.slots, starts, lengths, None, batch.rereads, tree=tree)
        return self._runner.forward(rows)

    def _verify(
        self,
        batch: DeviceBatch,
        draft: Draft,
        logits: Tensor,
        num_rows: int | None,
        allowed: Tensor | None,
    ) -> Verdict:
        """The verdict on every request's draft."""
        rows = SampleRows.build(
            batch.slots,
            self._state.num_tokens[batch.slots],
            draft.token_ids,
            draft.num_tokens,
            draft.one_hot,
            draft.probs,
            draft.vocabulary,
            num_rows=num_rows,
        )
        if allowed is not None:
            assert self._sampling.allowed_next is not None
            allowed.index_copy_(0, rows.first_row, self._sampling.allowed_next[batch.slots])
            rows = replace(rows, allowed=allowed, certain=draft.certain)
        if draft.tree is not None:
            trees = DraftedTrees(
                nodes=draft.tree,
                slots=batch.slots,
                positions=self._state.num_tokens[batch.slots],
                token_ids=draft.token_ids,
                num_nodes=draft.num_tokens,
                most_accepted=self._acceptable(batch.slots),
                num_rows=num_rows,
                allowed=allowed,
            )
            return verify_trees(logits, trees, self._sampling, batch.uses, self._verification)
        return verify(logits, rows, self._sampling, batch.uses, self._verification)

    def _commit(self, batch: DeviceBatch, verdict: Verdict) -> Verdict:
        """Append what was accepted; refused tokens lose their slots, and requests whose prompt is
        not at its end gain nothing."""
        num_tokens, num_accepted = self._preparation.commit(
            self._state.tables,
            batch.slots,
            batch.num_new_tokens,
            batch.at_end,
            verdict.token_ids,
            verdict.num_tokens,
            verdict.num_accepted,
        )
        self._sampling.commit(batch.slots, verdict.token_ids, num_tokens, batch.uses)
        return Verdict(verdict.token_ids, num_tokens, num_accepted, verdict.path)
