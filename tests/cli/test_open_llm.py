"""What the commands do before they load a model."""

import logging
import subprocess
import sys
from io import StringIO

import pytest
from rich.console import Console

from slipstream.cli.open_llm import _log_to

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


def test_a_warning_is_one_line_of_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("slipstream")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "level", logger.level)
    pipe = StringIO()
    _log_to(Console(file=pipe, width=80), verbose=False)
    logger.warning("word " * 30 + "end")
    assert pipe.getvalue() == f"WARNING  {'word ' * 30}end\n"
