"""The kernels that no interpreter has, and what it does not see of others: they are compiled."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="it is there for Linux only")

ROOT = Path(__file__).parents[2]
SHARED_MEMORY = 227 * 1024  # bytes that a program can have on an H200


@pytest.mark.parametrize(
    ("which", "count"),
    [
        ("ways", 6),
        pytest.param("attention", 3, marks=pytest.mark.full),
        pytest.param("more", 8, marks=pytest.mark.full),
        pytest.param("tiles", 8, marks=pytest.mark.full),
    ],
)
def test_kernels_without_an_interpreter_compile(which: str, count: int, tmp_path: Path) -> None:
    results = printed("compiled_kernels", which, cache=tmp_path)
    assert len(results) == count
    for result in results:
        assert result["products"] > 0
        assert result["shared"] <= SHARED_MEMORY
        assert result["machine_code"] > 0


@pytest.mark.parametrize(
    ("card", "kibibytes", "which", "least"),
    [
        ("86", 99, "few", 5),
        pytest.param("86", 99, "many", 8, marks=pytest.mark.full),
        pytest.param("80", 163, "many", 8, marks=pytest.mark.full),
        pytest.param("90", 227, "many", 8, marks=pytest.mark.full),
        pytest.param("120", 99, "many", 8, marks=pytest.mark.full),
    ],
)
def test_launches_fit_into_cards_with_little_shared_memory(
    card: str, kibibytes: int, which: str, least: int, tmp_path: Path
) -> None:
    found = printed("compiled_launches", card, str(kibibytes), which, cache=tmp_path)
    assert len({name for name, _ in found}) >= least
    for name, shared in found:
        assert shared <= kibibytes * 1024, name


def printed(program: str, *arguments: str, cache: Path) -> Any:
    """What a program beside this file prints, without an interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    environment["CUDA_VISIBLE_DEVICES"] = ""  # kernels are compiled for cards that are not here
    done = subprocess.run(
        [sys.executable, "-m", f"tests.kernels.{program}", *arguments],
        env=environment, cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)
