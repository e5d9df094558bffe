"""`slipstream doctor` and `slipstream list`."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.cli.doctor import Gpu, MachineFacts, Processor, advise, processor_name
from tests.checkpoints import write_qwen3
from tests.cli.conftest import CommandLine

PROCESSOR = Processor("Some CPU", 4, 2, "cores", 1, ("scalar", "avx2"), "avx2", 2e10)
MACHINE = MachineFacts(
    python="3.12.1",
    torch="2.12.0",
    cuda=None,
    triton=None,
    processor=PROCESSOR,
    memory=8 << 30,
    available_memory=4 << 30,
    gpus=(),
    backend="cpu (avx2)",
    missing={},
)
H200 = Gpu("NVIDIA H200", (9, 0), 141 << 30)


def test_the_doctor_looks_at_this_machine_and_tries_the_demo(slipstream: CommandLine) -> None:
    ran = slipstream("doctor", "--json")
    document = json.loads(ran.out)
    assert ran.code == 0
    assert document["works"]
    assert document["trial"].startswith("the demo runs: 64 tokens")
    assert document["processor"]["cores"] >= 1
    assert document["backend"] in ("reference", f"cpu ({document['processor']['level']})")
    assert 0 < document["available_memory"] <= document["memory"]


def test_the_doctor_says_it_in_words(
    slipstream: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.cli.doctor.read_machine", lambda: MACHINE)
    monkeypatch.setattr("slipstream.cli.doctor._trial", lambda: ("the demo is ill", False))
    ran = slipstream("doctor")
    assert ran.code == 1
    assert "Some CPU, 2 cores (4 hardware threads; cores)" in ran.out
    assert "avx2 (of scalar, avx2)" in ran.out
    assert "20.0 GB/s" in ran.out
    assert "the demo is ill" in ran.out


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        (replace(MACHINE, cuda="13.0"), "saves gigabytes"),
        (replace(MACHINE, processor=replace(PROCESSOR, level=None)), "C++ compiler"),
        (replace(MACHINE, processor=replace(PROCESSOR, nodes=2)), "numactl"),
        (replace(MACHINE, missing={"serve": ("uvicorn",)}), "'slipstream[serve]'"),
        (replace(MACHINE, missing={"deploy": ("ray",)}), "'slipstream[deploy]'"),
        (replace(MACHINE, cuda="13.0", gpus=(H200,)), "pip install triton"),
        (
            replace(MACHINE, cuda="13.0", triton="3.6", gpus=(replace(H200, capability=(7, 5)),)),
            "--device cpu",
        ),
    ],
)
def test_what_is_missing_is_said_with_its_remedy(machine: MachineFacts, said: str) -> None:
    assert [line for line in advise(machine) if said in line]


@pytest.mark.parametrize(
    "machine", [MACHINE, replace(MACHINE, cuda="13.0", triton="3.6", gpus=(H200,))]
)
def test_a_machine_that_lacks_nothing_needs_no_advice(machine: MachineFacts) -> None:
    assert list(advise(machine)) == []


def test_processors_are_called_by_their_names(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: EPYC 9B14 96-Core\n")
    assert processor_name(tmp_path / "cpuinfo") == "EPYC 9B14 96-Core"
    assert processor_name(tmp_path / "absent")


def test_the_list_has_the_bundled_models_and_downloads(
    slipstream: CommandLine, tmp_path: Path
) -> None:
    write_qwen3(add_download(tmp_path, "some/model"))
    (add_download(tmp_path, "other/kind") / "config.json").write_text(
        '{"architectures": ["BertModel"]}'
    )
    ran = slipstream("list", "--download-dir", str(tmp_path), "--json")
    assert ran.code == 0
    models = {model["name"]: model for model in json.loads(ran.out)}
    assert {"demo", "demo/eagle3", "some/model", "other/kind"} <= models.keys()
    assert models["demo/eagle3"]["kind"] == "drafter, method eagle3"
    assert models["some/model"]["kind"] == "Qwen3ForCausalLM"
    assert models["some/model"]["num_bytes"] > 0
    assert "BertModel" in models["other/kind"]["problem"]
    write_qwen3(add_download(tmp_path, "changed/model"))
    words = slipstream("list", "--download-dir", str(tmp_path)).out
    assert "changed/model" in words
    assert "some/model" in words
    assert "not supported" in words


def test_an_interrupted_download_is_told_of(slipstream: CommandLine, tmp_path: Path) -> None:
    snapshot = add_download(tmp_path, "half/model")
    (snapshot / "model.safetensors").symlink_to("../../blobs/absent")
    ran = slipstream("list", "--download-dir", str(tmp_path))
    assert ran.code == 0
    assert "not listed" in ran.err
    assert "half--model" in ran.err


def test_a_folder_that_holds_no_downloads_is_refused(
    slipstream: CommandLine, tmp_path: Path
) -> None:
    ran = slipstream("list", "--download-dir", str(tmp_path / "absent"))
    assert ran.code == 1
    assert "name another" in ran.err


def add_download(cache: Path, name: str, commit: str = "0" * 40) -> Path:
    """The empty snapshot of a model in a cache laid out as the hub's client does it."""
    folder = cache / f"models--{name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    return snapshot
