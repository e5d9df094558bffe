"""Token embedding and the head that shares its shape."""

from torch import Tensor

from slipstream.kernels.table import Ops, PackedMatrix, Weight
from slipstream.kernels.weights import look_up, select_rows, shape_of
from slipstream.layers.parameters import ParameterSource, Part


class Embedding:
    """The rows (tokens) would be split over ranks."""

    def __init__(self, source: ParameterSource, name: str, vocab_size: int, width: int) -> None:
        table = source.table([Part(f"{name}.weight", vocab_size)], width)
        self.weight: Tensor | PackedMatrix = table
        self.dtype, self.device = table.dtype, table.device

    def renumber(self, token_ids: Tensor) -> None:
        """From now on id i stands for what token_ids[i] stood for; the weight is a new one."""
        renumbered = select_rows(self.weight, token_ids)
        assert isinstance(renumbered, Tensor | PackedMatrix)
        self.weight = renumbered

    def share(self, packed: Weight) -> None:
        """Look rows up in a head's weight with the same numbers, where it has them unrounded: then
        the table is not kept twice."""
        if isinstance(packed, PackedMatrix) and packed.table_dtype is not None:
            self.weight = packed

    def __call__(self, token_ids: Tensor) -> Tensor:
        """token_ids [T] int32 or int64 -> [T, width]."""
        return look_up(self.weight, token_ids)


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
    vocab_size, width = shape_of(like.weight)
    return LanguageModelHead(ops, source.head([Part(f"{name}.weight", vocab_size)], width))


def tied_head(ops: Ops, source: ParameterSource, embedding: Embedding) -> LanguageModelHead:
    """A head with the embedding's numbers."""
    table = embedding.weight
    assert isinstance(table, Tensor), "the table is tied once"
    head = LanguageModelHead(ops, source.tied(table))
    embedding.share(head.weight)
    return head
