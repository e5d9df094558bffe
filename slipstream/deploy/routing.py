"""The replicas that run, and the choice of one for each request, from those sent to each before."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock

from slipstream.deploy.prompts import BLOCK, Prompt

_CHARACTERS_PER_TOKEN = 4
# Prefix affinity ends when a replica's number of requests exceeds that of the least busy replica by
# this number and by this factor.
_MORE, _TIMES = 4, 1.5


@dataclass(frozen=True)
class Replica:
    """A running replica.

    Attributes:
        id: begins with 12 hexadecimal digits that are unique to the replica.
        cache_tokens: capacity of its prefix cache in tokens.
        num_open: number of open requests that it last reported, from all clients.
    """

    id: str
    host: str
    port: int
    cache_tokens: int = 1 << 16
    num_open: int = 0


@dataclass
class _Sent:
    """The requests that were sent to one replica.

    Attributes:
        keys: keys of prompts, least recently used first; an estimate of its cache's content.
        open: number of requests that are being answered.
        total: number of requests so far; a new replica starts with the lowest number.
    """

    keys: OrderedDict[int, None] = field(default_factory=OrderedDict)
    open: int = 0
    total: int = 0


class ReplicaRouting:
    """Chooses replicas.

    The replica that was sent the longest beginning of the prompt answers, unless it is much busier
    than others; without one, the least busy. A beginning counts if it is half of what comes after
    instructions and tools, which would draw all prompts to one replica, or if it reaches over the
    first message of a longer conversation.

    Args:
        method: "prefix", "load" or "round_robin".
    """

    def __init__(self, method: str = "prefix") -> None:
        self._method = method
        self._replicas: Mapping[str, Replica] = {}
        self._sent: dict[str, _Sent] = {}
        self._turn = 0

    @property
    def replicas(self) -> Collection[Replica]:
        return self._replicas.values()

    def update(self, replicas: Iterable[Replica]) -> None:
        self._replicas = {it.id: it for it in replicas}
        least = min((it.total for it in self._sent.values()), default=0)
        for name in self._replicas:
            self._sent.setdefault(name, _Sent(total=least))
        for name in self._sent.keys() - self._replicas.keys():
            if not self._sent[name].open:
                del self._sent[name]

    def choose(self, prompt: Prompt, without: Collection[str] = ()) -> Replica | None:
        """Choose a replica for a request, except those in `without`; None if there is no other.

        The caller calls `begin` when it sends the request there.
        """
        able = [it for it in self._replicas.values() if it.id not in without]
        if not able:
            return None
        for replica in able:
            if prompt.replica is not None and replica.id.startswith(prompt.replica):
                return replica
        if self._method == "round_robin":
            self._turn += 1
            return able[self._turn % len(able)]
        if self._method == "prefix" and prompt.keys:
            least = min(map(self._load, able))
            free = [it for it in able if self._load(it) <= max(least + _MORE, least * _TIMES)]
            matched = {it.id: self._matched(it, prompt) for it in free}
            longest = max(matched.values())
            if longest:
                able = [it for it in free if matched[it.id] == longest]
        return min(able, key=lambda it: (self._load(it), self._sent[it.id].total))

    def begin(self, replica: Replica, prompt: Prompt) -> None:
        """Count a request that is sent to a replica."""
        sent = self._sent.setdefault(replica.id, _Sent())
        sent.open += 1
        sent.total += 1
        for key in reversed(prompt.keys):  # a beginning is kept longer than what follows it
            sent.keys[key] = None
            sent.keys.move_to_end(key)
        most = max(replica.cache_tokens * _CHARACTERS_PER_TOKEN // BLOCK, 1)
        while len(sent.keys) > most:
            sent.keys.popitem(last=False)

    def end(self, replica: Replica) -> None:
        sent = self._sent[replica.id]
        sent.open -= 1
        if not sent.open and replica.id not in self._replicas:
            del self._sent[replica.id]

    def _load(self, replica: Replica) -> int:
        """Number of its open requests; those from other fronts are known with a delay."""
        return max(self._sent[replica.id].open, replica.num_open)

    def _matched(self, replica: Replica, prompt: Prompt) -> int:
        """Number of the prompt's keys that were sent to a replica; 0 if they are too few."""
        keys = self._sent[replica.id].keys
        count = next((i for i, key in enumerate(prompt.keys) if key not in keys), len(prompt.keys))
        own, most = count - prompt.common, len(prompt.keys) - prompt.common
        enough = 0 < prompt.opening <= count or (own > 0 and own * 2 >= most)
        return count if enough else 0


Listener = Callable[[Sequence[Replica]], None]


class Directory:
    """Keeps the replicas of this process's deployment, and tells a listener of changes.

    Ray creates the router, which learns of replicas; the front, which needs them, is created
    elsewhere.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._replicas: Sequence[Replica] = ()
        self._listener: Listener | None = None

    def update(self, replicas: Sequence[Replica]) -> None:
        """Replace the list of running replicas. Thread-safe."""
        with self._lock:
            self._replicas = replicas
            if self._listener is not None:
                self._listener(replicas)

    def follow(self, listener: Listener) -> None:
        """Call a function on this event loop with the replicas, now and after every change."""
        loop = asyncio.get_running_loop()

        def tell(replicas: Sequence[Replica]) -> None:
            loop.call_soon_threadsafe(listener, replicas)

        with self._lock:
            self._listener = tell
            tell(self._replicas)

    def leave(self) -> None:
        """Stop calling the listener, because its event loop ends before the replicas do."""
        with self._lock:
            self._listener = None


DIRECTORY = Directory()
