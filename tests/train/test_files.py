"""Files of a run stay whole, and a full disk is a clear error."""

import resource
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from slipstream.core.errors import CheckpointError
from slipstream.train import files
from slipstream.train.files import (
    append_line,
    read_metadata,
    read_tensors,
    replacing,
    write_tensors,
    write_text,
)
from slipstream.train.plan import WORK
from slipstream.train.run import run_training
from slipstream.train.state import FILE as STATE
from tests.train.small_runs import settings

DiskUsage = namedtuple("DiskUsage", "total used free")
LARGE = {"a": torch.zeros(250_000)}


@contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    """The system refuses what would make a file larger."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_tensors_and_metadata_come_back_as_they_were(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 5).bfloat16(),
        "b": torch.tensor([True, False]),
        "c": torch.arange(4),
        "d": torch.randn(4, 2).T,
        "e": torch.nn.Parameter(torch.randn(6, 2))[2:4],
    }
    file = tmp_path / "new" / "t.safetensors"
    write_tensors(file, tensors, {"source": "\u00e9"})
    ours, theirs = read_tensors(file), load_file(file)
    for name, tensor in tensors.items():
        assert torch.equal(ours[name], tensor)
        assert torch.equal(theirs[name], tensor)
    assert read_metadata(file)["source"] == "\u00e9"
    (tmp_path / "plain").touch()
    assert file.stat().st_mode == (tmp_path / "plain").stat().st_mode
    with pytest.raises(CheckpointError, match=r"t\.safetensors cannot be read.*tensor z"):
        read_tensors(file, ["z"])


@pytest.mark.parametrize(
    "write",
    [
        lambda file: write_tensors(file, LARGE),
        lambda file: write_text(file, "x" * 1_000_000),
        lambda file: append_line(file, "x" * 1_000_000),
    ],
    ids=["tensors", "text", "line"],
)
def test_a_refused_write_leaves_the_file_that_was_there(
    write: Callable[[Path], None], tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_text("old\n")
    message = r"file cannot be written: it takes 1\.0 MB, more than the quota or `ulimit -f` allows"
    with largest_file(20_000), pytest.raises(CheckpointError, match=message):
        write(file)
    assert file.read_text().startswith("old\n")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        SafetensorError("Error while serializing: I/O error: No space left (os error 28)"),
        SafetensorError("Error while serializing: IoError(Os { code: 28, kind: StorageFull })"),
    ],
)
def test_a_full_disk_is_told_with_what_is_missing(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(files, "save_file", fail)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: DiskUsage(0, 0, 300_000))
    message = r"it takes 1\.0 MB and 0\.3 MB are free, so 0\.7 MB are missing; make room and"
    with pytest.raises(CheckpointError, match=message):
        write_tensors(tmp_path / "t.safetensors", LARGE)
    assert not list(tmp_path.iterdir())


def test_other_errors_keep_their_reason(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot be written: File exists"):
        write_text(tmp_path / "file" / "below", "x")
    with pytest.raises(ZeroDivisionError), replacing(tmp_path / "other", 1):
        raise ZeroDivisionError
    assert not (tmp_path / "other").exists()


def test_a_run_continues_after_the_disk_was_full(
    taught_target: str, own_words: Path, tmp_path: Path
) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    asked = {"steps": 8, "checkpoint_every": 4}
    run_training(settings("medusa", taught_target, own_words, whole, **asked))
    given = settings("medusa", taught_target, own_words, stopped, **asked)
    with largest_file(60_000), pytest.raises(CheckpointError, match=f"{STATE} cannot be written"):
        run_training(given)
    assert not (stopped / WORK / STATE).exists()
    first = settings("medusa", taught_target, own_words, stopped, **{**asked, "steps": 4})
    run_training(first)
    kept = (stopped / WORK / STATE).read_bytes()
    exported = (stopped / "model.safetensors").read_bytes()
    with largest_file(60_000), pytest.raises(CheckpointError, match="there is unchanged"):
        run_training(given)
    assert (stopped / WORK / STATE).read_bytes() == kept
    assert (stopped / "model.safetensors").read_bytes() == exported
    run_training(given)
    ours, theirs = ((out / "model.safetensors").read_bytes() for out in (whole, stopped))
    assert len(ours) == len(theirs)


def test_an_export_onto_a_full_disk_is_told(
    taught_target: str, own_words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_at_export(tensors: Any, file: Path, metadata: Any) -> None:
        if file.name.startswith("model"):
            raise SafetensorError("No space left (os error 28)")
        save_file(tensors, file, metadata)

    given = settings("medusa", taught_target, own_words, tmp_path, steps=2)
    with monkeypatch.context() as patch:
        patch.setattr(files, "save_file", fail_at_export)
        with pytest.raises(
            CheckpointError, match=r"model\.safetensors cannot be written: the disk"
        ):
            run_training(given)
    assert not (tmp_path / "model.safetensors").exists()
    run_training(given)
    assert (tmp_path / "model.safetensors").exists()


def test_training_without_safetensors_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['safetensors'] = None\n"
        "from slipstream.cli.main import main\n"
        "sys.exit(main())"
    )
    flags = ["train", "medusa", "demo", "--data", "x", "--out", "y", "--steps", "1"]
    ran = subprocess.run([sys.executable, "-c", code, *flags], capture_output=True, text=True)
    assert ran.returncode == 2
    assert "install it with pip install 'slipstream[train]'" in ran.stderr
    assert ran.stderr.count("\n") == 1
