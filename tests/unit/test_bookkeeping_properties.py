"""Scheduler and block manager under random load.

The pretended engine below runs real schedules against a pretended device: every "forward pass"
writes, into the place that the block table names, the whole prefix that a key at this place would
depend on, and checks all that it reads. So a stale block, a block shared too early or a drafter's
layers that are not there show up as a wrong prefix, whatever went wrong before. So does a
checkpoint of states, which holds the prefix that they cover.

The device has its own idea of every request, by slot. In a pipelined world steps are planned and
launched before the host has seen the results of the one before, so the host's idea lags behind.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from slipstream.cache.block_manager import BlockManager
from slipstream.cache.state_places import StatePlaces
from slipstream.cache.window_blocks import WindowBlocks, most_blocks_held
from slipstream.core.batch import Batch, Committed, ScheduledRequest
from slipstream.core.errors import UsageError
from slipstream.core.request import FinishReason, Request
from slipstream.core.sampling_params import SamplingParams
from slipstream.core.step_form import StepLimits
from slipstream.engine.scheduler import Scheduler

SAME_EVERY_TIME = settings(derandomize=True, database=None, deadline=None)
VOCABULARY = 25
EOS = 24
MAX_LEN = 30

Tokens = tuple[int, ...]


def next_token(prefix: Sequence[int]) -> int:
    """The pretended target: any function of the prefix will do."""
    return crc32(bytes(prefix)) % VOCABULARY


def plain_output(request: Request, prompt: Sequence[int]) -> list[int]:
    """The target's output without an engine."""
    tokens = list(prompt)
    for count in range(request.max_tokens):
        tokens.append(next_token(tokens))
        if tokens[-1] in request.stop_token_ids and count >= request.params.min_tokens:
            break
        if len(tokens) == MAX_LEN:
            break
    return tokens[len(prompt) :]


@dataclass
class Slot:
    """The device's state of a request."""

    tokens: list[int]
    computed: int  # tokens in the target's cache
    drafter_computed: int  # and in the drafter's
    taken_in: int = 0  # tokens that the states of its layers cover


@dataclass
class Share:
    """One request's share of a step, as the device was given it."""

    item: ScheduledRequest
    slot: Slot
    table: Tokens  # the blocks of the request when the step was launched
    window_table: Tokens  # and those of its layers with a window

    @property
    def name(self) -> str:
        return f"request {self.item.request.request_id}"

    def key(self, tokens: Sequence[int], position: int) -> Tokens:
        """The inputs that the key at a position depends on, and which rows may read it."""
        return int(self.item.request.cache_salt or 0), *tokens[: position + 1]

    def row_tokens(self, guess: Tokens) -> Tokens:
        return (*self.slot.tokens[: self.slot.computed + self.item.num_new_tokens], *guess)


@dataclass
class Launched:
    """A step that the device has done, or will have done when its results are waited for.

    The device works in the order of launches and reads nothing of the host's but what it was given
    at the launch, so it makes no difference when it works: here, at once.
    """

    batch: Batch
    known: list[Tokens]  # per request, before the step
    gains: list[Committed]


def num_rows(batch: Batch) -> int:
    """The tokens that a step computes, drafts among them."""
    return sum(item.num_new_tokens + item.num_draft_tokens for item in batch.requests)


