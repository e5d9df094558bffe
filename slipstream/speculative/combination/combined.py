"""Drafters that share a step: each request is drafted for by the first that has a guess for it.

A drafter with a network reads along where another's guess is taken: in the same step it computes
what it has not seen, in one pass instead of K, so that it is never more than K + 1 tokens behind.
Captured, that pass costs nothing beside those for other requests. On exact batches one that can
make up for any number of tokens is left out instead, until prefixes would have to wait for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor
from torch.nn.functional import pad

from slipstream.core.batch import Batch
from slipstream.core.request import Request
from slipstream.runner.device_batch import DeviceBatch, Guesses
from slipstream.runner.device_state import DeviceState
from slipstream.runner.model_runner import Forward
from slipstream.sampling.verification import Verdict
from slipstream.speculative.drafter import Draft, Drafter, DrafterLimits

MOST_BEHIND = 64  # tokens


@dataclass(frozen=True, eq=False)
class Member:
    """A drafter, what it can do, and how many tokens it guesses at most."""

    drafter: Drafter
    limits: DrafterLimits
    count: int


class CombinedDrafter(Drafter):
    """Asks its members in their order: those on the host while a step is planned, the others in it.

    Args:
        members: all but the last look up; those on the host come first.
        captured: see `DrafterResources`.
        count: draft tokens that any of them guesses at most.
    """

    def __init__(
        self, members: Sequence[Member], state: DeviceState, captured: bool, count: int
    ) -> None:
        super().__init__(state)
        self._count = count
        self._members = [member.drafter for member in members]
        self._on_host = [member for member in members if not member.limits.on_device]
        self._on_device = [member for member in members if member.limits.on_device]
        self._leaves_out = members[-1].limits.catches_up and not captured

    def prepare(self, batch: Batch) -> Guesses | None:
        for member in self._on_device:
            # Whoever drafts, so many tokens may be gained.
            member.drafter.prepare(batch)
        if not self._on_host:
            return None
        found: list[Sequence[int]] = [() for _ in batch.requests]
        for member in self._on_host:
            guesses = member.drafter.prepare(_view(batch, found, member.count))
            assert guesses is not None, "it guesses on the host"
            found = [old or new or () for old, new in zip(found, guesses, strict=True)]
        if not self._on_device:
            return found
        return [guess or None for guess in found]

    def propose(self, batch: DeviceBatch) -> Draft:
        if not batch.width:
            return Draft.empty(batch)
        # What waits for a drafter that reads features has room for so many rows and one more: one
        # that is read again takes the place of a draft token, which a look-up might have accepted.
        most = self._count - batch.rereads
        batch = replace(batch, num_draft_tokens=torch.minimum(batch.num_draft_tokens, most))
        draft = _host_draft(batch)
        for member in self._on_device:
            asked = self._asked(member, batch, draft.num_tokens > 0)
            if asked.width:
                draft = _completed(draft, member.drafter.propose(asked))
        return draft

    def observe(self, batch: DeviceBatch, verdict: Verdict, forward: Forward) -> None:
        for member in self._members:
            member.observe(batch, verdict, forward)

    def read_prompts(self, batch: Batch, forward: Forward) -> None:
        for member in self._members:
            member.read_prompts(batch, forward)

    def forget(self, requests: Sequence[Request]) -> None:
        for member in self._members:
            member.forget(requests)

    def cached_tokens(self, slots: Tensor) -> Tensor:
        return reduce(torch.minimum, (it.cached_tokens(slots) for it in self._members))

    def _asked(self, member: Member, batch: DeviceBatch, taken: Tensor) -> DeviceBatch:
        """What a member is to guess: nothing where another has, but one token where it has to read
        along."""
        known = self._state.num_tokens[batch.slots]
        wanted = batch.num_draft_tokens.clamp_max(member.count)
        if member.limits.max_model_len is not None:
            wanted = torch.minimum(wanted, (member.limits.max_model_len - known).clamp_min(0))
        reads_along: Tensor | int = 0 if member.limits.looks_up else 1
        if reads_along and batch.exact and self._leaves_out:
            behind = known - member.drafter.cached_tokens(batch.slots)
            reads_along = (behind > MOST_BEHIND).to(torch.int64)
        wanted = torch.where(taken, wanted.clamp_max(reads_along), wanted)
        return batch.asking_for(wanted, min(batch.width, member.count))


def _view(batch: Batch, found: Sequence[Sequence[int]], count: int) -> Batch:
    """The batch as it looks to a drafter that guesses `count` tokens where nobody has yet."""
    items = [
        replace(item, num_draft_tokens=0 if guess else min(item.num_draft_tokens, count))
        for item, guess in zip(batch.requests, found, strict=True)
    ]
    return replace(batch, requests=tuple(items))


def _host_draft(batch: DeviceBatch) -> Draft:
    """What was guessed on the host; no tokens for all others."""
    tokens = batch.guesses.clamp_min(0)
    if not tokens.shape[1]:
        tokens = batch.slots.new_zeros((batch.num_requests, batch.width))
    count = torch.where(batch.guessed, batch.num_draft_tokens, 0)
    return Draft(tokens, count, torch.ones_like(batch.at_end))


def _completed(draft: Draft, other: Draft) -> Draft:
    """`draft`, and where it has no tokens `other`, which may be narrower."""
    missing = draft.token_ids.shape[1] - other.token_ids.shape[1]
    taken = draft.num_tokens > 0
    tokens = torch.where(taken.unsqueeze(1), draft.token_ids, pad(other.token_ids, (0, missing)))
    probs = other.probs
    if probs is not None and missing:
        probs = pad(probs, (0, 0, 0, missing))
    return Draft(
        token_ids=tokens,
        num_tokens=torch.where(taken, draft.num_tokens, other.num_tokens),
        one_hot=taken | other.one_hot,
        probs=probs,
        vocabulary=other.vocabulary,
    )
