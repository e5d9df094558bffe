"""The tokens that a drafter drafts (FR-Spec, arXiv 2502.14856), and its mask token."""

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.core.errors import UsageError
from slipstream.kernels.formats.weight import Weight
from slipstream.models.tokenizer import Tokenizer, has_tokenizer
from slipstream.train.plan import RunPlan
from slipstream.train.sequences import Sequences


class DraftVocabulary:
    """The token of each column of a drafter's logits.

    Attributes:
        token_ids: [Vd] int64, ascending; None: all tokens.
    """

    def __init__(
        self, token_ids: Tensor | None, vocab_size: int, device: torch.device | None = None
    ) -> None:
        token_ids = None if token_ids is None else token_ids.to(device)
        self.token_ids = token_ids
        self.size = vocab_size if token_ids is None else len(token_ids)
        self._column: Tensor | None = None
        if token_ids is not None:
            column = token_ids.new_full((vocab_size,), -1)
            column[token_ids] = torch.arange(len(token_ids), device=token_ids.device)
            self._column = column

    def columns(self, token_ids: Tensor) -> Tensor:
        """The column of each token, -1 for tokens that are not drafted."""
        return token_ids if self._column is None else self._column[token_ids]

    def rows(self, weight: Weight) -> Tensor:
        """The rows of the target's lm_head [V, H] for these tokens, [Vd, H]."""
        floats = weight.dequantised() if weight.floats is None else weight.floats
        return floats if self.token_ids is None else floats[self.token_ids]

    def published(self) -> dict[str, Tensor]:
        """The tensors of published heads, none for all tokens.

        `d2t` [Vd] int64 is token id minus column; `t2d` [V] bool says which tokens are drafted.
        """
        if self.token_ids is None or self._column is None:
            return {}
        columns = torch.arange(len(self.token_ids), device=self.token_ids.device)
        return {"d2t": self.token_ids - columns, "t2d": self._column >= 0}


def require_draft_vocabulary(plan: RunPlan) -> None:
    """Raise UsageError if `--draft-vocab-size` exceeds the target's, or the head is shared."""
    options, vocab_size = plan.settings.options, plan.shape.vocab_size
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


def most_frequent(
    sequences: Sequences, size: int | None, vocab_size: int, kept: Sequence[int]
) -> Tensor | None:
    """[size] int64, ascending; None for the whole vocabulary.

    Args:
        kept: tokens to include whatever their frequency.
    """
    if size is None or size == vocab_size:
        return None
    counts = torch.bincount(sequences.token_ids.flatten().long(), minlength=vocab_size).double()
    counts[list(kept)] = float("inf")
    # The sort is stable: among equally frequent tokens the smaller id wins.
    order = torch.sort(counts, descending=True, stable=True).indices
    return order[:size].sort().values


def choose_mask_token(plan: RunPlan, vocab_size: int) -> int:
    """`--mask-token`, else the first id after all tokens, which may be `vocab_size`."""
    token, path = plan.settings.options.mask_token, plan.target.path
    if token is not None:
        if not 0 <= token < vocab_size:
            raise UsageError(f"--mask-token {token} is not in the vocabulary of {vocab_size} ids")
        return token
    if not has_tokenizer(path):
        return vocab_size
    return max(Tokenizer(path).vocabulary().values()) + 1


def mask_token_of_head(plan: RunPlan) -> int:
    """The id that a head uses as mask.

    It may also be a token's id, because a mask row also differs in its feature.
    """
    size = plan.shape.vocab_size
    return min(size - 1, choose_mask_token(plan, size))
