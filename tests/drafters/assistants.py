"""Tiny assistants in the manner of Gemma 4's, and what they draft, in plain torch.

The oracle reads whole texts again for every draft, and shares nothing with the engine.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.checkpoints import write_qwen3
from tests.drafters.fits import remembered
from tests.drafters.oracles import Read, Reader, Target, load, plain_layer, rms, rotate
from tests.models.parity_cases import Case

WIDTH, INNER, HEADS = 32, 40, 4
FIT_TEXTS, FIT_LENGTH = 24, 30
SLIDING, FULL = "sliding_attention", "full_attention"


def write_sliding_target(folder: Path, **changes: Any) -> str:
    """A target of three layers; the middle one has full attention."""
    kinds = [SLIDING, FULL, SLIDING]
    shape: dict[str, Any] = {"num_hidden_layers": 3, "layer_types": kinds, "max_window_layers": 0}
    shape |= {"use_sliding_window": True, "sliding_window": 9, **changes}
    return str(write_qwen3(folder, seed=5, **shape))


def write_assistant(
    folder: Path,
    target: str | Path,
    *,
    seed: int = 1,
    kinds: Sequence[str] = (FULL, FULL),
    centroids: tuple[int, int] | None = None,
    suppressed: Sequence[int] = (),
    listed: bool = False,
    text: dict[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """An assistant whose lm_head is fitted; `text` goes to its text_config, `changes` beside it.

    Args:
        centroids: how many, and how many are chosen.
        listed: sizes of heads are given layer by layer, as newer exports have them.
    """
    shape = json.loads((Path(target) / "config.json").read_text())
    backbone, vocab = shape["hidden_size"], shape["vocab_size"]
    head_dim, kv_heads = shape["head_dim"], shape["num_key_value_heads"]
    rope = {"rope_type": "default", "rope_theta": shape.get("rope_theta")}
    inner = {
        "model_type": "gemma4_text",
        "vocab_size": vocab,
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": len(kinds),
        "num_kv_shared_layers": len(kinds),
        "num_attention_heads": HEADS,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "layer_types": list(kinds),
        "rope_parameters": {SLIDING: rope, FULL: rope},
        "sliding_window": 6,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "use_double_wide_mlp": False,
        "enable_moe_block": False,
        "attention_k_eq_v": True,
        **(
            {"per_layer_config": {str(i): {"head_dim": head_dim} for i in range(len(kinds))}}
            if listed
            else {"global_head_dim": head_dim, "num_global_key_value_heads": kv_heads}
        ),
        **(text or {}),
    }
    config = {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "text_config": inner,
        "backbone_hidden_size": backbone,
        "use_ordered_embeddings": centroids is not None,
        "num_centroids": centroids[0] if centroids else 2048,
        "centroid_intermediate_top_k": centroids[1] if centroids else 32,
        "tie_word_embeddings": True,
        "dtype": "float32",
        **changes,
    }
    weights = _weights(seed, inner, backbone, centroids)
    folder.mkdir(parents=True, exist_ok=True)
    if suppressed:
        settings = {"suppress_tokens": list(suppressed)}
        (folder / "generation_config.json").write_text(json.dumps(settings))
    _save(folder, config, weights)
    weights["model.embed_tokens.weight"] = _fitted_table(folder, target)
    return _save(folder, config, weights)


def _weights(
    seed: int, inner: dict[str, Any], backbone: int, centroids: tuple[int, int] | None
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * scale / columns**0.5

    def gains(size: int) -> Tensor:
        return 1.0 + 0.3 * torch.randn(size, generator=generator)

    vocab = inner["vocab_size"]
    weights = {
        "model.embed_tokens.weight": matrix(vocab, WIDTH, 2.0),
        "model.norm.weight": gains(WIDTH),
        "pre_projection.weight": matrix(WIDTH, 2 * backbone, 2.0),
        "post_projection.weight": matrix(backbone, WIDTH, 2.0),
    }
    for index in range(inner["num_hidden_layers"]):
        name, head_dim = f"model.layers.{index}.", _head_dim(inner, index)
        rows = HEADS * head_dim
        weights |= {
            f"{name}self_attn.q_proj.weight": matrix(rows, WIDTH),
            f"{name}self_attn.q_norm.weight": gains(head_dim),
            f"{name}self_attn.o_proj.weight": matrix(WIDTH, rows),
            f"{name}mlp.gate_proj.weight": matrix(INNER, WIDTH),
            f"{name}mlp.up_proj.weight": matrix(INNER, WIDTH),
            f"{name}mlp.down_proj.weight": matrix(WIDTH, INNER),
            f"{name}layer_scalar": torch.tensor([0.7 + 0.2 * index]),
        }
        for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            weights[f"{name}{norm}_layernorm.weight"] = gains(WIDTH)
    if centroids:
        weights["masked_embedding.centroids.weight"] = matrix(centroids[0], WIDTH)
        weights["masked_embedding.token_ordering"] = torch.randperm(vocab, generator=generator)
    return weights


def _head_dim(config: Mapping[str, Any], index: int) -> int:
    """The width of a head in one layer of an assistant."""
    name = "head_dim" if config["layer_types"][index] == SLIDING else "global_head_dim"
    size: int = config.get(name, config["head_dim"])
    return size


def turned(x: Tensor, rope: Mapping[str, Any]) -> Tensor:
    """x [T, heads, D]; proportional ropes turn some pairs of the whole head, by its frequencies."""
    size = x.shape[-1]
    if rope["rope_type"] != "proportional":
        return rotate(x, size, rope)
    frequencies = rope["rope_theta"] ** -(torch.arange(0, size, 2).float() / size)
    frequencies[int(rope["partial_rotary_factor"] * size / 2) :] = 0.0
    angles = torch.outer(torch.arange(len(x)).float(), frequencies).unsqueeze(1)
    one, two = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((one * cos - two * sin, two * cos + one * sin), -1)


class MixedTarget(Target):
    """A target with and without windows by layer, and the content of its cache."""

    def read(self, ids: Sequence[int]) -> Read:
        x = self.embedding[torch.tensor(ids)]
        streams = [x]
        for index, kind in enumerate(self.kinds):
            config = {**self.config, "use_sliding_window": kind == SLIDING}
            x = plain_layer(self.weights, index, x, config)
            streams.append(x)
        hidden = self.weights.norm("norm", x, self.config["rms_norm_eps"])
        return streams, hidden, hidden @ self.head.T

    @property
    def kinds(self) -> list[str]:
        kinds: list[str] = self.config.get("layer_types") or (
            [FULL] * self.config["num_hidden_layers"]
        )
        return kinds

    def cache(self, streams: Sequence[Tensor], kind: str) -> tuple[Tensor, Tensor]:
        """Keys and values [T, heads, D] of the last layer of this kind."""
        index = max(i for i, it in enumerate(self.kinds) if it == kind)
        name, eps = f"layers.{index}", self.config["rms_norm_eps"]
        normed = self.weights.norm(f"{name}.input_layernorm", streams[index], eps)
        head_dim = self.config["head_dim"]
        key, value = (
            self.weights.linear(f"{name}.self_attn.{part}_proj", normed).view(
                len(normed), -1, head_dim
            )
            for part in "kv"
        )
        key = self.weights.norm(f"{name}.self_attn.k_norm", key, eps)
        return rotate(key, head_dim, self.config), value


class Gemma4Target(Reader):
    """A Gemma 4 of transformers, and the content of its cache."""

    def __init__(self, folder: Path | str) -> None:
        super().__init__()
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.embedding = self._model.get_input_embeddings().weight.detach()
        self.head = self._model.get_output_embeddings().weight.detach()

    @torch.no_grad()
    def read(self, ids: Sequence[int]) -> Read:
        out = self._model(torch.tensor([list(ids)]), output_hidden_states=True)
        *streams, hidden = (states[0] for states in out.hidden_states)
        return streams, hidden, out.logits[0]

    @torch.no_grad()
    def cache(self, streams: Sequence[Tensor], kind: str) -> tuple[Tensor, Tensor]:
        """Keys and values [T, heads, D] of the last layer of this kind that has its own."""
        layers, config = self._model.model.layers, self._model.config
        own = range(len(layers) - config.num_kv_shared_layers)
        index = max(i for i in own if config.layer_types[i] == kind)
        attention = layers[index].self_attn
        normed = layers[index].input_layernorm(streams[index])
        heads = (len(normed), -1, attention.head_dim)
        key = attention.k_proj(normed).view(heads)
        value = key if attention.v_proj is None else attention.v_proj(normed).view(heads)
        key, value = attention.k_norm(key), attention.v_norm(value)
        return turned(key, config.rope_parameters[kind]), value


def oracle_of(target: Path | str) -> "MixedTarget | Gemma4Target":
    config = json.loads((Path(target) / "config.json").read_text())
    return Gemma4Target(target) if config["model_type"] == "gemma4_text" else MixedTarget(target)


def write_gemma4_assistant(folder: Path, target: Path, case: Case) -> str:
    """An assistant with one sliding and one full layer, for a target of this case."""
    kept = ("sliding_window", "rope_parameters")
    config = json.loads((target / "config.json").read_text())
    own_heads = config["num_key_value_heads"]
    text = {key: config[key] for key in kept} | {
        "global_head_dim": case.changes["global_head_dim"],
        "num_global_key_value_heads": case.changes.get("num_global_key_value_heads", own_heads),
    }
    return str(write_assistant(folder, target, kinds=(SLIDING, FULL), text=text))


class Assistant:
    """Section 7 of the format reference; `flags` take the place of what text_config says."""

    def __init__(
        self, folder: Path | str, target: MixedTarget | Gemma4Target, **flags: Any
    ) -> None:
        config, self.weights = load(folder)
        self.config = {**config, **config["text_config"], **flags}
        self.target, self.eps = target, 1e-6
        self.suppressed: list[int] = []
        file = Path(folder) / "generation_config.json"
        if file.exists():
            self.suppressed = json.loads(file.read_text())["suppress_tokens"]
        self._cached: tuple[list[int], dict[str, tuple[Tensor, Tensor]]] = [], {}

    def hidden(self, ids: Sequence[int], token: int, hidden: Tensor) -> Tensor:
        """[H], after the final norm, of the row of `token`, whatever it is, after ids[:-1]."""
        weights = self.weights
        embedded = self.target.embedding[token] * self.config["backbone_hidden_size"] ** 0.5
        x = weights.linear("pre_projection", torch.cat((embedded, hidden)))
        for index, kind in enumerate(self.config["layer_types"]):
            name = f"layers.{index}"
            mixed = self._attention(index, self._norm(f"{name}.input", x), ids, kind)
            x = x + self._norm(f"{name}.post_attention", mixed)
            normed = self._norm(f"{name}.pre_feedforward", x)
            gate, up = (
                weights.linear(f"{name}.mlp.{part}_proj", normed) for part in ("gate", "up")
            )
            active = torch.nn.functional.gelu(gate, approximate="tanh") * up
            addend = weights.linear(f"{name}.mlp.down_proj", active)
            x = x + self._norm(f"{name}.post_feedforward", addend)
            x = x * weights[f"{name}.layer_scalar"]
        return weights.norm("norm", x, self.eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """[V], minus infinity for tokens that are out of the question."""
        logits = self.weights["embed_tokens.weight"] @ hidden
        cap = self.config.get("final_logit_softcapping")
        if cap:
            logits = cap * torch.tanh(logits / cap)
        if self.config["use_ordered_embeddings"]:
            parts = self.weights["masked_embedding.token_ordering"].view(
                self.config["num_centroids"], -1
            )
            likely = self.weights["masked_embedding.centroids.weight"] @ hidden
            chosen = likely.topk(self.config["centroid_intermediate_top_k"]).indices
            kept = torch.full_like(logits, -torch.inf)
            kept[parts[chosen].flatten()] = 0.0
            logits = logits + kept
        logits[self.suppressed] = -torch.inf
        return logits

    def drafts(self, ids: Sequence[int], count: int) -> tuple[list[int], list[Tensor]]:
        """Greedy: (draft tokens, the logits of each) after `ids`."""
        hidden, token = self.target(ids[:-1])[1][-1], ids[-1]
        tokens: list[int] = []
        logits: list[Tensor] = []
        for _ in range(count):
            normed = self.hidden(ids, token, hidden)
            logits.append(self.logits(normed))
            token = int(logits[-1].argmax())
            tokens.append(token)
            hidden = self.weights.linear("post_projection", normed)
        return tokens, logits

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return rms(x, self.eps) * self.weights[f"{name}_layernorm.weight"]

    def _cache(self, ids: Sequence[int], kind: str) -> tuple[Tensor, Tensor]:
        """The target's after ids[:-1], which every layer of a kind and every draft reads."""
        if self._cached[0] != list(ids):
            self._cached = list(ids), {}
        found = self._cached[1]
        if kind not in found:
            found[kind] = self.target.cache(self.target(ids[:-1])[0], kind)
        return found[kind]

    def _attention(self, index: int, x: Tensor, ids: Sequence[int], kind: str) -> Tensor:
        name, head_dim = f"layers.{index}.self_attn", _head_dim(self.config, index)
        known = len(ids)
        key, value = self._cache(ids, kind)
        if kind == SLIDING:  # it and so many before it, of which it has no key of its own
            seen = max(0, known - self.config["sliding_window"])
            key, value = key[seen:], value[seen:]
        query = self.weights.linear(f"{name}.q_proj", x).view(HEADS, head_dim)
        query = rms(query, self.eps) * self.weights[f"{name}.q_norm.weight"]
        rope = self.config["rope_parameters"][kind]
        rows = query.expand(known, -1, -1)
        query = turned(rows, {"rope_type": "default", **rope})[-1]
        groups = HEADS // key.shape[1]
        key, value = (part.repeat_interleave(groups, 1) for part in (key, value))
        weights = torch.einsum("hd,khd->hk", query, key).softmax(-1)
        return self.weights.linear(
            f"{name}.o_proj", torch.einsum("hk,khd->hd", weights, value).flatten()
        )


@remembered
def _fitted_table(folder: Path, target: str | Path) -> Tensor:
    """The lm_head whose logits for the first draft token are nearest to the target's."""
    model = oracle_of(target)
    assistant = Assistant(folder, model)
    texts = torch.randint(
        0, model.head.shape[0], (FIT_TEXTS, FIT_LENGTH), generator=torch.Generator().manual_seed(9)
    )
    inputs, wanted = [], []
    for text in texts.tolist():
        _, hidden, logits = model(text)
        for length in range(4, FIT_LENGTH, 3):
            known = text[:length]
            inputs.append(assistant.hidden(known, known[-1], hidden[length - 2]))
            wanted.append(logits[length - 1])
    x, y = torch.stack(inputs), torch.stack(wanted)
    square = x.T @ x + 1e-2 * torch.eye(x.shape[1])
    return torch.linalg.solve(square, x.T @ y).T.contiguous()


def _save(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> Path:
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder
