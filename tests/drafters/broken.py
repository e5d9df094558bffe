"""Checkpoints of drafters that are changed after they were written."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from slipstream import LLM
from tests.drafters import engines


def make(target: str | Path, drafter: Path | str, **options: Any) -> LLM:
    """`options` are keys of `speculative_config`."""
    return engines.make(str(target), drafter, speculative=options, num_kv_blocks=16)


def edit(folder: Path, drop: str | None = None, **tensors: torch.Tensor) -> Path:
    """Without the tensors whose names end so, with others."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    kept = {name: value for name, value in weights.items() if not (drop and name.endswith(drop))}
    save_file(kept | tensors, file)
    return folder


def write_config(folder: Path, **changes: Any) -> Path:
    """Keys of config.json replaced, and those within objects that it has; "drop" leaves one out."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(_changed(config, changes)))
    return folder


def _changed(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    within = {
        key: _changed(config[key], value) if isinstance(config.get(key), dict) else value
        for key, value in changes.items()
        if isinstance(value, dict)
    }
    return {key: value for key, value in (config | changes | within).items() if value != "drop"}
