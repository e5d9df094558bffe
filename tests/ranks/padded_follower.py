"""A follower whose steps are padded, as captured ones are (`tests/padded_steps.py`).

It takes the place of `slipstream.engine.ranks.follower` as the module that a process runs.
"""

import sys

import pytest

from slipstream.engine.ranks.follower import main
from tests.padded_steps import use_packed_steps

if __name__ == "__main__":
    use_packed_steps(pytest.MonkeyPatch())
    main(sys.argv[1:])
