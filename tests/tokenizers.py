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
