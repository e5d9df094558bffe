"""The plan of a deployment: the server's options, and those of its replicas."""

from dataclasses import dataclass

from slipstream.core.config import EngineConfig
from slipstream.deploy.options import ReplicaOptions
from slipstream.serve.options import ServerOptions


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
