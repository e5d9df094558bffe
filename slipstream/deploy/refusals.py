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


class NotAllDoneError(RequestError):
    """Some replicas did not do what all were asked for."""

    status, code = HTTPStatus.BAD_GATEWAY, "partly_done"


def require_done(results: Sequence[tuple[str, int, bytes]]) -> None:
    """Raise NotAllDoneError, which tells every replica's result, unless all did what they should.

    Args:
        results: of each replica its name, and the status (0: none) and the body of its answer.
    """
    done = [name for name, status, _ in results if 0 < status < HTTPStatus.BAD_REQUEST]
    if len(done) == len(results):
        return
    told = (
        f"{name} did it" if name in done
        else f"{name} answered {status}: {page.decode(errors='replace')}" if status
        else f"{name} did not answer"
        for name, status, page in results
    )  # fmt: skip
    raise NotAllDoneError(
        f"{len(done)} of {len(results)} replicas did what was asked; " + "; ".join(told)
    )
