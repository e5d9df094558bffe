"""MTP modules in plain torch, written from section 6 of the format reference.

Whole sequences, no cache. Row i of module j (both from 0) takes the embedding of token i + 1 + j
and what module j - 1 gave in row i (the target's hidden state after its final norm for j = 0); it
predicts token i + 2 + j.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.drafters.oracles import Target, Weights, attention, load, mixture, mlp

FEATURE_FIRST = {"mimo"}
BLANK_FIRST = {"mimo", "deepseek"}
ZERO_CENTRED = {"qwen"}
PARTS = {
    "qwen": ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"),
    "deepseek": ("{}.enorm", "{}.hnorm", "{}.eh_proj", "{}.shared_head.norm"),
    "mimo": ("{}.token_layernorm", "{}.hidden_layernorm", "{}.input_proj", "{}.final_layernorm"),
}
PARTS["speculators"] = PARTS["mimo"]


class Mtp:
    """The modules of a folder; `flags` turn single traits of the style on or off."""

    def __init__(self, folder: Path | str, target: Target, style: str, **flags: bool) -> None:
        config, self.weights = load(folder)
        self.config = config.get("transformer_layer_config", config)
        self.target, self.style, self.eps = target, style, self.config["rms_norm_eps"]
        self.feature_first = flags.get("feature_first", style in FEATURE_FIRST)
        self.blank_first = flags.get("blank_first", style in BLANK_FIRST)
        self.zero_centred = flags.get("zero_centred", style in ZERO_CENTRED)
        self.recycles_normed = flags.get("recycles_normed", True)
        self.reads_normed = flags.get("reads_normed", True)
        if self.zero_centred:
            self.weights = _centred(self.weights)
        first = {"qwen": "mtp.layers.{}", "deepseek": "layers.{}"}.get(style, "mtp_layers.{}")
        start = target.config["num_hidden_layers"] if style == "deepseek" else 0
        self.layers = []
        while f"{first.format(start)}.input_layernorm.weight" in self.weights:
            self.layers.append(first.format(start))
            start += 1

    def part(self, module: int, place: int) -> str:
        return PARTS[self.style][place].format(self.layers[module])

    def entry_norms(
        self, module: int, tokens: Sequence[int], features: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The two halves of what the projection reads; row 0 is the text's first."""
        embedded = self.target.embedding[torch.tensor(tokens)].clone()
        if self.blank_first:
            embedded[0] = 0
        e = self.weights.norm(self.part(module, 0), embedded, self.eps)
        return e, self.weights.norm(self.part(module, 1), features, self.eps)

    def module(self, module: int, tokens: Sequence[int], features: Tensor) -> Tensor:
        """tokens of length T, features [T, H] -> [T, H] after the last norm."""
        x = self.stream(module, tokens, features)
        return self.weights.norm(self.part(module, 3), x, self.eps)

    def stream(self, module: int, tokens: Sequence[int], features: Tensor) -> Tensor:
        """The residual stream [T, H] of `module`, in front of the last norm."""
        e, h = self.entry_norms(module, tokens, features)
        joined = torch.cat((h, e) if self.feature_first else (e, h), -1)
        x = self.weights.linear(self.part(module, 2), joined)
        name = self.layers[module]
        normed = self.weights.norm(f"{name}.input_layernorm", x, self.eps)
        x = x + attention(self.weights, f"{name}.self_attn", normed, self.config)
        normed = self.weights.norm(f"{name}.post_attention_layernorm", x, self.eps)
        if f"{name}.mlp.gate.weight" in self.weights:
            return x + mixture(self.weights, f"{name}.mlp", normed, self.config)
        return x + mlp(self.weights, f"{name}.mlp", normed)

    def features(self, ids: Sequence[int]) -> Tensor:
        streams, hidden, _ = self.target(ids)
        return hidden if self.reads_normed else streams[-1]

    def drafts(self, ids: Sequence[int], count: int) -> tuple[list[int], list[Tensor]]:
        """Greedy: (draft tokens, the logits of each) after `ids`."""
        tokens, given = list(ids), self.features(ids[:-1])
        drafts: list[int] = []
        logits: list[Tensor] = []
        for index in range(count):
            module = min(index, len(self.layers) - 1)
            x = self.stream(module, tokens[1 + module :], given)
            y = self.weights.norm(self.part(module, 3), x, self.eps)
            scores = y[-1] @ self.target.head.T
            logits.append(scores)
            drafts.append(int(scores.argmax()))
            tokens.append(drafts[-1])
            following = y if self.recycles_normed else x
            # The last module goes on alone: its next row reads what its last one gave.
            goes_on = index + 1 >= len(self.layers)
            given = torch.cat((given, following[-1:])) if goes_on else following
        return drafts, logits


def _centred(weights: Weights) -> Weights:
    tensors: dict[str, Any] = weights._tensors
    return Weights({name: t + 1 if "norm" in name else t for name, t in tensors.items()})
