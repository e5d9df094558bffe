"""Medusa heads (Cai et al. 2024, arXiv 2401.10774).

All heads read h, the target's hidden state of a token after the final norm. The target's lm_head
predicts the next token; head i predicts the token i + 2 positions after h's. Heads are independent.

    x = h;  x = x + silu(W x + b) for every layer;  logits = lm_head(x)

Every head has its own layers. The lm_head is its own, shared by all heads, or the target's.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.formats.weight import Weight
from slipstream.layers.embedding import Embedding, LanguageModelHead
from slipstream.layers.parameters import ParameterSource, Part
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.loading import LoadOptions
from slipstream.speculative.heads.last_hidden import LastHiddenDrafter, LastHiddenNetwork
from slipstream.speculative.heads.loading import HeadContext, load_head
from slipstream.speculative.heads.method import HeadMethod
from slipstream.speculative.medusa import own_head
from slipstream.speculative.medusa.checkpoint import (
    SHARED_HEAD,
    TOKEN_MAP,
    MedusaCheckpoint,
    MedusaConfig,
    MedusaShape,
    dummy_shape,
    read_medusa_config,
    read_shape,
)


def load_medusa(
    checkpoint: MedusaCheckpoint, config: MedusaConfig, target: DecoderConfig, options: LoadOptions
) -> "MedusaHeads":
    read = dummy_shape if options.load_format == "dummy" else read_shape
    shape = read(checkpoint, target.hidden_size, target.vocab_size)
    return load_head(checkpoint, target, options, partial(MedusaHeads, shape=shape), (TOKEN_MAP,))


class MedusaHeads(LastHiddenNetwork):
    """Computes the logits of several tokens from one hidden state."""

    def __init__(self, context: HeadContext, shape: MedusaShape) -> None:
        source, options = context.source, context.options
        self._ops, self._shape, self._dtype = context.ops, shape, options.dtype
        self.vocabulary = _on(shape.vocabulary, options.device)
        self._head_rows = _on(shape.head_rows, options.device)
        self.num_legal_tokens = shape.num_legal_tokens
        self._layers = self._read_layers(source)
        names: Sequence[str] = ()
        if shape.heads == "own":
            names = [own_head(index) for index in range(shape.num_heads)]
        elif shape.heads == "one":
            names = [SHARED_HEAD]
        self._heads = [self._chosen(self._read_head(source, name)) for name in names]

    def share(self, embedding: Embedding, head: LanguageModelHead) -> None:
        if self._shape.heads == "target":
            head = self._chosen(head)
            self._heads = [head]
            if head.tokens is not None:
                self.vocabulary, self.num_legal_tokens = head.tokens, head.num_tokens

    @property
    def num_ranks(self) -> int:
        return self._heads[0].columns.num_ranks

    def start(self, hidden: Tensor, count: int) -> Tensor:
        """hidden [R, H] -> the lm_head inputs of the first `count` heads, computed in one pass."""
        states = self._states(hidden.to(self._dtype), count)
        if self._shape.heads == "target":
            states = states.to(hidden.dtype)  # the dtype of the target's lm_head
        if self._shape.heads == "own":
            return states
        logits = self._heads[0](states.flatten(0, 1))
        return logits.view(count, len(hidden), -1)

    def logits(self, index: int, state: Tensor, last_tokens: Tensor) -> tuple[Tensor, Tensor]:
        if self._shape.heads == "own":
            return self._heads[index](state[index]), state
        return state[index], state

    def _states(self, hidden: Tensor, count: int) -> Tensor:
        """hidden [R, H] -> [count, R, H], the outputs of each head's layers."""
        width = hidden.shape[1]
        x = hidden.float().expand(count, -1, -1)
        for index, (weight, bias) in enumerate(self._layers):
            if index == 0:  # all heads read the same rows
                added = self._ops.logits(hidden, weight.rows(0, count * width))
                added = added.view(len(hidden), count, width).transpose(0, 1)
            else:
                rows = x.to(self._dtype)
                own = [weight.rows(head * width, (head + 1) * width) for head in range(count)]
                added = torch.stack([self._ops.logits(rows[i], own[i]) for i in range(count)])
            if bias is not None:
                added = added + bias[:count].unsqueeze(1)
            x = x + F.silu(added)
        return x.to(self._dtype).contiguous()

    def _read_layers(self, source: ParameterSource) -> list[tuple[Weight, Tensor | None]]:
        """Per layer: stacked matrices of all heads [heads * H, H], biases [heads, H] float32."""
        shape, width = self._shape, self._shape.hidden_size
        read: dict[tuple[str, ...], tuple[Weight, Tensor | None]] = {}
        layers = []
        for index in range(shape.num_layers):
            names = tuple(shape.layer_name(head, index) for head in range(shape.num_heads))
            if names not in read:
                weight = source.matrix([Part(f"{name}.weight", width) for name in names], width)
                bias = None
                if shape.bias:
                    stacked = source.vector([Part(f"{name}.bias", width) for name in names])
                    bias = stacked.float().view(shape.num_heads, width)
                read[names] = (weight, bias)
            layers.append(read[names])
        return layers

    def _read_head(self, source: ParameterSource, name: str) -> LanguageModelHead:
        part = Part(f"{name}.weight", self._shape.num_rows)
        return LanguageModelHead(self._ops, source.head([part], self._shape.hidden_size))

    def _chosen(self, head: LanguageModelHead) -> LanguageModelHead:
        """An lm_head with only the rows of the draft vocabulary, in its order."""
        return head if self._head_rows is None else head.over(self._head_rows)


def _on(table: Tensor | None, device: torch.device) -> Tensor | None:
    return None if table is None else table.to(device)


HEAD = HeadMethod(
    name="medusa",
    read=read_medusa_config,
    network=load_medusa,
    drafter=LastHiddenDrafter,
    checkpoint=MedusaCheckpoint,
)
