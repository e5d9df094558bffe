"""What can be told of a run before anything costly is done: refusals, and what it goes on with."""

from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch

from slipstream.core.errors import UsageError
from slipstream.core.flags import flag_name
from slipstream.models.catalogue import read_decoder_config
from slipstream.models.checkpoint import Checkpoint, resolve_checkpoint
from slipstream.models.loading import dtype_named
from slipstream.models.quantized.catalogue import refuse_quantized
from slipstream.runner.capability import choose_device, training_dtype
from slipstream.train.data import Data
from slipstream.train.plots import ACCEPTANCE, LOSS
from slipstream.train.recipe import Order, RecipeModule
from slipstream.train.records import FILE as METRICS
from slipstream.train.settings import LOSS_OPTIONS, DataSettings, DrafterOptions, TrainSettings

WORK = "training"
# They change what is learned; steps and minutes may be others when a run goes on.
_KEPT = (
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

_WHOLE_WEIGHTS = "training does not read; train with the unquantised checkpoint of this model"


def take_order(settings: TrainSettings, module: RecipeModule) -> tuple[Order, Data]:
    """What settings come to, and the data that they name.

    Raises:
        UsageError: settings that contradict each other, the kind, the data or the target.
        CheckpointError: configs that cannot be read.
    """
    settings.require_only(module.OPTIONS)
    _require_free(settings.out)
    device, _ = choose_device(settings.device)
    target = Checkpoint(resolve_checkpoint(settings.target, settings.revision))
    refuse_quantized(target.config, target.config_file, _WHOLE_WEIGHTS)
    shape = read_decoder_config(target)
    data = Data(settings, target, shape.vocab_size)
    order = Order(
        settings,
        target,
        shape,
        data.length,
        settings.num_speculative_tokens or module.PLACES,
        settings.learning_rate or module.LEARNING_RATE,
        device,
        _precision(settings, device),
    )
    if order.length <= 2 * order.places:
        raise UsageError(
            f"sequences of {order.length} tokens have no room for drafts of {order.places}; raise "
            "--max-length, or lower --num-speculative-tokens"
        )
    module.check(order)
    data.require_enough()
    return order, data


def _precision(settings: TrainSettings, device: torch.device) -> torch.dtype:
    """What the device trains in, unless something else is asked for."""
    if settings.dtype != "auto":
        return dtype_named(settings.dtype)
    return training_dtype(device)


def fingerprint(order: Order, source: str) -> dict[str, Any]:
    """What a run that is gone on with must have been started with, by the names of flags."""
    settings = order.settings
    told: dict[str, Any] = {
        "kind": settings.kind,
        "target": str(order.target.path),
        "--data": source,
        "--learning-rate": order.rate,
        "--dtype": str(order.dtype).removeprefix("torch."),
    }
    told |= {flag_name(name): getattr(settings, name) for name in _KEPT}
    for one in fields(DrafterOptions):
        told[flag_name(one.name)] = getattr(settings.options, one.name)
    return told


def _require_free(out: Path) -> None:
    """Refuse to write over a model, or any other file, that no run of ours has put there."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out} is a file; give a directory for the drafter")
    if (out / WORK).is_dir():
        return
    for file in ("config.json", "model.safetensors", "model.safetensors.index.json"):
        if (out / file).exists():
            raise UsageError(
                f"--out {out} holds a model already ({file}) and no run to go on with; give "
                "another --out, or remove it first"
            )
    for file in ("README.md", METRICS, LOSS, ACCEPTANCE):
        if (out / file).exists():
            raise UsageError(
                f"--out {out} holds a {file} that no run has put there and that this one would "
                "write over; give another --out, or remove it first"
            )


def make_writable(folder: Path, settings: DataSettings) -> None:
    """Make a folder, and refuse one that nothing can be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(
            f"--out {settings.out} cannot be written to ({error.strerror}); give another directory"
        ) from error
