"""Tiny drafting heads for a target on disk, with the names and shapes of published ones.

Their last matrix is fitted to the target by least squares, so that some drafts are accepted.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.drafters.fits import remembered
from tests.drafters.oracles import MASK, Eagle1, Eagle3, PEagle, Target

INNER = 64
FIT_TEXTS, FIT_LENGTH, FIT_DEPTHS = 24, 40, 3
Matrix = Callable[..., Tensor]


def write_eagle3(
    folder: Path,
    target: str | Path,
    *,
    seed: int = 1,
    draft_vocab: int | None = None,
    naming: str = "midlayer.",
    prefix: str = "",
    qk_norm: bool = False,
    own_embedding: bool = False,
    own_head: bool = True,
    fit: bool = True,
    **changes: Any,
) -> Path:
    """An EAGLE-3 head; `changes` go to its config.json, `hidden_size` among them.

    Args:
        draft_vocab: every so many-th token of the target's vocabulary, none twice.
    """
    shape = _config(target)
    vocab, layers = shape["vocab_size"], shape["num_hidden_layers"]
    config = {
        **_layers_config(shape),
        "draft_vocab_size": draft_vocab or vocab,
        "eagle_aux_hidden_state_layer_ids": [0, layers - 1, layers],
        **changes,
    }
    matrix, width = _matrices(seed), config["hidden_size"]
    weights = _eagle3_layers(matrix, config, naming, width, qk_norm) | _fusion(
        matrix, config, shape["hidden_size"]
    )
    if own_embedding:
        weights["embed_tokens.weight"] = matrix(vocab, width, 2.0)
    if own_head:
        weights["lm_head.weight"] = matrix(config["draft_vocab_size"], width, 2.0)
    if draft_vocab is not None:
        ids = torch.arange(draft_vocab) * vocab // draft_vocab
        weights["d2t"] = ids - torch.arange(draft_vocab)
        weights["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True)
    _save(folder, config, weights)
    if fit and own_head:
        weights["lm_head.weight"] = _fitted_head(folder, target)
    weights = {f"{prefix}{name}" if name != "d2t" else name: v for name, v in weights.items()}
    return _save(folder, config, weights)


def write_p_eagle(
    folder: Path,
    target: str | Path,
    *,
    seed: int = 1,
    mask_key: str | None = "ptd_token_id",
    mask_shape: str = "[1, 1, N]",
    naming: str = "layers.0.",
    own_embedding: bool = True,
    own_head: bool = True,
    fit: bool = True,
    **changes: Any,
) -> Path:
    """A P-EAGLE head; as for EAGLE-3, with the token `MASK` under `mask_key`."""
    named = {} if mask_key is None else {mask_key: MASK}
    changes = {"num_hidden_layers": 2, **named, **changes}
    options = {"naming": naming, "own_embedding": own_embedding, "own_head": own_head}
    write_eagle3(folder, target, seed=seed, **options, fit=False, **changes)  # type: ignore[arg-type]
    config, file = _config(folder), folder / "model.safetensors"
    weights = load_file(file)
    count = len(config["eagle_aux_hidden_state_layer_ids"])
    count = count if config.get("use_aux_hidden_state", True) else 1
    width = _config(target)["hidden_size"] * count
    vector = _matrices(seed + 1)(1, width).flatten() * width**0.5
    shape = {"[1, 1, N]": (1, 1, width), "[1, N]": (1, width), "[N]": (width,)}[mask_shape]
    _save(folder, config, weights | {"mask_hidden": vector.view(shape)})
    if fit and own_head:
        prefix = changes.get("prefix", "")
        weights[f"{prefix}lm_head.weight"] = _fitted_parallel_head(folder, target)
        _save(folder, config, weights | {f"{prefix}mask_hidden": vector.view(shape)})
    return folder


def write_eagle1(
    folder: Path,
    target: str | Path,
    *,
    seed: int = 1,
    bias: bool = True,
    own_embedding: bool = False,
    **changes: Any,
) -> Path:
    """An EAGLE-1 head, whose fc guesses the next feature."""
    shape = _config(target)
    vocab, width = shape["vocab_size"], shape["hidden_size"]
    config = {**_layers_config(shape), "vocab_size": vocab, **changes}
    matrix = _matrices(seed)
    weights = _layer(matrix, config, "layers.0.", width, width, late=0.1)
    for index in range(1, config["num_hidden_layers"]):
        name = f"layers.{index}."
        weights |= _layer(matrix, config, name, width, width, late=0.1)
        weights[f"{name}input_layernorm.weight"] = _gains(matrix, width)
    weights["fc.weight"] = matrix(width, 2 * width)
    if bias:
        weights["fc.bias"] = matrix(1, width).flatten() * 0.1
    if own_embedding:
        weights["embed_tokens.weight"] = load_file(Path(target) / "model.safetensors")[
            "model.embed_tokens.weight"
        ].clone()
    _save(folder, config, weights)
    weights["fc.weight"] = _fitted_fc(folder, target)
    return _save(folder, config, weights)


def as_pickle(folder: Path) -> Path:
    """Store the head's weights as pytorch_model.bin."""
    file = folder / "model.safetensors"
    torch.save(load_file(file), folder / "pytorch_model.bin")
    file.unlink()
    return folder


