"""The training checkpoint, from which an interrupted run is resumed."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slipstream.core.errors import CheckpointError, UsageError
from slipstream.train.files import read_metadata, read_tensors, write_tensors
from slipstream.train.parameters import Trainable

FILE = "state.safetensors"
_OLD_FILE = "state.pt"  # of earlier versions
_RUN = "run"


@dataclass(frozen=True)
class RunProgress:
    """How far a run is.

    Attributes:
        step: number of finished steps.
        seconds: time that they took.
    """

    step: int = 0
    seconds: float = 0.0


class StateFile:
    """The latest checkpoint of a run: parameters, the optimizer's moments, and the progress.

    Data order and random numbers are functions of seed and step, so they are not stored.

    Args:
        fingerprint: the settings that must not change within a run, by flag.
    """

    def __init__(self, folder: Path, fingerprint: dict[str, Any]) -> None:
        self._file, self._old_file = folder / FILE, folder / _OLD_FILE
        # JSON turns tuples into lists, so compare the settings in this form.
        self._fingerprint = json.loads(json.dumps(fingerprint))

    def save(
        self, trained: Trainable, optimizer: torch.optim.Optimizer, progress: RunProgress
    ) -> None:
        """Replace the checkpoint; raises CheckpointError and keeps it if the disk is full."""
        tensors = {}
        for parameter in trained.parameters:
            tensors[parameter.name] = parameter.tensor
            for key, value in optimizer.state[parameter.tensor].items():
                tensors[f"{parameter.name}/{key}"] = value
        run = {"fingerprint": self._fingerprint, **vars(progress)}
        write_tensors(self._file, tensors, {_RUN: json.dumps(run)})

    def restore(self, trained: Trainable, optimizer: torch.optim.Optimizer) -> RunProgress:
        """Continue from the checkpoint if there is one.

        Raises:
            CheckpointError: it cannot be read.
            UsageError: it belongs to a run with other settings.
        """
        progress = self.require_same()
        if progress.step == 0:
            return progress
        stored = read_tensors(self._file)
        for parameter in trained.parameters:
            tensor = parameter.tensor
            tensor.detach().copy_(stored.pop(parameter.name))
            for name in [name for name in stored if name.startswith(f"{parameter.name}/")]:
                value, key = stored.pop(name), name.rpartition("/")[2]
                # AdamW keeps its step counts on the host.
                device = value.device if key == "step" else tensor.device
                optimizer.state[tensor][key] = value.to(device, copy=True)
        return progress

    def require_same(self) -> RunProgress:
        """The steps done; raises as `restore` does, but reads no tensors."""
        if self._old_file.is_file():
            raise _unusable(f"{self._old_file} was written by an earlier version")
        if not self._file.is_file():
            return RunProgress()
        try:
            run = json.loads(read_metadata(self._file)[_RUN])
        except CheckpointError as error:
            raise _unusable(str(error)) from error
        except KeyError as error:
            raise _unusable(f"{self._file} is no checkpoint of a run") from error
        found = run["fingerprint"]
        for name, value in self._fingerprint.items():
            if found.get(name) != value:
                raise UsageError(
                    f"{self._file.parent.parent} holds a run with another {name} "
                    f"({_shown(found.get(name))}, now {_shown(value)}); give the settings of that "
                    "run to continue it, or another --out"
                )
        return RunProgress(run["step"], run["seconds"])


def _unusable(why: str) -> CheckpointError:
    return CheckpointError(f"{why}; remove it to train from the beginning")


def _shown(value: Any) -> str:
    return "not given" if value is None else str(value)
