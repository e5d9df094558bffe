"""Tiny parallel draft models on disk, and what they are to draft.

PARD: committed tokens, then K-1 mask tokens, at consecutive positions under the ordinary causal
mask; the last K rows give the draft. PARD-2 is shown the target's features besides: the input of
token p is its embedding + scale * target_proj(features of p - 1); masks are shown the last features
that there are, which are those of the token before the bonus token.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.checkpoints import write_qwen3
from tests.qwen3_oracle import Qwen3Oracle

MASK = 90
WIDTH, TARGET_WIDTH = 32, 48
SHAPE: dict[str, Any] = {"hidden_size": WIDTH, "num_attention_heads": 4}


def write_pard(folder: Path) -> str:
    """Write a checkpoint as published: an ordinary model with two more keys, and a stored head."""
    changes: dict[str, Any] = {"spd_type": "pard", "pard_token": MASK, "tie_word_embeddings": False}
    return str(write_qwen3(folder, keep_layers=1, **changes))


def write_pard2(
    folder: Path,
    layers: list[int],
    bias: bool = False,
    target_width: int = TARGET_WIDTH,
    **changes: Any,
) -> str:
    """A one-layer drafter of another width than its target's, and its projection."""
    config = {
        "pard2": True,
        "spd_type": "pard2",
        "pard_token": MASK,
        "pard2_scale": 0.5,
        "pard2_proj_bias": bias,
        "pard2_target_dim": target_width * len(layers),
        "pard2_target_layers": layers,
        **SHAPE,
        **changes,
    }
    write_qwen3(folder, seed=7, keep_layers=1, **config)
    generator = torch.Generator().manual_seed(1)
    size = target_width * len(layers)
    weights = {"target_proj.weight": torch.randn(WIDTH, size, generator=generator) * 0.3}
    if bias:
        weights["target_proj.bias"] = torch.randn(WIDTH, generator=generator)
    torch.save(weights, folder / "warp_model.bin")
    return str(folder)


class Chain:
    """An oracle of a draft model, which adds one token at a time."""

    def __init__(self, draft: str) -> None:
        self.model = Qwen3Oracle(draft)

    def drafts(self, ids: Sequence[int], count: int) -> tuple[list[int], list[Tensor]]:
        known, logits = list(ids), []
        for _ in range(count):
            logits.append(self.model.logits(known)[-1])
            known.append(int(logits[-1].argmax()))
        return known[len(ids) :], logits


class Pard:
    """An oracle that computes all tokens of one text at once: the known ones, then masks."""

    def __init__(self, draft: str, mask: int = MASK) -> None:
        self.model, self.mask = Qwen3Oracle(draft), mask

    def logits(self, ids: Sequence[int], count: int) -> Tensor:
        return self.model.logits([*ids, *[self.mask] * (count - 1)])[-count:]

    def drafts(self, ids: Sequence[int], count: int) -> tuple[list[int], list[Tensor]]:
        logits = self.logits(ids, count)
        return logits.argmax(-1).tolist(), list(logits)


class Pard2(Pard):
    """An oracle in which both models compute the whole text for every draft."""

    def __init__(self, target: str, draft: str) -> None:
        super().__init__(draft)
        self.target = Qwen3Oracle(target)
        self.weights = torch.load(Path(draft) / "warp_model.bin", weights_only=True)

    def logits(self, ids: Sequence[int], count: int) -> Tensor:
        config, known, masks = self.model.config, len(ids), count - 1
        states = self.target.hidden_states(list(ids))
        features = torch.cat([states[layer] for layer in config["pard2_target_layers"]], -1)
        shown = features @ self.weights["target_proj.weight"].double().T
        if "target_proj.bias" in self.weights:
            shown = shown + self.weights["target_proj.bias"].double()
        shown = config["pard2_scale"] * shown
        added = torch.zeros(known + masks, WIDTH, dtype=torch.float64)
        added[1:known] = shown[: known - 1]
        added[known:] = shown[known - 2]
        return self.model.logits([*ids, *[self.mask] * masks], added)[-count:]
