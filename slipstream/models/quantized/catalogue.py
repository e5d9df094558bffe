"""The supported quantised formats, and the function that reads a quantization_config."""

import importlib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Final, cast

from slipstream.core.errors import CheckpointError, UsageError
from slipstream.models.checkpoint import Checkpoint, read_json_object
from slipstream.models.config_reader import ConfigReader
from slipstream.models.quantized.module import StoredQuantization

_MODELOPT = "slipstream.models.quantized.modelopt"
# To add a format, add one line here and write its file, whose `read_settings` reads a
# quantization_config, and raises CheckpointError for keys that are unknown or unsupported.
FORMATS: Final = {
    "awq": "slipstream.models.quantized.awq",
    "compressed-tensors": "slipstream.models.quantized.compressed_tensors",
    "fp8": "slipstream.models.quantized.float8",
    "gguf": "slipstream.models.gguf.blocks",
    "gptq": "slipstream.models.quantized.gptq",
    "modelopt": _MODELOPT,
    "modelopt_fp4": _MODELOPT,
    "modelopt_mixed": _MODELOPT,
    "mxfp4": "slipstream.models.quantized.mxfp4",
    "quark": "slipstream.models.quantized.quark",
}
QUANTIZATION_KEYS: Final = ("quantization_config", "compression_config")
"""Keys of config.json; the second is an old name of the first."""
_SETTINGS_FILE = "hf_quant_config.json"  # older exports of ModelOpt have the settings only there


_FOR_HEADS = (
    "drafting heads are not read in; use the unquantised checkpoint, and --drafter-quantization "
    "to round it"
)


def refuse_quantized(config: Mapping[str, Any], file: str | Path, why: str = _FOR_HEADS) -> None:
    """Raise CheckpointError, with reason and advice, if a config.json has a quantization_config."""
    for key in QUANTIZATION_KEYS:
        settings = config.get(key)
        if settings:
            method = settings.get("quant_method") if isinstance(settings, Mapping) else None
            raise CheckpointError(
                f'{file}: "{key}" asks for {method or "quantised"} weights, which {why}'
            )


def read_quantization(
    config: Mapping[str, Any], file: str | Path = "config.json"
) -> StoredQuantization | None:
    """Read the quantization settings from a config.json; None: unquantised.

    Raises:
        CheckpointError: an unsupported format, or a setting that is missing, unknown or
            unsupported.
    """
    found = [key for key in QUANTIZATION_KEYS if config.get(key)]
    if not found:
        settings_file = Path(file).with_name(_SETTINGS_FILE)
        if not settings_file.is_file():
            return None
        settings = {**read_json_object(settings_file), "quant_method": "modelopt"}
        return _read(settings, settings_file, "")
    key, settings = found[0], config[found[0]]
    if not isinstance(settings, Mapping):
        raise CheckpointError(f'{file}: "{key}" must be an object, not {settings!r}')
    if len(found) > 1 and config[found[1]] != settings:
        raise CheckpointError(f'{file}: "{key}" and "{found[1]}" differ; remove one of them')
    return _read(settings, file, f"{key}.")


def require_format(checkpoint: Checkpoint, name: str) -> None:
    """Raise UsageError unless the checkpoint has the quantised format `name`, which may also be a
    name of one of vLLM's kernels for it."""
    settings = next((checkpoint.config.get(key) for key in QUANTIZATION_KEYS), None)
    has_settings_file = checkpoint.config_file.with_name(_SETTINGS_FILE).is_file()
    method = settings.get("quant_method") if isinstance(settings, Mapping) else None
    stored = FORMATS.get(str(method)) or (_MODELOPT if has_settings_file else None)
    if stored != FORMATS[name.removesuffix("_marlin")]:
        raise UsageError(
            f"quantization={name} is how some checkpoints are stored, but {checkpoint.path.name} "
            f"is {method or 'not quantised'}; leave it out"
        )


def _read(settings: Mapping[str, Any], file: str | Path, prefix: str) -> StoredQuantization:
    method = settings.get("quant_method")
    if method not in FORMATS:
        raise CheckpointError(
            f'{file}: "{prefix}quant_method" is {method!r}; supported are {", ".join(FORMATS)}. '
            "Use a checkpoint in one of them, or an unquantised one (and --quantization)"
        )
    module = importlib.import_module(FORMATS[method])
    harmless = cast(Collection[str], module.HARMLESS)
    reader = ConfigReader(settings, file, prefix, harmless)
    read = cast(Callable[[ConfigReader], StoredQuantization], module.read_settings)
    quantization = read(reader)
    reader.finish()
    return quantization
