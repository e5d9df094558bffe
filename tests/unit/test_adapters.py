"""Slots of adapters: who waits for one, whose is taken, and what others notice of it."""

from collections.abc import Iterator, Sequence
from threading import Event

import pytest

from slipstream.cache.block_manager import BlockManager
from slipstream.core.adapters import NamedAdapter
from slipstream.core.errors import UsageError
from slipstream.core.request import FinishReason, Request
from slipstream.engine.adapters import Adapters, OtherRanks
from slipstream.engine.scheduler import Scheduler
from tests.unit.test_scheduler import commit, request, scheduler


class Loads:
    """Replaces writing to slots; waits if it is told to.

    Attributes:
        written: (slot, numbers) in the order in which they were.
    """

    def __init__(self) -> None:
        self.written: list[tuple[int, object]] = []
        self.may_end = Event()
        self.may_end.set()
        self.fails = False

    def __call__(self, slot: int, factors: object) -> None:
        assert self.may_end.wait(30)
        if self.fails:
            raise RuntimeError("no memory")
        self.written.append((slot, factors))


@pytest.fixture
def loads() -> Iterator[Loads]:
    made = Loads()
    yield made
    made.may_end.set()


def adapters(loads: Loads, count: int = 2, names: Sequence[str] = "abcd") -> Adapters:
    made = Adapters(count, read=lambda path, _: path, write=loads)
    for name in names:
        made.add(name, f"numbers of {name}")
    return made


def with_adapter(one: Request, adapter: NamedAdapter | None) -> Request:
    one.adapter = adapter
    return one


def asking(made: Adapters, name: str, adapter: str | None) -> Request:
    return with_adapter(request(name, 4), None if adapter is None else made.named(adapter))


def ready(made: Adapters, waiting: Sequence[Request], running: Sequence[Request]) -> Request | None:
    """Who is, once all that is under way has been loaded."""
    found = made.next_ready(waiting, running)
    while found is None:
        made.wait(30)
        found = made.next_ready(waiting, running)
    return found


def test_an_adapter_is_loaded_before_its_request_runs(loads: Loads) -> None:
    made, loads_may_end = adapters(loads), loads.may_end
    loads_may_end.clear()
    first, second = asking(made, "a", "a"), asking(made, "b", None)
    assert made.next_ready([first], []) is None
    assert made.next_ready([first, second], []) is second  # which overtakes
    loads_may_end.set()
    made.wait(30)
    assert ready(made, [first, second], []) is first
    assert loads.written == [(made.slot_of(first), "numbers of a")]
    assert made.slot_of(second) == -1
    assert made.next_ready([asking(made, "c", "a")], [first]) is not None  # nothing to load
    assert len(loads.written) == 1


def test_the_slot_used_least_recently_is_taken_and_never_one_in_use(loads: Loads) -> None:
    made = adapters(loads)
    one, two, three, four = (asking(made, name, name) for name in "abcd")
    assert ready(made, [one], []) is one
    assert ready(made, [two], [one]) is two
    assert made.next_ready([three], [one, two]) is None
    assert len(loads.written) == 2  # there is no slot to load it into
    assert ready(made, [three], [two]) is three
    assert made.slot_of(three) == 0
    assert ready(made, [four], []) is four
    assert made.slot_of(four) == 1  # b's: c came later
    assert ready(made, [three], [four]) is three
    assert len(loads.written) == 4


def test_who_waits_for_a_slot_is_not_overtaken_for_ever(loads: Loads) -> None:
    made = adapters(loads, count=1)
    one = asking(made, "a", "a")
    assert ready(made, [one], []) is one
    waiting = [asking(made, "b", "b"), asking(made, "c", "a"), asking(made, "d", None)]
    assert made.next_ready(waiting, [one]) is waiting[2]
    assert made.next_ready(waiting[:2], [one]) is None
    assert ready(made, waiting[:2], []) is waiting[0]


def test_a_request_that_left_while_its_adapter_was_loaded_leaves_a_slot(loads: Loads) -> None:
    made = adapters(loads, count=1)
    loads.may_end.clear()
    assert made.next_ready([asking(made, "a", "a")], []) is None
    assert made.next_ready([asking(made, "b", "b")], []) is None
    loads.may_end.set()
    other = asking(made, "c", "b")
    assert ready(made, [other], []) is other


