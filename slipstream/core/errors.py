"""The errors that users may get.

SlipstreamError
├── UsageError        a parameter, flag or request is wrong (the command line exits with 2)
│   ├── PromptTooLongError
│   └── DraftTooLongError
├── CheckpointError   a model directory is missing, broken or does not fit (it exits with 1)
├── OtherRankError    a process that runs other requests of a step could not do its part
├── RanksLostError    a process that holds a share of the model has ended (it exits with 1)
└── GenerationError   an output ended with an error (it exits with 1)
"""

from collections.abc import Iterator
from contextlib import contextmanager


class SlipstreamError(Exception):
    """Base of all errors that users can fix. The message is one clear sentence."""


class UsageError(SlipstreamError, ValueError):
    """A parameter, flag or request is wrong; the message names the remedy."""


class PromptTooLongError(UsageError):
    """A prompt has more tokens than the maximum length."""


class DraftTooLongError(UsageError):
    """The requested number of draft tokens per step is above the drafter's maximum, `most`."""

    def __init__(self, most: int) -> None:
        super().__init__(
            f"this drafter guesses at most {counted(most, 'token')} a step; lower "
            "num_speculative_tokens"
        )
        self.most = most


class CheckpointError(SlipstreamError):
    """A model directory is missing, broken, unsupported, or does not fit its target."""


class RanksLostError(SlipstreamError):
    """A process that holds a share of the model has ended, or its state differs from the others';
    the engine cannot continue."""


class OtherRankError(SlipstreamError):
    """Another process, which runs other requests of this step, failed."""


class GenerationError(SlipstreamError):
    """An output ended with an error: the logits are not finite, or its grammar allows no token."""


def counted(number: int, noun: str) -> str:
    """The number and the noun, in the plural unless the number is 1: `1 token`, `2 tokens`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


@contextmanager
def about_prompt(index: int, number: int) -> Iterator[None]:
    """A UsageError says which prompt it is about, if there are several.

    Args:
        index: of the prompt, from 0.
        number: of all prompts that were given together.
    """
    try:
        yield
    except UsageError as error:
        if number > 1:
            error.args = (f"prompt {index + 1} of {number}: {error}",)
        raise
