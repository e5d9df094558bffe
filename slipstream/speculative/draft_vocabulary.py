"""Drafting over a part of the vocabulary (FR-Spec, Zhao et al. 2025, arXiv 2502.14856).

A draft model's head can be most of what a draft pass reads. Over a subset of the vocabulary it
reads less, and the output stays exact: q is what was sampled from, and is 0 elsewhere.
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
    """How many tokens to draft over, and the text whose commonest tokens they are.

    Without a text the tokens that the tokenizer learned first are taken: byte-level BPE numbers
    its tokens in the order of its merges, the commonest first.
    """

    size: int
    text: Path | None


def read_draft_vocabulary(options: Options) -> DraftVocabularyConfig | None:
    """`draft_vocab_size`, and with it `draft_vocab_text`."""
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
    """The chosen token ids, rising; the target's end tokens are among them where they can be.

    Args:
        shared: the only ones that the drafter has; None is all.

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
