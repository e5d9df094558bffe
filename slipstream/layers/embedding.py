"""Token embedding and the head that shares its shape."""

from torch import Tensor

from slipstream.kernels.formats.weight import Weight
from slipstream.kernels.table import Ops
from slipstream.layers.parameters import ParameterSource, Part


class Embedding:
    """The rows (tokens) would be split over ranks."""

    def __init__(self, source: ParameterSource, name: str, vocab_size: int, width: int) -> None:
        table = source.table([Part(f"{name}.weight", vocab_size)], width)
        self.weight: Weight = table
        self.dtype, self.device = table.values.dtype, table.values.device

    def renumber(self, token_ids: Tensor) -> None:
        """From now on id i stands for what token_ids[i] stood for; the weight is a new one."""
        self.weight = self.weight.select(token_ids)

    def share(self, packed: Weight) -> None:
        """Look rows up in a head's weight with the same numbers, where it has them unrounded: then
        the table is not kept twice."""
        if packed.table_dtype is not None:
            self.weight = packed

    def __call__(self, token_ids: Tensor) -> Tensor:
        """token_ids [T] int32 or int64 -> [T, width]."""
        return self.weight.look_up(token_ids)


class LanguageModelHead:
    """Hidden states to float32 logits; the weight may be the embedding's own."""

    def __init__(self, ops: Ops, weight: Weight) -> None:
        self._ops, self._logits = ops, ops.logits
        self.weight = weight

    @property
    def width(self) -> int:
        """Of the hidden states that it takes."""
        return self.weight.shape[1]

    def over(self, token_ids: Tensor) -> "LanguageModelHead":
        """A head for these tokens alone, in this order; its weight is a copy."""
        return LanguageModelHead(self._ops, self.weight.select(token_ids))

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [T, width] -> [T, vocab_size] float32."""
        return self._logits(hidden, self.weight)


def own_head(ops: Ops, source: ParameterSource, name: str, like: Embedding) -> LanguageModelHead:
    """A head with a matrix of its own, of the embedding's shape."""
    vocab_size, width = like.weight.shape
    return LanguageModelHead(ops, source.head([Part(f"{name}.weight", vocab_size)], width))


def tied_head(ops: Ops, source: ParameterSource, embedding: Embedding) -> LanguageModelHead:
    """A head with the embedding's numbers."""
    head = LanguageModelHead(ops, source.tied(embedding.weight))
    embedding.share(head.weight)
    return head
