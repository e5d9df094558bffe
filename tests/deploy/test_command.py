"""`slipstream deploy` and `serve --data-parallel-size`, up to where Ray begins."""

from pathlib import Path
from typing import Any

import pytest

import slipstream.cli.deploy
from slipstream.cli.errors import run
from slipstream.cli.main import app
from slipstream.deploy.plan import Plan


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """The plan of each command line, and what it is when it is read once more."""
    plans: list[Plan] = []

    def run_locally(plan: Plan, listen: Any, reread: Any) -> int:
        del listen
        plans.extend((plan, reread()))
        return 0

    monkeypatch.setattr(slipstream.cli.deploy, "run_locally", run_locally)
    monkeypatch.setattr("slipstream.cli.serve.run_locally", run_locally)
    return plans


def test_flags_of_serve_hold_for_replicas(planned: list[Plan]) -> None:
    line = "deploy demo --replicas 3 --max_replicas 5 --max-num-seqs 4 --served-model-name a"
    assert run(app, line.split()) == 0
    plan, again = planned
    assert plan == again
    assert (plan.replicas.replicas, plan.replicas.most, plan.config.max_num_seqs) == (3, 5, 4)
    assert (*plan.server.names,) == ("a",)
    assert plan.config.model == "demo"


def test_a_file_is_read_again(planned: list[Plan], tmp_path: Path) -> None:
    file = tmp_path / "deployment.yaml"
    file.write_text("model: demo\nreplicas: 2\nrouting: load\nmax-num-seqs: 3\n")
    assert run(app, ["deploy", "--config", str(file), "--max-num-seqs", "5"]) == 0
    assert planned[0] == planned[1]
    assert (planned[0].replicas.replicas, planned[0].replicas.routing) == (2, "load")
    assert planned[0].config.max_num_seqs == 5


def test_serve_takes_a_number_of_replicas(planned: list[Plan]) -> None:
    assert run(app, ["serve", "demo", "-dp", "2", "--max-waiting", "7"]) == 0
    assert planned[0] == planned[1]
    assert (planned[0].replicas.replicas, planned[0].server.limits.max_waiting) == (2, 7)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("deploy demo --replicas 0", "--replicas must be"),
        ("deploy demo --replicas 3 --max-replicas 2", "--max-replicas 2 is less than"),
        ("deploy demo --routing best", "--routing must be one of prefix, load, round_robin"),
        ("serve demo -dp 0", "--data-parallel-size must be"),
    ],
)
def test_wrong_flags_are_refused(
    line: str, told: str, planned: list[Plan], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(app, line.split()) == 2
    assert told in capsys.readouterr().err
    assert not planned
