"""DSpark: a DFlash block with heads that choose its tokens one after the other.

    logits_i = lm_head(h_i) + W2 r_i        h_i: row i of the block, after the final norm
    r_i = e_i                               "vanilla"; e_i = W1[token before position i]
    r_i = sigmoid(G [h_i, e_i]) * e_i       "gated"
    g, c, o = J [s_(i-1), e_i, h_i];  s_i = sigmoid(g) s_(i-1) + (1 - sigmoid(g)) tanh(c)
    r_i = tanh(o)                           "rnn", with s = 0 before the block
    confidence_i = sigmoid(C [h_i, e_i])    acceptance probability of the token at position i

W1 has a row for each token of the target's vocabulary, W2 for each of the draft vocabulary.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.core.errors import CheckpointError
from slipstream.layers.embedding import Embedding, LanguageModelHead
from slipstream.layers.linear import Linear, column_linear
from slipstream.layers.parameters import Part
from slipstream.speculative.dflash.drafter import BlockChainDrafter
from slipstream.speculative.dflash.network import (
    BlockKeys,
    DFlashConfig,
    DFlashNetwork,
    read_block_config,
)
from slipstream.speculative.draft_sampling import Places
from slipstream.speculative.heads.checkpoint import HeadCheckpoint
from slipstream.speculative.heads.loading import HeadContext, load_network
from slipstream.speculative.heads.method import HeadMethod
from slipstream.speculative.model_options import ModelKeys

_HEAD_TYPES = ("vanilla", "gated", "rnn")
_USUAL_RANK = 256


@dataclass(frozen=True, kw_only=True)
class DSparkConfig(DFlashConfig):
    """The config of a DSpark network.

    Attributes:
        rank: rank of the correction head; 0 if there is none.
        head_type: "vanilla": the correction depends on the previous token only; "gated": it is also
            gated by the hidden state; "rnn": it depends on all previous tokens of the block.
        tells_confidence: there is a head that estimates acceptance probabilities.
        confidence_sees_token: the confidence head also reads the previous token's embedding.
    """

    parallel: ClassVar[bool] = False

    rank: int
    head_type: str
    tells_confidence: bool
    confidence_sees_token: bool


def read_dspark_config(checkpoint: HeadCheckpoint) -> DSparkConfig:
    """Read the keys of DFlash and of both heads; which heads exist is read from the tensors."""
    config = read_block_config(checkpoint, DSparkConfig, "dspark", _read_own, from_anchor=True)
    if checkpoint.has_weights and "confidence_head.proj.weight" not in checkpoint.tensor_names:
        config = replace(config, tells_confidence=False)
    if config.tells_confidence and config.confidence_sees_token and not config.rank:
        raise CheckpointError(
            f"{checkpoint.config_file}: confidence_head_with_markov needs a markov_rank above 0"
        )
    return config


def _read_own(keys: BlockKeys) -> dict[str, Any]:
    # Restricts the correction to the likeliest tokens in other engines; not needed here.
    keys.take("dspark_draft_topk", int)
    rank = keys.take_or("markov_rank", int, _USUAL_RANK)
    head_type = keys.take_or("markov_head_type", str, "vanilla")
    if head_type not in _HEAD_TYPES:
        known = ", ".join(_HEAD_TYPES)
        raise keys.outer.error("markov_head_type", f"is {head_type!r}; supported are {known}")
    if rank < 0:
        raise keys.outer.error("markov_rank", f"must not be below 0, but is {rank}")
    return {
        "rank": rank,
        "head_type": head_type,
        "tells_confidence": keys.take_or("enable_confidence_head", bool, True),
        "confidence_sees_token": keys.take_or("confidence_head_with_markov", bool, True),
    }


class DSparkNetwork(DFlashNetwork):
    """A DFlash network whose correction head adjusts each position's logits in turn."""

    def __init__(self, context: HeadContext, config: DSparkConfig) -> None:
        super().__init__(context, config)
        layers, rank, source = config.layers, config.rank, context.source
        width, name = layers.hidden_size, "markov_head"
        self._rank, self._type = rank, config.head_type
        self._sees_token = config.confidence_sees_token
        self._first: Embedding | None = None
        self._mixing: Linear | None = None
        self._confidence: tuple[Tensor, Tensor] | None = None
        if rank:
            self._first = Embedding(source, f"{name}.markov_w1", layers.vocab_size, rank)
            second = Part(f"{name}.markov_w2.weight", config.draft_vocab_size)
            self._second = LanguageModelHead(context.ops, source.head([second], rank))
        if rank and config.head_type == "gated":
            part = Part(f"{name}.gate_proj", rank)
            self._mixing = column_linear(source, [part], width + rank, bias=True)
        if rank and config.head_type == "rnn":
            part = Part(f"{name}.joint_proj", 3 * rank)
            self._mixing = column_linear(source, [part], width + 2 * rank, bias=True)
        if config.tells_confidence:
            columns = width + (rank if config.confidence_sees_token else 0)
            proj = "confidence_head.proj"
            self._confidence = (
                source.table([Part(f"{proj}.weight", 1)], columns).values,
                source.vector([Part(f"{proj}.bias", 1)]),
            )

    def places(self, hidden: Tensor) -> Places:
        """Begin a round; hidden [R, K, H] is the final hidden state of the rows that predict."""
        base = self.head(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)
        state = hidden.new_zeros((len(hidden), self._rank))

        def place(index: int, last: Tensor) -> tuple[Tensor, Tensor | None]:
            nonlocal state
            logits, row = base[:, index], hidden[:, index]
            if self._first is None:
                return logits, self._chance([row])
            token = self._first(last)
            state, read = self._read(row, token, state)
            chance = self._chance([row, token] if self._sees_token else [row])
            return logits + self.head.columns.own(self._second(read), logits), chance

        return place

    def _read(self, row: Tensor, token: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The next recurrent state and r_i, the input of W2; [R, rank] each."""
        if self._type == "vanilla":
            return state, token
        if self._type == "gated":
            return state, self._mixed([row, token]).sigmoid() * token
        gate, new, out = self._mixed([state, token, row]).chunk(3, dim=-1)
        return torch.lerp(new.tanh(), state, gate.sigmoid()), out.tanh()

    def _mixed(self, sides: list[Tensor]) -> Tensor:
        assert self._mixing is not None, "heads of this type have a projection"
        return self._ops.joined_linear([(side, None) for side in sides], *self._mixing.product)

    def _chance(self, sides: list[Tensor]) -> Tensor | None:
        """The confidence, [R] float32; None without a confidence head."""
        if self._confidence is None:
            return None
        weight, bias = (values.float() for values in self._confidence)
        return F.linear(torch.cat(sides, -1).float(), weight, bias).squeeze(-1).sigmoid()


HEAD = HeadMethod(
    name="dspark",
    read=read_dspark_config,
    network=partial(load_network, DSparkNetwork),
    drafter=BlockChainDrafter,
    keys=ModelKeys(
        parallel=True, remedy="its layers run once for all tokens; leave it out", cache=True
    ),
)