def as_wrapper(folder: Path, **changes: Any) -> Path:
    """Rewrite the head as the speculators library would write it."""
    config = json.loads((folder / "config.json").read_text())
    outer = {
        key: config.pop(key)
        for key in list(config)
        if key in ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "mask_token_id")
        or key.startswith(("norm_", "fc_norm"))
    }
    wrapper = {
        "architectures": ["Eagle3Speculator"],
        "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
        "speculators_model_type": "eagle3",
        "speculators_version": "0.2.0.dev11",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "target"},
        },
        "tie_word_embeddings": False,
        "target_hidden_size": None,
        "transformer_layer_config": config,
        **outer,
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(wrapper))
    return folder


def _config(folder: str | Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text())
    return config


def _layers_config(target: dict[str, Any]) -> dict[str, Any]:
    """The layers as published heads declare them: a llama of one layer with its own rope."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": target["hidden_size"],
        "intermediate_size": INNER,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "num_hidden_layers": 1,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "vocab_size": target["vocab_size"],
    }


def _matrices(seed: int) -> Matrix:
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * scale / columns**0.5

    return matrix


def _gains(matrix: Matrix, size: int) -> Tensor:
    return 1.0 + 0.3 * matrix(1, size).flatten() * size**0.5


def _layer(
    matrix: Matrix, config: dict[str, Any], name: str, columns: int, width: int, late: float = 0.5
) -> dict[str, Tensor]:
    heads, kv_heads, head_dim = (
        config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    inner = config["intermediate_size"]
    biases = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim, "o": width}
    return {
        f"{name}self_attn.{part}_proj.bias": matrix(1, rows).flatten()
        for part, rows in biases.items()
        if config.get("attention_bias")
    } | {
        f"{name}self_attn.q_proj.weight": matrix(heads * head_dim, columns, 2.0),
        f"{name}self_attn.k_proj.weight": matrix(kv_heads * head_dim, columns, 2.0),
        f"{name}self_attn.v_proj.weight": matrix(kv_heads * head_dim, columns),
        f"{name}self_attn.o_proj.weight": matrix(width, heads * head_dim, late),
        f"{name}post_attention_layernorm.weight": _gains(matrix, width),
        f"{name}mlp.gate_proj.weight": matrix(inner, width),
        f"{name}mlp.up_proj.weight": matrix(inner, width),
        f"{name}mlp.down_proj.weight": matrix(width, inner, late),
    }


def _eagle3_layers(
    matrix: Matrix, config: dict[str, Any], first: str, width: int, qk_norm: bool
) -> dict[str, Tensor]:
    weights = _layer(matrix, config, first, 2 * width, width) | {
        f"{first}input_layernorm.weight": _gains(matrix, width),
        f"{first}hidden_norm.weight": _gains(matrix, width),
        "norm.weight": _gains(matrix, width),
    }
    names = [first, *(f"layers.{index}." for index in range(1, config["num_hidden_layers"]))]
    for name in names[1:]:
        weights |= _layer(matrix, config, name, width, width)
        weights[f"{name}input_layernorm.weight"] = _gains(matrix, width)
    for name in names if qk_norm else ():
        weights[f"{name}self_attn.q_norm.weight"] = _gains(matrix, config["head_dim"])
        weights[f"{name}self_attn.k_norm.weight"] = _gains(matrix, config["head_dim"])
    return weights


def _fusion(matrix: Matrix, config: dict[str, Any], width: int) -> dict[str, Tensor]:
    """The projection before the layers; `width` is the target's."""
    count = len(config["eagle_aux_hidden_state_layer_ids"])
    weights = {}
    if config.get("use_aux_hidden_state", True):
        weights["fc.weight"] = matrix(config["hidden_size"], count * width)
    if config.get("norm_before_fc"):
        weights["input_norm.weight"] = _gains(matrix, count * width)
    if config.get("fc_norm"):
        weights |= {f"fc_norm.{i}.weight": _gains(matrix, width) for i in range(count)}
    return weights


