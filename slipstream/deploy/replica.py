"""One replica: an engine and its server, as Ray Serve starts, watches and stops it."""

import asyncio
import socket
import threading
from collections import deque
from time import perf_counter
from typing import Any
from uuid import uuid4

from slipstream.deploy.options import DeploymentPlan
from slipstream.deploy.scaling import BUSY, QUEUE_TIME
from slipstream.engine.samples import Submission
from slipstream.serve.observers import Observer

_WINDOW = 10.0  # seconds in which queue times count


class QueueTimes(Observer):
    """Observes how long requests wait for a place in an engine."""

    def __init__(self) -> None:
        self._placed: deque[tuple[float, float]] = deque(maxlen=1024)  # when, and after how long
        self._new: dict[str, Submission] = {}

    def request_added(self, request_id: str, submission: Submission) -> None:
        self._new[submission.request_id] = submission

    def tokens_added(self, submission: Submission, gap: float | None) -> None:
        """At the first tokens of a request, note how long it waited."""
        if self._new.pop(submission.request_id, None) is not None:
            placed = _place_time(submission) or perf_counter()
            self._placed.append((perf_counter(), placed - submission.metrics.arrival_time))

    def request_ended(self, request_id: str, submission: Submission, reason: str) -> None:
        self._new.pop(submission.request_id, None)

    def mean(self) -> float:
        """Mean wait in seconds of recently placed requests and of those that still wait."""
        now = perf_counter()
        times = [waited for when, waited in [*self._placed] if now - when < _WINDOW]
        waiting = [it for it in [*self._new.values()] if _place_time(it) is None]
        times += [now - it.metrics.arrival_time for it in waiting]
        return sum(times) / len(times) if times else 0.0


def _place_time(submission: Submission) -> float | None:
    return submission.samples[0].request.place_time


class EngineReplica:
    """Loads the model and serves it on a port of its own, which the front sends requests to.

    Ray Serve calls the methods.
    """

    def __init__(self, plan: DeploymentPlan) -> None:
        # Here, because Ray's other processes read this module, too.
        from slipstream.engine.llm import LLM
        from slipstream.serve.listening import bind, listen
        from slipstream.serve.memory import keep_few_matmuls
        from slipstream.serve.page import page_routes
        from slipstream.serve.run import engine_server

        keep_few_matmuls()
        self._plan, self.id = plan, uuid4().hex[:12]
        self._host = "127.0.0.1" if plan.local else _own_address()
        self._engine = LLM(plan.config).engine
        self._queue_times = QueueTimes()
        self._server, self._thread = engine_server(
            self._engine,
            plan.config,
            plan.server.for_replica(self.id),
            page_routes(),
            [self._queue_times],
        )
        sock = bind(self._host, 0)
        listen(sock)
        self._port: int = sock.getsockname()[1]
        # The server needs its own event loop, apart from Ray's.
        self._serving = threading.Thread(target=self._serve, args=(sock,), name="server")
        self._serving.start()

    def _serve(self, sock: socket.socket) -> None:
        with sock:
            self._server.run(sockets=[sock])

    def ready(self) -> str:
        """The replica's name; a call of it makes Ray tell the caller of the replicas."""
        return self.id

    def record_replica_metadata(self) -> dict[str, Any]:
        """The facts that the front uses for routing."""
        blocks = self._engine.scheduler.block_manager
        tokens = blocks.num_all_blocks * blocks.block_size
        return {"id": self.id, "host": self._host, "port": self._port, "cache_tokens": tokens}

    def record_routing_stats(self) -> dict[str, Any]:
        """The number of open requests, which a front does not know if there are several fronts."""
        return {} if self._plan.local else {"num_open": self._thread.num_open}

    def record_autoscaling_stats(self) -> dict[str, float]:
        """The load of the engine, from which the number of replicas is chosen."""
        scheduler, limits = self._engine.scheduler, self._engine.resolved.limits
        return {
            QUEUE_TIME: self._queue_times.mean(),
            BUSY: scheduler.num_running / limits.max_num_seqs,
        }

    def check_health(self) -> None:
        """Raise if the engine does not run: Ray then replaces the replica."""
        if not self._thread.alive or not self._serving.is_alive():
            raise RuntimeError("the engine does not run")

    async def __del__(self) -> None:
        """Let the running requests finish; Ray waits for it before it ends the process."""
        self._server.handle_exit(0, None)
        await asyncio.to_thread(self._serving.join)


def _own_address() -> str:
    """This machine's address within the cluster."""
    from ray.util import get_node_ip_address

    return str(get_node_ip_address())
