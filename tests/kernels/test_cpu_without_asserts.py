"""The C++ kernels refuse what does not fit under `python -O` too, which leaves asserts out."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("_slipstream_cpu", reason="the C++ kernels are not built")

ROOT = Path(__file__).parents[2]
MODULES = ("preparation", "cpu_sampling", "cpu_rows", "cpu_stack")


def test_bad_calls_are_refused_without_asserts() -> None:
    files = [f"tests/kernels/test_{name}.py" for name in MODULES]
    # pytest warns that asserts are not run; what is tested are errors that are expected.
    quiet = ["--override-ini=filterwarnings=ignore", "-p", "no:cacheprovider"]
    # Plugins would have to be compiled again, without their asserts.
    alone = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-O", "-m", "pytest", "-q", *quiet, "-k", "refused", *files],
        cwd=ROOT, env=alone, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= len(MODULES)
