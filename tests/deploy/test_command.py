"""`slipstream deploy` and `serve --data-parallel-size`, up to where Ray begins."""

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import slipstream.cli.deploy
from slipstream.cli.errors import run
from slipstream.cli.flags import parsed
from slipstream.cli.main import app
from slipstream.deploy.options import DeploymentPlan
from slipstream.deploy.proxy import SETTINGS


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[DeploymentPlan]:
    """The plan of each command line, and the plan that is read again on an update."""
    plans: list[DeploymentPlan] = []

    def run_locally(plan: DeploymentPlan, reread: Any) -> int:
        plans.extend((plan, reread()))
        return 0

    monkeypatch.setattr(slipstream.cli.deploy, "run_locally", run_locally)
    monkeypatch.setattr("slipstream.cli.serve.run_locally", run_locally)
    return plans


def test_flags_of_serve_hold_for_replicas(planned: list[DeploymentPlan]) -> None:
    line = "deploy demo --replicas 3 --max_replicas 5 --max-num-seqs 4 --served-model-name a"
    assert run(app, line.split()) == 0
    plan, again = planned
    assert plan == again
    assert (plan.replicas.replicas, plan.replicas.most, plan.config.max_num_seqs) == (3, 5, 4)
    assert (*plan.server.served_model_name,) == ("a",)
    assert plan.config.model == "demo"


def test_a_file_is_read_again(planned: list[DeploymentPlan], tmp_path: Path) -> None:
    file = tmp_path / "deployment.yaml"
    file.write_text("model: demo\nreplicas: 2\nrouting: load\nmax-num-seqs: 3\n")
    assert run(app, ["deploy", "--config", str(file), "--max-num-seqs", "5"]) == 0
    assert planned[0] == planned[1]
    assert (planned[0].replicas.replicas, planned[0].replicas.routing) == (2, "load")
    assert planned[0].config.max_num_seqs == 5


def test_serve_takes_a_number_of_replicas(planned: list[DeploymentPlan]) -> None:
    assert run(app, ["serve", "demo", "-dp", "2", "--max-waiting", "7"]) == 0
    assert planned[0] == planned[1]
    assert (planned[0].replicas.replicas, planned[0].server.limits.max_waiting) == (2, 7)


def test_the_example_is_a_chat_where_the_model_can_chat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tiny_target: str
) -> None:
    ray_is_ready = SimpleNamespace(serve_locally=lambda plan, sock, reread, started: started() or 0)
    monkeypatch.setitem(sys.modules, "slipstream.deploy.local", ray_is_ready)
    for line, path in (
        ("demo", "chat/completions"),
        (tiny_target, "completions"),
        (f"{tiny_target} --tokenizer demo", "chat/completions"),
        (f"{tiny_target} --chat-template {{{{messages}}}}", "chat/completions"),
    ):
        assert run(app, ["deploy", *line.split(), "--port", "0"]) == 0
        assert f"/v1/{path} -H" in capsys.readouterr().err, line
    asked: set[bool] = set()

    def snapshot_download(name: str, **options: Any) -> str:
        asked.add(options["local_files_only"])
        return tiny_target

    hub = SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert run(app, ["deploy", "Some/Model", "--port", "0"]) == 0
    assert asked == {True}, "the front must not wait for the hub"


