"""The deployment as Ray Serve takes it."""

import json
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from ray import serve
from ray.serve import Application

from slipstream.core.errors import UsageError
from slipstream.deploy.plan import Plan
from slipstream.deploy.proxy import environment
from slipstream.deploy.replica import EngineReplica

NAME = "slipstream"
_DRAINING = 3600.0  # seconds, where the server's own limits do not end requests earlier
_MARGIN = 15.0  # for what is left to do when the last answer is complete


def build(plan: Plan) -> Application:
    """The application of a plan."""
    made = serve.deployment(EngineReplica).options(name=NAME, **deployment_options(plan))
    return made.bind(plan)


def deployment_options(plan: Plan) -> dict[str, Any]:
    """Ray Serve's options of the deployment, by the names that its files have for them."""
    options, limits = plan.replicas, plan.server.limits
    cpus, gpus = options.replica_cpus, options.replica_gpus or 0
    draining = limits.drain_timeout or limits.request_timeout or _DRAINING
    found: dict[str, Any] = {
        "ray_actor_options": {"num_cpus": cpus, "num_gpus": gpus},
        "max_ongoing_requests": 1 << 20,  # the server has limits of its own
        "health_check_period_s": 1.0,
        "health_check_timeout_s": 20.0,
        "graceful_shutdown_wait_loop_s": 0.1,
        "graceful_shutdown_timeout_s": draining + _MARGIN,
        "request_router_config": {
            "request_router_class": "slipstream.deploy.replica_list:ReplicaList",
            "request_routing_stats_period_s": 1.0,
        },
    }
    if gpus > 1:  # of one machine, and set aside together
        found["placement_group_bundles"] = [{"CPU": cpus, "GPU": float(gpus)}]
        found["placement_group_strategy"] = "STRICT_PACK"
    if options.max_replicas is None:
        found["num_replicas"] = options.replicas
    else:
        found["autoscaling_config"] = {
            "min_replicas": options.replicas,
            "max_replicas": options.max_replicas,
            "metrics_interval_s": 1.0,
            "look_back_period_s": 5.0,
            "upscale_delay_s": 5.0,
            "downscale_delay_s": 120.0,
            "policy": {
                "policy_function": "slipstream.deploy.scaling:QueueTimePolicy",
                "policy_kwargs": {"target": options.target_queue_time},
            },
        }
    return found


# Fields that are used here, of KubeRay 1.4's definition (ray.io/v1).
SCHEMA = json.loads((Path(__file__).parent / "rayservice.schema.json").read_text("utf-8"))
_RAY = "2.60.0"
_MEMORY = "2Gi"  # of the head, which runs no replica
_PORTS = {"gcs-server": 6379, "dashboard": 8265, "client": 10001}


def ray_service(plan: Plan, arguments: Sequence[str], name: str, image: str, port: int) -> str:
    """The manifest in YAML; one worker for each replica.

    Args:
        arguments: of `slipstream deploy`, from which the replicas read what they serve.
        name: of the service.
        image: with Slipstream, its extra `deploy`, and the model.
        port: of the service.

    Raises:
        UsageError: an argument makes the manifest invalid, such as a name with a space.
    """
    options = plan.replicas
    resources = {"cpu": str(max(options.replica_cpus, 1.0))}
    if options.replica_gpus:
        resources["nvidia.com/gpu"] = str(options.replica_gpus)
    variables = [{"name": key, "value": it} for key, it in environment(plan).items()]
    head = _container("ray-head", image, variables, {"cpu": "1", "memory": _MEMORY})
    head["ports"] = [
        {"containerPort": it, "name": key} for key, it in {**_PORTS, "serve": port}.items()
    ]
    worker = _container("ray-worker", image, variables, resources)
    workers = {
        "groupName": "replicas",
        "replicas": options.replicas,
        "minReplicas": options.replicas,
        "maxReplicas": options.most,
        "rayStartParams": {},
        "template": {"spec": {"containers": [worker]}},
    }
    cluster = {
        "rayVersion": _ray_version(),
        **({"enableInTreeAutoscaling": True} if options.max_replicas else {}),
        "headGroupSpec": {
            "rayStartParams": {"dashboard-host": "0.0.0.0", "num-cpus": "0"},
            "template": {"spec": {"containers": [head]}},
        },
        "workerGroupSpecs": [workers],
    }
    manifest = {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {"name": name},
        "spec": {"serveConfigV2": _serve_config(arguments, port), "rayClusterConfig": cluster},
    }
    check(manifest)
    return str(yaml.safe_dump(manifest, sort_keys=False))


def _serve_config(arguments: Sequence[str], port: int) -> str:
    application = {
        "name": "slipstream",
        "route_prefix": "/",
        "import_path": "slipstream.cli.deploy:application",
        "args": {"arguments": [*arguments]},
    }
    config = {
        "proxy_location": "EveryNode",
        "http_options": {"host": "0.0.0.0", "port": port},
        "applications": [application],
    }
    return str(yaml.safe_dump(config, sort_keys=False))


def check(manifest: Any) -> None:
    """Raise UsageError for what KubeRay would refuse."""
    try:
        jsonschema.validate(manifest, SCHEMA)
    except jsonschema.ValidationError as error:
        where = ".".join(map(str, error.absolute_path))
        raise UsageError(f"the manifest would not be valid: {where}: {error.message}") from None


def _container(
    name: str, image: str, variables: Sequence[Any], resources: dict[str, Any]
) -> dict[str, Any]:
    return {
        "name": name,
        "image": image,
        "env": [*variables],
        "resources": {"requests": resources, "limits": resources},
    }


def _ray_version() -> str:
    try:
        return version("ray")
    except PackageNotFoundError:
        return _RAY
