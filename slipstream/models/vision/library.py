"""Loads vision towers and image processors of transformers from a checkpoint's files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from slipstream.core.errors import CheckpointError, UsageError
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.vision.tower import load_tensors

PROJECTOR = ("model.multi_modal_projector.", "multi_modal_projector.")
_FILES = ("preprocessor_config.json", "processor_config.json")


def missing_packages() -> list[str]:
    """The packages of the extra `vision` that are not installed."""
    missing = []
    for module, name in (("transformers", "transformers"), ("PIL", "pillow")):
        try:
            __import__(module)
        except ImportError:
            missing.append(name)
    return missing


def require_class(name: str, module: str = "") -> Any:
    """A class of transformers; UsageError if the installed version does not have it. Classes that
    it does not export are in a submodule."""
    import transformers

    try:
        return getattr(import_module(f"transformers{module}"), name)
    except (AttributeError, ImportError) as error:
        raise UsageError(
            f"transformers {transformers.__version__} has no {name}, which reads this model's "
            "images; install a newer one (pip install -U 'slipstream[vision]'), or do without "
            'images (limit_mm_per_prompt={"image": 0})'
        ) from error


@dataclass(frozen=True)
class TowerClasses:
    """The names of a tower's class and its config's in transformers, and the submodule of the
    former if transformers does not export it."""

    model: str
    config: str
    module: str = ""


def tower_of(
    checkpoint: Checkpoint,
    classes: TowerClasses,
    prefixes: Sequence[str],
    dtype: torch.dtype,
    device: torch.device,
) -> Any:
    """Load a vision tower from the checkpoint; `prefixes` as for `load_tensors`."""
    model, config = require_class(classes.model, classes.module), require_class(classes.config)
    given = checkpoint.whole_config["vision_config"]
    try:
        read = config(**{key: it for key, it in given.items() if key != "dtype"})
        tower = model._from_config(read, dtype=dtype).to(device).eval()
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{checkpoint.config_file}: vision_config: {error}") from error
    load_tensors(tower, checkpoint, prefixes)
    return tower.requires_grad_(False)


def projector_of(
    checkpoint: Checkpoint, name: str, module: str, config: Any, dtype: torch.dtype,
    device: torch.device,
) -> Any:  # fmt: skip
    """Load the projector from a tower's features to the language model's embeddings.

    Args:
        name, module: its class, and the submodule of transformers that has it.
        config: of the whole model.
    """
    projector = require_class(name, module)(config).to(device, dtype).eval()
    load_tensors(projector, checkpoint, PROJECTOR)
    return projector.requires_grad_(False)


def image_processor(checkpoint: Checkpoint, name: str, sizes: Mapping[str, Any]) -> Any:
    """A PIL image processor with the checkpoint's settings, or with `sizes` if it has none."""
    processor = require_class(name)
    if not any((checkpoint.path / file).is_file() for file in _FILES):
        return processor(**sizes)
    return processor.from_pretrained(str(checkpoint.path), local_files_only=True)
