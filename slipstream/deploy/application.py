"""Builds the Ray Serve application of a deployment."""

from typing import Any

from ray import serve
from ray.serve import Application

from slipstream.deploy.options import DeploymentPlan
from slipstream.deploy.replica import EngineReplica

NAME = "slipstream"
_DRAINING = 3600.0  # seconds, unless the server's own limits end requests earlier
_MARGIN = 15.0  # for shutting down after the last answer is complete


def build(plan: DeploymentPlan) -> Application:
    made = serve.deployment(EngineReplica).options(name=NAME, **deployment_options(plan))
    return made.bind(plan)


def deployment_options(plan: DeploymentPlan) -> dict[str, Any]:
    """Ray Serve's options of the deployment, keyed as in Ray Serve's config files."""
    options, limits = plan.replicas, plan.server.limits
    cpus, gpus = options.replica_cpus, options.replica_gpus or 0
    draining = limits.drain_timeout or limits.request_timeout or _DRAINING
    found: dict[str, Any] = {
        "ray_actor_options": {"num_cpus": cpus, "num_gpus": gpus},
        "max_ongoing_requests": 1 << 20,  # the server applies its own limits
        "health_check_period_s": 1.0,
        "health_check_timeout_s": 20.0,
        "graceful_shutdown_wait_loop_s": 0.1,
        "graceful_shutdown_timeout_s": draining + _MARGIN,
        "request_router_config": {
            "request_router_class": "slipstream.deploy.replica_list:ReplicaList",
            "request_routing_stats_period_s": 1.0,
        },
    }
    if gpus > 1:  # on one machine, and reserved together
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
