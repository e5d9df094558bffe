"""Headers of harmony messages: what stands before a message's text says what the text is."""

import re
from collections.abc import Collection

from slipstream.serve.output.parts import Part

_MOST_CHARACTERS = 256
_ROLES = ("assistant", "user", "system", "developer", "tool")
_ROLE = re.compile(rf"\s*({'|'.join(_ROLES)}|functions\.[\w.-]{{0,64}})?")
_REST = re.compile(r"\s*(t|to|to=\S{0,128})?\s*")
_RECIPIENT = re.compile(r"(?:^|\s)to=(\S+)")
_FUNCTION = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_PREFIX = "functions."


class Header:
    """The header of a message, as it comes.

    Attributes:
        role, channel: their texts, either perhaps with a recipient; a channel that has not begun is
            None.
    """

    def __init__(self, channel: str | None = None) -> None:
        self.role, self.channel = "", channel

    def begin_channel(self) -> None:
        self.channel = "" if self.channel is None else self.channel + " "

    def write(self, text: str) -> None:
        if self.channel is None:
            self.role += text
        else:
            self.channel += text

    def text(self) -> str | None:
        """What is no header but text whose marks the model forgot; None as long as it may be one.

        Models that were not trained well answer without any marks, or never end a header.
        """
        if self.channel is not None:
            return self.channel if len(self.channel) > _MOST_CHARACTERS else None
        role = self.role
        named = _ROLE.match(role)
        assert named is not None, "it matches anything"
        rest = role[named.end() :]
        if _REST.fullmatch(rest) and len(role) <= _MOST_CHARACTERS:
            return None
        if role.strip() and any(it.startswith(role.strip()) for it in (*_ROLES, _PREFIX)):
            return None
        return rest

    def part(self) -> Part:
        """What the text behind it is, calls aside."""
        named = _ROLE.match(self.role)
        role = (named[1] if named else None) or "assistant"
        channel = _RECIPIENT.sub(" ", self.channel or "").split()
        if role != "assistant" or self._recipient() is not None or channel[:1] == ["analysis"]:
            return Part.REASONING
        return Part.CONTENT

    def called(self, functions: Collection[str] | None) -> str | None:
        """The function that the message calls, if it calls one.

        Args:
            functions: that may be called; None if there may be no calls. A name that is none of
                them is told all the same where the model says that it is a function.
        """
        recipient = self._recipient()
        if functions is None or recipient is None:
            return None
        if recipient in functions:
            return recipient
        name = recipient.removeprefix(_PREFIX)
        return name if name != recipient and _FUNCTION.fullmatch(name) else None

    def _recipient(self) -> str | None:
        found = _RECIPIENT.search(f"{self.role} {self.channel or ''}")
        return None if found is None or found[1] in ("user", "assistant") else found[1]
