"""LoRA adapters in the layout of PEFT for tiny models, and models with one merged into them."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: Path,
    target: str | Path,
    *,
    seed: int = 0,
    rank: int = 4,
    targets: Sequence[str] = ALL,
    size: float = 0.5,
    prefix: str = "",
    **config: Any,
) -> str:
    """A random adapter of the target's modules whose names end so.

    Args:
        size: of what it adds, beside what a matrix makes.
        prefix: of modules, before their names in the target's checkpoint.
        config: keys of adapter_config.json that are not the usual ones.
    """
    generator = torch.Generator().manual_seed(100 + seed)
    tensors: dict[str, Tensor] = {}
    files = sorted(Path(target).glob("*.safetensors"))
    weights = {name: it for file in files for name, it in load_file(file).items()}
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if weight.ndim != 2 or not module.endswith(tuple(targets)):
            continue
        rows, columns = weight.shape
        down = torch.randn(rank, columns, generator=generator) / columns**0.5
        up = torch.randn(rows, rank, generator=generator) * size / rank**0.5
        name = f"base_model.model.{prefix}{module}"
        tensors |= {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    given = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(target),
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.1,
        "bias": "none",
        "target_modules": list(targets),
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps({**given, **config}))
    return str(folder)


def write_merged(folder: Path, target: str | Path, adapter: str | Path, scale: float = 1.0) -> str:
    """The target with W + scale B A in place of W, summed in float64."""
    shutil.copytree(target, folder)
    weights = load_file(Path(target) / "model.safetensors")
    factors = load_file(Path(adapter) / "adapter_model.safetensors")
    for name in [name for name in factors if name.endswith(".lora_A.weight")]:
        module = name.removesuffix(".lora_A.weight")
        gain = factors[f"{module}.lora_B.weight"].double() @ factors[name].double()
        own = f"{module.removeprefix('base_model.model.')}.weight"
        weights[own] = (weights[own].double() + scale * gain).to(weights[own].dtype)
    save_file(weights, folder / "model.safetensors")
    return str(folder)
