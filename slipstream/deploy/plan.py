"""The plan of a deployment: the server's options, and those of its replicas."""

from dataclasses import dataclass

from slipstream.core.config import EngineConfig
from slipstream.core.errors import UsageError
from slipstream.deploy.options import ReplicaOptions
from slipstream.serve.run import ServerOptions


@dataclass(frozen=True, kw_only=True)
class Plan:
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
