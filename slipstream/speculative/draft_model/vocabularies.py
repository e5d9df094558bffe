"""Compares the vocabularies of two checkpoints, and maps token ids between different ones.

Drafting across tokenizers uses token-level intersection (TLI, Timor et al. 2025, arXiv 2502.05202):
the draft model proposes only tokens that the target's vocabulary has too, and reads the target's
tokens translated one by one, so that positions stay equal. This is lossless, since q is 0 for every
token that is not shared.
"""

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.core.errors import CheckpointError
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.gguf.tokenizer import SPACE_PIECE
from slipstream.models.tokenizer import Tokenizer, has_tokenizer

logger = logging.getLogger("slipstream")

# The bytes of a token's text; a special token is represented by itself.
_Meaning = tuple[bool, bytes]

_FEW = 100
_SHOWN = 3  # maximum of differing tokens that a message names


@dataclass(frozen=True)
class TokenMap:
    """Maps token ids of a target to those of a draft model.

    Attributes:
        draft_ids: the draft model's id of each shared token, by the target's id; one to one.
        fallback: the draft model's id that replaces tokens which are not shared.
    """

    draft_ids: dict[int, int]
    fallback: int


def map_tokens(target: Path, target_size: int, draft: Checkpoint, draft_size: int) -> TokenMap:
    """Match tokens with equal bytes; ids not below the sizes have no row in the models.

    Tokens that are not shared are mapped to the draft model's unknown token, or if it has none to
    its first end token.

    Raises:
        CheckpointError: a tokenizer.json is missing, no token is shared, or the draft model has
            neither an unknown nor an end token.
    """
    for path in (target, draft.path):
        if not has_tokenizer(path):
            raise CheckpointError(
                f"use_heterogeneous_vocab compares the tokenizers, but {path} has no "
                "tokenizer.json; add it, or use a drafter of the target's own tokenizer"
            )
    ours, theirs = _meanings(target, target_size), _meanings(draft.path, draft_size)
    draft_ids = {token: theirs[what] for what, token in ours.items() if what in theirs}
    if not draft_ids:
        raise CheckpointError(
            f"the tokenizers of {target} and {draft.path} have no token in common, so nothing can "
            "be drafted; choose a drafter of a tokenizer that is more alike"
        )
    logger.log(
        logging.WARNING if len(draft_ids) < _FEW else logging.INFO,
        "%d of the target's %d tokens are among the drafter's %d and can be drafted",
        len(draft_ids),
        len(ours),
        len(theirs),
    )
    return TokenMap(draft_ids, _fallback(draft, draft_size))


def _fallback(draft: Checkpoint, draft_size: int) -> int:
    tokenizer = Tokenizer(draft.path)
    content = json.loads(tokenizer.to_json())
    unknown = tokenizer.special_tokens.get("unk_token") or content["model"].get("unk_token")
    found = None if unknown is None else tokenizer.token_to_id(str(unknown))
    for token in (found, *draft.eos_token_ids, tokenizer.eos_token_id):
        if token is not None and token < draft_size:
            return token
    raise CheckpointError(
        f"{draft.path} has neither an unknown token nor an end token to stand for the target's "
        "other tokens; name one as unk_token in its tokenizer_config.json"
    )


def _meanings(path: Path, size: int) -> dict[_Meaning, int]:
    """One token id for each meaning (bytes or special token).

    If several tokens have the same meaning, plain tokens precede SentencePiece's byte tokens
    <0x..>, and smaller ids larger ones.
    """
    tokenizer = Tokenizer(path)
    byte_level = _is_byte_level(tokenizer)
    tokens = sorted(tokenizer.vocabulary().items(), key=lambda item: (_is_byte(item[0]), item[1]))
    found: dict[_Meaning, int] = {}
    for text, token in tokens:
        if token >= size:
            continue
        if token in tokenizer.special_token_ids:
            what = (True, text.encode())
        else:
            what = (False, _byte_level_bytes(text) if byte_level else _plain_bytes(text))
        found.setdefault(what, token)
    return found


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    """Whether tokens are written in GPT-2's byte-level alphabet."""
    content = json.loads(tokenizer.to_json())
    parts = (content.get("pre_tokenizer"), content.get("decoder"))
    return any(kind == "ByteLevel" for part in parts for kind in _kinds(part))


def _kinds(part: Any) -> Iterator[str]:
    """The types of a pre-tokenizer or decoder and, recursively, of its parts."""
    if isinstance(part, dict):
        yield str(part.get("type"))
        for key in ("pretokenizers", "decoders"):
            for inner in part.get(key) or ():
                yield from _kinds(inner)


def _is_byte(text: str) -> bool:
    return len(text) == 6 and text.startswith("<0x") and text.endswith(">")


def _plain_bytes(text: str) -> bytes:
    """The bytes of a SentencePiece token, with its space symbol and `<0x..>` decoded."""
    if _is_byte(text):
        try:
            return bytes([int(text[3:5], 16)])
        except ValueError:
            return text.encode()
    return text.replace(SPACE_PIECE, " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's byte alphabet: printable bytes map to themselves, others to characters from 256."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in sorted(printable)}
    return letters | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTES = _byte_alphabet()


def _byte_level_bytes(text: str) -> bytes:
    if any(letter not in _BYTES for letter in text):  # an added token, stored as plain text
        return text.encode()
    return bytes(_BYTES[letter] for letter in text)


def require_same_vocabulary(target: Path, target_size: int, draft: Path, draft_size: int) -> None:
    """Raise CheckpointError unless every token has the same id in both.

    The sizes may differ only by padding, which are ids without a token.
    """
    if not has_tokenizer(target) or not has_tokenizer(draft):
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
    if draft_size < target_size and (usual := Tokenizer(draft).num_usual_tokens) > draft_size:
        raise CheckpointError(
            f"the tokenizer of {draft} has {usual} tokens, and its model only {draft_size}: one of "
            "them is of another checkpoint; download the drafter again"
        )


def vocabularies_agree(target: Path, draft: Path) -> bool:
    """Whether every token is known to have the same id in both."""
    if not has_tokenizer(target) or not has_tokenizer(draft):
        return False
    ours, theirs = target / "tokenizer.json", draft / "tokenizer.json"
    are_files = ours.is_file() and theirs.is_file()
    if target == draft or (are_files and ours.read_bytes() == theirs.read_bytes()):
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
