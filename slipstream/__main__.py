"""`slipstream` and `python -m slipstream`.

Imports nothing that takes time before Ctrl-C is taken care of: what is imported first would print a
traceback, or take the interrupt for an error of its own.
"""

import os
import signal
import sys
from types import FrameType

INTERRUPTED = 130


def _leave(number: int, frame: FrameType | None) -> None:
    """Exit at once: nothing is open that would have to be closed."""
    try:
        os.write(2, b"slipstream: interrupted\n")
    finally:  # also where stderr is closed or its disk is full
        os._exit(INTERRUPTED)


def main() -> None:
    """Run the command line of this process and leave with its exit code."""
    before = signal.signal(signal.SIGINT, _leave)
    from slipstream.cli.main import main as run
    from slipstream.cli.terminal import TorchFinder

    sys.meta_path.insert(0, TorchFinder(_leave))
    signal.signal(signal.SIGINT, before)
    try:
        run()
    except KeyboardInterrupt:  # before the command begins, or after its end
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
