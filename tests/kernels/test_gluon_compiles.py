"""The kernels that no interpreter has, and what it does not see of others: they are compiled."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="it is there for Linux only")

ROOT = Path(__file__).parents[2]
SHARED_MEMORY = 227 * 1024  # bytes that a program can have on an H200


@pytest.mark.parametrize(
    ("which", "count"),
    [
        ("ways", 5),
        pytest.param("attention", 3, marks=pytest.mark.full),
        pytest.param("more", 6, marks=pytest.mark.full),
        pytest.param("tiles", 6, marks=pytest.mark.full),
    ],
)
def test_kernels_without_an_interpreter_compile(which: str, count: int, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compiled_for_hopper", which],
        env=environment, cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    results = json.loads(done.stdout)
    assert len(results) == count
    for result in results:
        assert result["products"] > 0
        assert result["shared"] <= SHARED_MEMORY
        assert result["machine_code"] > 0
