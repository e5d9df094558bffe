"""Server-sent events, as far as the OpenAI protocol uses them: the data of each event."""

from collections.abc import Iterator

_MOST_BYTES = 64 << 20


class EventStream:
    """Takes bytes as they come from the network, cut anywhere."""

    def __init__(self) -> None:
        self._rest = b""

    @property
    def is_between_events(self) -> bool:
        """Whether nothing is left of an event that has begun."""
        return not self._rest.strip()

    def feed(self, data: bytes) -> Iterator[str]:
        """The events that these bytes complete.

        Raises:
            ValueError: an event is not UTF-8 or has no end.
        """
        # An event ends with an empty line; lines end as the standard lets them.
        text = self._rest + data
        if b"\r" in text:
            held = b"\r" if text.endswith(b"\r") else b""  # a \n may follow
            text = text.removesuffix(held).replace(b"\r\n", b"\n").replace(b"\r", b"\n") + held
        *events, self._rest = text.split(b"\n\n")
        if len(self._rest) > _MOST_BYTES:
            raise ValueError("an event of the stream has no end")
        for event in events:
            lines = [
                line[5:].removeprefix(b" ")
                for line in event.split(b"\n")
                if line.startswith(b"data:")
            ]
            if lines:
                yield b"\n".join(lines).decode("utf-8")
