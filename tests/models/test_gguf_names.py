"""Where GGUF models are found: named themselves, in directories and in repositories of the hub."""

import sys
import types
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from slipstream.core.errors import CheckpointError, UsageError
from slipstream.models.checkpoint import resolve_checkpoint


class Repository:
    """Stands in for huggingface_hub with one repository, whose files are empty."""

    def __init__(self, folder: Path, files: Sequence[str]) -> None:
        self.folder, self.files = folder, files
        self.asked: list[str] = []

    def snapshot_download(self, name: str, **options: Any) -> str:
        self.asked.append(name)
        for file in self.files:
            if any(fnmatch(file, pattern) for pattern in options["allow_patterns"]):
                (self.folder / file).parent.mkdir(exist_ok=True)
                (self.folder / file).touch()
        return str(self.folder)

    def list_repo_files(self, name: str, **options: Any) -> list[str]:
        return list(self.files)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> "Repository":
        hub = types.ModuleType("huggingface_hub")
        hub.snapshot_download = self.snapshot_download  # type: ignore[attr-defined]
        hub.list_repo_files = self.list_repo_files  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
        return self


def touched(folder: Path, *names: str) -> list[Path]:
    files = [folder / name for name in names]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    return files


def test_a_file_or_the_directory_of_one(tmp_path: Path) -> None:
    (file,) = touched(tmp_path, "model-Q4_K_M.GGUF")
    assert resolve_checkpoint(file) == file
    touched(tmp_path, "mmproj-model-f16.gguf", "config.json")
    assert resolve_checkpoint(tmp_path) == file
    (own,) = touched(tmp_path / "one", "model.gguf")
    assert resolve_checkpoint(tmp_path / "one") == own
    with pytest.raises(UsageError, match=r"model.gguf is a local path and has no revision"):
        resolve_checkpoint(own, "main")
    touched(tmp_path / "one", "model.safetensors")
    assert resolve_checkpoint(tmp_path / "one") == tmp_path / "one"


def test_split_files_count_as_one_model(tmp_path: Path) -> None:
    parts = touched(tmp_path, *(f"m-0000{part}-of-00003.gguf" for part in (1, 2, 3)))
    assert resolve_checkpoint(tmp_path) == parts[0] == resolve_checkpoint(parts[0])
    with pytest.raises(CheckpointError, match=r"00002-of-00003.gguf is a later .* m-00001-of-0000"):
        resolve_checkpoint(parts[1])
    touched(tmp_path, "other.gguf")
    with pytest.raises(
        CheckpointError, match=r"several GGUF models; name one: m-00001.*other.gguf"
    ):
        resolve_checkpoint(tmp_path)


def test_a_file_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Repository(tmp_path, []).install(monkeypatch)
    with pytest.raises(CheckpointError, match=r"there is no GGUF file 'models/m.gguf'"):
        resolve_checkpoint("models/m.gguf")
    assert hub.asked == []


FILES = (
    *("m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m-q8_0.gguf", "mmproj-m-Q8_0.gguf", "README.md"),
    *(f"BF16/m-BF16-0000{part}-of-00002.gguf" for part in (1, 2)),
)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("a/m-GGUF", "m-Q4_K_M.gguf"),
        ("a/m-gguf:Q4_K_S", "m-Q4_K_S.gguf"),
        ("a/m-GGUF:Q8_0", "m-q8_0.gguf"),
        ("a/m:bf16", "BF16/m-BF16-00001-of-00002.gguf"),
    ],
)
def test_names_in_the_hub(
    name: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Repository(tmp_path, FILES).install(monkeypatch)
    assert resolve_checkpoint(name) == tmp_path / file
    assert hub.asked == [name.partition(":")[0]]
    assert not (tmp_path / "README.md").exists()
    touched(tmp_path, *FILES)  # fetched at other times
    assert resolve_checkpoint(name) == tmp_path / file


def test_what_the_hub_has_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Repository(tmp_path, FILES).install(monkeypatch)
    with pytest.raises(
        CheckpointError, match=r"a/m-GGUF has no file of Q2_K; .* \(m-BF16.*\) .* a/m-GGUF:Q8_0"
    ):
        resolve_checkpoint("a/m-GGUF:Q2_K")
    Repository(tmp_path, ["README.md"]).install(monkeypatch)
    with pytest.raises(CheckpointError, match=r"a/m-GGUF holds no model in GGUF"):
        resolve_checkpoint("a/m-GGUF")
    Repository(tmp_path, ["oss-mxfp4.gguf", "README.md"]).install(monkeypatch)
    assert resolve_checkpoint("a/oss-GGUF") == tmp_path / "oss-mxfp4.gguf"
