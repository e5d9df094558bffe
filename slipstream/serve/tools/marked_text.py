"""The text around tool calls, and the marks that set calls apart from it."""

from collections.abc import Sequence

from slipstream.serve.tools.events import Content


class MarkFinder:
    """Holds back the end of a text while it may begin a mark.

    Args:
        marks: none is the beginning of another.
    """

    def __init__(self, marks: Sequence[str]) -> None:
        self._marks = tuple(marks)
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None, str]:
        """The text before the first mark, the mark, and what stands behind it, to be fed again.

        Without a mark: the text that is certain, None and nothing.
        """
        text, self._held = self._held + text, ""
        found = [(place, mark) for mark in self._marks if (place := text.find(mark)) >= 0]
        if found:
            place, mark = min(found)
            return text[:place], mark, text[place + len(mark) :]
        keep = self._beginning(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None, ""

    def finish(self) -> str:
        """What was held back."""
        text, self._held = self._held, ""
        return text

    def _beginning(self, text: str) -> int:
        """Letters at the end that may begin a mark."""
        longest = max((len(mark) for mark in self._marks), default=1)
        for size in range(min(longest - 1, len(text)), 0, -1):
            if any(mark.startswith(text[-size:]) for mark in self._marks):
                return size
        return 0


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
