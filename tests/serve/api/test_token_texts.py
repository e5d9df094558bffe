"""Tokens one by one: bytes, texts and places in the whole text."""

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

import slipstream
from slipstream.models.tokenizer import Tokenizer
from slipstream.serve.token_texts import TokenReader, TokenTexts

DEMO = Tokenizer(Path(slipstream.__file__).parent / "demo" / "target")
DEMO_TEXTS = TokenTexts(DEMO)


@pytest.fixture(scope="module")
def spaced(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer that marks spaces and writes what it has no piece for in bytes."""
    pieces = [
        "<unk>",
        "<s>",
        "▁the",
        "▁cat",
        "s",
        "é",
        "▁",
        *(f"<0x{it:02X}>" for it in range(256)),
    ]
    folder = tmp_path_factory.mktemp("spaced")
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            {piece: place for place, piece in enumerate(pieces)},
            [],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    backend.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<s>"])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    return Tokenizer(folder)


@given(st.text(max_size=30))
def test_bytes_of_tokens_are_those_of_the_text(text: str) -> None:
    tokens = DEMO.encode(text, add_special_tokens=False)
    assert b"".join(DEMO_TEXTS.content(token) for token in tokens) == text.encode()


@given(st.text(max_size=30), st.integers(0, 5))
def test_what_tokens_add_is_the_text(text: str, offset: int) -> None:
    tokens = DEMO.encode(text, add_special_tokens=False)
    reader = TokenReader(DEMO_TEXTS, skip_special=True, offset=offset)
    assert "".join(reader.take(token) for token in tokens) == text
    assert reader.offset == offset + len(text)


def test_a_part_of_a_character_is_written_as_bytes() -> None:
    tokens = DEMO.encode("€", add_special_tokens=False)
    assert len(tokens) > 1
    texts = [DEMO_TEXTS.text(token) for token in tokens]
    assert all(text.startswith("bytes:\\x") for text in texts)
    assert "".join(texts).replace("bytes:", "") == "\\xe2\\x82\\xac"


def test_special_tokens_are_in_the_text_or_not() -> None:
    tokens = DEMO.encode("<|im_start|>x")
    assert DEMO_TEXTS.text(tokens[0]) == "<|im_start|>"
    hidden = TokenReader(DEMO_TEXTS, skip_special=True)
    assert [hidden.take(token) for token in tokens] == ["", "x"]
    shown = TokenReader(DEMO_TEXTS, skip_special=False)
    assert [shown.take(token) for token in tokens] == ["<|im_start|>", "x"]


def test_marked_spaces_and_bytes(spaced: Tokenizer) -> None:
    texts = TokenTexts(spaced)
    euro = [spaced.token_to_id(f"<0x{byte:02X}>") for byte in "€".encode()]
    tokens = [2, 3, 4, 5, *(token for token in euro if token is not None)]
    assert [texts.text(token) for token in tokens[:4]] == [" the", " cat", "s", "é"]
    assert b"".join(texts.content(token) for token in tokens) == " the catsé€".encode()
    reader = TokenReader(texts, skip_special=True)
    assert "".join(reader.take(token) for token in tokens) == spaced.decode(tokens) == "the catsé€"
