"""Finding model directories and what lies in them."""

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from slipstream.core.errors import CheckpointError
from slipstream.models.checkpoint import (
    Checkpoint,
    Replaced,
    read_json_object,
    resolve_checkpoint,
)
from slipstream.models.hub import HubAccess, hub_settings
from slipstream.models.tokenizer import Tokenizer


def write_json(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content))


def write_shards(folder: Path, weight_map: dict[str, str]) -> None:
    save_file({"a": torch.ones(2), "b": torch.zeros(3)}, folder / "one.safetensors")
    save_file({"c": torch.ones(4, dtype=torch.float16)}, folder / "two.safetensors")
    write_json(folder / "model.safetensors.index.json", {"weight_map": weight_map})


WHOLE = {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"}


class FakeHub:
    """Stands in for huggingface_hub."""

    def __init__(self, folder: Path, error: Exception | None = None) -> None:
        self.folder, self.error = folder, error
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def snapshot_download(self, name: str, **options: Any) -> str:
        self.asked.append((name, options))
        if self.error:
            raise self.error
        return str(self.folder)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> "FakeHub":
        hub = types.ModuleType("huggingface_hub")
        hub.snapshot_download = self.snapshot_download  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
        return self


@pytest.fixture
def demos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "demo_root"
    for name in ("target", "draft"):
        (folder / name).mkdir(parents=True)
        write_json(folder / name / "config.json", {})
    monkeypatch.setattr("slipstream.models.bundled._DEMO", folder)
    return folder


# Names


def test_bundled_names(demos: Path) -> None:
    assert resolve_checkpoint("demo") == demos / "target"
    assert resolve_checkpoint("demo/draft") == demos / "draft"


def test_an_unknown_demo_lists_the_bundled_ones(demos: Path) -> None:
    with pytest.raises(CheckpointError, match=r"demo/none is not bundled .*: demo, demo/draft\)"):
        resolve_checkpoint("demo/none")


def test_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "Org" / "Model").mkdir(parents=True)
    assert resolve_checkpoint(tmp_path) == tmp_path
    monkeypatch.chdir(tmp_path)
    assert resolve_checkpoint("Org/Model") == Path("Org/Model")  # not taken for a hub name
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_checkpoint("~/Org") == tmp_path / "Org"


def test_a_home_of_nobody_is_no_directory() -> None:
    with pytest.raises(CheckpointError, match="there is no model directory '~nosuchuser/x'"):
        resolve_checkpoint("~nosuchuser/x")


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is not a GGUF file, by its first bytes; give"):
        resolve_checkpoint(tmp_path / "config.json")


def test_a_name_of_ollama_is_not_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"names of Ollama are not known .* a GGUF file"):
        resolve_checkpoint("llama3.2:1b")


@pytest.mark.parametrize("name", ["/no/such/place", "./here", "../there", "a/b/c", "a b", ""])
def test_what_cannot_be_a_hub_name_is_not_looked_up(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = FakeHub(tmp_path).install(monkeypatch)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=f"there is no model directory '{name}'"):
        resolve_checkpoint(name)
    assert hub.asked == []


def test_a_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = FakeHub(tmp_path).install(monkeypatch)
    assert resolve_checkpoint("Qwen/Qwen3-0.6B", revision="abc") == tmp_path
    ((name, options),) = hub.asked
    assert (name, options["revision"]) == ("Qwen/Qwen3-0.6B", "abc")
    assert {"*.json", "*.safetensors", "*.jinja"} <= set(options["allow_patterns"])
    assert "consolidated*" in options["ignore_patterns"]


