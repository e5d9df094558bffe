"""Medusa heads and MLPSpeculators for tests, random or right by construction, and their oracles.

The oracles are plain torch over the tensors as they are stored, written from the formats alone.
"""

import json
from collections.abc import Callable
from itertools import pairwise
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from tests.checkpoints import write_qwen3

Tensors = dict[str, Tensor]
Guess = Callable[[Tensor, int, int], list[Tensor]]
"""(hidden [H], last token, K) -> greedy logits of K draft tokens."""

NUM_HEADS = 7


def target_sizes(target: str) -> tuple[int, int]:
    """(hidden size, vocabulary)."""
    config = json.loads((Path(target) / "config.json").read_text())
    return config["hidden_size"], config["vocab_size"]


# ---------------------------------------------------------------------- Medusa


def medusa_tensors(
    width: int, vocab_size: int, heads: int = NUM_HEADS, layers: int = 1, seed: int = 0
) -> Tensors:
    """The tensors of a Medusa checkpoint, as FasterDecoding stores them."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator) * scale

    tensors: Tensors = {}
    for head in range(heads):
        for layer in range(layers):
            tensors[f"{head}.{layer}.linear.weight"] = random(width, width, scale=width**-0.5)
            tensors[f"{head}.{layer}.linear.bias"] = random(width, scale=0.3)
        tensors[f"{head}.{layers}.weight"] = random(vocab_size, width, scale=2 * width**-0.5)
    return tensors


def converted(tensors: Tensors, layers: int = 1, bias: bool = True) -> Tensors:
    """The tensors under vLLM's names."""
    renamed: Tensors = {}
    for name, value in tensors.items():
        head, layer, *rest = name.split(".")
        if int(layer) == layers:
            renamed[f"medusa_heads.lm_heads.{head}.weight"] = value
        elif bias or rest[-1] == "weight":
            renamed[f"medusa_heads.blocks.{head}.layers.{layer}.{rest[-1]}"] = value
    return renamed


def write_medusa(
    folder: Path, tensors: Tensors, file: str = "medusa_lm_head.safetensors", **config: Any
) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    if file.endswith(".safetensors"):
        save_file({name: value.contiguous() for name, value in tensors.items()}, folder / file)
    else:
        torch.save(tensors, folder / file)
    config = config or {"medusa_num_heads": NUM_HEADS, "medusa_num_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def medusa_oracle(tensors: Tensors, layers: int = 1) -> Guess:
    """The guesses of a head whose tensors have the original names."""

    def guess(hidden: Tensor, last: int, count: int) -> list[Tensor]:
        rows = []
        for head in range(count):
            x = hidden
            for layer in range(layers):
                prefix = f"{head}.{layer}.linear"
                x = x + F.silu(tensors[f"{prefix}.weight"] @ x + tensors[f"{prefix}.bias"])
            rows.append(tensors[f"{head}.{layers}.weight"] @ x)
        return rows

    return guess


def medusa_for(target: str, heads: int = NUM_HEADS) -> str:
    """Random heads for a target, in a folder of their own."""
    folder = Path(target) / f"medusa-{heads}"
    if folder.is_dir():
        return str(folder)
    tensors = medusa_tensors(*target_sizes(target), heads=heads)
    return write_medusa(folder, tensors, medusa_num_heads=heads, medusa_num_layers=1)


def mapped_medusa_for(target: str) -> str:
    """Random heads over some of a target's tokens, named from the last one to the first."""
    folder = Path(target) / "mapped_medusa"
    if folder.is_dir():
        return str(folder)
    width, vocab_size = target_sizes(target)
    ids = torch.tensor([token for token in range(vocab_size - 1, -1, -1) if token % 3])
    tensors = converted(medusa_tensors(width, vocab_size)) | {"token_map": ids}
    return write_medusa(folder, tensors, "model.safetensors")


# ---------------------------------------------------------------------- MLPSpeculator


def mlp_tensors(
    width: int, vocab_size: int, inner: int, steps: int = NUM_HEADS, tied: bool = False
) -> Tensors:
    """The tensors of an MLP speculator, as IBM stores them."""
    generator = torch.Generator().manual_seed(2)

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator) * scale

    tensors: Tensors = {}
    for step in range(steps):
        columns = inner if step else width
        if step < (2 if tied else steps):
            tensors[f"speculator.proj.{step}.weight"] = random(inner, columns, scale=columns**-0.5)
        if step < (1 if tied else steps):
            tensors[f"speculator.emb.{step}.weight"] = random(vocab_size, inner)
            tensors[f"speculator.head.{step}.weight"] = random(
                vocab_size, inner, scale=3 * inner**-0.5
            )
            tensors[f"speculator.ln.{step}.weight"] = 1 + random(inner, scale=0.2)
            tensors[f"speculator.ln.{step}.bias"] = random(inner, scale=0.2)
    return tensors