def _fit_texts(vocab: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(99)
    texts: Tensor = torch.randint(0, vocab, (FIT_TEXTS, FIT_LENGTH), generator=generator)
    return texts.tolist()


@remembered
def _fitted_head(folder: Path, target: str | Path) -> Tensor:
    """The lm_head whose logits are nearest to the target's."""
    model = Target(target)
    head = Eagle3(folder, model)
    width = head.embedding.shape[1]
    head.head = torch.eye(width)  # its "logits" are then what enters the lm_head
    columns = torch.arange(model.head.shape[0])
    if "d2t" in head.weights:
        columns = torch.arange(len(head.weights["d2t"])) + head.weights["d2t"]
    inputs, wanted = [], []
    for ids in _fit_texts(model.head.shape[0]):
        inputs.append(head.rows(ids[1:], head.features(ids[:-1]))[0])
        wanted.append(model(ids)[2][1:, columns])
    return _ridge(torch.cat(inputs), torch.cat(wanted))


@remembered
def _fitted_parallel_head(folder: Path, target: str | Path) -> Tensor:
    """The lm_head whose logits are nearest to the target's, over the rows of all depths."""
    model = Target(target)
    head = PEagle(folder, model, MASK)
    head.head = torch.eye(head.embedding.shape[1])
    columns = torch.arange(model.head.shape[0])
    if "d2t" in head.weights:
        columns = torch.arange(len(head.weights["d2t"])) + head.weights["d2t"]
    inputs, wanted = [], []
    for ids in _fit_texts(model.head.shape[0]):
        logits = model(ids)[2][:, columns]
        for end in range(2, len(ids) - FIT_DEPTHS, 5):
            inputs.append(head.rows(*head.masked(ids[:end], FIT_DEPTHS))[0][-FIT_DEPTHS:])
            wanted.append(logits[end - 1 : end - 1 + FIT_DEPTHS])
    return _ridge(torch.cat(inputs), torch.cat(wanted))


@remembered
def _fitted_fc(folder: Path, target: str | Path) -> Tensor:
    """The fc that is nearest to the next feature."""
    model = Target(target)
    inputs, wanted = [], []
    for ids in _fit_texts(model.head.shape[0]):
        features = model(ids)[1]
        embedded = model.embedding[torch.tensor(ids[1:])]
        inputs.append(torch.cat((embedded, features[:-1]), -1))
        wanted.append(features[1:])
    return _ridge(torch.cat(inputs), torch.cat(wanted))


def _ridge(x: Tensor, y: Tensor) -> Tensor:
    """W [columns of y, columns of x] with x W^T near y."""
    square = x.T @ x + 1e-2 * torch.eye(x.shape[1])
    return torch.linalg.solve(square, x.T @ y).T.contiguous()


def _save(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: value.contiguous() for name, value in weights.items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(config))
    return folder


__all__ = [
    "MASK",
    "Eagle1",
    "Eagle3",
    "PEagle",
    "Target",
    "as_pickle",
    "as_wrapper",
    "write_eagle1",
    "write_eagle3",
    "write_p_eagle",
]
