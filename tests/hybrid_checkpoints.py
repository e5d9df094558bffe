"""Tiny random models of gated delta nets and gated attention, as transformers writes them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.utils import logging as transformers_logging

from tests.drafters.heads import _fit_texts, _ridge
from tests.models.delta_cases import DELTA, FULL, MIXED, delta

COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 700.0,
        "partial_rotary_factor": 0.25,
    },
    **delta(2, 4, 16, 8, DELTA, DELTA, FULL, DELTA),
}
# By model_type: the prefix of transformers' classes, and the family's own config keys.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5_text": ("Qwen3_5", {}),
    "qwen3_next": ("Qwen3Next", MIXED),
    "qwen3_5_moe_text": ("Qwen3_5Moe", MIXED),
}
_SCALES = {"q_proj": 2.0, "k_proj": 2.0, "out_proj": 3.0, "gate.weight": 2.0, "lm_head": 2.0}


def write_hybrid(folder: Path, kind: str, seed: int = 0, **changes: Any) -> str:
    """A model of the family `kind`."""
    model = _model(kind, **changes)
    randomise(model, torch.Generator().manual_seed(seed))
    _save(model, folder)
    return str(folder)


def _model(kind: str, **changes: Any) -> Any:
    name, own = FAMILIES[kind]
    names = f"{name}TextConfig", f"{name}Config"
    found = next(it for it in names if hasattr(transformers, it))
    config = getattr(transformers, found)(**{**COMMON, **own, **changes})
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def _save(model: Any, folder: Path) -> None:
    transformers_logging.disable_progress_bar()
    model.save_pretrained(folder)


@torch.no_grad()
def randomise(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Every parameter, norms too, so that logits are spread and text does not only repeat."""
    for name, parameter in model.named_parameters():
        if name.endswith("linear_attn.norm.weight"):
            parameter.uniform_(0.5, 1.5, generator=generator)
        elif name.endswith("norm.weight"):  # stored as their distance from 1
            parameter.uniform_(-0.5, 0.5, generator=generator)
        elif name.endswith("A_log"):
            parameter.uniform_(-4.0, 0.0, generator=generator)
        elif name.endswith("bias"):
            parameter.normal_(std=0.25, generator=generator)
        else:
            scale = next((scale for part, scale in _SCALES.items() if part in name), 1.0)
            parameter.normal_(std=scale / parameter.shape[-1] ** 0.5, generator=generator)


class HybridMtp:
    """An oracle of the module: transformers' own layer over whole texts."""

    def __init__(self, folder: Path) -> None:
        plain = {"attn_implementation": "eager"}
        self.target = transformers.AutoModelForCausalLM.from_pretrained(folder, **plain)
        self.layer = transformers.AutoModel.from_pretrained(folder / "module", **plain)
        stored = load_file(folder / "model.safetensors")
        self.ends = {name: stored[f"mtp.{name}.weight"] for name in ("fc", *_ENTRIES)}

    @torch.inference_mode()
    def features(self, ids: Sequence[int]) -> Tensor:
        hidden: Tensor = self.target.model(torch.tensor([ids])).last_hidden_state[0]
        return hidden

    def inputs(self, ids: Sequence[int], features: Tensor) -> Tensor:
        """The inputs of the projection in the rows of ids[1:]."""
        embedded = self.target.model.embed_tokens.weight[torch.tensor(ids[1:])].detach()
        sides = zip(_ENTRIES, (embedded, features), strict=True)
        eps = self.target.config.rms_norm_eps
        return torch.cat(
            [
                torch.nn.functional.rms_norm(x, x.shape[-1:], 1 + self.ends[name], eps)
                for name, x in sides
            ],
            -1,
        )

    @torch.inference_mode()
    def drafts(self, ids: Sequence[int], count: int) -> tuple[list[int], list[Tensor]]:
        """Greedy: (draft tokens, the logits of each) behind `ids`."""
        tokens, given = list(ids), self.features(ids[:-1])
        logits: list[Tensor] = []
        for _ in range(count):
            x = self.inputs(tokens, given) @ self.ends["fc"].T
            y = self.layer(inputs_embeds=x.unsqueeze(0)).last_hidden_state[0]
            logits.append(self.target.lm_head(y[-1]))
            tokens.append(int(logits[-1].argmax()))
            given = torch.cat((given, y[-1:]))
        return tokens[len(ids) :], logits


_ENTRIES = ("pre_fc_norm_embedding", "pre_fc_norm_hidden")


def add_module(folder: str, kind: str, seed: int = 1) -> Path:
    """A module within the target's checkpoint, whose projection is fitted to the target."""
    generator, width = torch.Generator().manual_seed(seed), COMMON["hidden_size"]
    layer = _model(kind, num_hidden_layers=1, layer_types=[FULL]).model
    randomise(layer, generator)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():  # the projection says more
            if name.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj")):
                parameter.mul_(0.3)
    path = Path(folder) / "model.safetensors"
    modules = Path(folder) / "module"
    _save(layer, modules)
    own = load_file(modules / "model.safetensors")
    weights = {f"mtp.{name}": it for name, it in own.items() if "embed_tokens" not in name}
    weights["mtp.fc.weight"] = torch.zeros(width, 2 * width)
    for name in _ENTRIES:
        weights[f"mtp.{name}.weight"] = torch.rand(width, generator=generator) - 0.5
    weights |= load_file(path)
    save_file(weights, path)
    config = json.loads((Path(folder) / "config.json").read_text())
    config["mtp_num_hidden_layers"] = 1
    (Path(folder) / "config.json").write_text(json.dumps(config))
    oracle = HybridMtp(Path(folder))
    texts = _fit_texts(COMMON["vocab_size"])[:28]
    features = [oracle.features(ids) for ids in texts]
    inputs = [oracle.inputs(ids, it[:-1]) for ids, it in zip(texts, features, strict=True)]
    weights["mtp.fc.weight"] = _ridge(torch.cat(inputs), torch.cat([it[1:] for it in features]))
    save_file(weights, path)
    return Path(folder)
