"""`slipstream deploy`: several replicas of the server, on this machine or on a cluster."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import typer

from slipstream.cli.flags import Given, parsed
from slipstream.cli.listen import MissingPackagesError, ServingFlags, announce
from slipstream.cli.prompts import require_writable
from slipstream.cli.terminal import stderr_console
from slipstream.core.errors import SlipstreamError, UsageError, counted
from slipstream.core.flags import flag, given_flags
from slipstream.deploy.options import DeploymentPlan, ReplicaOptions


@dataclass(frozen=True, kw_only=True)
class ClusterFlags:
    """A manifest for a cluster, which is deployed with other tools."""

    manifest: Path | None = flag(
        None,
        "Write a RayService for KubeRay to this file instead of serving; kubectl apply -f FILE "
        "makes it, and later replaces the replicas one by one.",
        panel="Kubernetes",
    )
    image: str = flag(
        "slipstream:cpu", "Container image of the RayService; it needs the extra deploy."
    )
    name: str = flag("slipstream", "Name of the RayService.")


_ELSEWHERE = ("--uds", "--ssl-certfile")  # a cluster's ingress has them


def deploy(
    *, serving: ServingFlags, replicas: ReplicaOptions, cluster: ClusterFlags, given: Given
) -> None:
    """Serve several replicas of a model, on Ray Serve.

    They share one address. All flags of slipstream serve hold for every replica; --config FILE
    reads them from YAML. On SIGHUP the command line and its files are read again, and the replicas
    replaced one by one, without a request lost. The first Ctrl-C or SIGTERM lets running requests
    finish, the second stops at once.
    """
    plan = _plan(serving=serving, replicas=replicas, cluster=cluster)
    if cluster.manifest is not None:
        _write_manifest(plan, cluster, given.settled)
        return
    raise typer.Exit(run_locally(plan, lambda: parsed(_plan, given.line)))


def _plan(
    *, serving: ServingFlags, replicas: ReplicaOptions, cluster: ClusterFlags
) -> DeploymentPlan:
    """The plan of a command line; UsageError for flags that have no effect without another."""
    if cluster.manifest is None:
        for name in given_flags(cluster):
            raise UsageError(f"{name} is for the manifest of a cluster; add --manifest FILE")
    if serving.engine.data_parallel_size > 1 and not serving.engine.shares_experts:
        raise UsageError(
            "--data-parallel-size is for slipstream serve; here --replicas is the number of "
            "replicas, and with --enable-expert-parallel each one is several processes"
        )
    return plan_of(serving, replicas)


def plan_of(serving: ServingFlags, replicas: ReplicaOptions) -> DeploymentPlan:
    """The plan of replicas that are servers with these flags."""
    config, server = serving.checked()
    return DeploymentPlan(config=config, server=server, replicas=replicas)


def application(args: Mapping[str, Sequence[str]]) -> Any:
    """The application of the `arguments` of `slipstream deploy`, as Ray Serve builds it on a
    cluster."""
    from slipstream.deploy.application import build

    plan = parsed(_plan, args["arguments"])
    return build(replace(plan, local=False))


def _write_manifest(plan: DeploymentPlan, cluster: ClusterFlags, arguments: Sequence[str]) -> None:
    assert cluster.manifest is not None
    for name in given_flags(plan.server):
        if name in _ELSEWHERE:
            raise UsageError(
                f"{name} does not go with --manifest; give it to the cluster's ingress"
            )
    if any(it.startswith("--api-key") for it in arguments):
        raise UsageError(
            "--api-key would be readable in the manifest; leave it out, and set SLIPSTREAM_API_KEY "
            "in the containers' environment from a secret"
        )
    try:
        from slipstream.deploy.manifest import ray_service
    except ModuleNotFoundError as error:
        raise _missing(error) from error
    kept, names = [], {"--manifest", "--image", "--name"}
    words = iter(arguments)
    for word in words:
        if word in names:
            next(words)
        else:
            kept.append(word)
    text = ray_service(plan, kept, cluster.name, cluster.image, plan.server.port)
    require_writable("--manifest", cluster.manifest)
    cluster.manifest.write_text(text, "utf-8")
    print(f"written: {cluster.manifest}; kubectl apply -f {cluster.manifest} creates the service")


def _chats(plan: DeploymentPlan) -> bool:
    """Whether the model is known to have a chat template. The replicas have loaded it already."""
    from slipstream.engine.named_target import with_named_target
    from slipstream.engine.sizing import Reasons
    from slipstream.models.chat_template import has_chat_template
    from slipstream.models.checkpoint import resolve_checkpoint
    from slipstream.models.hub import HubAccess, hub_settings

    config = plan.config
    if config.skip_tokenizer_init or plan.server.chat_template is not None:
        return not config.skip_tokenizer_init
    downloads = HubAccess(config.download_dir, config.hf_token, offline=True)
    with suppress(SlipstreamError), hub_settings(downloads):
        name, revision = config.tokenizer, config.tokenizer_revision
        if name is None:
            config = with_named_target(config, Reasons())
            name, revision = config.model, config.tokenizer_revision or config.revision
        return has_chat_template(resolve_checkpoint(name, revision))
    return False


def _missing(error: ModuleNotFoundError) -> MissingPackagesError:
    return MissingPackagesError(
        f"several replicas need the package {error.name}; install it with: pip install "
        "'slipstream[deploy]'"
    )


def run_locally(plan: DeploymentPlan, reread: Callable[[], DeploymentPlan]) -> int:
    """Serve with replicas on this machine until a signal; returns the exit code. `reread` gives the
    plan of the replicas that are to replace them."""
    try:
        from slipstream.deploy.local import serve_locally
    except ModuleNotFoundError as error:
        raise _missing(error) from error
    from slipstream.serve.listening import bind
    from slipstream.serve.listening import listen as let_connect

    server = plan.server
    sock = bind(server.host, server.port, server.uds)
    began = perf_counter()
    with suppress(OSError):
        stderr_console().print(f"starting {counted(plan.replicas.replicas, 'replica')} on Ray")

    def started() -> None:
        let_connect(sock)
        with suppress(OSError):  # as in serve
            announce(server, sock, perf_counter() - began, _chats(plan))

    try:
        return serve_locally(plan, sock, reread, started)
    finally:
        sock.close()
        if server.uds is not None:
            server.uds.unlink(missing_ok=True)
