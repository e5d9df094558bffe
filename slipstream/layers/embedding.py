"""Token embedding and the head that shares its shape."""

from dataclasses import dataclass
from typing import Final

from torch import Tensor

from slipstream.kernels.columns import Columns
from slipstream.kernels.formats.weight import Weight
from slipstream.kernels.table import Ops
from slipstream.layers.parameters import ROWS, WHOLE, ParameterSource, Part, Share


class Embedding:
    """A table of rows by token; ranks share the tokens."""

    def __init__(
        self,
        source: ParameterSource,
        name: str,
        vocab_size: int,
        width: int,
        share: Share = WHOLE,
    ) -> None:
        # An odd vocabulary cannot be shared; then each rank has all of it.
        self.vocab_size, self.ranks = vocab_size, WHOLE if vocab_size % share.size else share
        split = None if vocab_size % share.size else ROWS
        self.weight = source.embedding([Part(f"{name}.weight", vocab_size, split)], width)
        assert self.weight.table_dtype is not None, "rows of embeddings are looked up"
        self.dtype, self.device = self.weight.table_dtype, self.weight.table_device

    def renumber(self, token_ids: Tensor) -> None:
        """Give id i the row that token_ids[i] had; token_ids [n] int64. The weight is a copy."""
        self.weight = self.weight.select(token_ids)

    def share(self, packed: Weight) -> None:
        """Look rows up in a head's weight with the same numbers, where it has them unrounded: then
        the table is not kept twice."""
        if packed.table_dtype is not None:
            self.weight = packed

    def __call__(self, token_ids: Tensor) -> Tensor:
        """token_ids [T] int32 or int64 -> [T, width]."""
        ranks = self.ranks
        if ranks.reduce is None:
            return self.weight.look_up(token_ids)
        start, stop = ranks.span(self.vocab_size, "vocab_size")
        is_own = (token_ids >= start) & (token_ids < stop)
        found = self.weight.look_up((token_ids - start).clamp(0, stop - start - 1))
        return ranks.reduce(found.masked_fill(~is_own.unsqueeze(-1), 0.0))


@dataclass(frozen=True)
class LogitCurve:
    """What becomes of a product with the head's weight.

    Attributes:
        scale: it is multiplied by it.
        softcap: then logits become softcap * tanh(logit / softcap); None leaves them.
    """

    scale: float = 1.0
    softcap: float | None = None

    def apply(self, logits: Tensor) -> Tensor:
        """Logits from products, in place."""
        if self.scale != 1.0:
            logits.mul_(self.scale)
        return (
            logits if self.softcap is None else logits.div_(self.softcap).tanh_().mul_(self.softcap)
        )


_STRAIGHT: Final = LogitCurve()


class LanguageModelHead:
    """Hidden states to float32 logits; the weight may be the embedding's own.

    Args:
        ranks: that share the tokens.
        curve: what becomes of a product.
        chosen: [n] int64, the tokens that logits are given of, in this order; None: all.

    Attributes:
        columns: that this rank's share of the weight gives, of all tokens.
    """

    def __init__(
        self,
        ops: Ops,
        weight: Weight,
        ranks: Share = WHOLE,
        curve: LogitCurve = _STRAIGHT,
        chosen: Tensor | None = None,
    ) -> None:
        self._ops, self._logits, self._ranks = ops, ops.logits, ranks
        self._curve, self._chosen = curve, chosen
        self.columns = Columns(ranks.rank, ranks.size, ranks.gather)
        self.weight = weight

    @property
    def width(self) -> int:
        """Numbers of a hidden state that it takes."""
        return self.weight.shape[1]

    def over(self, token_ids: Tensor) -> "LanguageModelHead":
        """A head for these tokens alone, in this order; its weight is a copy, unless ranks share
        the tokens."""
        if self._ranks.size > 1:
            return LanguageModelHead(self._ops, self.weight, self._ranks, self._curve, token_ids)
        return LanguageModelHead(self._ops, self.weight.select(token_ids), curve=self._curve)

    def own(self, hidden: Tensor) -> Tensor:
        """hidden [T, width] -> [T, v] float32, the logits that `columns` says."""
        return self._curve.apply(self._logits(hidden, self.weight))

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [T, width] -> [T, vocab_size] float32; where ranks share the tokens they exchange
        whole rows."""
        logits, gather = self.own(hidden), self.columns.gather
        if gather is not None:
            logits = gather(logits)
        return logits if self._chosen is None else logits.index_select(-1, self._chosen)


def own_head(
    ops: Ops, source: ParameterSource, name: str, like: Embedding, curve: LogitCurve = _STRAIGHT
) -> LanguageModelHead:
    """A head with a matrix of its own, of the embedding's shape."""
    split = ROWS if like.ranks.size > 1 else None
    part = Part(f"{name}.weight", like.vocab_size, split)
    weight = source.head([part], like.weight.shape[1])
    return LanguageModelHead(ops, weight, like.ranks, curve)


def tied_head(
    ops: Ops, source: ParameterSource, embedding: Embedding, curve: LogitCurve = _STRAIGHT
) -> LanguageModelHead:
    """A head with the embedding's numbers."""
    head = LanguageModelHead(ops, source.tied(embedding.weight), embedding.ranks, curve)
    embedding.share(head.weight)
    return head
