"""Keeps complete responses, in bounded memory."""

from collections import OrderedDict
from dataclasses import dataclass
from http import HTTPStatus
from threading import Lock

from slipstream.serve.errors import ApiError


@dataclass(frozen=True)
class StoredResponse:
    """A response.

    Attributes:
        document: the response that was sent, in JSON.
        messages: the conversation including this answer, without instructions, in JSON.
        has_images: whether any of the messages has images.
    """

    document: bytes
    messages: bytes
    has_images: bool = False

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.document) + len(self.messages)


class ResponseStore:
    """Responses by id; the least recently used ones are evicted. Thread-safe.

    Args:
        most_bytes: maximum size of all together; a larger response is not kept.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._kept: OrderedDict[str, StoredResponse] = OrderedDict()
        self._num_bytes = 0
        self._lock = Lock()

    @property
    def keeps(self) -> bool:
        return self._most > 0

    def put(self, name: str, response: StoredResponse) -> None:
        """Keep a response under a new id."""
        if not self.keeps or response.size > self._most_bytes:
            return
        with self._lock:
            self._kept[name] = response
            self._num_bytes += response.size
            while len(self._kept) > self._most or self._num_bytes > self._most_bytes:
                _, oldest = self._kept.popitem(last=False)
                self._num_bytes -= oldest.size

    def get(self, name: str, param: str | None = None) -> StoredResponse:
        """The response with this id; ApiError (404), which names `param`, if there is none."""
        with self._lock:
            found = self._kept.get(name)
            if found is None:
                raise _missing(name, param)
            self._kept.move_to_end(name)
            return found

    def delete(self, name: str) -> None:
        """Delete a response; ApiError (404) if there is none."""
        with self._lock:
            found = self._kept.pop(name, None)
            if found is None:
                raise _missing(name, None)
            self._num_bytes -= found.size


def _missing(name: str, param: str | None) -> ApiError:
    return ApiError(
        HTTPStatus.NOT_FOUND,
        f"there is no response {name[:100]!r} here: it was not stored, has been deleted, or made "
        "way for newer ones (--max-stored-responses, --max-stored-bytes); send the whole "
        "conversation as input",
        param=param,
        code="response_not_found",
    )
