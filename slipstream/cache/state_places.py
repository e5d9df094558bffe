"""Allocation of places for checkpoints of recurrent states, and an index to find them.

With recurrent layers, blocks alone do not suffice to resume a request. A checkpoint is a copy of
the states of all such layers after a whole number of blocks (at an *edge*). It has a place besides
the requests' own states, and is found by the digest of the block before the edge. A request
resumes at the last edge of its prefix that has a checkpoint.

A pass copies the states at the last edge that its tokens reach, into a place that was planned for
it. So each request has a latest checkpoint, which moves along with it. Other checkpoints are kept:
at the end of its prompt, where another request branched off, after every `interval` blocks, and
when it ends or is preempted. A new place is the least recently used one. When a checkpoint moves
on, its old place is reused for the next one, so a request has two places, however many planned
steps do not reach an edge.

A request may end when its states do not include its last accepted draft tokens yet (they *wait*).
If an edge is among these, a last checkpoint is indexed there (`end`). It is written by the step in
flight, if the request has one, which includes the tokens that wait; else the next step begins
by writing it, where it `replays`. Steps run in order, so this precedes whatever reads the
checkpoint.

A place whose checkpoint is in the index is never written by a later step, unless the checkpoint is
forgotten first. A step may have been launched before its request was known to have ended. This is
safe: its place is freed with the request, and the next owner overwrites it later.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from slipstream.cache.block_pool import BlockPool
from slipstream.core.batch import LastCheckpoint

NO_PLACE = -1
# A prompt is cut for a checkpoint if this saves other requests at least this part of an interval.
_WORTH_A_CUT = 1 / 8


@dataclass(slots=True, eq=False)
class _Held:
    """The places of a request. The number of an edge is the number of blocks before it.

    Attributes:
        num_included: tokens that its states include after the last committed step.
        num_waiting: draft tokens that this step has accepted; the next one includes them.
        num_prompt: number of its tokens when it was admitted.
        branch: the edge where requests with the same beginning branch off; 0: none is known.
        kept_edge: the last edge whose checkpoint is kept.
        latest: the place of its last checkpoint in the index.
        written, written_edge: a newer checkpoint, whose blocks are not in the prefix index yet.
        spare: a place for its next checkpoint.
        planned: the place of each step in flight, the oldest first.
    """

    num_included: int
    num_prompt: int
    branch: int
    kept_edge: int
    latest: int = NO_PLACE
    written: int = NO_PLACE
    written_edge: int = 0
    spare: int = NO_PLACE
    num_waiting: int = 0
    planned: deque[int] = field(default_factory=deque)

    def places(self) -> list[int]:
        places = (self.latest, self.written, self.spare, *self.planned)
        return [place for place in places if place != NO_PLACE]


class StatePlaces:
    """Allocates places for checkpoints, and finds checkpoints.

    Args:
        num_places: number of places.
        block_size: tokens in a block.
        interval: blocks between two checkpoints of a request that stay.
        rereads: 1: a request computes the last token of its prefix again, so a checkpoint covers
            one token less than the blocks before its edge; else 0.
        replays: whether a step writes the last checkpoints of requests that had no step in flight
            when they ended (`take_last`).
    """

    def __init__(
        self, num_places: int, block_size: int, interval: int, rereads: int, replays: bool = True
    ) -> None:
        assert interval > 0
        assert rereads in (0, 1)
        self.num_places, self._block_size = num_places, block_size
        self._interval, self._rereads, self._replays = interval, rereads, replays
        self.reset()

    def reset(self) -> None:
        """Forget all checkpoints and requests."""
        self._pool = BlockPool(self.num_places)
        self._requests: dict[str, _Held] = {}
        self._last: list[LastCheckpoint] = []
        self._staying: set[int] = set()  # checkpoints that do not move along with a request

    def forget_contents(self) -> None:
        self._pool.forget_contents()

    @property
    def num_checkpoints(self) -> int:
        """Number of checkpoints in the index."""
        return len(self._pool.index)

    def longest_prefix(self, digests: Sequence[bytes]) -> int:
        """The number of leading blocks of this chain after which a request can resume."""
        for count in range(len(digests), 0, -1):
            if self._pool.index.block_of(digests[count - 1]) is not None:
                return count
        return 0

    def admit(
        self, request_id: str, digests: Sequence[bytes], num_tokens: int, num_shared: int
    ) -> None:
        """Admit a request with a prefix that `longest_prefix` found.

        Args:
            num_tokens: number of its tokens.
            num_shared: leading blocks that it shares with others, whether it can resume there or
                not.
        """
        edge = len(digests)
        worth = max(1, self._interval * _WORTH_A_CUT)
        branch = num_shared if num_shared - edge >= worth else 0
        taken_in = edge * self._block_size - self._rereads if edge else 0
        held = self._requests[request_id] = _Held(taken_in, num_tokens, branch, edge)
        if edge:
            place = self._pool.index.block_of(digests[-1])
            assert place is not None, "only a prefix with a checkpoint can be resumed"
            self._pool.share(place)
            self._staying.add(place)
            held.latest = place

    def latest(self, request_id: str) -> int:
        """The place of a request's last checkpoint; `NO_PLACE` if it has none. A request that was
        just admitted resumes from it."""
        return self._requests[request_id].latest

    def chunk_end(self, request_id: str, start: int, end: int) -> int:
        """The end of a prompt chunk from token `start` on, at most `end`: it is cut where other
        requests branch off, so that later ones find a checkpoint there."""
        branch = self._requests[request_id].branch * self._block_size
        return branch if start < branch < end else end

    def plan(self, request_id: str, most_tokens: int, num_before: int | None = None) -> int:
        """The place for the checkpoint of a planned step; `NO_PLACE` if the step cannot reach an
        edge, or no place is available. Each call is followed by `commit`, in order, or by `free`.

        Args:
            most_tokens: maximum number of tokens, of those that are known when the step begins,
                that the states may include after it.
            num_before: minimum number of tokens that they include before it, if another step is in
                flight; None: there is none.
        """
        held = self._requests[request_id]
        before = held.num_included if num_before is None else num_before
        place = self._take(held) if self._edge(most_tokens, before) else NO_PLACE
        held.planned.append(place)
        return place

    def commit(self, request_id: str, num_tokens: int, num_accepted: int = 0) -> None:
        """Commit the oldest planned step, after which the states include `num_tokens` tokens, and
        `num_accepted` draft tokens wait."""
        held = self._requests[request_id]
        place, before = held.planned.popleft(), held.num_included
        held.num_included, held.num_waiting = num_tokens, num_accepted
        if place != NO_PLACE:
            edge = self._edge(num_tokens, before)
            if edge:
                place, held.written, held.written_edge = held.written, place, edge
            self._release_place(held, place)
        if before < held.num_prompt <= num_tokens:  # a request with the same prompt resumes here
            self._keep_place(held.latest if held.written == NO_PLACE else held.written)

    def index(self, request_id: str, digests: Sequence[bytes]) -> None:
        """Add the written checkpoint to the index, once the blocks before it are indexed."""
        held = self._requests[request_id]
        place, edge = held.written, held.written_edge
        if place == NO_PLACE or edge > len(digests):
            return
        index, digest = self._pool.index, digests[edge - 1]
        stays = place in self._staying or edge == held.branch
        if edge - held.kept_edge >= self._interval:
            held.kept_edge, stays = edge, True
        known = index.block_of(digest)
        if known is None:
            index.add(digest, place)
        else:  # another request has a checkpoint at the same edge
            self._release_place(held, place)
            self._pool.share(known)
            place = known
        last, held.latest, held.written = held.latest, place, NO_PLACE
        if stays:
            self._keep_place(place)
        self._release_place(held, last)

    def end(self, request_id: str, digests: Sequence[bytes], slot: int) -> None:
        """Index a checkpoint at the last edge among the tokens that wait; `free` follows.

        Args:
            digests: those of the request's blocks in the prefix index.
            slot: the request's slot.
        """
        held = self._requests[request_id]
        in_flight = bool(held.planned)  # a step that includes what waits, and one token more
        num_tokens = held.num_included + held.num_waiting + in_flight
        edge = self._edge(num_tokens, held.num_included)
        if not in_flight:
            edge = min(edge, len(digests))
        count = edge * self._block_size - self._rereads - held.num_included
        if not held.num_waiting or count <= 0 or edge > len(digests) or held.written != NO_PLACE:
            return
        if not (in_flight or self._replays):
            return
        place = held.planned.popleft() if in_flight else self._take(held)
        held.written, held.written_edge = place, edge
        self.index(request_id, digests)
        if place != NO_PLACE and held.latest == place and not in_flight:
            # An earlier checkpoint that was to be written there has been forgotten.
            self._last = [last for last in self._last if last.place != place]
            self._last.append(LastCheckpoint(slot, count, place))

    def take_last(self) -> tuple[LastCheckpoint, ...]:
        """The checkpoints of requests that have ended which the next step has to write."""
        taken, self._last = tuple(self._last), []
        return taken

    def free(self, request_id: str) -> None:
        """End or preempt a request; its last checkpoint is kept until its place is needed."""
        held = self._requests.pop(request_id)
        self._keep_place(held.latest)
        for place in held.places():
            self._pool.release(place)

    def check_invariants(self, num_final: dict[str, int]) -> None:
        """Raise AssertionError unless requests, free places and the index agree.

        Args:
            num_final: leading blocks of each request that are never written again.
        """
        assert num_final.keys() == self._requests.keys(), "a request has blocks or states alone"
        held = Counter(place for each in self._requests.values() for place in each.places())
        self._pool.check_invariants(held)
        for request_id, each in self._requests.items():
            for place in each.places():
                if place != each.latest:
                    self._pool.check_owned(place)
            waits = each.written != NO_PLACE and each.written_edge <= num_final[request_id]
            assert not waits, f"{request_id}: a checkpoint was forgotten"

    def _edge(self, num_tokens: int, num_before: int) -> int:
        """The last edge that is reached between `num_before` and `num_tokens` tokens; 0 if none
        is."""
        edge = (num_tokens + self._rereads) // self._block_size
        return edge if edge * self._block_size - self._rereads > num_before else 0

    def _take(self, held: _Held) -> int:
        """A place to write: the request's spare one, a free one, or another request's spare one."""
        owner: _Held | None = held
        if held.spare == NO_PLACE:
            if self._pool.num_available:
                place = self._pool.take()
                self._staying.discard(place)
                return place
            owner = next((it for it in self._requests.values() if it.spare != NO_PLACE), None)
        if owner is None:
            return NO_PLACE
        place, owner.spare = owner.spare, NO_PLACE
        return place

    def _release_place(self, held: _Held, place: int) -> None:
        """Free a place that a request has used; its checkpoint is kept only if it is to stay."""
        if place == NO_PLACE:
            return
        empty = place not in self._staying and self._pool.forget(place)
        if empty and held.spare == NO_PLACE:
            held.spare = place
        else:
            self._pool.release(place)

    def _keep_place(self, place: int) -> None:
        if place != NO_PLACE:
            self._staying.add(place)
