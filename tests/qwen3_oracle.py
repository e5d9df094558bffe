"""Qwen3 in a page of plain torch, from its published description: no cache, no batch, no kernels.

A second opinion for drafters: it knows nothing of slots, blocks and positions, so it gives what a
language model says of a text that it reads from the beginning.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor


class Qwen3Oracle:
    """Reads a checkpoint of `tests/checkpoints.py`."""

    def __init__(self, folder: str | Path) -> None:
        self.config = json.loads((Path(folder) / "config.json").read_text())
        self.weights = {
            name: value.double()
            for name, value in load_file(Path(folder) / "model.safetensors").items()
        }

    def logits(
        self, ids: list[int], added: Tensor | None = None, positions: list[int] | None = None
    ) -> Tensor:
        """[T, vocab_size] float64 of a text, each row for the next token.

        Args:
            added: [T, hidden_size] to the embeddings.
            positions: of the tokens, where they are not all of a text.
        """
        self._positions = torch.tensor(positions or range(len(ids)))
        tied = self.config["tie_word_embeddings"]
        head = self.weights["model.embed_tokens.weight" if tied else "lm_head.weight"]
        return self._states(ids, added)[-1] @ head.T

    def hidden_states(self, ids: list[int], added: Tensor | None = None) -> list[Tensor]:
        """The inputs of all layers and the output of the final norm, each [T, hidden_size]."""
        self._positions = torch.arange(len(ids))
        return self._states(ids, added)

    def _states(self, ids: list[int], added: Tensor | None) -> list[Tensor]:
        stream = self.weights["model.embed_tokens.weight"][torch.tensor(ids)]
        if added is not None:
            stream = stream + added
        states = []
        for index in range(self.config["num_hidden_layers"]):
            states.append(stream)
            name = f"model.layers.{index}."
            stream = stream + self._attend(
                self._norm(stream, name + "input_layernorm"), name + "self_attn."
            )
            stream = stream + self._feed(
                self._norm(stream, name + "post_attention_layernorm"), name + "mlp."
            )
        return [*states, self._norm(stream, "model.norm")]

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = (x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]).rsqrt()
        return x * scale * self.weights[name + ".weight"]

    def _feed(self, x: Tensor, name: str) -> Tensor:
        gate, up, down = (
            self.weights[f"{name}{part}_proj.weight"] for part in ("gate", "up", "down")
        )
        return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T

    def _attend(self, x: Tensor, name: str) -> Tensor:
        size, count = self.config["head_dim"], len(x)
        query, key, value = (
            (x @ self.weights[f"{name}{part}_proj.weight"].T).view(count, -1, size).transpose(0, 1)
            for part in "qkv"
        )
        query = self._rotate(self._norm(query, name + "q_norm"))
        key = self._rotate(self._norm(key, name + "k_norm"))
        groups = len(query) // len(key)
        key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
        scores = query @ key.transpose(1, 2) / size**0.5
        later = torch.ones(count, count, dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(later, -torch.inf).softmax(-1) @ value
        return mixed.transpose(0, 1).reshape(count, -1) @ self.weights[name + "o_proj.weight"].T

    def _rotate(self, heads: Tensor) -> Tensor:
        """heads [heads, T, head_dim], row t at `_positions[t]`."""
        half = heads.shape[-1] // 2
        powers = torch.arange(half, dtype=torch.float64) / half
        angles = self._positions.unsqueeze(1) / self.config["rope_theta"] ** powers
        first, second = heads[..., :half], heads[..., half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
