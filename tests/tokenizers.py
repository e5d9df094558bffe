"""Tiny tokenizers, written to disk for tests."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def write_tokenizer(folder: Path, vocab: Sequence[str], **parts: Any) -> Path:
    """A tokenizer.json whose tokens are whole words, the first of them the unknown one.

    Args:
        parts: of the file, in place of those that are written by default.
    """
    folder.mkdir(exist_ok=True)
    ids = {token: index for index, token in enumerate(vocab)}
    content = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": None,
        "model": {"type": "WordLevel", "vocab": ids, "unk_token": vocab[0]},
        **parts,
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def write_byte_tokenizer(folder: Path, pieces: Sequence[str]) -> Path:
    """A byte-level tokenizer.json: token 0 ends a text, the others are these pieces of ASCII, those
    of one character first; each longer one is made of an earlier one and a character."""
    import tokenizers
    from tokenizers import AddedToken, decoders, models, pre_tokenizers

    spelled = [piece.replace(" ", "Ġ").replace("\n", "Ċ") for piece in pieces]
    merges = [(piece[:-1], piece[-1]) for piece in spelled if len(piece) > 1]
    vocab = {"<end>": 0, **{piece: index for index, piece in enumerate(spelled, 1)}}
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<end>", normalized=False)])
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    return folder
