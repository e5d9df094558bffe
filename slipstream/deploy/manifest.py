"""The manifest that KubeRay's operator makes a deployment from: a RayService."""

import json
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from slipstream.core.errors import UsageError
from slipstream.deploy.options import DeploymentPlan
from slipstream.deploy.proxy import environment

# Fields that are used here, of KubeRay 1.4's definition (ray.io/v1).
SCHEMA = json.loads((Path(__file__).parent / "rayservice.schema.json").read_text("utf-8"))
_RAY = "2.60.0"
_MEMORY = "2Gi"  # of the head, which runs no replica
_PORTS = {"gcs-server": 6379, "dashboard": 8265, "client": 10001}


def ray_service(
    plan: DeploymentPlan, arguments: Sequence[str], name: str, image: str, port: int
) -> str:
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