def test_a_name_may_go_and_come_back_with_other_numbers(loads: Loads) -> None:
    made = adapters(loads)
    old = asking(made, "a", "a")
    assert ready(made, [old], []) is old
    made.remove("a")
    assert made.names == ["b", "c", "d"]
    with pytest.raises(UsageError, match="there is no adapter 'a'; there is b, c, d"):
        made.named("a")
    made.add("a", "others")
    new = asking(made, "b", "a")
    assert ready(made, [new], [old]) is new
    assert made.slot_of(new) != made.slot_of(old)
    limits = scheduler().limits
    assert len({limits.namespace(it) for it in (old, new, request("c", 4))}) == 3
    with pytest.raises(UsageError, match="there is an adapter 'a' already"):
        made.add("a", "more")


def test_a_load_that_fails_raises_and_leaves_a_slot(loads: Loads) -> None:
    made = adapters(loads, count=1)
    loads.fails = True
    one = asking(made, "a", "a")
    with pytest.raises(RuntimeError, match="no memory"):
        ready(made, [one], [])
    loads.fails = False
    assert ready(made, [one], []) is one


def test_other_ranks_get_an_adapter_in_parts_between_steps(loads: Loads) -> None:
    """They have all parts before a request runs, and get them again if the slot was taken."""
    told: list[tuple[object, ...]] = []
    others = OtherRanks(
        parts=lambda factors: [f"{factors}, part {it}" for it in range(3)],
        write_part=lambda slot, part: None,
        tell=lambda *call: told.append(call),
    )
    made = Adapters(1, read=lambda path, _: path, write=loads, others=others)
    for name in "ab":
        made.add(name, name)
    one, two = asking(made, "a", "a"), asking(made, "b", "b")
    for sent in (1, 2):
        assert made.next_ready([one], []) is None
        assert len(told) == sent
        made.wait(30)
    assert ready(made, [two], []) is two  # the other left: its slot is taken
    assert ready(made, [one], []) is one
    (function,) = made.followed
    assert told[2:] == [(function, 0, f"{of}, part {it}") for of in "ba" for it in range(3)]


def test_requests_run_while_another_waits_for_its_adapter(loads: Loads) -> None:
    made = adapters(loads, count=1)
    limits = scheduler().limits
    engine = Scheduler(limits, BlockManager(40, 4, True), adapters=made)
    loads.may_end.clear()
    slow, plain = asking(made, "a", "a"), asking(made, "b", None)
    engine.add(slow)
    assert engine.schedule().requests == ()
    engine.add(plain)
    for _ in range(3):
        batch = engine.schedule()
        assert [it.request for it in batch.requests] == [plain]
        engine.check_invariants()
        ahead = engine.schedule_ahead(batch) if batch.is_decode else None
        commit(engine, batch)
        if ahead is not None:  # nobody waits for a place who could take one
            commit(engine, ahead)
    assert ahead is not None
    loads.may_end.set()
    made.wait(30)
    batch = engine.schedule()
    assert {it.request.request_id: it.adapter for it in batch.requests} == {"a": 0, "b": -1}
    commit(engine, batch)
    engine.finish(slow, FinishReason.ABORT)
    other = asking(made, "c", "b")
    engine.add(other)
    engine.schedule()
    made.wait(30)
    engine.restart([other])
    assert [it.adapter for it in engine.schedule().requests] == [0]
    engine.check_invariants()


def test_a_slot_whose_loading_was_broken_off_before_it_began_is_loaded_anew(loads: Loads) -> None:
    made, interrupts = adapters(loads, count=1), [KeyboardInterrupt()]

    def parts(factors: object) -> list[object]:
        if interrupts:
            raise interrupts.pop()
        return [factors]

    one, two = asking(made, "a", "a"), asking(made, "b", "b")
    assert ready(made, [one], []) is one
    made._others = OtherRanks(parts, lambda *_: None, lambda *_: None)
    with pytest.raises(KeyboardInterrupt):
        made.next_ready([two], [])
    made.check_invariants([])
    for it, name in ((one, "a"), (two, "b")):  # what it held may be half overwritten
        assert ready(made, [it], []) is it
        assert loads.written[-1] == (0, f"numbers of {name}")
    assert len(loads.written) == 3
