"""What the commands do before they load a model."""

import subprocess
import sys

_IMPORT_TWICE = """
import gc
from slipstream.cli.open_llm import _import_llm

first = _import_llm()
frozen = gc.get_freeze_count()
assert frozen > 50_000, frozen
kept = [[] for _ in range(10)]
assert _import_llm() is first
assert gc.get_freeze_count() <= frozen, "what an engine makes is collected as ever"
assert gc.isenabled()
gc.disable()
_import_llm()
assert not gc.isenabled(), "whoever turned it off keeps it off"
"""


def test_modules_are_left_out_of_the_search_for_cycles() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT_TWICE], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
