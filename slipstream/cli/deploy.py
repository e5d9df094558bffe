"""`slipstream deploy`: several replicas of the server, on this machine or on a cluster."""

from collections.abc import Callable
from contextlib import suppress
from time import perf_counter
from typing import TYPE_CHECKING

import typer

from slipstream.cli.drafter_flags import DrafterFlags
from slipstream.cli.flags import Given, parsed
from slipstream.cli.listen import ListenFlags, MissingPackagesError, announce, checked_options
from slipstream.core.config import EngineConfig
from slipstream.deploy.options import ReplicaOptions
from slipstream.serve.limits import ServeLimits
from slipstream.serve.options import AnswerOptions, LogOptions

if TYPE_CHECKING:
    from slipstream.deploy.plan import Plan


def deploy(
    *,
    drafter: DrafterFlags,
    engine: EngineConfig,
    listen: ListenFlags,
    answers: AnswerOptions,
    limits: ServeLimits,
    log: LogOptions,
    replicas: ReplicaOptions,
    given: Given,
) -> None:
    """Serve a model by several replicas on Ray Serve, behind one address.

    All flags of slipstream serve hold for every replica; --config FILE reads them from YAML. On
    SIGHUP the command line and its files are read again, and the replicas replaced one by one,
    without a request lost. The first Ctrl-C or SIGTERM lets running requests finish, the second
    stops at once.
    """
    plan = _plan(
        drafter=drafter,
        engine=engine,
        listen=listen,
        answers=answers,
        limits=limits,
        log=log,
        replicas=replicas,
    )
    raise typer.Exit(run_locally(plan, listen, lambda: parsed(_plan, given.line)))


def _plan(
    *,
    drafter: DrafterFlags,
    engine: EngineConfig,
    listen: ListenFlags,
    answers: AnswerOptions,
    limits: ServeLimits,
    log: LogOptions,
    replicas: ReplicaOptions,
) -> "Plan":
    config = drafter.apply(engine)
    server = checked_options(config, listen, limits, answers, log)
    from slipstream.deploy.plan import Plan

    return Plan(config=config, server=server, replicas=replicas)


def run_locally(plan: "Plan", listen: ListenFlags, reread: "Callable[[], Plan]") -> int:
    """Serve by replicas on this machine until a signal ends it; the exit code.

    Args:
        reread: the plan as it is when the replicas are to be replaced.
    """
    try:
        from slipstream.deploy.local import serve_locally
    except ModuleNotFoundError as error:
        raise MissingPackagesError(
            f"several replicas need the package {error.name}; install it with: pip install "
            "'slipstream[deploy]'"
        ) from error
    from slipstream.serve.listening import bind
    from slipstream.serve.listening import listen as let_connect

    sock = bind(listen.host, listen.port, listen.uds)
    began = perf_counter()

    def started() -> None:
        let_connect(sock)
        with suppress(OSError):  # as in serve
            announce(listen, plan.server, sock, perf_counter() - began)

    try:
        return serve_locally(plan, sock, reread, started)
    finally:
        sock.close()
        if listen.uds is not None:
            listen.uds.unlink(missing_ok=True)