@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed: the extra deploy"
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_each_replica_may_be_several_ranks(
    planned: list[DeploymentPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They share the cores, or have as many GPUs."""
    from slipstream.deploy import local

    assert run(app, ["serve", "demo", "-dp", "3", "-tp", "2"]) == 0
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(26)))
    fitted = []
    for on_gpus in (False, True):
        monkeypatch.setattr(local, "uses_gpu_memory", lambda device, answer=on_gpus: answer)
        fitted.append(local._fitted(planned[0]))
    assert [it.config.tensor_parallel_size for it in fitted] == [2, 2]
    assert [it.config.threads for it in fitted] == [4, None]
    assert [it.replicas.replica_gpus for it in fitted] == [0, 2]
    assert run(app, ["deploy", "demo", "--replicas", "3", "-dp", "2", "-ep"]) == 0
    plan = local._fitted(planned[-1])
    assert (plan.replicas.replicas, plan.replicas.replica_gpus, plan.config.num_ranks) == (3, 2, 2)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("deploy demo --replicas 0", "--replicas must be"),
        ("deploy demo --replicas 3 --max-replicas 2", "--max-replicas 2 is less than"),
        ("deploy demo --routing best", "--routing must be one of prefix, load, round_robin"),
        ("deploy demo --name a", "--name is for the manifest of a cluster; add --manifest"),
        ("deploy demo --image a", "--image is for the manifest of a cluster; add --manifest"),
        ("serve demo -dp 0", "--data-parallel-size must be"),
        ("deploy demo -dp 2", "--data-parallel-size is for slipstream serve; here --replicas"),
        ("serve demo -dp 2 -ep -tp 2", "give tensor_parallel_size 1, or leave out"),
        ("deploy demo -dp 2 -ep --replica-gpus 1", "is less than the 2 processes of a replica"),
    ],
)
def test_wrong_flags_are_refused(
    line: str, told: str, planned: list[DeploymentPlan], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(app, line.split()) == 2
    assert told in capsys.readouterr().err
    assert not planned


def written(tmp_path: Path, *flags: str) -> dict[str, Any]:
    """The manifest of a command line."""
    file = tmp_path / "service.yaml"
    assert run(app, ["deploy", "demo", *flags, "--manifest", str(file)]) == 0
    found: dict[str, Any] = yaml.safe_load(file.read_text())
    return found


def test_a_manifest_holds_the_command_line(tmp_path: Path, planned: list[DeploymentPlan]) -> None:
    file = tmp_path / "flags.yaml"
    file.write_text("max-num-seqs: 3\n")
    manifest = written(
        tmp_path, *("--replicas", "2", "--max-replicas", "4", "--replica-gpus", "2"),
        *("--routing", "load", "--port", "8100", "--config", str(file), "--name", "a-b"),
    )  # fmt: skip
    assert not planned
    assert manifest["metadata"] == {"name": "a-b"}
    spec = manifest["spec"]
    (made,) = yaml.safe_load(spec["serveConfigV2"])["applications"]
    plan = parsed(slipstream.cli.deploy._plan, made["args"]["arguments"])
    assert (plan.replicas.replicas, plan.replicas.routing) == (2, "load")
    assert plan.config.max_num_seqs == 3
    (workers,) = spec["rayClusterConfig"]["workerGroupSpecs"]
    assert (workers["minReplicas"], workers["maxReplicas"]) == (2, 4)
    (container,) = workers["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "2"
    (settings,) = [it["value"] for it in container["env"] if it["name"] == SETTINGS]
    assert json.loads(settings)["routing"] == "load"


def test_what_a_manifest_cannot_hold_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags, told in (
        (["--name", "a b"], "metadata.name"),
        (["--image", "a b"], "containers.0.image"),
        (["--uds", "socket"], "--uds does not go with --manifest"),
        (["--api-key", "secret"], "set SLIPSTREAM_API_KEY"),
    ):
        line = ["deploy", "demo", *flags, "--manifest", str(tmp_path / "service.yaml")]
        assert run(app, line) == 2
        assert told in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed: the extra deploy"
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_ray_takes_what_is_written(tmp_path: Path) -> None:
    from ray.serve.schema import ServeDeploySchema

    from slipstream.deploy.application import NAME, deployment_options

    manifest = written(tmp_path, "--max-replicas", "2", "--replica-gpus", "2")
    config = ServeDeploySchema.model_validate(yaml.safe_load(manifest["spec"]["serveConfigV2"]))
    assert config.applications[0].import_path == "slipstream.cli.deploy:application"
    made = slipstream.cli.deploy.application(config.applications[0].args)
    assert made._bound_deployment.name == NAME
    plan = parsed(slipstream.cli.deploy._plan, config.applications[0].args["arguments"])
    options = deployment_options(plan)
    assert options["placement_group_bundles"] == [{"CPU": 1.0, "GPU": 2.0}]
