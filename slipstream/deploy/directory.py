"""The replicas that run, where the front finds them."""

import asyncio
from collections.abc import Callable, Sequence
from threading import Lock

from slipstream.deploy.routing import Replica

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
