"""How a process learns from Ray Serve which replicas run.

Ray pickles this module's class with all that it refers to, so it refers to the directory by its
module.
"""

from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter, RunningReplica

from slipstream.deploy import routing


class ReplicaList(FIFOMixin, RequestRouter):  # type: ignore[misc]
    """Ray Serve's router of the deployment, which only notes the replicas.

    Requests do not come by Ray: its proxy takes some ten times as long to pass on an event of a
    stream (docs/deployment.md).
    """

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._tell(replicas)

    def on_replica_actor_died(self, replica_id: Any) -> None:
        super().on_replica_actor_died(replica_id)
        self._tell([it for it in self._replicas.values() if it.replica_id != replica_id])

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """All of them: calls through Ray concern the deployment, not the engine."""
        return [candidate_replicas]

    def _tell(self, replicas: Sequence[RunningReplica]) -> None:
        routing.DIRECTORY.update(
            [routing.Replica(**{**it.replica_metadata, **it.routing_stats}) for it in replicas]
        )
