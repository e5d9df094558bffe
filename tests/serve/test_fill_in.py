"""`suffix`: the prompt that asks for what stands between two texts."""

from pathlib import Path
from typing import Any

import pytest

from slipstream.models.tokenizer import Tokenizer
from slipstream.serve.errors import ApiError
from slipstream.serve.fill_in import fill_in
from tests.tokenizers import write_tokenizer

MARKS = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"]


def tokenizer(folder: Path, marks: list[str]) -> Tokenizer:
    """Words are tokens, and every text begins with one of its own."""
    begin: Any = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    text: Any = {"Sequence": {"id": "A", "type_id": 0}}
    added = {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}
    parts: dict[str, Any] = {
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": {
            **{"type": "TemplateProcessing", "single": [begin, text]},
            **{"pair": [begin, text], "special_tokens": added},
        },
    }
    vocab = ["<unk>", "<s>", "before", "behind", *marks]
    return Tokenizer(write_tokenizer(folder, vocab, **parts))


def test_the_texts_stand_behind_their_marks(tmp_path: Path) -> None:
    made = tokenizer(tmp_path / "t", MARKS)

    def ids(before: str, special: bool) -> list[int]:
        made_of: Any = fill_in(before, "behind", made, special)
        return list(made_of["prompt_token_ids"])

    assert ids("before before", False) == [4, 2, 2, 5, 3, 6]
    assert ids("before before", True) == [1, 4, 2, 2, 5, 3, 6]
    assert ids("", True) == [1, 4, 5, 3, 6]


def test_what_cannot_be_filled_in_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ApiError, match="marks for filling in"):
        fill_in("before", "behind", tokenizer(tmp_path / "a", MARKS[:2]), False)
    with pytest.raises(ApiError, match="a prompt that is a text"):
        fill_in({"prompt_token_ids": [2]}, "x", tokenizer(tmp_path / "b", MARKS), False)
