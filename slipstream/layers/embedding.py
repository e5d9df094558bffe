"""Token embedding and the head that shares its shape."""

from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.table import Ops, Weight
from slipstream.kernels.weights import select_rows, shape_of
from slipstream.layers.parameters import ParameterSource, Part


class Embedding:
    """The rows (tokens) would be split over ranks."""

    def __init__(self, source: ParameterSource, name: str, vocab_size: int, width: int) -> None:
        self.weight = source.table([Part(f"{name}.weight", vocab_size)], width)

    def renumber(self, token_ids: Tensor) -> None:
        """From now on id i stands for what token_ids[i] stood for; the weight is a new one."""
        self.weight = self.weight[token_ids]

    def __call__(self, token_ids: Tensor) -> Tensor:
        """token_ids [T] int32 or int64 -> [T, width]."""
        return F.embedding(token_ids, self.weight)


class LanguageModelHead:
    """Hidden states to float32 logits; the weight may be the embedding's own."""

    def __init__(self, ops: Ops, weight: Weight) -> None:
        self._ops, self._logits = ops, ops.logits
        self.weight = weight

    @property
    def width(self) -> int:
        """Of the hidden states that it takes."""
        return shape_of(self.weight)[1]

    def over(self, token_ids: Tensor) -> "LanguageModelHead":
        """A head for these tokens alone, in this order; its weight is a copy."""
        return LanguageModelHead(self._ops, select_rows(self.weight, token_ids))

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [T, width] -> [T, vocab_size] float32."""
        return self._logits(hidden, self.weight)


def own_head(ops: Ops, source: ParameterSource, name: str, like: Embedding) -> LanguageModelHead:
    """A head with a matrix of its own, of the embedding's shape."""
    vocab_size, width = like.weight.shape
    return LanguageModelHead(ops, source.head([Part(f"{name}.weight", vocab_size)], width))


def tied_head(ops: Ops, source: ParameterSource, embedding: Embedding) -> LanguageModelHead:
    """A head with the embedding's numbers."""
    return LanguageModelHead(ops, source.tied(embedding.weight))
