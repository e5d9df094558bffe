"""A run that is killed or stopped continues as if it had not been interrupted."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from slipstream.cli.terminal import interrupt_noted
from slipstream.core.errors import CheckpointError, UsageError
from slipstream.train.metrics import ACCEPTANCE, FILE, LOSS, MetricsLog
from slipstream.train.plan import WORK
from slipstream.train.run import run_training
from slipstream.train.state import FILE as STATE
from slipstream.train.trainer import Report, RunStoppedError
from tests.train.small_runs import losses, settings

STEPS, EVERY = 18, 4


def command(target: str, data: Path, out: Path) -> list[str]:
    flags = {
        "data": data,
        "out": out,
        "steps": STEPS,
        "batch-size": 4,
        "accumulate": 2,
        "max-length": 48,
        "num-speculative-tokens": 3,
        "checkpoint-every": EVERY,
        "validate-every": 6,
        "log-every": 1,
        "validation": 0.2,
        "learning-rate": 0.003,
        "device": "cpu",
    }
    spoken = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    return [sys.executable, "-m", "slipstream", "train", "eagle3", target, *spoken]


def train_until(arguments: list[str], out: Path, step: int) -> None:
    """Kill the process once it has logged a step."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        arguments, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    while process.poll() is None:
        records = MetricsLog(out).all()
        if records and max(record["step"] for record in records) >= step:
            process.send_signal(signal.SIGKILL)
        time.sleep(0.01)
    _, complaint = process.communicate(timeout=300)
    assert process.returncode == -signal.SIGKILL, complaint


@pytest.mark.parametrize("kills", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_run_that_is_killed_ends_with_the_same_curve(
    kills: int, taught_target: str, own_words: Path, tmp_path: Path
) -> None:
    """The last part runs here, with settings that must be those of the command."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"

    def run_to_the_end(out: Path) -> None:
        given = settings(
            "eagle3",
            taught_target,
            own_words,
            out,
            steps=STEPS,
            batch_size=4,
            accumulate=2,
            checkpoint_every=EVERY,
            validate_every=6,
            learning_rate=3e-3,
        )
        run_training(given)

    run_to_the_end(whole)
    arguments = command(taught_target, own_words, killed)
    for step in (EVERY + 2, 2 * EVERY + 1)[:kills]:
        train_until(arguments, killed, step)
        assert not (killed / "README.md").exists()
    run_to_the_end(killed)
    curves = [losses(out) for out in (whole, killed)]
    assert len(curves[0]) == len(curves[1]) == STEPS
    assert curves[0][-1] < 0.8 * curves[0][0]
    torch.testing.assert_close(curves[0], curves[1], rtol=1e-5, atol=1e-6)
    steps = [
        record["step"] for record in MetricsLog(killed).all() if record["kind"] == "validation"
    ]
    assert steps == [0, 6, 12, 18]
    ours, theirs = ((out / "model.safetensors").read_bytes() for out in (whole, killed))
    assert ours == theirs


def test_a_run_continues_with_its_own_settings_only(
    taught_target: str, own_words: Path, tmp_path: Path
) -> None:
    run_training(settings("eagle3", taught_target, own_words, tmp_path, steps=5))
    changes: list[dict[str, Any]] = [
        {"batch_size": 4},
        {"learning_rate": 1e-4},
        {"argmax_weight": 0.5},
        {"place_decay": 0.5},
        {"weight_decay": 0.5},
        {"clip": 0.1},
        {"warmup": 0.2},
        {"validation": 0.1},
        {"dtype": "bfloat16"},
        {"options": {"norm_output": True}},
    ]
    for change in changes:
        name = next(iter(change.get("options", change))).replace("_", "-")
        with pytest.raises(UsageError, match=f"a run with another --{name} .*another --out"):
            run_training(settings("eagle3", taught_target, own_words, tmp_path, **change))
    longer = run_training(
        settings("eagle3", taught_target, own_words, tmp_path, steps=10, max_length=None)
    )
    assert [record["step"] for record in MetricsLog(tmp_path).all() if record["kind"] == "training"]
    assert max(record["step"] for record in MetricsLog(tmp_path).all()) == 10
    assert longer.acceptance.drafts > 0
    assert "Ended after 10 steps of 384 tokens" in (tmp_path / "README.md").read_text()
    file = tmp_path / WORK / STATE
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="cannot be read"):
        run_training(settings("eagle3", taught_target, own_words, tmp_path, steps=15))
    save_file({"model": torch.zeros(2)}, file)
    with pytest.raises(CheckpointError, match="is no checkpoint of a run"):
        run_training(settings("eagle3", taught_target, own_words, tmp_path, steps=15))
    file.rename(file.with_name("state.pt"))
    with pytest.raises(CheckpointError, match=r"state\.pt was written by an earlier version"):
        run_training(settings("eagle3", taught_target, own_words, tmp_path, steps=15))


def test_ctrl_c_keeps_what_was_learned(taught_target: str, own_words: Path, tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    asked = {"steps": 12, "checkpoint_every": 100}
    run_training(settings("medusa", taught_target, own_words, whole, **asked))
    arguments = settings("medusa", taught_target, own_words, stopped, **asked)
    seen: list[Report] = []

    def press(report: Report) -> None:
        seen.append(report)
        if report.step == 7 and not report.resumed:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(RunStoppedError, match="stopped after step 7"):
        run_training(arguments, on_report=press, stop_requests=interrupt_noted)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    seen.clear()
    run_training(arguments, on_report=seen.append)
    assert [report.step for report in seen if report.resumed] == [7]
    assert MetricsLog(stopped).all()[-1]["step"] == 12
    curves = [losses(out) for out in (whole, stopped)]
    torch.testing.assert_close(curves[0], curves[1], rtol=1e-5, atol=1e-6)
    ours, theirs = ((out / "model.safetensors").read_bytes() for out in (whole, stopped))
    assert ours == theirs


def test_ctrl_c_pressed_twice_leaves_at_once(
    taught_target: str, own_words: Path, tmp_path: Path
) -> None:
    def press(report: Report) -> None:
        if report.step == 3:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    given = settings("medusa", taught_target, own_words, tmp_path, steps=9)
    with pytest.raises(KeyboardInterrupt):
        run_training(given, on_report=press, stop_requests=interrupt_noted)
    assert not (tmp_path / WORK / STATE).exists()


def test_records_of_lost_steps_are_dropped(tmp_path: Path) -> None:
    records = MetricsLog(tmp_path)
    for step in range(6):
        records.add(step, kind="training", loss=1.0)
    with (tmp_path / FILE).open("a") as opened:
        opened.write('{"step": 6, "lo')
    assert [record["step"] for record in records.all()] == list(range(6))
    records.rewind(3)
    lines = (tmp_path / FILE).read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2, 3]


def test_curves_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    records = MetricsLog(tmp_path)
    for step in range(3):
        records.add(step, kind="training", loss=1.0 / (1 + step))
        lengths = {"acceptance_length": 1.0 + step, "acceptance_length_sampled": 1.5}
        records.add(step, kind="validation", **lengths)
    records.draw()
    for name in (LOSS, ACCEPTANCE):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
