"""Defaults of sampling parameters, from generation_config.json and a user's overrides."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.core.errors import CheckpointError, UsageError
from slipstream.core.paths import user_path
from slipstream.core.sampling_params import SamplingDefaults, SamplingParams
from slipstream.models.checkpoint import Checkpoint

AUTO, NEUTRAL = "auto", "vllm"
_MOST_TOKENS = "max_new_tokens"
_KEYS = {
    name: name
    for name in (
        *("temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
        *("presence_penalty", "frequency_penalty", "skip_special_tokens"),
    )
} | {_MOST_TOKENS: "max_tokens"}
_SWITCHES = ("do_sample", "skip_special_tokens")


def generation_folder(given: str) -> Path | None:
    """The directory that `EngineConfig.generation_config` names; None for "auto" and "vllm"."""
    if given in (AUTO, NEUTRAL):
        return None
    folder = user_path(given)
    if not (folder / "generation_config.json").is_file():
        raise UsageError(
            f"generation_config: {given} has no generation_config.json; give a directory that has "
            f"one, {AUTO} or {NEUTRAL}"
        )
    return folder


def read_sampling_defaults(
    checkpoint: Checkpoint, given: str, overrides: Mapping[str, Any] | None
) -> SamplingDefaults:
    """The defaults of requests, like vLLM's: `do_sample` has no effect.

    `max_new_tokens` is a default if it comes from the model's own file, and a limit of the server
    if the user gives a directory or the number.

    Args:
        given: "auto", "vllm" (nothing is read), or a directory, which `checkpoint` knows already.
        overrides: take precedence over the file.

    Raises:
        CheckpointError: a value in the file is invalid.
        UsageError: an override is invalid.
    """
    unknown = sorted((overrides or {}).keys() - _KEYS.keys())
    if unknown:
        raise UsageError(
            f"override_generation_config: {', '.join(unknown)} cannot be set; it takes "
            f"{', '.join(_KEYS)}"
        )
    found = {} if given == NEUTRAL else checkpoint.generation_config
    values, sources = _taken(found, CheckpointError, f"{checkpoint.generation_file}: "), []
    if values:
        sources.append(str(checkpoint.generation_file))
    own = _taken(overrides or {}, UsageError, "override_generation_config: ")
    if own:
        sources.append("override_generation_config")
    values |= own
    limits = given not in (AUTO, NEUTRAL) or "max_tokens" in own
    most = values.get("max_tokens") if limits else None
    return SamplingDefaults(values, most, " and ".join(sources))


def _taken(content: Mapping[str, Any], error: type[Exception], where: str) -> dict[str, Any]:
    given = {field: content.get(key) for key, field in _KEYS.items()}
    values = {field: value for field, value in given.items() if value is not None}
    try:
        for key in _SWITCHES:
            if not isinstance(content.get(key), bool | None):
                raise UsageError(f"{key} must be true or false, not {content[key]!r}")
        SamplingParams(**values)
    except UsageError as problem:
        raise error(f"{where}{problem}; fix it, or give generation_config={NEUTRAL}") from None
    return values
