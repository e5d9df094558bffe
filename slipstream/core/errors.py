"""The errors that a user can meet.

SlipstreamError
├── UsageError        a parameter, flag or request is wrong (the command line exits with 2)
│   └── DraftTooLongError
├── CheckpointError   a model directory is missing, broken or does not fit (it exits with 1)
├── OtherRankError    a process that runs other requests of a step could not do its part
├── RanksLostError    a process that holds a share of the model has ended (it exits with 1)
└── GenerationError   an output ended with an error (it exits with 1)
"""


class SlipstreamError(Exception):
    """Base of every error that is the user's to mend. Its message is one clear sentence."""


class UsageError(SlipstreamError, ValueError):
    """A parameter, flag or request is wrong; the message names the remedy."""


class PromptTooLongError(UsageError):
    """A prompt has more tokens than the model reads."""


class DraftTooLongError(UsageError):
    """More draft tokens a step are asked for than the drafter can guess, which is `most`."""

    def __init__(self, most: int) -> None:
        super().__init__(
            f"this drafter guesses at most {counted(most, 'token')} a step; lower "
            "num_speculative_tokens"
        )
        self.most = most


class CheckpointError(SlipstreamError):
    """A model directory is missing, broken, unsupported, or does not fit its target."""


class RanksLostError(SlipstreamError):
    """A process that holds a share of the model has ended, or has come to differ from the others;
    the engine cannot go on."""


class OtherRankError(SlipstreamError):
    """Another process, which runs other requests of this step, could not do its part."""


class GenerationError(SlipstreamError):
    """An output ended with an error: logits that are not finite, or nothing that its grammar
    allows."""


def counted(number: int, noun: str) -> str:
    """`1 token`, `2 tokens`: for messages."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
