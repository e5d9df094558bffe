"""A deployment on this machine: Ray in the background, the front in this process."""

import asyncio
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import ray
from ray import serve

from slipstream.core.errors import SlipstreamError
from slipstream.deploy.application import NAME, build
from slipstream.deploy.front import Front
from slipstream.deploy.options import DeploymentPlan
from slipstream.deploy.routing import DIRECTORY
from slipstream.runner.capability import choose_device
from slipstream.runner.memory import uses_gpu_memory
from slipstream.serve.logs import RequestIds, set_up_logs
from slipstream.serve.memory import freeze_garbage_collection
from slipstream.serve.middleware import BodyLimits, DrainGate
from slipstream.serve.run import DrainingServer

logger = logging.getLogger("slipstream.serve")

_OBJECT_STORE = 80 << 20  # bytes, Ray's minimum: requests do not use it
_RAY_CPUS = 1  # besides the replicas'
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_worker_niceness": "0",  # replicas have normal priority
}


class DeployError(SlipstreamError):
    """The replicas could not be started."""


def serve_locally(
    plan: DeploymentPlan,
    sock: socket.socket,
    reread: Callable[[], DeploymentPlan],
    started: Callable[[], None],
) -> int:
    """Serve by local replicas until a signal ends it; the exit code, as of `start_server`.

    SIGHUP replaces the replicas one by one, while the others serve.

    Args:
        sock: to listen on.
        reread: the plan that SIGHUP puts in place of this one.
        started: called when all replicas are ready, and signals are handled.
    """
    with _ray(plan):
        plan = _fitted(plan)
        _deploy(plan)
        set_up_logs(plan.server.log)
        front = Front(None, plan.replicas.routing, plan.replicas.wait_timeout)
        gate = DrainGate(BodyLimits(front, plan.server.limits))
        work = _FrontWork(front, lambda: _deploy(_fitted(reread())), started)
        freeze_garbage_collection()
        server = DrainingServer(RequestIds(gate), plan.server, work, gate)
        server.run(sockets=[sock])
    return server.exit_code


class _FrontWork:
    """Runs concurrently with the front's connections.

    Args:
        update: puts new replicas in place of the old ones; slow.
        started: called when SIGHUP is handled.
    """

    def __init__(
        self, front: Front, update: Callable[[], None], started: Callable[[], None]
    ) -> None:
        self._front, self._update, self._started = front, update, started
        self._updating = threading.Lock()

    @property
    def num_open(self) -> int:
        return self._front.num_open

    def start(self) -> None:
        """Follow changes of the replicas, and replace them on SIGHUP."""
        DIRECTORY.follow(self._front.update)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, self._begin_update)
        self._started()

    async def drain(self) -> None:
        """Do nothing: the gate waits for running requests."""

    async def stop(self) -> None:
        DIRECTORY.leave()
        self._front.stop()

    def _begin_update(self) -> None:
        threading.Thread(target=self._run_update, name="update", daemon=True).start()

    def _run_update(self) -> None:
        with self._updating:
            logger.info("replacing the replicas")
            try:
                self._update()
            except Exception:  # the old replicas go on
                logger.exception("the replicas could not be replaced")
            else:
                logger.info("the replicas are replaced")


@contextmanager
def _ray(plan: DeploymentPlan) -> Iterator[None]:
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # It logs the address of its own proxy, which is not started.
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    options = plan.replicas
    ray.init(
        num_cpus=int(options.most * options.replica_cpus) + _RAY_CPUS,
        object_store_memory=_OBJECT_STORE,
        include_dashboard=False,
        configure_logging=False,
    )
    try:
        serve.start(proxy_location="Disabled")
        yield
    finally:
        serve.shutdown()
        ray.shutdown()


def _fitted(plan: DeploymentPlan) -> DeploymentPlan:
    """Add to the plan what this machine determines: GPUs, or a share of the cores."""
    options, config = plan.replicas, plan.config
    gpus = options.replica_gpus
    if gpus is None:
        on_gpus = uses_gpu_memory(choose_device(config.device)[0])
        gpus = config.num_ranks if on_gpus else 0
    if not gpus and config.threads is None:
        cores = len(os.sched_getaffinity(0))
        engines = options.most * config.num_ranks
        config = replace(config, threads=max(cores // engines, 1))
    return replace(plan, config=config, replicas=replace(options, replica_gpus=gpus))


def _deploy(plan: DeploymentPlan) -> None:
    """Start these replicas in place of any others; raises DeployError if that fails."""
    try:
        handle = serve.run(build(plan), name=NAME, route_prefix="/")
        handle.ready.remote().result()
    except Exception as error:
        reasons = [line for line in str(error).splitlines() if "Error: " in line]
        message = reasons[-1].partition("Error: ")[2] if reasons else str(error)
        raise DeployError(f"the replicas do not start: {message}") from error
