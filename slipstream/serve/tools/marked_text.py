"""Find the marks of tool calls, and clean the text around them."""

from collections.abc import Sequence

from slipstream.serve.tools.events import Content


class MarkFinder:
    """Finds marks in a text that arrives in pieces; holds back its end while it may begin a mark.

    Args:
        marks: none may be the beginning of another.
    """

    def __init__(self, marks: Sequence[str]) -> None:
        self._marks = tuple(marks)
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None, str]:
        """The text before the first mark, the mark, and the text after it, to be fed again.

        Without a mark: the text that cannot begin a mark, None and "".
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
        """The text that was held back."""
        text, self._held = self._held, ""
        return text

    def _beginning(self, text: str) -> int:
        """Number of characters at the end that may begin a mark."""
        longest = max((len(mark) for mark in self._marks), default=1)
        for size in range(min(longest - 1, len(text)), 0, -1):
            if any(mark.startswith(text[-size:]) for mark in self._marks):
                return size
        return 0


class ContentWriter:
    """Removes white space that only separates calls."""

    def __init__(self) -> None:
        self._space = ""
        self._after_call = False

    def write(self, text: str) -> list[Content]:
        """Further text; white space at its end is held back."""
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if not kept:
            return []
        self._after_call = False
        return [Content(kept)]

    def break_off(self) -> None:
        """A call follows."""
        self._space, self._after_call = "", True

    def flush(self) -> list[Content]:
        """The rest; the answer is complete."""
        space, self._space = self._space, ""
        return [Content(space)] if space and not self._after_call else []
