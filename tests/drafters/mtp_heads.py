"""Tiny MTP modules for a target on disk, with the names and shapes of published ones.

Their projection is fitted to the target by least squares, so that some drafts are accepted.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoints import write_qwen3
from tests.drafters.heads import _fit_texts, _gains, _matrices, _ridge
from tests.drafters.mtp_oracle import FEATURE_FIRST, ZERO_CENTRED, Mtp
from tests.drafters.oracles import Target

NAMES = {
    "qwen": ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"),
    "deepseek": tuple(
        f"model.layers.{{n}}.{part}" for part in ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    ),
    "mimo": tuple(
        f"model.mtp_layers.{{i}}.{part}"
        for part in ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
    ),
}
NAMES["speculators"] = tuple(name.removeprefix("model.") for name in NAMES["mimo"])
LAYERS = {
    "qwen": "mtp.layers.{i}",
    "deepseek": "model.layers.{n}",
    "mimo": "model.mtp_layers.{i}",
    "speculators": "mtp_layers.{i}",
}
COUNT_KEYS = {"qwen": "mtp_num_hidden_layers"}
MTP_TYPES = {"qwen": "Qwen3NextMTP", "mimo": "MiMoMTPModel", "deepseek": "DeepSeekMTPModel"}


def write_mtp(
    folder: Path,
    target: str | Path,
    style: str = "qwen",
    *,
    seed: int = 1,
    modules: int = 1,
    own_ends: bool = False,
    fit: bool = True,
    **changes: Any,
) -> Path:
    """Modules in a folder of their own; `changes` go to its config.json."""
    shape = json.loads((Path(target) / "config.json").read_text())
    weights, model = module_weights(shape, style, seed, modules), Target(target)
    if "num_experts_per_tok" in shape:
        weights |= layers_with_experts(model, style, seed, modules)
    if own_ends:
        for index in range(modules):
            name = f"model.layers.{shape['num_hidden_layers'] + index}"
            weights[f"{name}.embed_tokens.weight"] = model.embedding.clone()
            weights[f"{name}.shared_head.head.weight"] = model.head.clone()
    config = {**shape, COUNT_KEYS.get(style, "num_nextn_predict_layers"): modules}
    if style == "speculators":
        config = as_wrapped(shape, modules)
    else:
        config["architectures"] = [MTP_TYPES[style]]
    config |= changes
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    for index in range(modules if fit else 0):
        save_file(weights, folder / "model.safetensors")
        projection = NAMES[style][2].format(i=index, n=shape["num_hidden_layers"] + index)
        if index == 0 or style != "qwen":  # whose modules share it
            weights[f"{projection}.weight"] = fitted(folder, model, style, index)
    save_file(weights, folder / "model.safetensors")
    return folder


def add_mtp(folder: Path, style: str, **options: Any) -> Path:
    """Put the modules into the target's own checkpoint."""
    apart = write_mtp(folder / "apart", folder, style, **options)
    weights = load_file(folder / "model.safetensors") | load_file(apart / "model.safetensors")
    save_file(weights, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config[COUNT_KEYS.get(style, "num_nextn_predict_layers")] = options.get("modules", 1)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def as_wrapped(shape: dict[str, Any], modules: int) -> dict[str, Any]:
    """The config.json of the speculators library."""
    return {
        "architectures": ["MTPDraftModel"],
        "speculators_model_type": "mtp",
        "speculators_version": "0.6.0",
        "speculators_config": {
            "algorithm": "mtp",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "target", "architectures": shape["architectures"]},
        },
        "num_nextn_predict_layers": modules,
        "transformer_layer_config": shape,
    }


def layers_with_experts(target: Target, style: str, seed: int, modules: int) -> dict[str, Tensor]:
    """Random layers with the tensors of the target's last one."""
    count, generator = target.config["num_hidden_layers"], torch.Generator().manual_seed(seed + 1)
    last, weights = f"layers.{count - 1}.", {}
    for index in range(modules):
        layer = LAYERS[style].format(i=index, n=count + index)
        for name, like in target.weights.items():
            if name.startswith(last):
                values = torch.randn(like.shape, generator=generator) * like.std()
                is_norm = name.endswith("norm.weight")
                weights[f"{layer}.{name.removeprefix(last)}"] = values + 1 if is_norm else values
    return weights


