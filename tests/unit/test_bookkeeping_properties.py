"""Scheduler and block manager under random load.

The pretended engine below runs real schedules against a pretended cache: every "forward pass"
writes, into the place that the block table names, the whole prefix that a key at this place would
depend on, and checks all that it reads. So a stale block, a block shared too early or a drafter's
layers that are not there show up as a wrong prefix, whatever went wrong before.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from zlib import crc32

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from slipstream.cache.block_manager import BlockManager
from slipstream.core.batch import Batch, Committed, ScheduledRequest
from slipstream.core.errors import UsageError
from slipstream.core.limits import StepLimits
from slipstream.core.request import FinishReason, Request
from slipstream.core.sampling_params import SamplingParams
from slipstream.engine.scheduler import Scheduler

SAME_EVERY_TIME = settings(derandomize=True, database=None, deadline=None)
VOCABULARY = 25
EOS = 24
MAX_LEN = 40

Tokens = tuple[int, ...]


def next_token(prefix: Sequence[int]) -> int:
    """The pretended target: any function of the prefix will do."""
    return crc32(bytes(prefix)) % VOCABULARY


def plain_output(request: Request, prompt: Sequence[int]) -> list[int]:
    """What the target says without an engine."""
    tokens = list(prompt)
    for count in range(request.max_tokens):
        tokens.append(next_token(tokens))
        if tokens[-1] in request.stop_token_ids and count >= request.params.min_tokens:
            break
        if len(tokens) == MAX_LEN:
            break
    return tokens[len(prompt) :]


@dataclass
class World:
    """A scheduler, a pretended target and drafter, and the cache that they share."""

    limits: StepLimits
    num_blocks: int
    block_size: int
    caching: bool
    target_kv: dict[int, Tokens] = field(default_factory=dict)
    drafter_kv: dict[int, Tokens] = field(default_factory=dict)
    drafter_computed: dict[Request, int] = field(default_factory=dict)
    everyone: list[Request] = field(default_factory=list)
    cut_short: set[Request] = field(default_factory=set)
    seen: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.blocks = BlockManager(self.num_blocks, self.block_size, self.caching)
        self.scheduler = Scheduler(self.limits, self.blocks)

    def add(
        self, prompt: Sequence[int], max_tokens: int, drafts: int, min_tokens: int, logprobs: bool
    ) -> None:
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min(min_tokens, max_tokens),
            prompt_logprobs=0 if logprobs else None,
        )
        drafts = min(drafts, self.limits.num_speculative_tokens)
        number = len(self.everyone)
        stops = frozenset({EOS})
        request = Request(
            str(number), list(prompt), params, 0, stops, max_tokens, drafts, arrival=number
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
        """One turn; the requests of `ended` are aborted between schedule and commit."""
        first = min(self.unfinished, key=lambda each: each.arrival, default=None)
        batch = self.scheduler.schedule()
        self.scheduler.check_invariants()
        self.check_plan(batch, first)
        drafts = [self.propose(item, rng) for item in batch.requests]
        for item, guess in zip(batch.requests, drafts, strict=True):
            self.write(self.target_kv, item, self.row_tokens(item, guess), item.start)
        for item, guess in zip(batch.requests, drafts, strict=True):
            self.read(self.target_kv, item, self.row_tokens(item, guess))
        gains = [self.verify(*each, rng) for each in zip(batch.requests, drafts, strict=True)]
        for request in ended:
            self.leave(request, None)
        self.scheduler.commit(batch, gains)
        self.scheduler.check_invariants()
        self.seen["preempted"] += len(batch.preempted)
        self.seen["shared"] += sum(count > 1 for count in self.blocks._references)

    def leave(self, request: Request, stop_string: str | None) -> None:
        """End a request from outside: a stop string was found, or the user went away."""
        if stop_string is None:
            assert self.scheduler.abort(request.request_id) is request
        else:
            self.scheduler.finish(request, FinishReason.STOP, stop_string)
        assert request.finished
        self.cut_short.add(request)

    def propose(self, item: ScheduledRequest, rng: Random) -> Tokens:
        """Guess some of the planned drafts, as often right as wrong.

        The drafter first computes the tokens that it lacks, then its own guesses.
        """
        if item.admitted:
            self.drafter_computed[item.request] = item.start
        count = rng.randint(0, item.num_draft_tokens)
        if not count:
            return ()
        tokens = item.request.token_ids[:]
        for _ in range(count):
            tokens.append(next_token(tokens) if rng.random() < 0.7 else rng.randrange(VOCABULARY))
        self.write(self.drafter_kv, item, tokens, self.drafter_computed[item.request])
        self.read(self.drafter_kv, item, tokens)
        self.drafter_computed[item.request] = item.request.num_tokens
        return tuple(tokens[-count:])

    def verify(self, item: ScheduledRequest, guess: Tokens, rng: Random) -> Committed:
        tokens = item.request.token_ids[:]
        accepted = 0
        if item.reaches_end:
            while accepted < len(guess) and guess[accepted] == next_token(tokens):
                tokens.append(guess[accepted])
                accepted += 1
            tokens.append(next_token(tokens))
        computed = item.start + item.num_new_tokens + accepted
        self.observe(item, tokens, computed, rng)
        gained = tuple(tokens[item.request.num_tokens :])
        return Committed(gained, len(guess), accepted, self.drafter_computed[item.request])

    def observe(
        self, item: ScheduledRequest, tokens: Sequence[int], computed: int, rng: Random
    ) -> None:
        """The drafter catches up as far as it likes; it never runs for requests without drafts."""
        if not item.request.num_speculative_tokens:
            return
        done = self.drafter_computed[item.request]
        upto = rng.choice([done, computed, rng.randint(done, computed)])
        self.write(self.drafter_kv, item, tokens[:upto], done)
        self.read(self.drafter_kv, item, tokens[:upto])
        self.drafter_computed[item.request] = upto

    def row_tokens(self, item: ScheduledRequest, guess: Tokens) -> Tokens:
        return (*item.request.token_ids[: item.start + item.num_new_tokens], *guess)

    def place(self, item: ScheduledRequest, position: int) -> int:
        block, offset = divmod(position, self.block_size)
        return item.block_table[block] * self.block_size + offset

    def write(
        self, cache: dict[int, Tokens], item: ScheduledRequest, tokens: Sequence[int], start: int
    ) -> None:
        for position in range(start, len(tokens)):
            cache[self.place(item, position)] = tuple(tokens[: position + 1])

    def read(self, cache: dict[int, Tokens], item: ScheduledRequest, tokens: Sequence[int]) -> None:
        for position in range(len(tokens)):
            assert cache.get(self.place(item, position)) == tuple(tokens[: position + 1]), (
                f"request {item.request.request_id} reads a foreign key at {position}"
            )

    # ------------------------------------------------------------------ what must hold

    @property
    def unfinished(self) -> list[Request]:
        return [request for request in self.everyone if not request.finished]

    def check_plan(self, batch: Batch, first: Request | None) -> None:
        members = [item.request for item in batch.requests]
        assert batch.num_tokens <= self.limits.max_num_batched_tokens
        assert [each.arrival for each in members] == sorted({each.arrival for each in members})
        assert first is None or first in members, "the earliest request does not get on"
        assert not batch.preempted or not any(item.admitted for item in batch.requests)
        assert not set(batch.preempted) & set(members)
        if batch.num_tokens > len(members):
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
        assert len(item.block_table) * self.block_size >= reach + item.num_draft_tokens
        if item.num_draft_tokens:
            assert item.reaches_end
            assert not item.is_prompt_chunk or self.limits.drafts_behind_prompt
            assert item.start > 0 or self.limits.drafts_behind_prompt
            assert item.num_draft_tokens <= request.num_speculative_tokens
            assert reach + item.num_draft_tokens <= self.limits.drafter_max_model_len
            assert reach + item.num_draft_tokens < self.limits.max_model_len
            assert request.num_output_tokens + item.num_draft_tokens < request.max_tokens

    def drain(self, rng: Random) -> None:
        """Run to the end, in no more steps than the earliest request ever needs tokens."""
        steps = sum(
            min(request.num_prompt_tokens + request.max_tokens, MAX_LEN)
            for request in self.unfinished
        )
        while self.scheduler.has_unfinished:
            assert steps > 0, "the scheduler does not get on"
            steps -= 1
            self.step(rng)
        self.check_end()

    def check_end(self) -> None:
        assert self.blocks.num_available == self.blocks.num_blocks
        assert not self.blocks.request_ids
        for request in self.everyone:
            prompt = request.token_ids[: request.num_prompt_tokens]
            expected = plain_output(request, prompt)
            said = list(request.output_token_ids)
            assert said == (expected[: len(said)] if request in self.cut_short else expected)


def limits(
    seqs: int, rows: int, drafts: int, drafter_len: int = MAX_LEN, behind_prompt: bool = False
) -> StepLimits:
    return StepLimits(
        max_num_seqs=seqs,
        max_num_batched_tokens=rows,
        max_model_len=MAX_LEN,
        drafter_max_model_len=drafter_len,
        num_speculative_tokens=drafts,
        drafts_behind_prompt=behind_prompt,
        cache_identity="drafter",
    )


worlds = st.builds(
    World,
    limits=st.builds(
        limits,
        seqs=st.integers(1, 5),
        rows=st.integers(1, 24),
        drafts=st.integers(0, 5),
        drafter_len=st.sampled_from([MAX_LEN, MAX_LEN, 12]),
        behind_prompt=st.booleans(),
    ),
    num_blocks=st.integers(6, 24),
    block_size=st.sampled_from([1, 2, 3, 4]),
    caching=st.sampled_from([True, True, False]),
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
    }
)
seeds = st.integers(0, 2**32 - 1)


@settings(SAME_EVERY_TIME, max_examples=500)
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


def test_the_simulation_meets_what_it_is_there_for() -> None:
    """Preemptions, hits, shared blocks and evictions all occur in a tight cache."""
    world = World(limits(4, 16, 3, behind_prompt=True), 12, 2, True)
    rng = Random(0)
    for number in range(12):
        world.add([1] * (number % 5) + [number % 2], 12, 3, 0, False)
        world.step(rng)
    used = set()
    while world.scheduler.has_unfinished:
        world.step(rng)
        used |= set(world.target_kv)
    world.check_end()
    assert world.seen["preempted"]
    assert world.seen["shared"]
    assert world.blocks.num_hit_tokens
    assert len(used) == 12 * 2
    assert sum(request.num_tokens for request in world.everyone) > 2 * len(used)


def test_a_request_that_fits_alone_finishes_among_others_in_the_tightest_cache() -> None:
    world = World(limits(4, 8, 4), num_blocks=6, block_size=3, caching=True)
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
        who = data.draw(st.sampled_from(range(len(self.world.unfinished))))
        self.world.step(self.rng, [self.world.unfinished[who]])

    @precondition(lambda self: self.world.unfinished)
    @rule(data=st.data(), stop_string=st.sampled_from([None, "stop string"]))
    def leave(self, data: st.DataObject, stop_string: str | None) -> None:
        who = data.draw(st.sampled_from(range(len(self.world.unfinished))))
        self.world.leave(self.world.unfinished[who], stop_string)

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
TestEngine.settings = settings(SAME_EVERY_TIME, max_examples=150, stateful_step_count=25)
TestBlocks = Blocks.TestCase
TestBlocks.settings = settings(SAME_EVERY_TIME, max_examples=150, stateful_step_count=40)
