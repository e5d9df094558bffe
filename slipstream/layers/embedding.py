"""The token embedding and the LM head."""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from slipstream.kernels.columns import ALL_COLUMNS, Columns
from slipstream.kernels.formats.weight import Weight
from slipstream.kernels.ops import Ops
from slipstream.layers.parameters import ROWS, WHOLE, ParameterSource, Part, Share


class Embedding:
    """The token embedding, split over ranks by the vocabulary."""

    def __init__(
        self, source: ParameterSource, name: str, vocab_size: int, width: int, share: Share = WHOLE
    ) -> None:
        # The table is replicated if the vocabulary is not divisible by the number of ranks.
        self.vocab_size, self.ranks = vocab_size, WHOLE if vocab_size % share.size else share
        split = None if vocab_size % share.size else ROWS
        self.weight = source.embedding([Part(f"{name}.weight", vocab_size, split)], width)
        assert self.weight.table_dtype is not None, "rows of embeddings are looked up"
        self.dtype, self.device = self.weight.table_dtype, self.weight.table_device

    def renumber(self, token_ids: Tensor) -> None:
        """Give token i the old row of token_ids[i], [n] int64; the table is copied."""
        self.weight = self.weight.select(token_ids)

    def share(self, packed: Weight) -> None:
        """Look rows up in the tied head's weight, if it is unquantised, to keep only one table."""
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
    """Scale and softcap of logits.

    Attributes:
        scale: factor of the logits, applied first.
        softcap: logits become softcap * tanh(logit / softcap); None: no softcap.
    """

    scale: float = 1.0
    softcap: float | None = None

    def apply(self, logits: Tensor) -> Tensor:
        """Scale and cap logits in place, and return them."""
        if self.scale != 1.0:
            logits.mul_(self.scale)
        return (
            logits if self.softcap is None else logits.div_(self.softcap).tanh_().mul_(self.softcap)
        )


_STRAIGHT: Final = LogitCurve()


class LanguageModelHead:
    """The LM head: computes float32 logits from hidden states; its weight may be the embedding's.

    Args:
        ranks: this rank's share of the vocabulary.
        curve: scale and softcap of the logits.

    Attributes:
        columns: which columns of the full logits this rank computes.
        tokens: [n] int64, token ids of the columns of all ranks, for a reduced vocabulary; None:
            column i is token i.
    """

    def __init__(
        self, ops: Ops, weight: Weight, ranks: Share = WHOLE, curve: LogitCurve = _STRAIGHT
    ) -> None:
        self._ops, self._logits, self._ranks = ops, ops.logits, ranks
        self._curve, self._num_own = curve, weight.shape[0]
        self.columns = Columns(ranks.rank, ranks.size, ranks.gather)
        self.weight = weight
        self.tokens: Tensor | None = None

    @property
    def width(self) -> int:
        """Size of the hidden states."""
        return self.weight.shape[1]

    @property
    def num_tokens(self) -> int:
        """Number of columns over all ranks."""
        if self.tokens is not None:
            return len(self.tokens)
        return self.weight.shape[0] * self.columns.num_ranks

    def over(self, token_ids: Tensor) -> "LanguageModelHead":
        """A head for only these tokens, [n] int64, in this order; the weight is copied.

        On several ranks `token_ids` must rise, and each rank keeps the rows that it holds. Ranks
        with fewer tokens than others pad theirs: with their last token, or if they have none, with
        the first of their rows. `tokens` includes the padding, whose logits are -inf.
        """
        ranks, own, num_own = self._ranks, token_ids, len(token_ids)
        if ranks.size > 1:
            width = self.weight.shape[0]
            counts = torch.bincount(token_ids // width, minlength=ranks.size).unsqueeze(1)
            place = torch.arange(int(counts.max()), device=token_ids.device)
            index = (counts.cumsum(0) - counts + place.minimum(counts - 1)).clamp(0, num_own - 1)
            first = torch.arange(ranks.size, device=token_ids.device).unsqueeze(1) * width
            shares = torch.where(counts > 0, token_ids[index], first)  # [ranks, most of a rank]
            own, num_own = shares[ranks.rank] - ranks.rank * width, int(counts[ranks.rank])
            token_ids = shares.flatten()
        head = LanguageModelHead(self._ops, self.weight.select(own), ranks, self._curve)
        head.tokens, head._num_own = token_ids, num_own
        return head

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [T, width] -> [T, v] float32, the logits of this rank's `columns`."""
        logits = self._curve.apply(self._logits(hidden, self.weight))
        if self._num_own < logits.shape[-1]:
            logits[:, self._num_own :] = -torch.inf
        return logits


class WholeRows(LanguageModelHead):
    """An LM head that gathers the full logits on every rank, for a drafter whose vocabulary is
    split over ranks differently from the target's."""

    def __init__(self, shares: LanguageModelHead) -> None:
        super().__init__(shares._ops, shares.weight, shares._ranks, shares._curve)
        self._gather, self.columns = self.columns.gather, ALL_COLUMNS

    def over(self, token_ids: Tensor) -> LanguageModelHead:
        head = WholeRows(self)
        head.tokens = token_ids
        return head

    def __call__(self, hidden: Tensor) -> Tensor:
        logits = super().__call__(hidden)
        if self._gather is not None:  # the tokens are shared
            logits = self._gather(logits)
        return logits if self.tokens is None else logits.index_select(-1, self.tokens)


def own_head(
    ops: Ops, source: ParameterSource, name: str, like: Embedding, curve: LogitCurve = _STRAIGHT
) -> LanguageModelHead:
    """An LM head with its own weight, of the embedding's shape."""
    split = ROWS if like.ranks.size > 1 else None
    part = Part(f"{name}.weight", like.vocab_size, split)
    weight = source.head([part], like.weight.shape[1])
    return LanguageModelHead(ops, weight, like.ranks, curve)


def tied_head(
    ops: Ops, source: ParameterSource, embedding: Embedding, curve: LogitCurve = _STRAIGHT
) -> LanguageModelHead:
    """An LM head with the embedding's weight."""
    head = LanguageModelHead(ops, source.tied(embedding.weight), embedding.ranks, curve)
    embedding.share(head.weight)
    return head
