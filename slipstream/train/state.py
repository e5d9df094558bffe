"""What a killed run goes on from."""

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slipstream.core.errors import CheckpointError, UsageError
from slipstream.train.parameters import Trainable

FILE = "state.pt"
_KEYS = {"fingerprint", "tensors", "names", "optimizer", "step", "seconds"}


@dataclass(frozen=True)
class Progress:
    """How far a run is.

    Attributes:
        step: steps done.
        seconds: spent in them.
    """

    step: int = 0
    seconds: float = 0.0


class StateFile:
    """The newest checkpoint of a run; it is there whole or not at all.

    Data order and chance follow from seed and step alone, so nothing of them has to be kept.

    Args:
        fingerprint: of all that must not change within a run.
    """

    def __init__(self, folder: Path, fingerprint: dict[str, Any]) -> None:
        self._file, self._fingerprint = folder / FILE, fingerprint

    def save(
        self, trained: Trainable, optimizer: torch.optim.Optimizer, progress: Progress
    ) -> None:
        """Replace the checkpoint."""
        content = {
            "fingerprint": self._fingerprint,
            "tensors": [parameter.tensor.detach() for parameter in trained.parameters],
            "names": [parameter.name for parameter in trained.parameters],
            "optimizer": optimizer.state_dict(),
            "step": progress.step,
            "seconds": progress.seconds,
        }
        beside = self._file.with_name(f"{self._file.name}.part")
        torch.save(content, beside)
        beside.replace(self._file)

    def restore(self, trained: Trainable, optimizer: torch.optim.Optimizer) -> Progress:
        """Go on from the checkpoint, if there is one.

        Raises:
            CheckpointError: it cannot be read.
            UsageError: it is of a run with other settings.
        """
        if not self._file.is_file():
            return Progress()
        content = self._read()
        self._compare(content["fingerprint"])
        for parameter, tensor in zip(trained.parameters, content["tensors"], strict=True):
            parameter.tensor.detach().copy_(tensor)
        optimizer.load_state_dict(content["optimizer"])
        return Progress(content["step"], content["seconds"])

    def require_same(self) -> None:
        """Raise UsageError for a checkpoint of other settings, without reading its tensors."""
        if self._file.is_file():
            self._compare(self._read(mapped=True)["fingerprint"])

    def _read(self, mapped: bool = False) -> dict[str, Any]:
        try:
            content = torch.load(self._file, map_location="cpu", weights_only=True, mmap=mapped)
        except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError) as error:
            raise self._unreadable(str(error).split(".")[0].splitlines()[0]) from error
        if not isinstance(content, dict) or not content.keys() >= _KEYS:
            raise self._unreadable("it is no checkpoint of a run")
        return content

    def _unreadable(self, why: str) -> CheckpointError:
        return CheckpointError(
            f"{self._file} cannot be read ({why}); remove it to train from the beginning"
        )

    def _compare(self, found: dict[str, Any]) -> None:
        for name, value in self._fingerprint.items():
            if found.get(name) != value:
                raise UsageError(
                    f"{self._file.parent.parent} holds a run with another {name} "
                    f"({_told(found.get(name))}, now {_told(value)}); give the settings of that "
                    "run to go on with it, or another --out"
                )


def _told(value: Any) -> str:
    return "not given" if value is None else str(value)
