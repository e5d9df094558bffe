"""The errors that the front returns to clients when replicas do not answer."""

from collections.abc import Sequence
from http import HTTPStatus

from slipstream.serve.limits import RequestError


class NoReplicaError(RequestError):
    """No replica is running."""

    status, code = HTTPStatus.SERVICE_UNAVAILABLE, "unavailable"
    message = "no replica is ready; try again in a while"


class ReplicaLostError(RequestError):
    """The replicas died while they answered a request."""

    status, code = HTTPStatus.SERVICE_UNAVAILABLE, "replica_lost"
    message = "the replica that was answering has died; send the request again"


class NotAllDoneError(RequestError):
    """Some replicas failed a request that was sent to all of them."""

    status, code = HTTPStatus.BAD_GATEWAY, "partly_done"


def require_done(results: Sequence[tuple[str, int, bytes]]) -> None:
    """Raise NotAllDoneError with every replica's result unless all replicas succeeded.

    Args:
        results: per replica its name, the HTTP status (0 if there was no answer) and the body.
    """
    done = [name for name, status, _ in results if 0 < status < HTTPStatus.BAD_REQUEST]
    if len(done) == len(results):
        return
    answers = (
        f"{name} did it" if name in done
        else f"{name} answered {status}: {page.decode(errors='replace')}" if status
        else f"{name} did not answer"
        for name, status, page in results
    )  # fmt: skip
    raise NotAllDoneError(
        f"{len(done)} of {len(results)} replicas did what was asked; " + "; ".join(answers)
    )
