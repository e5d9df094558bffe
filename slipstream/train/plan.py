"""A run as it will be carried out, and the checks of its directory before anything costly."""

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch

from slipstream.core.errors import UsageError
from slipstream.core.flags import flag_name
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.decoder_config import DecoderConfig
from slipstream.train.metrics import ACCEPTANCE, LOSS
from slipstream.train.metrics import FILE as METRICS
from slipstream.train.settings import LOSS_OPTIONS, DataSettings, TrainSettings

WORK = "training"
# Settings that change what is learned. Steps and minutes may change when a run is continued.
_FIXED = (
    "seed",
    "batch_size",
    "accumulate",
    "num_speculative_tokens",
    "warmup",
    "weight_decay",
    "clip",
    "argmax_weight",
    "validation",
    *LOSS_OPTIONS,
)


@dataclass(frozen=True, eq=False)
class RunPlan:
    """The settings with their defaults resolved, before data are made and the target is loaded.

    Attributes:
        target: its directory.
        shape: its config.
        length: tokens of a sequence.
        num_draft_tokens: draft positions that are trained, K.
        learning_rate: the highest.
        dtype: of matrix products; parameters are float32.
    """

    settings: TrainSettings
    target: Checkpoint
    shape: DecoderConfig
    length: int
    num_draft_tokens: int
    learning_rate: float
    device: torch.device
    dtype: torch.dtype

    @property
    def max_positions(self) -> int:
        """The longest sequence that drafter and target meet, drafts included."""
        return max(self.length, self.shape.max_position_embeddings) + self.num_draft_tokens

    def fingerprint(self, source: str) -> dict[str, Any]:
        """The settings that must not change when a run is continued, by flag.

        Args:
            source: identifies the data.
        """
        settings = self.settings
        values: dict[str, Any] = {
            "kind": settings.kind,
            "target": str(self.target.path),
            "--lora": settings.lora and str(settings.lora.resolve()),
            "--data": source,
            "--learning-rate": self.learning_rate,
            "--dtype": str(self.dtype).removeprefix("torch."),
        }
        values |= {flag_name(name): getattr(settings, name) for name in _FIXED}
        return values | {flag_name(name): it for name, it in vars(settings.options).items()}


def require_unused(out: Path) -> None:
    """Raise UsageError rather than overwrite a model, or a file that no run has written."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out} is a file; give a directory for the drafter")
    if (out / WORK).is_dir():
        return
    for file in ("config.json", "model.safetensors", "model.safetensors.index.json"):
        if (out / file).exists():
            raise UsageError(
                f"--out {out} holds a model already ({file}) and no run to continue; give "
                "another --out, or remove it first"
            )
    for file in ("README.md", METRICS, LOSS, ACCEPTANCE):
        if (out / file).exists():
            raise UsageError(
                f"--out {out} holds a {file} that no run has written and that this one would "
                "overwrite; give another --out, or remove it first"
            )


def make_writable(folder: Path, settings: DataSettings) -> None:
    """Create a directory; raise UsageError if nothing can be written to it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(
            f"--out {settings.out} cannot be written to ({error.strerror}); give another directory"
        ) from error
