"""The tiny random checkpoints that many tests share, each written when it is first asked for."""

from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import write_qwen3
from tests.drafters.assistants import write_assistant
from tests.drafters.blocks import write_dflash, write_dflash2, write_dspark
from tests.drafters.heads import write_eagle1, write_eagle3, write_p_eagle
from tests.drafters.mtp_heads import write_mtp

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
# config.json of each supported architecture, with what only that one has.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "rope_scaling": LLAMA3_ROPE,
    },
    "MiMoForCausalLM": {"model_type": "mimo", "attention_bias": True},
    "MistralForCausalLM": {"model_type": "mistral", "sliding_window": 9},
    "Qwen2ForCausalLM": {
        "model_type": "qwen2",
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 1,
    },
    "Qwen3ForCausalLM": {"model_type": "qwen3", "rope_scaling": {"type": "linear", "factor": 2.5}},
}
# The linear modules that have a bias where config.json says so.
BIASES = {
    "LlamaForCausalLM": (
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    ),
    "MiMoForCausalLM": ("q_proj", "k_proj", "v_proj"),
    "Qwen2ForCausalLM": ("q_proj", "k_proj", "v_proj"),
}


HEADS = (
    *("assistant", "dflash", "dflash2", "dspark", "eagle", "eagle3", "p-eagle", "mtp"),
    "mtp_modules",
)


class TinyModels:
    """Checkpoints in subfolders of `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def target(self) -> str:
        """A random two-layer Qwen3 of 96 tokens."""
        return str(write_qwen3(self.folder / "target"))

    @cached_property
    def draft(self) -> str:
        """The first layer of `target`: agrees with it most of the time."""
        return str(write_qwen3(self.folder / "draft", keep_layers=1))

    @cached_property
    def heads(self) -> dict[str, str]:
        """Drafting heads for `target`, by their method."""
        folder, target = self.folder / "heads", self.target
        return {
            "assistant": str(write_assistant(folder / "assistant", target)),
            "dflash": str(write_dflash(folder / "dflash", target, block=16, draft_vocab=80)),
            "dflash2": str(write_dflash2(folder / "dflash2", target, block=16)),
            "dspark": str(write_dspark(folder / "dspark", target, block=16, draft_vocab=80)),
            "eagle": str(write_eagle1(folder / "eagle", target)),
            "eagle3": str(write_eagle3(folder / "eagle3", target, draft_vocab=80)),
            "p-eagle": str(write_p_eagle(folder / "p-eagle", target, draft_vocab=80)),
            "mtp": str(write_mtp(folder / "mtp", target)),
            "mtp_modules": str(write_mtp(folder / "modules", target, "deepseek", modules=2)),
        }

    @property
    def all(self) -> tuple[str, str, dict[str, str]]:
        """(target, draft, heads)."""
        return self.target, self.draft, self.heads

    def of_architecture(self, name: str, keep_layers: int | None = None) -> str:
        """A random three-layer model of the architecture, or its first layers."""
        folder = self.folder / name / str(keep_layers)
        if not folder.is_dir():
            write_decoder(folder, name, keep_layers)
        return str(folder)


def write_decoder(folder: Path, architecture: str, keep_layers: int | None = None) -> None:
    """The random weights of `write_qwen3` under the architecture's names, and random biases."""
    config = {"architectures": [architecture], "num_hidden_layers": 3, "tie_word_embeddings": False}
    changes = {**ARCHITECTURES[architecture], **config}
    write_qwen3(folder, seed=3, keep_layers=keep_layers, **changes)
    weights = load_file(folder / "model.safetensors")
    if architecture != "Qwen3ForCausalLM":
        norms = ("q_norm.weight", "k_norm.weight")
        weights = {name: value for name, value in weights.items() if not name.endswith(norms)}
    generator = torch.Generator().manual_seed(4)
    for layer in range(3):  # of all layers, so that what is kept does not change the first ones
        for module in BIASES.get(architecture, ()):
            part = "self_attn" if module[0] in "qkvo" else "mlp"
            name = f"model.layers.{layer}.{part}.{module}"
            rows = len(weights[f"model.layers.0.{part}.{module}.weight"])
            bias = torch.randn(rows, generator=generator) * 0.3
            if f"{name}.weight" in weights:
                weights[f"{name}.bias"] = bias
    save_file(weights, folder / "model.safetensors")
