"""The errors that a user can meet.

SlipstreamError
├── UsageError        a parameter, flag or request is wrong (the command line exits with 2)
└── CheckpointError   a model directory is missing, broken or does not fit (it exits with 1)
"""


class SlipstreamError(Exception):
    """Base of every error that is the user's to mend. Its message is one clear sentence."""


class UsageError(SlipstreamError, ValueError):
    """A parameter, flag or request is wrong; the message names the remedy."""


class CheckpointError(SlipstreamError):
    """A model directory is missing, broken, unsupported, or does not fit its target."""
