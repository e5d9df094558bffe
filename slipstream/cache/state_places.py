"""Checkpoints of recurrent states: which place holds the states behind which prefix.

Where layers keep a state of each request, blocks alone do not resume it. A checkpoint is a copy of
the states of all these layers behind a whole number of blocks (an *edge*), kept in a place beside
the requests' own states, and found by the digest of the block in front of the edge. A prefix is
resumed at its last edge that has one.

A pass copies the states behind the last edge that its tokens reach, into a place that was planned
for it. So every request has a checkpoint that moves on with it, and others stay behind: at the end
of its prompt, where another request parted from it, after every `interval` blocks, and when it ends
or loses its place. Who needs a place takes the one that nobody has used for the longest time. The
one that a checkpoint has left is its request's next one: so a request holds two places, however
many steps are planned that do not get to an edge.

A place with a checkpoint in the index is never written, so a step that was launched before it was
known that its request had ended does no harm: its place is given back with its request, and whoever
gets it writes it later.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from slipstream.cache.block_pool import BlockPool

NO_PLACE = -1
# A prompt is cut for a checkpoint that saves others at least this part of an interval.
_WORTH_A_CUT = 1 / 8


@dataclass(slots=True, eq=False)
class _Held:
    """What a request holds. Edges count the blocks in front of them.

    Attributes:
        num_taken_in: tokens that its states cover behind the last step whose results are known.
        num_prompt: tokens to compute before it decodes, as of its admission.
        branch: the edge where others that begin alike part from it; 0: none is known.
        kept_edge: the last edge whose checkpoint stays.
        latest: the place of its last checkpoint in the index.
        written, written_edge: a newer one, whose blocks are not in the prefix index yet.
        spare: a place for its next one.
        planned: of each step under way, the oldest first.
    """

    num_taken_in: int
    num_prompt: int
    branch: int
    kept_edge: int
    latest: int = NO_PLACE
    written: int = NO_PLACE
    written_edge: int = 0
    spare: int = NO_PLACE
    planned: deque[int] = field(default_factory=deque)

    def places(self) -> list[int]:
        """All that it holds."""
        places = (self.latest, self.written, self.spare, *self.planned)
        return [place for place in places if place != NO_PLACE]


class StatePlaces:
    """Hands out places for checkpoints, and finds those that there are.

    Args:
        num_places: places for checkpoints.
        block_size: tokens in a block.
        interval: blocks between two checkpoints that stay behind a request.
        rereads: 1: a request computes the last token of its prefix again, so a checkpoint covers
            one token less than the blocks in front of its edge; else 0.
    """

    def __init__(self, num_places: int, block_size: int, interval: int, rereads: int) -> None:
        assert interval > 0
        assert rereads in (0, 1)
        self.num_places, self._block_size = num_places, block_size
        self._interval, self._rereads = interval, rereads
        self.reset()

    def reset(self) -> None:
        """Forget all checkpoints and requests."""
        self._pool = BlockPool(self.num_places)
        self._requests: dict[str, _Held] = {}
        self._staying: set[int] = set()  # checkpoints that requests leave behind as they move on

    def forget_contents(self) -> None:
        """As of `BlockPool`."""
        self._pool.forget_contents()

    @property
    def num_checkpoints(self) -> int:
        """How many there are."""
        return len(self._pool.index)

    def longest_prefix(self, digests: Sequence[bytes]) -> int:
        """How many leading blocks of this chain a request can be resumed behind."""
        for count in range(len(digests), 0, -1):
            if self._pool.index.block_of(digests[count - 1]) is not None:
                return count
        return 0

    def admit(
        self, request_id: str, digests: Sequence[bytes], num_tokens: int, num_shared: int
    ) -> None:
        """A request begins behind a prefix that `longest_prefix` found.

        Args:
            num_tokens: that it has now.
            num_shared: leading blocks that it has in common with others, resumable or not.
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
        """The place of a request's last checkpoint, which it was resumed from if it has just been
        admitted; `NO_PLACE` if it has none."""
        return self._requests[request_id].latest

    def chunk_end(self, request_id: str, start: int, end: int) -> int:
        """Where a chunk of a prompt had better end that begins at token `start` and could go on to
        `end`: where others part from it, so that they find a checkpoint there the next time."""
        branch = self._requests[request_id].branch * self._block_size
        return branch if start < branch < end else end

    def plan(self, request_id: str, num_tokens: int, drafts_in_flight: int | None = None) -> int:
        """The place for the checkpoint of a step that is planned; `NO_PLACE` if it cannot reach an
        edge, or if there is no place. Each is followed by `take_in`, in order, or by `free`.

        Args:
            num_tokens: that the states cover behind the step if none is under way.
            drafts_in_flight: of the step under way, if one is, which has a single known token: the
                states cover `num_tokens` behind that step, and behind the planned one as many more
                as it accepts of these drafts, and one. None: no step is under way.
        """
        held = self._requests[request_id]
        before, most = held.num_taken_in, num_tokens
        if drafts_in_flight is not None:
            before, most = num_tokens, num_tokens + drafts_in_flight + 1
        place = self._take(held) if self._edge(most, before) else NO_PLACE
        held.planned.append(place)
        return place

    def take_in(self, request_id: str, num_tokens: int) -> None:
        """The oldest planned step is done: the states cover so many tokens behind it."""
        held = self._requests[request_id]
        place, before = held.planned.popleft(), held.num_taken_in
        held.num_taken_in = num_tokens
        if place != NO_PLACE:
            edge = self._edge(num_tokens, before)
            if edge:
                place, held.written, held.written_edge = held.written, place, edge
            self._leave(held, place)
        if before < held.num_prompt <= num_tokens:  # what the same prompt is resumed from
            self._stay(held.latest if held.written == NO_PLACE else held.written)

    def index(self, request_id: str, digests: Sequence[bytes]) -> None:
        """The blocks of these digests are in the prefix index: so is the checkpoint behind them."""
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
        else:  # another has come to the same edge
            self._leave(held, place)
            self._pool.share(known)
            place = known
        last, held.latest, held.written = held.latest, place, NO_PLACE
        if stays:
            self._stay(place)
        self._leave(held, last)

    def free(self, request_id: str) -> None:
        """The request ends or loses its place; its last checkpoint stays until its place is
        needed."""
        held = self._requests.pop(request_id)
        self._stay(held.latest)
        for place in held.places():
            self._pool.release(place)

    def check_invariants(self, num_final: dict[str, int]) -> None:
        """Raise AssertionError unless all places are where they belong.

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
        """The last edge that states get to which go from `num_before` tokens to `num_tokens`; 0 if
        they do not get to any."""
        edge = (num_tokens + self._rereads) // self._block_size
        return edge if edge * self._block_size - self._rereads > num_before else 0

    def _take(self, held: _Held) -> int:
        """A place without a checkpoint: the request's own, one that nobody holds, or another's."""
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

    def _leave(self, held: _Held, place: int) -> None:
        """A request needs this place no longer, and what is in it only if that is to stay."""
        if place == NO_PLACE:
            return
        empty = place not in self._staying and self._pool.forget(place)
        if empty and held.spare == NO_PLACE:
            held.spare = place
        else:
            self._pool.release(place)

    def _stay(self, place: int) -> None:
        if place != NO_PLACE:
            self._staying.add(place)
