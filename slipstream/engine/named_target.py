"""A drafter given as the model: its config.json names the target, and it drafts for that.

Drafters of the speculators library say for which model they were made and how many tokens they
guess, so that their folder alone is enough to run both.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from slipstream.core.config import EngineConfig
from slipstream.core.errors import CheckpointError
from slipstream.engine.sizing import Reasons
from slipstream.models.checkpoint import Checkpoint, resolve_checkpoint
from slipstream.speculative.heads.config import is_wrapped, wrapped_target

_REMEDY = "give the target as the model, and this drafter as the model of speculative_config"


def with_named_target(config: EngineConfig, reasons: Reasons) -> EngineConfig:
    """If the model is a drafter that names its target: a config with that target as the model.

    A drafter or number of tokens in `speculative_config` takes precedence.

    Raises:
        CheckpointError: the drafter names no target, or none that is found.
    """
    path = resolve_checkpoint(config.model, config.revision)
    drafter = Checkpoint(path)
    if not drafter.config_file.is_file() or not is_wrapped(drafter.config):
        return config
    name = wrapped_target(drafter.config)
    if name is None:
        raise CheckpointError(
            f"{path} is a drafter, and its config.json names no target "
            f"(speculators_config.verifier.name_or_path); {_REMEDY}"
        )
    target = _find(name, path)
    if is_wrapped(Checkpoint(target).config):
        raise CheckpointError(
            f"{path} is a drafter, and {name}, which it names as its target, is one as well; "
            f"{_REMEDY}"
        )
    reasons.add("target", target, f"the drafter {path.name} names {name}")
    options = _drafter_options(config.drafter_options, path)
    return replace(config, model=str(target), revision=None, speculative_config=options)


def _find(name: str, drafter: Path) -> Path:
    """Find the target: a directory, also relative to the drafter's, or a hub name."""
    local = drafter / name
    try:
        return local if local.is_dir() else resolve_checkpoint(name)
    except CheckpointError as error:
        raise CheckpointError(
            f"{drafter} is a drafter for {name}, which was not found ({error}); {_REMEDY}"
        ) from error


def _drafter_options(given: Mapping[str, Any] | None, drafter: Path) -> Mapping[str, Any]:
    """`speculative_config` with this drafter, unless it names another one."""
    if given is None:
        return {"model": str(drafter)}
    if any(given.get(key) is not None for key in ("model", "method", "drafters")):
        return given
    return {**given, "model": str(drafter)}
