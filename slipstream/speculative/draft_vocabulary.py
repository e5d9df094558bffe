"""Reduced draft vocabularies (FR-Spec, Zhao et al. 2025, arXiv 2502.14856).

The lm_head can be most of the memory traffic of a draft pass; a subset of its rows makes the pass
faster. Verification stays lossless, since q is 0 for all tokens outside the subset.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from slipstream.core.errors import UsageError
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.tokenizer import Tokenizer
from slipstream.speculative.options import Options


@dataclass(frozen=True)
class DraftVocabularyConfig:
    """The size of the draft vocabulary, and a text from whose token frequencies it is chosen.

    Without a text the smallest token ids are chosen: byte-level BPE numbers tokens in the order of
    merges, so that frequent ones come first.
    """

    size: int
    text: Path | None


def read_draft_vocabulary(options: Options) -> DraftVocabularyConfig | None:
    """Read `draft_vocab_size` and `draft_vocab_text`; None if the former is not given."""
    size = options.take_int("draft_vocab_size", None)
    text = options.take_str("draft_vocab_text", None)
    if size is None:
        if text is not None:
            raise UsageError("speculative_config: draft_vocab_text needs draft_vocab_size")
        return None
    if size < 1:
        raise UsageError(f"speculative_config: draft_vocab_size must be positive, not {size}")
    return DraftVocabularyConfig(size, None if text is None else Path(text))


def choose_draft_vocabulary(
    config: DraftVocabularyConfig,
    target: Path,
    num_legal_tokens: int,
    shared: Collection[int] | None = None,
) -> list[int]:
    """Choose the draft vocabulary; returns rising token ids, which include the target's end tokens
    if the drafter has them.

    Args:
        shared: the token ids that the drafter has; None if it has all.

    Raises:
        UsageError: the text cannot be read, or the size is larger than the vocabulary.
    """
    legal = range(num_legal_tokens) if shared is None else sorted(shared)
    if config.size > len(legal):
        of_both = "" if shared is None else " that target and drafter have in common"
        raise UsageError(
            f"speculative_config: draft_vocab_size ({config.size}) is larger than the vocabulary "
            f"of {len(legal)}{of_both}; leave it out to draft over the whole vocabulary"
        )
    allowed = frozenset(legal)
    common = [] if config.text is None else _commonest(config.text, target)
    candidates = dict.fromkeys((*Checkpoint(target).eos_token_ids, *common, *legal))
    return sorted(_first(candidates, config.size, allowed))


def _first(candidates: Iterable[int], size: int, allowed: Collection[int]) -> list[int]:
    return [token for token in candidates if token in allowed][:size]


def _commonest(text: Path, target: Path) -> list[int]:
    try:
        content = text.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"speculative_config: draft_vocab_text {text} cannot be read ({error}); give a text "
            "file in UTF-8"
        ) from error
    counts = Counter(Tokenizer(target).encode(content, add_special_tokens=False))
    return sorted(counts, key=lambda token: (-counts[token], token))
