"""The special tokens of harmony, the format in which gpt-oss models write messages."""

from dataclasses import dataclass

from slipstream.models.tokenizer import Tokenizer

START, MESSAGE, CHANNEL, CONSTRAIN = "<|start|>", "<|message|>", "<|channel|>", "<|constrain|>"
END, RETURN, CALL, END_OF_TEXT = "<|end|>", "<|return|>", "<|call|>", "<|endoftext|>"


@dataclass(frozen=True)
class HarmonyTokens:
    """Token ids of the format's special tokens.

    A message is START, a role, optionally CHANNEL and a channel, MESSAGE, the text, and finally END
    (more messages follow), RETURN (the answer is complete) or CALL (a tool call). The role or the
    channel may be followed by a recipient (" to=functions.NAME"), and the channel by CONSTRAIN and
    the type of the text.

    Attributes:
        end_of_text: None if the vocabulary does not have it.
    """

    start: int
    message: int
    channel: int
    constrain: int
    end: int
    end_of_answer: int
    call: int
    end_of_text: int | None

    @property
    def stops(self) -> tuple[int, ...]:
        """The tokens that end an output."""
        ids = (self.end_of_answer, self.end_of_text, self.call)
        return tuple(token for token in ids if token is not None)

    @property
    def marks(self) -> tuple[int, ...]:
        """All special tokens; the text of a message never contains one."""
        return (self.start, self.message, self.channel, self.constrain, self.end, *self.stops)


def find_harmony(tokenizer: Tokenizer) -> HarmonyTokens | None:
    """The special tokens in this vocabulary; None if it does not have harmony's."""
    ids: list[int] = []
    for text in (START, MESSAGE, CHANNEL, CONSTRAIN, END, RETURN, CALL):
        token = tokenizer.token_to_id(text)
        if token is None:
            return None
        ids.append(token)
    start, message, channel, constrain, end, end_of_answer, call = ids
    return HarmonyTokens(
        start=start,
        message=message,
        channel=channel,
        constrain=constrain,
        end=end,
        end_of_answer=end_of_answer,
        call=call,
        end_of_text=tokenizer.token_to_id(END_OF_TEXT),
    )
