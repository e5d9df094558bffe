"""What is to be deployed: the server's options, and how many of it there are."""

from dataclasses import dataclass

from slipstream.core.config import EngineConfig
from slipstream.deploy.options import ReplicaOptions
from slipstream.serve.run import ServerOptions


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A whole deployment; it travels to the replicas.

    Args:
        local: all replicas are on this machine, and listen on its loopback address.
    """

    config: EngineConfig
    server: ServerOptions
    replicas: ReplicaOptions
    local: bool = True
