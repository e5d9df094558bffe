"""A target and drafting heads in plain torch, written from the papers and published formats.

Nothing here is shared with the engine: whole sequences, no cache, one row after another. Tensors
have the names of the files; `Weights` forgives a leading `model.` and the two names of layer 0.
"""

import json
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

Config = Mapping[str, Any]
Read = tuple[list[Tensor], Tensor, Tensor]


class Weights:
    """Tensors of a checkpoint by their shortest name."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = {
            name.removeprefix("model.").replace("midlayer.", "layers.0."): tensor
            for name, tensor in tensors.items()
        }

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def items(self) -> Iterable[tuple[str, Tensor]]:
        return self._tensors.items()

    def linear(self, name: str, x: Tensor) -> Tensor:
        out = x @ self[f"{name}.weight"].T
        return out + self[f"{name}.bias"] if f"{name}.bias" in self else out

    def norm(self, name: str, x: Tensor, eps: float) -> Tensor:
        return rms(x, eps) * self[f"{name}.weight"]


def rms(x: Tensor, eps: float) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt()


def load(folder: Path | str) -> tuple[Config, Weights]:
    folder = Path(folder)
    config = json.loads((folder / "config.json").read_text())
    return config, Weights(load_file(folder / "model.safetensors"))


def attention(weights: Weights, name: str, x: Tensor, config: Config) -> Tensor:
    """Causal attention of rows at positions 0, 1 ...; x [T, whatever q_proj takes]. No row sees
    those of `left_out`."""
    if f"{name}.kv_a_proj_with_mqa.weight" in weights:
        return latent_attention(weights, name, x, config)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    query, key, value = (
        weights.linear(f"{name}.{part}_proj", x).view(len(x), -1, head_dim) for part in "qkv"
    )
    if f"{name}.q_norm.weight" in weights:
        query = weights.norm(f"{name}.q_norm", query, config["rms_norm_eps"])
        key = weights.norm(f"{name}.k_norm", key, config["rms_norm_eps"])
    query, key = (rotate(part, head_dim, config) for part in (query, key))
    key, value = (part.repeat_interleave(heads // kv_heads, 1) for part in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) / head_dim**0.5
    hidden = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    if config.get("use_sliding_window"):
        hidden |= torch.ones_like(hidden).tril(-config["sliding_window"])
    if "left_out" in config:
        hidden[:, slice(*config["left_out"])] = True
    mixed = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value.transpose(0, 1)
    return weights.linear(f"{name}.o_proj", mixed.transpose(0, 1).flatten(1))


def latent_attention(weights: Weights, name: str, x: Tensor, config: Config) -> Tensor:
    """Section 6.2 of the reference of models, in the plain form."""
    heads, rank = config["num_attention_heads"], config["kv_lora_rank"]
    plain, turned = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    low = weights.norm(f"{name}.q_a_layernorm", weights.linear(f"{name}.q_a_proj", x), 1e-6)
    query = weights.linear(f"{name}.q_b_proj", low).view(len(x), heads, plain + turned)
    latent, shared = weights.linear(f"{name}.kv_a_proj_with_mqa", x).split((rank, turned), -1)
    latent = weights.norm(f"{name}.kv_a_layernorm", latent, 1e-6)
    both = weights.linear(f"{name}.kv_b_proj", latent).view(len(x), heads, -1)
    key, value = both[..., :plain], both[..., plain:]

    def pairs_apart(x: Tensor) -> Tensor:
        return rotate(torch.cat((x[..., 0::2], x[..., 1::2]), -1), turned, config)

    scores = torch.einsum("qhd,khd->hqk", query[..., :plain], key)
    scores = scores + torch.einsum(
        "qhd,kd->hqk", pairs_apart(query[..., plain:]), pairs_apart(shared[:, None])[:, 0]
    )
    hidden = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    scores = (scores / (plain + turned) ** 0.5).masked_fill(hidden, -torch.inf)
    mixed = scores.softmax(-1) @ value.transpose(0, 1)
    return weights.linear(f"{name}.o_proj", mixed.transpose(0, 1).flatten(1))


def rotate(x: Tensor, head_dim: int, config: Config) -> Tensor:
    """Half-split rotary embedding of the first part of a head; a missing theta is 10000."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta: float = rope.get("rope_theta") or config.get("rope_theta", 10000.0)
    size = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    cos, sin = turns(len(x), size, theta, json.dumps(rope))
    one, two = x[..., :size].chunk(2, -1)
    return torch.cat((one * cos - two * sin, two * cos + one * sin, x[..., size:]), -1)


