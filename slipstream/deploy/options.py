"""The options of a deployment: the number of replicas, routing, and the servers' own."""

from dataclasses import dataclass

from slipstream.core.config import EngineConfig
from slipstream.core.errors import UsageError
from slipstream.core.flags import check_fields, flag
from slipstream.serve.options import ServerOptions


@dataclass(frozen=True, kw_only=True)
class ReplicaOptions:
    """How many replicas there are, what each gets, and which of them answers a request."""

    replicas: int = flag(
        1, "Replicas of the engine, each with a model of its own.", panel="Replicas", at_least=1
    )
    max_replicas: int | None = flag(
        None,
        "Maximum number of replicas: more are started while requests wait, and stopped when they "
        "are not needed. [--replicas]",
        at_least=1,
    )
    target_queue_time: float = flag(
        0.5, "Seconds that requests may wait for a place before replicas are added.", above=0
    )
    replica_cpus: float = flag(1.0, "CPUs that Ray reserves for each replica.", at_least=0)
    replica_gpus: int | None = flag(
        None,
        "GPUs of each replica; several are taken from one machine. [1 if there are any and "
        "--device is not cpu]",
        at_least=0,
    )
    routing: str = flag(
        "prefix",
        "Which replica answers: prefix (one that has computed the prompt's beginning, unless "
        "others are much less busy), load (the least busy), or round_robin.",
        choices=("prefix", "load", "round_robin"),
    )
    wait_timeout: float = flag(
        60.0, "Seconds that a request waits while there is no replica (503).", above=0
    )

    def __post_init__(self) -> None:
        check_fields(type(self), vars(self))
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise UsageError(
                f"--max-replicas {self.max_replicas} is less than --replicas {self.replicas}, with "
                "which it starts; give the larger number as --max-replicas"
            )

    @property
    def most(self) -> int:
        """The maximum number of replicas at a time."""
        return self.max_replicas or self.replicas


@dataclass(frozen=True, kw_only=True)
class DeploymentPlan:
    """The plan of a deployment, which is sent to every replica.

    Args:
        local: all replicas run on this machine and listen on its loopback address.
    """

    config: EngineConfig
    server: ServerOptions
    replicas: ReplicaOptions
    local: bool = True

    def __post_init__(self) -> None:
        size, gpus = self.config.num_ranks, self.replicas.replica_gpus
        if gpus and gpus < size:
            raise UsageError(
                f"--replica-gpus {gpus} is less than the {size} processes of a replica, each of "
                f"which needs a GPU; give at least {size}, or leave it out"
            )
