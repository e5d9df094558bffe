"""A load on the server: nothing fails, and every answer is what the engine says offline."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from slipstream.cli.main import app

ROOT = Path(__file__).parents[2]
# Float32, where equality is exact: in bfloat16 near-ties may fall otherwise in another batch.
EXACT = ("--dtype", "float32", "--max-num-seqs", "16")
WORKLOAD = ("--num-prompts", "40", "--max-tokens", "6")

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("slipstream.serve") is None
    or importlib.util.find_spec("fastapi") is None,
    reason="needs slipstream[serve]",
)


def run(*arguments: str) -> str:
    ran = CliRunner().invoke(app, arguments)
    assert ran.exit_code == 0, ran.output
    return ran.output


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts of the offline engine."""
    file = tmp_path_factory.mktemp("offline") / "texts.json"
    run("bench", "throughput", *EXACT, *WORKLOAD, "--save-texts", str(file))
    return file


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server of the demo."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", "slipstream", "serve", "demo", "--port", str(port), *EXACT]
    line += ["-k", "4"]  # by default the server's timing decides how many tokens it drafts
    server = subprocess.Popen(line, env=environment, stderr=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        assert server.wait(60) == 0


def load(url: str, expected: Path, figures: Path, *arguments: str) -> dict[str, Any]:
    run(
        *("bench", "serve", "--base-url", url, "--ready-timeout", "120", *WORKLOAD),
        *("--compare-texts", str(expected), "--output", str(figures), *arguments),
    )
    summary: dict[str, Any] = json.loads(figures.read_text())
    return summary


def test_answers_under_load_are_those_of_the_engine(
    url: str, expected: Path, tmp_path: Path
) -> None:
    summary = load(url, expected, tmp_path / "s.json", "--max-concurrency", "32")
    assert (summary["completed"], summary["failed"], summary["texts_differing"]) == (40, 0, [])
    assert summary["texts_compared"] == 40
    assert summary["max_concurrent_requests"] == 32
    assert summary["output_tokens_counted_by"] == ["usage"]
    assert summary["spec_decode_source"] == "the usage of each answer"
    assert summary["spec_decode_acceptance_length"] > 1.5
    assert len(summary["spec_decode_per_position_acceptance_rates"]) == 4
    assert summary["mean_itl_per_token_ms"] is not None


def test_counters_tell_what_answers_are_not_asked_for(
    url: str, expected: Path, tmp_path: Path
) -> None:
    line = ("--num-prompts", "8", "--no-return-speculation", "--request-rate", "200")
    summary = load(url, expected, tmp_path / "s.json", *line)
    assert summary["failed"] == 0
    assert "spec_decode_num_drafts" in summary["spec_decode_source"]
    assert summary["spec_decode_acceptance_length"] > 1.5


def test_the_same_texts_come_without_drafts(url: str, expected: Path, tmp_path: Path) -> None:
    summary = load(url, expected, tmp_path / "s.json", "--num-prompts", "20", "-k", "0")
    assert (summary["failed"], summary["texts_differing"]) == (0, [])
    assert summary.get("spec_decode_num_drafts", 0) == 0
