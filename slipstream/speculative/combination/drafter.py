"""`combination`: several drafters in one step; each request is served by the first that can draft.

    {"drafters": [{"method": "ngram"}, {"model": "demo/draft"}], "num_speculative_tokens": 4}

All but the last look up matches (`ngram`, `suffix`, `custom`), and draft nothing if there is none
that is long enough; the last drafts for all other requests. The drafts form one padded tensor, and
each request is verified with the q of the drafter that drafted for it.

If K is "auto", the policy limits for each request how much is looked up, and how much is drafted if
nothing was found (`Split`).

If another's draft is used, a drafter with a network still reads along: in the same step it computes
the tokens that it lacks, in one pass instead of K, so it is never more than K + 1 tokens behind. In
captured steps that costs nothing in addition to the passes for other requests. On exact batches, a
drafter that can catch up with any number of tokens is left out instead, until prefixes would have
to wait for it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from slipstream.core.batch import Batch, Split
from slipstream.core.errors import UsageError, counted
from slipstream.core.request import Request
from slipstream.kernels.devices import upload
from slipstream.runner.device_batch import DeviceBatch, Guesses
from slipstream.runner.device_state import DeviceState
from slipstream.runner.model_runner import Forward
from slipstream.sampling.verification import Verdict
from slipstream.speculative.catalogue import METHODS
from slipstream.speculative.drafter import (
    Draft,
    Drafter,
    DrafterLimits,
    DrafterResources,
    LoadedDrafter,
)
from slipstream.speculative.loading import (
    AUTO,
    DEFAULT_NUM_SPECULATIVE_TOKENS,
    ChosenDrafter,
    choose,
)
from slipstream.speculative.options import Options, TargetModel

# For lookups that precede another drafter: after shorter matches a draft model is better.
DEFAULT_MIN_MATCH = 8
_NO_LIMITS = Split(1 << 20, 1 << 20)
MOST_BEHIND = 64  # tokens that a drafter may lack before it reads along


@dataclass(frozen=True)
class CombinationConfig:
    """The drafters in their order.

    Attributes:
        counts: the maximum of draft tokens of each.
        num_speculative_tokens: the maximum of all.
    """

    members: tuple[ChosenDrafter, ...]
    counts: tuple[int, ...]
    num_speculative_tokens: int


def read_options(options: Options) -> CombinationConfig:
    """Each drafter takes its own options; those that look up matches also `min_match`."""
    listed = options.take("drafters")
    if not isinstance(listed, list | tuple) or len(listed) < 2:
        raise UsageError(
            "speculative_config: drafters must be a list of two or more, such as "
            '[{"method": "ngram"}, {"model": "..."}]'
        )
    last = len(listed) - 1
    members = [_read_member(given, index, index == last) for index, given in enumerate(listed)]
    whole = options.peek("num_speculative_tokens")
    whole = whole if isinstance(whole, int) and whole > 0 else None
    of_last = members[-1].given or whole or members[-1].proposed or DEFAULT_NUM_SPECULATIVE_TOKENS
    most = max(of_last, *(member.given or 0 for member in members))
    if whole is not None and most > whole:
        raise UsageError(
            f"speculative_config: one of drafters is to guess {most} tokens and all together "
            f"{whole}; give a larger number next to drafters, or lower the one inside"
        )
    most = whole or most
    counts = (*(member.given or most for member in members[:-1]), of_last)
    return CombinationConfig(tuple(members), counts, most)


def _read_member(given: Any, index: int, is_last: bool) -> ChosenDrafter:
    if not isinstance(given, Mapping):
        raise UsageError(
            f"speculative_config: each of drafters must be a mapping of options, not {given!r}"
        )
    options = Options(given)
    if options.peek("drafters") is not None or options.peek("method") == "combination":
        raise UsageError("speculative_config: drafters holds a combination; list its drafters")
    if options.peek("rejection_sample_method") is not None:
        raise UsageError(
            "speculative_config: all drafters are verified in one way; give "
            "rejection_sample_method next to drafters, not inside"
        )
    if options.peek("num_speculative_tokens") == 0:
        raise UsageError("speculative_config: a drafter with num_speculative_tokens 0; take it out")
    _fill_min_match(options, not is_last)
    choice = choose(options)
    if choice.adaptive:
        raise UsageError(
            "speculative_config: num_speculative_tokens is chosen for all drafters together; give "
            f'"{AUTO}" next to drafters'
        )
    options.finish(f"{choice.name} (number {index + 1} of drafters)")
    return choice


def _fill_min_match(options: Options, has_followers: bool) -> None:
    """Set the shortest match: `min_match` is one key for all drafters that look up, with another
    default if other drafters follow."""
    name = options.peek("method") or options.peek("model")
    method = METHODS.get(name) if isinstance(name, str) else None
    if method is None or method.match_keys is None:
        return
    shortest_key, longest_key = method.match_keys
    asked = options.take_int("min_match", None)
    if asked is not None and options.peek(shortest_key) is not None:
        raise UsageError(
            f"speculative_config: min_match is {shortest_key} for method {name}; give one of them"
        )
    longest = options.peek(longest_key)
    default = min(DEFAULT_MIN_MATCH, longest) if isinstance(longest, int) else DEFAULT_MIN_MATCH
    if asked is not None or has_followers:
        options.fill(shortest_key, default if asked is None else asked)


def load(config: CombinationConfig, target: TargetModel) -> LoadedDrafter:
    """Load every drafter; UsageError for an order in which some would never be asked."""
    loaded = [member.load(target) for member in config.members]
    names = [member.name for member in config.members]
    for name, member in zip(names[:-1], loaded[:-1], strict=True):
        if not member.limits.is_lookup:
            raise UsageError(
                f"speculative_config: {name} has a guess for every request, so that the drafters "
                "after it are never asked; put it last"
            )
    on_device = [member.limits.on_device for member in loaded]
    if on_device != sorted(on_device):
        late = names[len(names) - 1 - on_device[::-1].index(False)]
        raise UsageError(
            f"speculative_config: {late} guesses on the host, before the others begin; put it first"
        )
    most, given = loaded[-1].limits.max_speculative_tokens, config.members[-1].given
    if most is not None and given is not None and given > most:
        raise UsageError(
            f"{names[-1]} guesses at most {counted(most, 'token')} a step; lower its "
            "num_speculative_tokens"
        )
    counts = (*config.counts[:-1], min(config.counts[-1], most or config.counts[-1]))
    return _combine(loaded, counts)


def _combine(loaded: Sequence[LoadedDrafter], counts: Sequence[int]) -> LoadedDrafter:
    """The combined drafter; only its last member may have layers in the blocks."""
    last, limits = loaded[-1], [member.limits for member in loaded]

    def build(resources: DrafterResources) -> Drafter:
        lent = replace(resources, in_combination=True)
        members = [
            Member(member.build(lent), member.limits, count)
            for member, count in zip(loaded, counts, strict=True)
        ]
        count = resources.num_speculative_tokens
        return CombinedDrafter(members, resources.state, resources.captured, count)

    return LoadedDrafter(
        build=build,
        limits=DrafterLimits(
            drafts_at_prefill=all(it.drafts_at_prefill for it in limits),
            cache_identity=last.limits.cache_identity,
            on_device=all(it.on_device for it in limits),
            keeps_probabilities=last.limits.keeps_probabilities,
            is_lookup=last.limits.is_lookup,
            lookup_passes=None if last.limits.is_lookup else int(not last.limits.may_skip_steps),
        ),
        needs=last.needs,
        layout=last.layout,
        window=last.window,
        adapters=last.adapters,
    )


@dataclass(frozen=True, eq=False)
class Member:
    """A drafter, its limits, and its maximum of draft tokens."""

    drafter: Drafter
    limits: DrafterLimits
    count: int


class CombinedDrafter(Drafter):
    """Asks its members in order: those on the host before the step, the others within it.

    Args:
        members: all but the last look up; those on the host come first.
        captured: see `DrafterResources`.
        count: the maximum of draft tokens of any member.
    """

    def __init__(
        self, members: Sequence[Member], state: DeviceState, captured: bool, count: int
    ) -> None:
        super().__init__(state)
        self._count = count
        self._members = [member.drafter for member in members]
        self._on_host = [member for member in members if not member.limits.on_device]
        self._on_device = [member for member in members if member.limits.on_device]
        self._leaves_out = members[-1].limits.may_skip_steps and not captured
        # What each slot is limited to: by `_splits`, as a tensor [2, num_slots] on the device.
        self._splits = [_NO_LIMITS] * state.num_slots
        self._limits = torch.full((2, state.num_slots), max(_NO_LIMITS), device=state.device)

    def prepare(self, batch: Batch) -> Guesses | None:
        self._set_limits(batch)
        for member in self._on_device:
            # All get the whole batch, as requests may get tokens whichever drafter drafts.
            member.drafter.prepare(batch)
        if not self._on_host:
            return None
        found: list[Sequence[int]] = [() for _ in batch.requests]
        for member in self._on_host:
            guesses = member.drafter.prepare(_view(batch, found, member.count))
            if guesses is None:  # the leader drafts, and this rank is another
                return None
            found = [old or new or () for old, new in zip(found, guesses, strict=True)]
        if not self._on_device:
            return found
        return [guess or None for guess in found]

    def _set_limits(self, batch: Batch) -> None:
        splits = {item.request.slot: item.split or _NO_LIMITS for item in batch.requests}
        changed = [slot for slot, split in splits.items() if split != self._splits[slot]]
        if changed:
            found = [splits[slot] for slot in changed]
            slots, *limits = upload(
                [changed, *map(list, zip(*found, strict=True))], self._state.device
            )
            self._limits.index_copy_(1, slots, torch.stack(limits))
            for slot in changed:
                self._splits[slot] = splits[slot]

    def propose(self, batch: DeviceBatch) -> Draft:
        # The buffer of a drafter that reads features has `count` + 1 rows. A token that is computed
        # again takes one of them, so there may be one draft token less.
        most = self._count - batch.rereads
        counts = torch.minimum(batch.num_draft_tokens, most)
        batch = replace(batch, num_draft_tokens=counts, draft_counts=None)
        draft, looked_up = _host_draft(batch), torch.zeros_like(batch.at_end)
        for member in self._on_device:
            taken = draft.num_tokens > 0
            if not member.limits.is_lookup:
                looked_up = taken
            asked = self._member_batch(member, batch, taken)
            if asked.width:
                draft = _completed(draft, member.drafter.propose(asked))
        return replace(draft, looked_up=looked_up)

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

    def _member_batch(self, member: Member, batch: DeviceBatch, taken: Tensor) -> DeviceBatch:
        """The batch with the numbers that a member is to draft: 0 for requests that have a draft
        (`taken`), but 1 if it has to read along."""
        known = self._state.num_tokens[batch.slots]
        most = self._limits[0 if member.limits.is_lookup else 1, batch.slots]
        wanted = batch.num_draft_tokens.clamp_max(member.count)
        if member.limits.max_model_len is not None:
            wanted = torch.minimum(wanted, (member.limits.max_model_len - known).clamp_min(0))
        reads_along: Tensor | int = 0 if member.limits.is_lookup else 1
        if reads_along and batch.exact and self._leaves_out:
            missing = known - member.drafter.cached_tokens(batch.slots)
            reads_along = (missing > MOST_BEHIND).to(torch.int64)
        least = wanted.clamp_max(reads_along)
        wanted = torch.where(taken, least, torch.maximum(torch.minimum(wanted, most), least))
        return batch.asking_for(wanted, min(batch.width, member.count))


def _view(batch: Batch, found: Sequence[Sequence[int]], count: int) -> Batch:
    """The batch for a drafter of `count` tokens, which drafts for requests without a draft."""
    items = []
    for item, guess in zip(batch.requests, found, strict=True):
        most = min(item.num_draft_tokens, count, (item.split or _NO_LIMITS).looked_up)
        items.append(replace(item, num_draft_tokens=0 if guess else most))
    return replace(batch, requests=tuple(items))


def _host_draft(batch: DeviceBatch) -> Draft:
    """The draft that was made on the host; no tokens for other requests."""
    tokens = batch.guesses.clamp_min(0)
    if not tokens.shape[1]:
        tokens = batch.slots.new_zeros((batch.num_requests, batch.width))
    count = torch.where(batch.guessed, batch.num_draft_tokens, 0)
    return Draft(tokens, count, torch.ones_like(batch.at_end))


def _completed(draft: Draft, other: Draft) -> Draft:
    """`draft`, whose requests without tokens take the tokens of `other`, which may be narrower."""
    missing = draft.token_ids.shape[1] - other.token_ids.shape[1]
    taken = draft.num_tokens > 0
    tokens = torch.where(taken.unsqueeze(1), draft.token_ids, pad(other.token_ids, (0, missing)))
    probs = other.probs
    if probs is not None and missing:
        probs = pad(probs, (0, 0, 0, missing))
    confidences = other.confidences  # drafts that were looked up have none
    if confidences is not None:
        confidences = pad(confidences, (0, missing)).masked_fill(taken.unsqueeze(1), torch.nan)
    return Draft(
        token_ids=tokens,
        num_tokens=torch.where(taken, draft.num_tokens, other.num_tokens),
        one_hot=taken | other.one_hot,
        probs=probs,
        vocabulary=other.vocabulary,
        confidences=confidences,
        shares=other.shares,
    )
