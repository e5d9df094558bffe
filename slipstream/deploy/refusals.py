"""What the front tells its clients where replicas do not answer."""

from collections.abc import Sequence
from http import HTTPStatus

from slipstream.serve.limits import RequestError


class NoReplicaError(RequestError):
    """There is no replica."""

    status, code = HTTPStatus.SERVICE_UNAVAILABLE, "unavailable"
    message = "no replica is ready; try again in a while"


class ReplicaLostError(RequestError):
    """Replicas died while they answered."""

    status, code = HTTPStatus.SERVICE_UNAVAILABLE, "replica_lost"
    message = "the replica that was answering has died; send the request again"


class PartlyDoneError(RequestError):
    """Some replicas did what all were asked for."""

    status, code = HTTPStatus.BAD_GATEWAY, "partly_done"

    def __init__(self, refused: Sequence[str], num_asked: int) -> None:
        super().__init__(
            f"{len(refused)} of {num_asked} replicas refused, and the others did it: "
            + "; ".join(refused)
        )
