"""Messages from the leader to the other ranks, as bytes.

Messages are pickled. Requests and block tables grow with every step and would be most of a message,
so only their changes since the last message are written. Each follower keeps its own copy of every
request and appends the new tokens to it.
"""

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

from slipstream.core.adapters import NamedAdapter
from slipstream.core.batch import ScheduledRequest
from slipstream.core.request import Request
from slipstream.core.structured import Advance
from slipstream.engine.ranks.ranks import MakeGuide
from slipstream.runner.device_state import num_equal

# The fields of a request that change, besides its tokens.
_COUNTERS = (
    *("status", "slot", "num_computed", "num_cached_tokens", "num_steps", "num_preemptions"),
    *("drafter_computed", "steps_in_flight"),
)
_FIELDS = (
    *("request_id", "token_ids", "params", "seed", "stop_token_ids", "max_tokens"),
    *("num_speculative_tokens", "arrival", "bad_words", "guide", "verification", "priority"),
    *("spans", "adapter"),
)


@dataclass(frozen=True)
class Call:
    """A call of a follower's function: its name and its arguments."""

    name: str
    arguments: tuple[Any, ...] = ()


class GuideElsewhere:
    """Replaces a request's grammar on ranks that do not walk it."""

    problem = ""

    def advance(self, token: int) -> Advance:
        raise AssertionError("other ranks walk this grammar")


class Writer:
    """Writes messages as differences, for readers that have read all earlier messages."""

    def __init__(self) -> None:
        self._num_sent: dict[str, int] = {}  # number of tokens sent, by request id
        self._tables: dict[int, tuple[list[int], list[int]]] = {}  # by slot

    def write(self, message: Any) -> bytes:
        buffer = BytesIO()
        pickler = pickle.Pickler(buffer, pickle.HIGHEST_PROTOCOL)
        pickler.dispatch_table = {
            Request: self._request,
            ScheduledRequest: self._scheduled,
            NamedAdapter: _without_factors,
        }
        pickler.dump(message)
        return buffer.getvalue()

    def begin_anew(self) -> None:
        """Write the next requests and tables in full, since requests may have lost tokens."""
        self._num_sent.clear()
        self._tables.clear()

    def _request(self, request: Request) -> tuple[Callable[..., Request], tuple[Any, ...]]:
        name, counters = request.request_id, [getattr(request, it) for it in _COUNTERS]
        num_sent = self._num_sent.get(name)
        if request.finished:
            self._num_sent.pop(name, None)
        else:
            self._num_sent[name] = request.num_tokens
        if num_sent is not None:
            return _extended_request, (name, request.token_ids[num_sent:], counters)
        fields = {it: getattr(request, it) for it in _FIELDS}
        fields["guide"] = None if request.guide is None else GuideElsewhere()
        return _new_request, (fields, request.num_prompt_tokens, counters)

    def _scheduled(
        self, item: ScheduledRequest
    ) -> tuple[Callable[..., ScheduledRequest], tuple[Any, ...]]:
        slot = item.request.slot
        new = list(item.block_table), list(item.window_table)
        old = self._tables.get(slot, ([], []))
        self._tables[slot] = new
        kept = [num_equal(*pair) for pair in zip(old, new, strict=True)]
        gained = [table[count:] for table, count in zip(new, kept, strict=True)]
        fields = {
            name: value
            for name, value in vars(item).items()
            if name not in ("block_table", "window_table")
        }
        return _scheduled_request, (fields, slot, kept, gained)


class Reader:
    """Reads all messages of a `Writer`, in order.

    Args:
        rank: of this process.

    Attributes:
        make_guide: makes the guides of this rank's requests that follow a grammar; None: the leader
            alone walks grammars.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.make_guide: MakeGuide | None = None
        self._requests: dict[str, Request] = {}
        self._tables: dict[int, list[list[int]]] = {}

    def read(self, message: bytes) -> Any:
        return _Unpickler(BytesIO(message), self).load()

    def new_request(
        self, fields: dict[str, Any], num_prompt_tokens: int, counters: list[Any]
    ) -> Request:
        request = Request(**fields)
        request.num_prompt_tokens = num_prompt_tokens
        self._requests[request.request_id] = request
        return self._with(request, counters)

    def extended_request(self, name: str, token_ids: list[int], counters: list[Any]) -> Request:
        request = self._requests[name]
        request.token_ids.extend(token_ids)
        if request.guide is not None and not isinstance(request.guide, GuideElsewhere):
            for token in token_ids:
                request.guide.advance(token)
        return self._with(request, counters)

    def _begin_to_walk(self, request: Request) -> None:
        structured = request.params.structured
        if self.make_guide is not None and structured is not None:
            request.guide = self.make_guide(structured, request.stop_token_ids)
            for token in request.output_token_ids:
                request.guide.advance(token)

    def scheduled_request(
        self,
        fields: dict[str, Any],
        slot: int,
        kept: Sequence[int],
        gained: Sequence[list[int]],
    ) -> ScheduledRequest:
        if fields["rank"] == self._rank and isinstance(fields["request"].guide, GuideElsewhere):
            self._begin_to_walk(fields["request"])
        old = self._tables.get(slot, [[], []])
        # New lists, since an earlier step may still use the old ones.
        tables = [
            [*table[:count], *more] for table, count, more in zip(old, kept, gained, strict=True)
        ]
        self._tables[slot] = tables
        return ScheduledRequest(**fields, block_table=tables[0], window_table=tables[1])

    def _with(self, request: Request, counters: list[Any]) -> Request:
        for name, value in zip(_COUNTERS, counters, strict=True):
            setattr(request, name, value)
        if request.finished:
            self._requests.pop(request.request_id, None)
        return request


class _Unpickler(pickle.Unpickler):
    """Resolves the functions that a `Writer` names to methods of the reader."""

    def __init__(self, file: BytesIO, reader: Reader) -> None:
        super().__init__(file)
        self._named = {
            "_new_request": reader.new_request,
            "_extended_request": reader.extended_request,
            "_scheduled_request": reader.scheduled_request,
        }

    def find_class(self, module: str, name: str) -> Any:
        if module == __name__ and name in self._named:
            return self._named[name]
        return super().find_class(module, name)


def _without_factors(
    adapter: NamedAdapter,
) -> tuple[Callable[..., NamedAdapter], tuple[Any, ...]]:
    """Pickle an adapter without its weights, which followers have in the adapter's slot."""
    return NamedAdapter, (adapter.name, adapter.serial, None, adapter.adapts_drafts)


def _new_request(*_: Any) -> Request:
    raise AssertionError("a reader makes it")


def _extended_request(*_: Any) -> Request:
    raise AssertionError("a reader has it")


def _scheduled_request(*_: Any) -> ScheduledRequest:
    raise AssertionError("a reader makes it")
