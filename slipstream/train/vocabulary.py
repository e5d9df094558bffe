"""The draft vocabulary: the tokens that a text uses most (FR-Spec, arXiv 2502.14856); and the
token that heads ask with."""

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.core.errors import UsageError
from slipstream.models.tokenizer import Tokenizer
from slipstream.train.recipe import Order
from slipstream.train.sequences import Sequences


def require_draft_vocabulary(order: Order) -> None:
    """Raise UsageError for a size that the target has not, or beside a shared head."""
    options, vocab_size = order.settings.options, order.shape.vocab_size
    size = options.draft_vocab_size
    if size is None:
        return
    if options.share_head:
        raise UsageError(
            "--share-head drafts over the target's whole vocabulary; leave --draft-vocab-size "
            "or --share-head out"
        )
    if size > vocab_size:
        raise UsageError(
            f"--draft-vocab-size ({size}) must be between 1 and the target's vocabulary of "
            f"{vocab_size}"
        )


def choose_tokens(
    sequences: Sequences, size: int | None, vocab_size: int, kept: Sequence[int]
) -> Tensor | None:
    """[size] int64, rising: the commonest tokens; None for the whole vocabulary.

    Args:
        kept: tokens that belong to it whatever the text says (those that end an output).
    """
    if size is None or size == vocab_size:
        return None
    counts = torch.bincount(sequences.token_ids.flatten().long(), minlength=vocab_size).double()
    counts[list(kept)] = float("inf")
    # A stable order: of equally common tokens those with the smaller id.
    order = torch.sort(counts, descending=True, stable=True).indices
    return order[:size].sort().values


def offsets(token_ids: Tensor) -> Tensor:
    """`d2t` [Vd] int64 of published heads: token id less column."""
    return token_ids - torch.arange(len(token_ids), device=token_ids.device)


def membership(token_ids: Tensor, vocab_size: int) -> Tensor:
    """`t2d` [V] bool: whether a token is drafted."""
    member = torch.zeros(vocab_size, dtype=torch.bool, device=token_ids.device)
    member[token_ids] = True
    return member


def mask_token_of_head(order: Order) -> int:
    """The one of `--mask-token`, else the first id that no token has, else the last id: a head
    tells its masks from that token by what else their rows take."""
    token, size = order.settings.options.mask_token, order.shape.vocab_size
    if token is not None:
        if not 0 <= token < size:
            raise UsageError(f"--mask-token {token} is none of the {size} ids of the vocabulary")
        return token
    path = order.target.path
    if not (path / "tokenizer.json").is_file():
        return size - 1
    return min(size - 1, max(Tokenizer(path).vocabulary().values()) + 1)
