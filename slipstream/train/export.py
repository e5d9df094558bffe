"""Writing drafters as others read them."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.train.tensor_file import write_tensors

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)
DTYPE_NAMES = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
}


def write_checkpoint(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], dtype: torch.dtype
) -> None:
    """config.json and model.safetensors; floating-point tensors in `dtype`, others as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }
    write_tensors(folder / "model.safetensors", stored)
    content = {**config, "torch_dtype": DTYPE_NAMES[dtype]}
    (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def copy_tokenizer(target: Path, folder: Path) -> None:
    """Language models carry the tokenizer that they speak."""
    for name in _TOKENIZER_FILES:
        if (target / name).is_file():
            shutil.copyfile(target / name, folder / name)
