"""The draft vocabulary: the tokens that a text uses most (FR-Spec, arXiv 2502.14856)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.core.errors import UsageError
from slipstream.train.sequences import Sequences


def choose_tokens(
    sequences: Sequences, size: int | None, vocab_size: int, kept: Sequence[int]
) -> Tensor | None:
    """[size] int64, rising: the commonest tokens; None for the whole vocabulary.

    Args:
        kept: tokens that belong to it whatever the text says (those that end an output).
    """
    if size is None or size == vocab_size:
        return None
    if not 0 < size <= vocab_size:
        raise UsageError(
            f"--draft-vocab-size ({size}) must be between 1 and the target's vocabulary of "
            f"{vocab_size}"
        )
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