def module_weights(shape: dict[str, Any], style: str, seed: int, modules: int) -> dict[str, Tensor]:
    """Random ones; a layer is of the target's own kind, but for experts."""
    matrix, width = _matrices(seed), shape["hidden_size"]
    inner, heads = shape["intermediate_size"], shape["num_attention_heads"]
    head_dim = shape.get("head_dim") or width // heads
    kv_rows = shape["num_key_value_heads"] * head_dim
    weights: dict[str, Tensor] = {}
    for index in range(modules):
        place = {"i": index, "n": shape["num_hidden_layers"] + index}
        for part, name in zip(("e", "h", "fc", "norm"), NAMES[style], strict=True):
            tensor = matrix(width, 2 * width) if part == "fc" else _gains(matrix, width)
            weights[f"{name.format(**place)}.weight"] = tensor
        if "kv_lora_rank" in shape:
            continue  # the layer is like the target's last one
        name = LAYERS[style].format(**place)
        for part, rows in (("q", heads * head_dim), ("k", kv_rows), ("v", kv_rows)):
            weights[f"{name}.self_attn.{part}_proj.weight"] = matrix(rows, width, 2.0)
            if shape["model_type"] in ("qwen2", "mimo"):
                weights[f"{name}.self_attn.{part}_proj.bias"] = matrix(1, rows).flatten()
        if shape["model_type"] == "qwen3":
            for part in "qk":
                weights[f"{name}.self_attn.{part}_norm.weight"] = _gains(matrix, head_dim)
        weights |= {
            f"{name}.self_attn.o_proj.weight": matrix(width, heads * head_dim, 0.3),
            f"{name}.input_layernorm.weight": _gains(matrix, width),
            f"{name}.post_attention_layernorm.weight": _gains(matrix, width),
        }
        if "num_experts_per_tok" in shape:
            continue
        weights |= {
            f"{name}.mlp.gate_proj.weight": matrix(inner, width),
            f"{name}.mlp.up_proj.weight": matrix(inner, width),
            f"{name}.mlp.down_proj.weight": matrix(width, inner, 0.3),
        }
    if style in ZERO_CENTRED:
        norms = [name for name, value in weights.items() if "norm" in name]
        weights |= {name: weights[name] - 1 for name in norms}
    return weights


def fitted(folder: Path, target: Target, style: str, module: int) -> Tensor:
    """The projection whose rows are nearest to the hidden states that they should become."""
    head = Mtp(folder, target, style)
    inputs, wanted = [], []
    for ids in _fit_texts(target.head.shape[0]):
        features = target(ids)[1]
        given = features
        for index in range(module):
            given = head.module(index, ids[1 + index :], given[:-1])
        tokens = ids[1 + module :]
        e, h = head.entry_norms(module, tokens, given[: len(tokens)])
        inputs.append(torch.cat((h, e) if style in FEATURE_FIRST else (e, h), -1))
        # Before the last norm, what the target's feature of the row's token is.
        wanted.append(features[1 + module :])
    return _ridge(torch.cat(inputs), torch.cat(wanted))


def write_mimo(folder: Path) -> Path:
    """A MiMo model without modules: a Qwen2 of another name."""
    write_qwen3(
        folder,
        architectures=["MiMoForCausalLM"],
        model_type="mimo",
        attention_bias=True,
        tie_word_embeddings=False,
    )
    weights = load_file(folder / "model.safetensors")
    matrix = _matrices(7)
    kept = {name: value for name, value in weights.items() if "_norm.weight" not in name}
    for name in [
        name for name in kept if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
    ]:
        kept[name.replace("weight", "bias")] = matrix(1, len(kept[name])).flatten()
    save_file(kept, folder / "model.safetensors")
    return folder


def with_gains(folder: Path) -> Path:
    """Give the model a final norm whose gains change the direction of a hidden state."""
    weights = load_file(folder / "model.safetensors")
    name = "model.norm.weight"
    weights[name] = _gains(_matrices(8), len(weights[name]))
    save_file(weights, folder / "model.safetensors")
    return folder