@cache
def turns(rows: int, size: int, theta: float, rope: str) -> tuple[Tensor, Tensor]:
    """[rows, 1, size / 2] each: cosines and sines, which all heads of all layers ask for."""
    settings = json.loads(rope)
    frequencies, weight = theta ** -(torch.arange(0, size, 2).float() / size), 1.0
    if settings.get("rope_type") == "yarn":
        frequencies, weight = yarn(frequencies, theta, settings)
    angles = torch.outer(torch.arange(rows).float(), frequencies).unsqueeze(1)
    return angles.cos() * weight, angles.sin() * weight


def yarn(frequencies: Tensor, theta: float, rope: Config) -> tuple[Tensor, float]:
    """Section 1.4 of the reference of models: frequencies, and the factor of cosines and sines."""
    factor, original = rope["factor"], rope["original_max_position_embeddings"]
    size = 2 * len(frequencies)

    def dim(beta: float) -> float:
        return size * math.log(original / (2 * math.pi * beta)) / (2 * math.log(theta))

    low, high = dim(rope.get("beta_fast", 32.0)), dim(rope.get("beta_slow", 1.0))
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    high += 0.001 if low == high else 0
    ramp = ((torch.arange(size // 2) - low) / (high - low)).clamp(0, 1)
    mixed = frequencies / factor * ramp + frequencies * (1 - ramp)
    return mixed, 0.1 * math.log(factor) + 1


def mlp(weights: Weights, name: str, x: Tensor) -> Tensor:
    gate, up = (weights.linear(f"{name}.{part}_proj", x) for part in ("gate", "up"))
    return weights.linear(f"{name}.down_proj", torch.nn.functional.silu(gate) * up)


def plain_layer(weights: Weights, index: int, x: Tensor, config: Config) -> Tensor:
    name, eps = f"layers.{index}", config["rms_norm_eps"]
    normed = weights.norm(f"{name}.input_layernorm", x, eps)
    x = x + attention(weights, f"{name}.self_attn", normed, config)
    return x + mlp(weights, f"{name}.mlp", weights.norm(f"{name}.post_attention_layernorm", x, eps))


def mixture(weights: Weights, name: str, x: Tensor, config: Config) -> Tensor:
    """Section 1.6 of the reference of models: noaux_tc without groups, or softmax over all."""
    logits, corrected = x @ weights[f"{name}.gate.weight"].T, f"{name}.gate.e_score_correction_bias"
    if corrected in weights:
        scores = logits.sigmoid()
        preferred = scores + weights[corrected]
    else:
        preferred = scores = logits.softmax(-1)
    chosen = preferred.topk(config["num_experts_per_tok"]).indices
    share = scores.gather(-1, chosen)
    share = share / share.sum(-1, keepdim=True) * config.get("routed_scaling_factor", 1.0)
    shared = f"{name}.shared_experts"
    out = torch.zeros_like(x)
    if f"{shared}.up_proj.weight" in weights:
        out = mlp(weights, shared, x)
    for row, (experts, factors) in enumerate(zip(chosen.tolist(), share, strict=True)):
        for expert, factor in zip(experts, factors, strict=True):
            out[row] += factor * mlp(weights, f"{name}.experts.{expert}", x[row])
    return out


class Reader:
    """Reads texts with a causal model: the streams that enter each layer and leave the last, the
    final hidden state, the logits.

    Rows follow from the tokens up to them alone, so the beginning of a text that was read shortly
    before is not read again.
    """

    def __init__(self) -> None:
        self._known: deque[tuple[list[int], Read]] = deque(maxlen=8)

    def __call__(self, ids: Sequence[int]) -> Read:
        for text, (streams, hidden, logits) in self._known:
            if text[: len(ids)] == list(ids):
                rows = slice(len(ids))
                return [stream[rows] for stream in streams], hidden[rows], logits[rows]
        read = self.read(ids)
        self._known.appendleft((list(ids), read))
        return read

    def read(self, ids: Sequence[int]) -> Read:
        raise NotImplementedError


class Target(Reader):
    """Models with experts are run by transformers."""

    def __init__(self, folder: Path | str) -> None:
        super().__init__()
        self.config, self.weights = load(folder)
        tied = self.config["tie_word_embeddings"]
        self.embedding = self.weights["embed_tokens.weight"]
        self.head = self.embedding if tied else self.weights["lm_head.weight"]
        has_experts = any(".experts." in name for name, _ in self.weights.items())
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder) if has_experts else None

    def read(self, ids: Sequence[int]) -> Read:
        if self._model is not None:
            return self._of_transformers(ids)
        x = self.embedding[torch.tensor(ids)]
        streams = [x]
        for index in range(self.config["num_hidden_layers"]):
            x = plain_layer(self.weights, index, x, self.config)
            streams.append(x)
        hidden = self.weights.norm("norm", x, self.config["rms_norm_eps"])
        return streams, hidden, hidden @ self.head.T

    @torch.no_grad()
    def _of_transformers(self, ids: Sequence[int]) -> Read:
        entering: list[Tensor] = []
        hook = self._model.model.norm.register_forward_pre_hook(
            lambda _, inputs: entering.append(inputs[0][0])
        )
        out = self._model(torch.tensor([list(ids)]), output_hidden_states=True)
        hook.remove()
        *streams, hidden = (states[0] for states in out.hidden_states)
        return [*streams, *entering], hidden, out.logits[0]


class Head:
    """The chain of drafts that both kinds of heads share."""

    def __init__(self, folder: Path | str, target: Target, **flags: Any) -> None:
        config, self.weights = load(folder)
        self.config = {**config, **flags}
        self.target, self.eps = target, config["rms_norm_eps"]
        weights = self.weights
        has = "embed_tokens.weight" in weights
        self.embedding = weights["embed_tokens.weight"] if has else target.embedding
        has = "lm_head.weight" in weights
        self.head = weights["lm_head.weight"] if has else target.head

    def features(self, ids: Sequence[int]) -> Tensor:
        """[T, H], of every token."""
        raise NotImplementedError

    def rows(self, tokens: Sequence[int], features: Tensor) -> tuple[Tensor, Tensor]:
        """Row i takes token i + 1 and feature i: (logits [T, Vd], next features [T, H])."""
        raise NotImplementedError

    def drafts(self, ids: Sequence[int], count: int) -> tuple[list[int], list[Tensor]]:
        """Greedy: (draft tokens, the logits of each) after `ids`."""
        tokens, features = list(ids[1:]), self.features(ids[:-1])
        drafts: list[int] = []
        logits: list[Tensor] = []
        for _ in range(count):
            scores, following = self.rows(tokens, features)
            logits.append(scores[-1])
            index = int(scores[-1].argmax())
            if "d2t" in self.weights:
                index += int(self.weights["d2t"][index])
            drafts.append(index)
            tokens.append(index)
            features = torch.cat((features, following[-1:]))
        return drafts, logits


class Eagle3(Head):
    """Section 3 of the format reference, with its flags as the config has them."""

    def features(self, ids: Sequence[int]) -> Tensor:
        streams, hidden, _ = self.target(ids)
        if not self.config.get("use_aux_hidden_state", True):
            return hidden
        layers = self.config["eagle_aux_hidden_state_layer_ids"]
        return self.fused([streams[layer] for layer in layers])

    def fused(self, picked: Sequence[Tensor]) -> Tensor:
        if self.config.get("fc_norm"):
            picked = [
                self.weights.norm(f"fc_norm.{i}", stream, self.eps)
                for i, stream in enumerate(picked)
            ]
        joined = torch.cat(list(picked), -1)
        if self.config.get("norm_before_fc"):
            joined = self.weights.norm("input_norm", joined, self.eps)
        return self.weights.linear("fc", joined)

    def rows(self, tokens: Sequence[int], features: Tensor) -> tuple[Tensor, Tensor]:
        weights, name = self.weights, "layers.0"
        embedded = self.embedding[torch.tensor(tokens)]
        e = weights.norm(f"{name}.input_layernorm", embedded, self.eps)
        u = weights.norm(f"{name}.hidden_norm", features, self.eps)
        x = u if self.config.get("norm_before_residual") else features
        x = x + attention(weights, f"{name}.self_attn", torch.cat((e, u), -1), self.config)
        normed = weights.norm(f"{name}.post_attention_layernorm", x, self.eps)
        x = x + mlp(weights, f"{name}.mlp", normed)
        for index in range(1, self.config["num_hidden_layers"]):
            x = plain_layer(weights, index, x, self.config)
        normed = weights.norm("norm", x, self.eps)
        return normed @ self.head.T, normed if self.config.get("norm_output") else x


MASK = 2  # token that parallel heads ask with in the tests


class PEagle(Eagle3):
    """Section 5: masks after the known tokens, all in one pass."""

    def __init__(self, folder: Path | str, target: Target, mask: int, **flags: Any) -> None:
        super().__init__(folder, target, **flags)
        self.mask = mask

    def mask_feature(self) -> Tensor:
        """[1, H]: the learned vector goes where a token's streams would go."""
        vector = self.weights["mask_hidden"].view(1, -1)
        if not self.config.get("use_aux_hidden_state", True):
            return vector
        return self.fused(vector.split(self.target.embedding.shape[1], -1))

    def masked(self, ids: Sequence[int], count: int) -> tuple[list[int], Tensor]:
        """Tokens and features of the rows after `ids`, `count` - 1 masks the last of them."""
        masks = [self.mask] * (count - 1)
        features = [self.features(ids[:-1]), *[self.mask_feature()] * (count - 1)]
        return [*ids[1:], *masks], torch.cat(features)

    def drafts(self, ids: Sequence[int], count: int) -> tuple[list[int], list[Tensor]]:
        logits = list(self.rows(*self.masked(ids, count))[0][-count:])
        drafts = [int(scores.argmax()) for scores in logits]
        if "d2t" in self.weights:
            drafts = [index + int(self.weights["d2t"][index]) for index in drafts]
        return drafts, logits


def p_eagle_oracle(
    folder: Path | str, target: Path | str, mask: int = MASK, **flags: Any
) -> PEagle:
    """The oracle of a head, with the target that the head is for."""
    return PEagle(folder, Target(target), mask, **flags)


class Eagle1(Head):
    """Section 2 of the format reference."""

    def features(self, ids: Sequence[int]) -> Tensor:
        return self.target(ids)[1]

    def rows(self, tokens: Sequence[int], features: Tensor) -> tuple[Tensor, Tensor]:
        weights, name = self.weights, "layers.0"
        embedded = self.embedding[torch.tensor(tokens)]
        x = weights.linear("fc", torch.cat((embedded, features), -1))
        x = x + attention(weights, f"{name}.self_attn", x, self.config)
        normed = weights.norm(f"{name}.post_attention_layernorm", x, self.eps)
        x = x + mlp(weights, f"{name}.mlp", normed)
        for index in range(1, self.config["num_hidden_layers"]):
            x = plain_layer(weights, index, x, self.config)
        return x @ self.head.T, x