@dataclass
class World:
    """A scheduler, a pretended target and drafter, and the cache that they share.

    With a window the target has layers that keep no more, in `spare` blocks above the fewest; with
    places, layers that keep a state of each request.
    """

    limits: StepLimits
    num_blocks: int
    block_size: int
    caching: bool
    pipelined: bool = False
    window: int = 0
    spare: int = 0
    places: int = 0
    interval: int = 1
    rereads: int = 0
    checkpoints: dict[int, Tokens] = field(default_factory=dict)
    window_kv: dict[int, Tokens] = field(default_factory=dict)
    target_kv: dict[int, Tokens] = field(default_factory=dict)
    drafter_kv: dict[int, Tokens] = field(default_factory=dict)
    slots: dict[int, Slot] = field(default_factory=dict)
    last_shares: dict[int, Share] = field(default_factory=dict)  # by slot
    in_flight: Launched | None = None
    everyone: list[Request] = field(default_factory=list)
    cut_short: set[Request] = field(default_factory=set)
    seen: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        window = None
        if self.window:
            fewest = most_blocks_held(self.window, self.block_size)
            window = WindowBlocks(fewest + self.spare, self.block_size, self.window)
        self.states = None
        if self.places and self.caching:
            self.states = StatePlaces(self.places, self.block_size, self.interval, self.rereads)
        self.blocks = BlockManager(
            self.num_blocks, self.block_size, self.caching, window, self.states
        )
        self.scheduler = Scheduler(self.limits, self.blocks)

    def add(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        drafts: int,
        min_tokens: int,
        logprobs: bool,
        priority: int = 0,
        salt: int = 0,
    ) -> None:
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min(min_tokens, max_tokens),
            prompt_logprobs=0 if logprobs else None,
        )
        drafts = min(drafts, self.limits.num_speculative_tokens)
        stops = frozenset({EOS})
        # An id is used again as soon as it is free, also while a step of the old one is under way.
        taken = {request.request_id for request in self.unfinished}
        name = next(name for name in map(str, range(len(taken) + 1)) if name not in taken)
        number = len(self.everyone)
        request = Request(
            *(name, list(prompt), params, 0, stops, max_tokens, drafts, number),
            priority=priority,
            cache_salt=str(salt or ""),
        )
        try:
            self.scheduler.add(request)
        except UsageError:
            self.seen["refused"] += 1
            assert len(prompt) + max_tokens > self.num_blocks * self.block_size
        else:
            self.everyone.append(request)

    # ------------------------------------------------------------------ one step

    def step(self, rng: Random, ended: Sequence[Request] = ()) -> None:
        """One batch; the requests of `ended` are aborted while it is under way."""
        launched, self.in_flight = self.in_flight, None
        if launched is None or not self.is_of_use(launched, rng):
            launched = self.launch(self.plan(), rng)
        before, during = ended[::2], ended[1::2]
        for request in before:
            self.leave(request, None)
        if self.pipelined:
            ahead = self.plan_ahead(launched.batch)
            self.in_flight = None if ahead is None else self.launch(ahead, rng)
        for request in during:
            self.leave(request, None)
        self.commit(launched)

    def is_of_use(self, launched: Launched, rng: Random) -> bool:
        """Whether any request needs the results; if none does, both answers are right."""
        live = any(not item.request.finished for item in launched.batch.requests)
        return live or rng.random() < 0.5

    def plan(self) -> Batch:
        # One that waits may come before those that run, and gets on once it has a place.
        candidates = [*self.scheduler.running] or self.unfinished
        first = min(candidates, key=lambda each: each.order, default=None)
        batch = self.scheduler.schedule()
        self.scheduler.check_invariants()
        self.check_plan(batch, first)
        self.seen["preempted"] += len(batch.preempted)
        self.seen["admitted"] += sum(item.admitted for item in batch.requests)
        return batch

    def plan_ahead(self, last: Batch) -> Batch | None:
        running = [*self.scheduler.running]
        batch = self.scheduler.schedule_ahead(last)
        self.scheduler.check_invariants()
        came = [] if batch is None else [item.request for item in batch.admitted]
        assert {*self.scheduler.running} == {*running, *came}, "nobody goes in a step planned ahead"
        if batch is not None:
            self.check_ahead(last, batch)
            self.seen["ahead"] += 1
            self.seen["ahead of a prompt"] += not last.is_decode
            self.seen["prompt ahead"] += not batch.is_decode
            self.seen["admitted ahead"] += len(came)
        return batch

    def commit(self, launched: Launched) -> None:
        for item, known in zip(launched.batch.requests, launched.known, strict=True):
            if item.request.finished:
                self.seen["surplus"] += 1
            else:
                assert tuple(item.request.token_ids) == known, "host and device disagree"
        self.scheduler.commit(launched.batch, launched.gains)
        self.scheduler.check_invariants()
        self.check_windows()
        self.seen["shared"] += sum(count > 1 for count in self.blocks._pool._references)

    def leave(self, request: Request, stop_string: str | None) -> None:
        """End a request from outside: a stop string was found, or the user went away."""
        if stop_string is None:
            self.scheduler.finish(request, FinishReason.ABORT)
        else:
            self.scheduler.finish(request, FinishReason.STOP, stop_string)
        assert request.finished
        self.cut_short.add(request)

    # ------------------------------------------------------------------ the device

    def launch(self, batch: Batch, rng: Random) -> Launched:
        self.save_last(batch)
        shares = []
        for item in batch.requests:
            request = item.request
            if item.admitted:
                self.slots[request.slot] = Slot([*request.token_ids], item.start, item.start)
            if item.admitted and self.states is not None:
                self.resume(item, self.slots[request.slot])
            tables = tuple(item.block_table), tuple(item.window_table)
            shares.append(Share(item, self.slots[request.slot], *tables))
            self.last_shares[request.slot] = shares[-1]
        known = [tuple(share.slot.tokens) for share in shares]
        guesses = [self.propose(share, rng) for share in shares]
        rows = [share.row_tokens(guess) for share, guess in zip(shares, guesses, strict=True)]
        for share, tokens in zip(shares, rows, strict=True):
            self.write(self.target_kv, share, tokens, share.slot.computed)
            if self.window:
                self.write_window(share, tokens)
        for share, tokens in zip(shares, rows, strict=True):
            self.read(self.target_kv, share, tokens)
            if self.window:
                self.read_window(share, tokens)
        if self.states is not None:
            for share in shares:
                self.take_in(share)
        gains = [self.verify(*each, rng) for each in zip(shares, guesses, strict=True)]
        return Launched(batch, known, gains)

    def propose(self, share: Share, rng: Random) -> Tokens:
        """Guess some of the planned drafts, as often right as wrong.

        The drafter first computes the tokens that it lacks, then its own guesses.
        """
        slot, wanted = share.slot, share.item.num_draft_tokens
        longest = min(self.limits.max_model_len - 1, self.limits.drafter_max_model_len)
        room = max(0, longest - len(slot.tokens))
        assert self.pipelined or wanted <= room, "more drafts were planned than have room"
        count = rng.randint(0, min(wanted, room))
        if not count:
            return ()
        tokens = [*slot.tokens]
        for _ in range(count):
            tokens.append(next_token(tokens) if rng.random() < 0.7 else rng.randrange(VOCABULARY))
        self.write(self.drafter_kv, share, tokens, slot.drafter_computed)
        self.read(self.drafter_kv, share, tokens)
        slot.drafter_computed = len(slot.tokens)
        return tuple(tokens[-count:])

    def verify(self, share: Share, guess: Tokens, rng: Random) -> Committed:
        slot, item = share.slot, share.item
        known, accepted = len(slot.tokens), 0
        if item.reaches_end:
            while accepted < len(guess) and guess[accepted] == next_token(slot.tokens):
                slot.tokens.append(guess[accepted])
                accepted += 1
            slot.tokens.append(next_token(slot.tokens))
        slot.computed += item.num_new_tokens + accepted
        self.observe(share, rng)
        return Committed(tuple(slot.tokens[known:]), len(guess), accepted, slot.drafter_computed)

    def observe(self, share: Share, rng: Random) -> None:
        """The drafter catches up as far as it likes; it never runs for requests without drafts."""
        if not share.item.request.num_speculative_tokens:
            return
        slot = share.slot
        done = slot.drafter_computed
        upto = rng.choice([done, slot.computed, rng.randint(done, slot.computed)])
        self.write(self.drafter_kv, share, slot.tokens[:upto], done)
        self.read(self.drafter_kv, share, slot.tokens[:upto])
        slot.drafter_computed = upto

    def resume(self, item: ScheduledRequest, slot: Slot) -> None:
        """States begin with a checkpoint of all cached tokens, or but for the one that is computed
        again."""
        assert (item.resumed >= 0) == (item.start > 0), "blocks without states"
        if item.start:
            slot.taken_in = item.start - self.rereads
            found = self.checkpoints[item.resumed]
            assert found == Share(item, slot, (), ()).key(slot.tokens, slot.taken_in - 1), (
                f"request {item.request.request_id} begins with foreign states"
            )
            self.seen["resumed"] += 1

    def take_in(self, share: Share) -> None:
        """The states of a request go on to after its known tokens."""
        slot, before = share.slot, share.slot.taken_in
        slot.taken_in = slot.computed + share.item.num_new_tokens
        edge = (slot.taken_in + self.rereads) // self.block_size
        save_at = edge * self.block_size - self.rereads
        if share.item.saved >= 0 and save_at > before:
            self.checkpoints[share.item.saved] = share.key(slot.tokens, save_at - 1)
            self.seen["saved"] += 1
        self.seen["not saved"] += share.item.saved < 0 and save_at > before

    def save_last(self, batch: Batch) -> None:
        """Checkpoints of requests that have ended, some of whose accepted drafts wait."""
        for last in batch.checkpoints:
            share = self.last_shares[last.slot]
            slot, end = share.slot, share.slot.taken_in + last.count
            assert slot.taken_in < end <= slot.computed, "not so many rows wait"
            assert (end + self.rereads) % self.block_size == 0, "not at an edge"
            self.checkpoints[last.place] = share.key(slot.tokens, end - 1)
            self.seen["saved last"] += 1

    def place(self, share: Share, position: int) -> int:
        block, offset = divmod(position, self.block_size)
        assert block < len(share.table), f"{share.name} has no block for position {position}"
        return share.table[block] * self.block_size + offset

    def write(
        self, cache: dict[int, Tokens], share: Share, tokens: Sequence[int], start: int
    ) -> None:
        for position in range(start, len(tokens)):
            cache[self.place(share, position)] = share.key(tokens, position)

    def read(self, cache: dict[int, Tokens], share: Share, tokens: Sequence[int]) -> None:
        for position in range(len(tokens)):
            assert cache.get(self.place(share, position)) == share.key(tokens, position), (
                f"{share.name} reads a foreign key at {position}"
            )

    def window_place(self, share: Share, position: int) -> int:
        block, offset = divmod(position, self.block_size)
        assert block < len(share.window_table), f"{share.name} has no window block for {position}"
        return share.window_table[block] * self.block_size + offset

    def write_window(self, share: Share, tokens: Sequence[int]) -> None:
        for position in range(share.slot.computed, len(tokens)):
            self.window_kv[self.window_place(share, position)] = share.key(tokens, position)

    def read_window(self, share: Share, tokens: Sequence[int]) -> None:
        """What the rows attend to, from the last token of a prefix hit on (computed again)."""
        first_row = share.slot.computed - int(share.item.admitted and share.item.start > 0)
        for position in range(max(0, first_row - self.window + 1), len(tokens)):
            seen = self.window_kv.get(self.window_place(share, position))
            assert seen == share.key(tokens, position), (
                f"{share.name} reads a foreign key at {position} of its window"
            )

    # ------------------------------------------------------------------ what must hold

    def check_windows(self) -> None:
        """Between steps a request holds a window at most, and the null block is not written."""
        if not self.window:
            return
        window = self.blocks._window
        assert window is not None
        assert all(place // self.block_size != window.null for place in self.window_kv)
        for request in self.scheduler.running:
            held = [it for it in window.table(request.request_id) if it != window.null]
            if not request.steps_in_flight:
                assert len(held) <= most_blocks_held(self.window, self.block_size) - 1
            self.seen["given back"] += len(held) < len(window.table(request.request_id))

    @property
    def unfinished(self) -> list[Request]:
        return [request for request in self.everyone if not request.finished]

    def check_plan(self, batch: Batch, first: Request | None) -> None:
        members = [item.request for item in batch.requests]
        assert num_rows(batch) <= self.limits.max_num_batched_tokens
        assert [each.order for each in members] == sorted({each.order for each in members})
        assert first is None or first in members, "the first request does not get on"
        assert not batch.preempted or not any(item.admitted for item in batch.requests)
        assert not set(batch.preempted) & set(members)
        if num_rows(batch) > len(members):
            assert set(self.scheduler.running) == set(members), "someone got no token"
        for item in batch.requests:
            self.check_item(item)

    def check_item(self, item: ScheduledRequest) -> None:
        request = item.request
        reach = item.start + item.num_new_tokens
        assert item.start == request.num_computed
        assert item.num_new_tokens >= 1
        assert reach <= request.num_tokens
        assert item.num_draft_tokens >= 0
        assert request.steps_in_flight == 1
        assert len(item.block_table) * self.block_size >= reach + item.num_draft_tokens
        if item.num_draft_tokens:
            assert item.reaches_end
            assert not item.is_prompt_chunk or self.limits.drafts_at_prefill
            assert item.start > 0 or self.limits.drafts_at_prefill
            assert item.num_draft_tokens <= request.num_speculative_tokens
            assert reach + item.num_draft_tokens <= self.limits.drafter_max_model_len
            assert reach + item.num_draft_tokens < self.limits.max_model_len
            assert request.num_output_tokens + item.num_draft_tokens < request.max_tokens

    def check_ahead(self, last: Batch, batch: Batch) -> None:
        """The step after `last`, whose results the host does not know."""
        assert num_rows(batch) <= self.limits.max_num_batched_tokens
        assert not batch.preempted
        in_flight = {item.request: item for item in last.requests}
        members = [item.request for item in batch.requests]
        assert [each.order for each in members] == sorted({each.order for each in members})
        for request in self.scheduler.running:
            gains = request in in_flight and in_flight[request].reaches_end
            ends = request.num_output_tokens + gains == request.max_tokens
            ends |= request.num_tokens + gains == self.limits.max_model_len
            assert not (request in members and ends), "those that surely end are left out"
            if num_rows(batch) > len(members):
                assert request in members or ends, "someone got no token"
            assert request.steps_in_flight == (request in in_flight) + (request in members)
        for item in batch.requests:
            request, before = item.request, in_flight.get(item.request)
            assert item.num_draft_tokens <= request.num_speculative_tokens
            # A request that was at its end has one token more at least, and all of `last`'s drafts
            # besides at most.
            fewest, start, drafts = request.num_tokens, request.num_computed, 0
            if before is not None:
                fewest, start = fewest + before.reaches_end, start + before.num_new_tokens
                drafts = before.num_draft_tokens
            reach = item.start + item.num_new_tokens
            assert item.start == start
            assert 1 <= item.num_new_tokens <= fewest - start
            assert item.reaches_end == (reach == fewest)
            assert item.reaches_end or not item.num_draft_tokens
            assert fewest + item.num_draft_tokens < self.limits.max_model_len
            outputs = fewest - request.num_prompt_tokens
            assert outputs + item.num_draft_tokens < request.max_tokens
            if item.num_draft_tokens:
                assert fewest + item.num_draft_tokens <= self.limits.drafter_max_model_len
            most = reach + drafts + item.num_draft_tokens
            covered = len(item.block_table) * self.block_size
            assert covered >= min(most, self.limits.max_model_len), "a row may have no block"
            assert covered < self.limits.max_model_len + self.block_size, "the table is too long"

    def drain(self, rng: Random) -> None:
        """Run to the end, in no more steps than the first request ever needs tokens.

        One that is admitted before others may take their blocks, and they begin again.
        """
        # One is for what runs ahead when it ends.
        steps = 1 + sum(
            min(request.num_prompt_tokens + request.max_tokens, MAX_LEN)
            for request in self.unfinished
        )
        if len({request.priority for request in self.unfinished}) > 1:
            steps *= len(self.unfinished)
        while self.scheduler.has_unfinished or self.in_flight is not None:
            assert steps > 0, "the scheduler does not get on"
            steps -= 1
            self.step(rng)
        self.check_end()

    def check_end(self) -> None:
        assert self.blocks.num_available == self.blocks.num_blocks
        assert not self.blocks.request_ids
        assert self.states is None or self.states._pool.num_available == self.places
        for request in self.everyone:
            prompt = request.token_ids[: request.num_prompt_tokens]
            expected = plain_output(request, prompt)
            said = list(request.output_token_ids)
            assert said == (expected[: len(said)] if request in self.cut_short else expected)


def limits(
    seqs: int, rows: int, drafts: int, drafter_len: int = MAX_LEN, after_prompt: bool = False
) -> StepLimits:
    return StepLimits(
        max_num_seqs=seqs,
        max_num_batched_tokens=rows,
        max_model_len=MAX_LEN,
        drafter_max_model_len=drafter_len,
        num_speculative_tokens=drafts,
        drafts_at_prefill=after_prompt,
        cache_identity="drafter",
        by_priority=True,
    )


worlds = st.builds(
    World,
    limits=st.builds(
        limits,
        seqs=st.integers(1, 5),
        rows=st.integers(1, 24),
        drafts=st.integers(0, 5),
        drafter_len=st.sampled_from([MAX_LEN, MAX_LEN, 12]),
        after_prompt=st.booleans(),
    ),
    num_blocks=st.integers(6, 24),
    block_size=st.sampled_from([1, 2, 3, 4]),
    caching=st.sampled_from([True, True, False]),
    pipelined=st.booleans(),
    window=st.sampled_from([0, 0, 1, 3, 4, 9]),
    spare=st.integers(0, 8),
    places=st.sampled_from([0, 0, 1, 2, 4, 9, 20]),
    interval=st.integers(1, 4),
    rereads=st.integers(0, 1),
)
# Prompts that begin alike, so that they meet in the prefix index.
prompts = st.builds(
    lambda alike, own: [1] * alike + own,
    st.integers(0, 16),
    st.lists(st.integers(0, 1), min_size=1, max_size=3),
)
wishes = st.fixed_dictionaries(
    {
        "prompt": prompts,
        "max_tokens": st.integers(1, 14),
        "drafts": st.sampled_from([0, 1, 2, 5, 5]),
        "min_tokens": st.sampled_from([0, 0, 4]),
        "logprobs": st.sampled_from([False, False, False, True]),
        "priority": st.sampled_from([0, 0, 0, -1, 5]),
        "salt": st.sampled_from([0, 0, 7, 8]),
    }
)
seeds = st.integers(0, 2**32 - 1)


@settings(SAME_EVERY_TIME, max_examples=300)
@given(worlds, st.lists(st.tuples(wishes, st.integers(0, 4)), max_size=8), seeds)
def test_every_request_ends_with_the_plain_output(
    world: World, arrivals: list[tuple[dict[str, object], int]], seed: int
) -> None:
    rng = Random(seed)
    for wish, steps in arrivals:
        world.add(**wish)  # type: ignore[arg-type]
        for _ in range(steps):
            world.step(rng)
    world.drain(rng)


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("window", [0, 3])
def test_the_simulation_meets_what_it_is_there_for(pipelined: bool, window: int) -> None:
    """Preemptions, hits, shared blocks and evictions all occur in a tight cache."""
    world = World(limits(4, 16, 3, after_prompt=True), 12, 2, True, pipelined, window, spare=8)
    rng = Random(0)
    for number in range(12):
        world.add([1] * (number % 5) + [number % 2], 12, 3, 0, False)
        world.step(rng)
    used = set()
    while world.scheduler.has_unfinished:
        world.step(rng)
        used |= set(world.target_kv)
    world.drain(rng)
    assert world.seen["preempted"]
    assert world.seen["shared"]
    assert world.blocks.num_hit_tokens
    assert len(used) == 12 * 2
    assert sum(request.num_tokens for request in world.everyone) > 2 * len(used)
    for ahead in ("ahead", "ahead of a prompt", "prompt ahead", "admitted ahead"):
        assert bool(world.seen[ahead]) == pipelined
    assert bool(world.seen["given back"]) == bool(window)


def test_a_pipeline_runs_ahead_of_its_results_most_of_the_time() -> None:
    world = World(limits(4, 24, 3), 40, 2, True, pipelined=True)
    rng = Random(0)
    for _ in range(4):
        world.add([1, 0], 14, 3, 14, False)
    steps = 0
    while world.scheduler.has_unfinished:
        world.step(rng)
        steps += 1
    assert world.seen["ahead"] >= steps - 3
    world.drain(rng)
    assert world.seen["admitted"] == 4
    assert not world.seen["preempted"]


def test_blocks_of_a_request_that_ended_are_written_and_given_away_at_once() -> None:
    """A step is under way for a request whose blocks the next plan gives to another."""
    world = World(limits(2, 24, 3), 8, 4, False, pipelined=True)
    rng = Random(0)
    for _ in range(40):
        for _ in range(2 - len(world.unfinished)):
            world.add([1, 0, 1, 0], 14, 3, 14, False)
        world.step(rng)
        world.step(rng)
        if world.in_flight is not None and len(world.unfinished) == 2:
            left, stays = world.unfinished
            freed = set(world.blocks.table(left.request_id))
            world.leave(left, None)
            assert world.in_flight.batch.requests[0].request is left
            world.step(rng)
            if not stays.finished:
                world.seen["given away"] += bool(freed & {*world.blocks.table(stays.request_id)})
    assert world.seen["given away"]
    assert world.seen["surplus"]
    world.drain(rng)


@pytest.mark.parametrize("pipelined", [False, True])
def test_a_request_that_fits_alone_finishes_among_others_in_the_tightest_cache(
    pipelined: bool,
) -> None:
    world = World(limits(4, 8, 4), num_blocks=6, block_size=3, caching=True, pipelined=pipelined)
    for number in range(4):
        world.add([number] * 6, 12, 4, 12, False)
    world.drain(Random(1))
    assert [request.num_output_tokens for request in world.everyone] == [12] * 4


class Engine(RuleBasedStateMachine):
    """Users come and go while the engine runs."""

    @initialize(world=worlds, seed=seeds)
    def start(self, world: World, seed: int) -> None:
        self.world = world
        self.rng = Random(seed)

    @rule(wish=wishes)
    def add(self, wish: dict[str, object]) -> None:
        self.world.add(**wish)  # type: ignore[arg-type]

    @rule(times=st.integers(1, 4))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.world.step(self.rng)

    @precondition(lambda self: self.world.unfinished)
    @rule(data=st.data())
    def step_while_someone_leaves(self, data: st.DataObject) -> None:
        who = data.draw(st.lists(st.sampled_from(self.world.unfinished), max_size=2, unique=True))
        self.world.step(self.rng, who)

    @precondition(lambda self: self.world.unfinished)
    @rule(data=st.data(), stop_string=st.sampled_from([None, "stop string"]))
    def leave(self, data: st.DataObject, stop_string: str | None) -> None:
        who = data.draw(st.sampled_from(range(len(self.world.unfinished))))
        self.world.leave(self.world.unfinished[who], stop_string)

    @rule()
    def reset_the_prefix_cache(self) -> None:
        self.world.scheduler.block_manager.forget_prefixes()

    @invariant()
    def everything_is_in_its_place(self) -> None:
        self.world.scheduler.check_invariants()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain(self.rng)


class Blocks(RuleBasedStateMachine):
    """The block manager alone: tables grow, are rewound and freed in any order."""

    size = 2

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(8, self.size, True)
        self.content: dict[int, Tokens] = {}
        self.tokens: dict[str, list[int]] = {}
        self.names = 0

    def write(self, name: str, tokens: Sequence[int], start: int) -> None:
        for position in range(start, len(tokens)):
            block, offset = divmod(position, self.size)
            place = self.blocks.table(name)[block] * self.size + offset
            self.content[place] = tuple(tokens[: position + 1])

    def some(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.tokens)))

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=10))
    def begin(self, tokens: list[int]) -> None:
        name = str(self.names)
        self.names += 1
        found = self.blocks.match_prefix("", tokens)
        assert len(found) * self.size < len(tokens)
        fits = self.blocks.can_admit(found, len(tokens))
        self.blocks.admit(name, found, len(tokens))
        assert self.blocks.grow(name, len(tokens)) == fits
        if fits:
            self.tokens[name] = tokens
            self.write(name, tokens, len(found) * self.size)
        else:
            self.blocks.free(name)

    @precondition(lambda self: self.tokens)
    @rule(
        data=st.data(),
        more=st.lists(st.integers(0, 1), min_size=1, max_size=5),
        accepted=st.integers(0, 5),
    )
    def guess(self, data: st.DataObject, more: list[int], accepted: int) -> None:
        name = self.some(data)
        tokens = self.tokens[name]
        room = self.blocks.capacity(name)
        grown = self.blocks.grow(name, len(tokens) + len(more))
        assert grown == (len(tokens) + len(more) <= room)
        if grown:
            self.write(name, tokens + more, len(tokens))
            tokens += more[:accepted]
            self.blocks.rewind(name, len(tokens))

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), share=st.floats(0, 1))
    def index(self, data: st.DataObject, share: float) -> None:
        name = self.some(data)
        tokens = self.tokens[name]
        self.blocks.index(name, "", tokens, round(share * len(tokens)))

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        name = self.some(data)
        del self.tokens[name]
        self.blocks.free(name)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=10))
    def forget(self, tokens: list[int]) -> None:
        self.blocks.forget_prefixes()
        assert self.blocks.match_prefix("", tokens) == []

    @invariant()
    def everything_is_in_its_place(self) -> None:
        self.blocks.check_invariants()

    @invariant()
    def every_table_reads_its_own_tokens(self) -> None:
        for name, tokens in self.tokens.items():
            for position in range(len(tokens)):
                block, offset = divmod(position, self.size)
                place = self.blocks.table(name)[block] * self.size + offset
                assert self.content[place] == tuple(tokens[: position + 1])

    def teardown(self) -> None:
        for name in list(self.tokens):
            self.blocks.free(name)
        self.blocks.check_invariants()
        assert self.blocks.num_available == self.blocks.num_blocks


TestEngine = Engine.TestCase
TestEngine.settings = settings(SAME_EVERY_TIME, max_examples=100, stateful_step_count=25)
TestBlocks = Blocks.TestCase
TestBlocks.settings = settings(SAME_EVERY_TIME, max_examples=75, stateful_step_count=40)
