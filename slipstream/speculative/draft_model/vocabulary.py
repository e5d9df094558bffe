"""Whether two checkpoints speak of the same tokens."""

from pathlib import Path

from slipstream.core.errors import CheckpointError
from slipstream.models.tokenizer import Tokenizer

_SHOWN = 3  # differing tokens named in the message


def require_same_vocabulary(target: Path, target_size: int, draft: Path, draft_size: int) -> None:
    """Raise CheckpointError unless every token has the same id in both.

    The vocabularies' sizes may differ by padding only: ids that no token has.
    """
    ours, theirs = target / "tokenizer.json", draft / "tokenizer.json"
    if not ours.is_file() or not theirs.is_file():
        if target_size != draft_size:
            raise CheckpointError(
                f"the drafter's vocabulary has {draft_size} entries and the target's "
                f"{target_size}, and without a tokenizer.json in both directories it cannot be "
                "told whether they differ by padding only"
            )
        return
    if not vocabularies_agree(target, draft):
        raise CheckpointError(
            _difference(Tokenizer(target).vocabulary(), Tokenizer(draft).vocabulary())
        )


def vocabularies_agree(target: Path, draft: Path) -> bool:
    """Whether every token is known to have the same id in both."""
    ours, theirs = target / "tokenizer.json", draft / "tokenizer.json"
    if not ours.is_file() or not theirs.is_file():
        return False
    if ours.read_bytes() == theirs.read_bytes():
        return True
    return Tokenizer(target).vocabulary() == Tokenizer(draft).vocabulary()


def _difference(target: dict[str, int], draft: dict[str, int]) -> str:
    by_id = {index: token for token, index in target.items()}
    by_draft_id = {index: token for token, index in draft.items()}
    differing = sorted(
        index
        for index in by_id.keys() | by_draft_id.keys()
        if by_id.get(index) != by_draft_id.get(index)
    )
    shown = ", ".join(
        f"id {index} is {by_id.get(index)!r} in the target and {by_draft_id.get(index)!r} "
        "in the drafter"
        for index in differing[:_SHOWN]
    )
    return (
        f"the drafter's vocabulary is another one than the target's: {len(differing)} ids differ "
        f"({shown}); choose a drafter of the same tokenizer, or let a draft model propose the "
        "tokens that both have with use_heterogeneous_vocab=true"
    )