def test_an_unreachable_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeHub(tmp_path, OSError("no route to host\nmore lines")).install(monkeypatch)
    with pytest.raises(
        CheckpointError,
        match=r"^a/b is neither a directory \(in .*\) nor a bundled demo, .*hub at revision r "
        r"\(no route to host\); check the name and the network",
    ):
        resolve_checkpoint("a/b", "r")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("RepositoryNotFoundError", "no such model, or a private one: check the spelling"),
        ("GatedRepoError", "wants consent to terms: give it on its page, and --hf-token"),
        ("RevisionNotFoundError", "but not this revision: check --revision"),
    ],
)
def test_what_the_hub_does_not_give(
    kind: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message of its client begins with "401 Client Error"."""
    from huggingface_hub import errors

    error = getattr(errors, kind).__new__(getattr(errors, kind))
    FakeHub(tmp_path, error).install(monkeypatch)
    with pytest.raises(CheckpointError, match=rf"^a/b is neither .*, and the hub .*{words}"):
        resolve_checkpoint("a/b")


def test_a_lora_adapter_is_called_so(tmp_path: Path) -> None:
    write_json(tmp_path / "adapter_config.json", {"base_model_name_or_path": "Qwen/Qwen3-8B"})
    with pytest.raises(
        CheckpointError, match=r"is a LoRA adapter: give Qwen/Qwen3-8B as the model"
    ):
        _ = Checkpoint(tmp_path).config


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer.json", "model.safetensors"]
)
def test_a_git_lfs_pointer_is_called_so(name: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path)
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'a' * 64}\nsize 12345\n"
    (tmp_path / name).write_text(pointer)
    readers = {
        "config.json": lambda: checkpoint.config,
        "generation_config.json": lambda: checkpoint.generation_config,
        "tokenizer.json": lambda: Tokenizer(tmp_path),
        "model.safetensors": lambda: checkpoint.entries,
    }
    with pytest.raises(CheckpointError, match=f"{name} is a Git LFS pointer, .*git lfs pull"):
        readers[name]()


def test_hub_names_need_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match=r"install slipstream\[hub\]"):
        resolve_checkpoint("a/b")


# Configs


def test_the_config_alone_can_be_looked_at(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {"vocab_size": 3})
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.config == {"vocab_size": 3}
    assert checkpoint.generation_config == {}
    assert not checkpoint.has_weights
    assert checkpoint.weights_dtype is None


def test_a_directory_without_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        _ = Checkpoint(tmp_path).config


@pytest.mark.parametrize("content", ["", "{", "[1]", '"x"', "\ufeff{}", "[" * 100_000])
def test_invalid_json(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json (is not valid JSON|must hold)"):
        _ = Checkpoint(tmp_path).config


def test_an_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot read"):
        read_json_object(tmp_path)
    (tmp_path / "latin.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(CheckpointError, match="not valid JSON"):
        read_json_object(tmp_path / "latin.json")


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": 5}, {"eos_token_id": 7}, (5,)),
        ({"eos_token_id": [5, 6, 5]}, {}, (5, 6)),
        ({"eos_token_id": None}, {"eos_token_id": 7}, (7,)),
        ({"eos_token_id": []}, {"eos_token_id": [7, 8]}, (7, 8)),
        (None, {"eos_token_id": 0}, (0,)),
        ({}, {}, ()),
    ],
)
def test_end_tokens(
    tmp_path: Path, generation: Any, config: Any, expected: tuple[int, ...]
) -> None:
    write_json(tmp_path / "config.json", config)
    if generation is not None:
        write_json(tmp_path / "generation_config.json", generation)
    assert Checkpoint(tmp_path).eos_token_ids == expected


@pytest.mark.parametrize("value", ["</s>", True, [1, None], -1, 2.0])
def test_end_tokens_that_are_none(tmp_path: Path, value: Any) -> None:
    write_json(tmp_path / "config.json", {"eos_token_id": value})
    with pytest.raises(CheckpointError, match=r"config\.json: eos_token_id must be"):
        _ = Checkpoint(tmp_path).eos_token_ids


# Weights


def test_one_file(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2), "ids": torch.ones(9).long()}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    assert set(checkpoint.entries) == {"a", "ids"}
    assert checkpoint.size_bytes == 8 + 72
    assert checkpoint.weights_dtype == torch.float32


def test_shards(tmp_path: Path) -> None:
    write_shards(tmp_path, WHOLE)
    checkpoint = Checkpoint(tmp_path)
    files = {name: entry.file.name for name, entry in checkpoint.entries.items()}
    assert files == WHOLE
    assert checkpoint.size_bytes == 8 + 12 + 8
    assert checkpoint.has_weights


def test_a_tensor_that_the_index_forgot_is_still_seen(tmp_path: Path) -> None:
    write_shards(tmp_path, {"a": "one.safetensors"})
    assert set(Checkpoint(tmp_path).entries) == {"a", "b"}


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({**WHOLE, "d": "three.safetensors"}, r"names three\.safetensors, which does not exist"),
        ({**WHOLE, "d": "two.safetensors"}, r"places tensor d in two\.safetensors, which does not"),
        ({"a": "../one.safetensors"}, "not a plain file name"),
        ({"a": "/one.safetensors"}, "not a plain file name"),
        ({"a": 3}, "not a plain file name"),
        ({"a": ""}, "not a plain file name"),
        ({}, "has no weight_map"),
        ([], "has no weight_map"),
    ],
)
def test_a_wrong_index(tmp_path: Path, weight_map: Any, message: str) -> None:
    write_shards(tmp_path, weight_map)
    with pytest.raises(CheckpointError, match=message):
        _ = Checkpoint(tmp_path).entries


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("pytorch_model.bin", "only pickled weights, .*; convert them to safetensors"),
        ("pytorch_model-00001-of-00002.bin", "only pickled weights"),
        ("consolidated.00.pth", "only pickled weights"),
        ("adapter_model.safetensors", "only a LoRA adapter; give its base model"),
        ("model-00001-of-00002.safetensors", "only model-0.*; download model.safetensors, or all"),
        ("readme.md", "download the weights, or ask for dummy weights"),
    ],
)
def test_weights_that_are_not_there(tmp_path: Path, file: str, message: str) -> None:
    (tmp_path / file).touch()
    with pytest.raises(CheckpointError, match=message) as caught:
        _ = Checkpoint(tmp_path).entries
    assert str(tmp_path) in str(caught.value)


YARN = {"rope_type": "yarn", "factor": 4.0}
REPLACED_ROPES = [
    ({}, {"rope_scaling": YARN}, {"rope_scaling": YARN}),
    (
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", "low_freq_factor": 1.0}},
        {"rope_scaling": YARN, "rope_theta": 1e6},
        {"rope_parameters": {"rope_theta": 1e6, **YARN}},
    ),
    (
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 5.0},
        {"rope_parameters": {"factor": 3.0}, "rope_theta": 7.0},
        {"rope_scaling": {"type": "linear", "factor": 3.0}, "rope_theta": 7.0},
    ),
    ({"rope_scaling": YARN, "a": 1}, {"rope_scaling": None}, {"rope_scaling": {}, "a": 1}),
    ({"a": {"b": 1, "c": {"d": 2}}}, {"a": {"c": {"d": 3}}}, {"a": {"b": 1, "c": {"d": 3}}}),
    ({"a": {"b": 1}}, {"a": None, "new": [1]}, {"a": None, "new": [1]}),
]


@pytest.mark.parametrize(("content", "changes", "expected"), REPLACED_ROPES, ids=str)
def test_values_in_place_of_those_in_config_json(
    tmp_path: Path, content: dict[str, Any], changes: dict[str, Any], expected: dict[str, Any]
) -> None:
    write_json(tmp_path / "config.json", content)
    assert Checkpoint(tmp_path, Replaced(config=changes)).config == expected


def test_a_config_from_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    write_json(tmp_path / "config.json", {"a": 1})
    checkpoint = Checkpoint(tmp_path / "model", Replaced({"b": 2}, config_folder=tmp_path))
    assert checkpoint.config == {"a": 1, "b": 2}
    with pytest.raises(CheckpointError, match=r"model has no config\.json"):
        _ = Checkpoint(tmp_path / "model").config


def test_the_hub_is_reached_as_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = FakeHub(tmp_path).install(monkeypatch)
    with hub_settings(HubAccess("there", "secret")):
        resolve_checkpoint("org/model")
    resolve_checkpoint("org/model")
    asked = [(options["cache_dir"], options["token"]) for _, options in hub.asked]
    assert asked == [("there", "secret"), (None, None)]
    assert "secret" not in repr(HubAccess("there", "secret"))