def mlp_config(width: int, vocab_size: int, inner: int, steps: int = NUM_HEADS) -> dict[str, Any]:
    return {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "vocab_size": vocab_size,
        "emb_dim": width,
        "inner_dim": inner,
        "n_predict": steps,
        "top_k_tokens_per_head": [5, 4, 3],
        "n_candidates": 5,
        "tie_weights": False,
        "scale_input": False,
        "torch_dtype": "float32",
    }


def write_mlp(
    folder: Path, tensors: Tensors, config: dict[str, Any], file: str = "model.safetensors"
) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    if file.endswith(".safetensors"):
        save_file(tensors, folder / file)
    else:
        torch.save(tensors, folder / file)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def mlp_oracle(tensors: Tensors, config: dict[str, Any]) -> Guess:
    """The greedy chain."""
    steps, tied = config["n_predict"], config["tie_weights"]
    inner = config["inner_dim"] or config["emb_dim"]
    state_weight = 0.5 ** (0.5 / steps)
    token_weight = sqrt(1 - state_weight**2) * sqrt(inner / 2)

    def rms(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean() + 1e-6)

    def guess(hidden: Tensor, last: int, count: int) -> list[Tensor]:
        state, rows = hidden, []
        if config["scale_input"]:
            state = rms(state) / sqrt(2)
        for step in range(count):
            at = 0 if tied else step
            projected = tensors[f"speculator.proj.{min(step, 1) if tied else step}.weight"] @ state
            state = projected * state_weight
            state = state + tensors[f"speculator.emb.{at}.weight"][last] * token_weight
            state = rms(state) * tensors[f"speculator.ln.{at}.weight"]
            state = F.gelu(state + tensors[f"speculator.ln.{at}.bias"])
            rows.append(tensors[f"speculator.head.{at}.weight"] @ state)
            last = int(rows[-1].argmax())
        return rows

    return guess


def mlp_for(target: str, steps: int = NUM_HEADS) -> str:
    """A random speculator for a target, in another folder."""
    folder = Path(target) / f"mlp_speculator-{steps}"
    if folder.is_dir():
        return str(folder)
    width, vocab_size = target_sizes(target)
    tensors = mlp_tensors(width, vocab_size, inner=40, steps=steps)
    return write_mlp(folder, tensors, mlp_config(width, vocab_size, inner=40, steps=steps))


# ---------------------------------------------------------------------- right by construction


def write_cycle_target(folder: Path) -> str:
    """A target whose next token follows from the last one alone: they go round in one cycle."""
    path = write_qwen3(folder, tie_word_embeddings=False)
    tensors = load_file(path / "model.safetensors")
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name].zero_()  # nothing but the embedding reaches the head
    embedding = F.normalize(tensors["model.embed_tokens.weight"], dim=1)
    tensors["model.embed_tokens.weight"] = embedding
    tensors["lm_head.weight"] = _moved(embedding, cycle(len(embedding)), 1)
    save_file(tensors, path / "model.safetensors")
    return str(path)


def cycle(vocab_size: int) -> Tensor:
    """[V]: the token after each."""
    order = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(4)).tolist()
    next_token = torch.empty(vocab_size, dtype=torch.int64)
    for token, follower in pairwise([*order, order[0]]):
        next_token[token] = follower
    return next_token


def write_right_medusa(folder: Path, target: str) -> str:
    """Heads that predict the cycle, except for every fifth token of each."""
    embedding = load_file(Path(target) / "model.safetensors")["model.embed_tokens.weight"]
    vocab_size, width = embedding.shape
    tensors: Tensors = {}
    for head in range(NUM_HEADS):
        tensors[f"{head}.0.linear.weight"] = torch.zeros(width, width)
        tensors[f"{head}.0.linear.bias"] = torch.zeros(width)
        rows = _moved(embedding, cycle(vocab_size), head + 2)
        rows[head::5] = 0
        tensors[f"{head}.1.weight"] = rows
    return write_medusa(folder, tensors)


def write_right_mlp(folder: Path, target: str) -> str:
    """Steps that predict the next token from the last one, except for every fifth token."""
    width, vocab_size = target_sizes(target)
    tensors = mlp_tensors(width, vocab_size, inner=vocab_size)
    follower = torch.eye(vocab_size)[cycle(vocab_size)].T.contiguous()
    for step in range(NUM_HEADS):
        tensors[f"speculator.proj.{step}.weight"].zero_()
        tensors[f"speculator.emb.{step}.weight"] = torch.eye(vocab_size)
        tensors[f"speculator.ln.{step}.weight"].fill_(1)
        tensors[f"speculator.ln.{step}.bias"].zero_()
        rows = follower.clone()
        rows[step::5] = 0
        tensors[f"speculator.head.{step}.weight"] = rows
    return write_mlp(folder, tensors, mlp_config(width, vocab_size, inner=vocab_size))


def _moved(embedding: Tensor, next_token: Tensor, steps: int) -> Tensor:
    """[V, H]: the row of the token `steps` after t is the embedding of t."""
    place = torch.arange(len(next_token))
    for _ in range(steps):
        place = next_token[place]
    rows = torch.empty_like(embedding)
    rows[place] = embedding
    return rows
