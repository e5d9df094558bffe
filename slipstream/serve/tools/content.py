"""The text around tool calls."""

from slipstream.serve.tools.events import Content


class ContentWriter:
    """Leaves out white space that does nothing but set calls apart."""

    def __init__(self) -> None:
        self._space = ""
        self._behind_call = False

    def write(self, text: str) -> list[Content]:
        """Text, whose white space at the end waits for what follows it."""
        text = self._space + text
        said = text.rstrip()
        self._space = text[len(said) :]
        if not said:
            return []
        self._behind_call = False
        return [Content(said)]

    def break_off(self) -> None:
        """A call follows."""
        self._space, self._behind_call = "", True

    def flush(self) -> list[Content]:
        """The answer is over."""
        space, self._space = self._space, ""
        return [Content(space)] if space and not self._behind_call else []
