"""Tokenizers and chat templates from the metadata of GGUF files.

The pieces and tokens that are expected here are those that llama.cpp makes.
"""

from pathlib import Path
from typing import Any

import pytest

from slipstream.core.errors import CheckpointError
from slipstream.models.chat_template import ChatTemplate
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.gguf.tokenizer import read_tokenizer
from slipstream.models.tokenizer import Tokenizer, has_tokenizer
from slipstream.speculative.draft_model.vocabularies import vocabularies_agree
from tests.gguf_files import write_gguf

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
LETTERS = "abcdeghinorst.Ġ0123<>|/sâĨĹ"
PIECES = ["<|end|>", "<|bos|>", "<tool>", *dict.fromkeys(LETTERS), "th", "the", "Ġth", "Ġthe", "in"]
MERGES = ["t h", "th e", "Ġ th", "Ġth e", "i n"]


def byte_level(file: Path, **more: Any) -> Path:
    """A byte-level vocabulary; `more` are keys of the tokenizer, None for those to leave out."""
    words = [*PIECES, "other", "[PAD99]"]
    keys = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": words,
        "token_type": [CONTROL, CONTROL, USER_DEFINED, *[NORMAL] * (len(words) - 4), UNUSED],
        "merges": MERGES,
        "bos_token_id": 1,
        "eos_token_id": 0,
        **more,
    }
    metadata = {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}
    return write_gguf(file, {"tokenizer.chat_template": "{{ bos_token }}", **metadata}, {})


def sentence_piece(file: Path, **more: Any) -> Path:
    """Letters, two bytes and a few words with scores."""
    words = ["<unk>", "<s>", "</s>", "<0x0A>", "<0xC3>", "<0xA9>", "▁", "a", "b", "n"]
    made = ["an", "na", "ana", "▁b", "▁ban", "ban"]
    keys = {
        "model": "llama",
        "tokens": [*words, *made],
        "scores": [0.0] * 6
        + [-10.0 - index for index in range(4)]
        + [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0],
        "token_type": [UNKNOWN, CONTROL, CONTROL, BYTE, BYTE, BYTE, *[NORMAL] * 10],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        **more,
    }
    metadata = {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}
    return write_gguf(file, metadata, {})


def tokens(tokenizer: Tokenizer, text: str, **options: bool) -> list[str | None]:
    return [tokenizer.id_to_token(it) for it in tokenizer.encode(text, **options)]


def test_byte_level_vocabularies(tmp_path: Path) -> None:
    tokenizer = Tokenizer(byte_level(tmp_path / "m.gguf"))
    assert tokens(tokenizer, "the other") == ["the", "Ġ", "o", "the", "r"]
    assert tokens(tokenizer, "in <tool> the<|end|>.") == [
        *("in", "Ġ", "<tool>", "Ġ", "the", "<|end|>", "."),
    ]
    assert tokenizer.decode(tokenizer.encode("the ↗ in<|end|>")) == "the ↗ in"
    assert tokenizer.special_token_ids == {0, 1}
    assert tokenizer.added_token_ids == {0, 1, 2}
    assert (tokenizer.named_id("bos_token"), tokenizer.eos_token_id) == (1, 0)
    assert "[PAD99]" not in tokenizer.vocabulary()  # only fills up the table
    assert tokenizer.token_to_id("other") == len(PIECES)


def test_whole_words_and_first_tokens(tmp_path: Path) -> None:
    llama3 = Tokenizer(byte_level(tmp_path / "m.gguf", pre="llama-bpe"))
    assert tokens(llama3, "other") == ["<|bos|>", "other"]
    assert tokens(llama3, "other", add_special_tokens=False) == ["other"]
    without = Tokenizer(byte_level(tmp_path / "n.gguf", pre="llama-bpe", add_bos_token=False))
    assert tokens(without, "the") == ["the"]
    both = byte_level(tmp_path / "o.gguf", add_bos_token=True, add_eos_token=True)
    assert tokens(Tokenizer(both), "the") == ["<|bos|>", "the", "<|end|>"]


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["It", "'s", " 2024", "!!", " \n", "\n", "Él", " aB"]),
        ("smollm", ["It", "'s", " ", "2", "0", "2", "4", "!!", " \n", "\n", "Él", " aB"]),
        ("qwen2", ["It", "'s", " ", "2", "0", "2", "4", "!!", " \n\n", "Él", " aB"]),
        ("llama-bpe", ["It", "'s", " ", "202", "4", "!!", " \n\n", "Él", " aB"]),
        ("gpt-4o", ["It's", " ", "202", "4", "!!", " \n\n", "Él", " a", "B"]),
        ("tekken", ["It", "'s", " ", "2", "0", "2", "4", "!!", " \n\n", "Él", " a", "B"]),
        ("default", ["It", "'", "s", " ", "202", "4", "!!", " \n", "\n", "Él", " aB"]),
        ("deepseek-llm", ["It", "'", "s", " ", "2024", "!!", " ", "\n", "\n", "É", "l", " aB"]),
        ("deepseek-coder", ["It", "'", "s", " ", *"2024", "!!", " ", "\n", "\n", "Él", " aB"]),
    ],
)
def test_texts_are_split_as_the_vocabulary_wants(
    pre: str, pieces: list[str], tmp_path: Path
) -> None:
    backend = read_tokenizer(byte_level(tmp_path / "m.gguf", pre=pre))
    text = "It's 2024!! \n\nÉl aB"
    found = backend.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:stop] for _, (start, stop) in found] == pieces


def test_sentence_piece_vocabularies(tmp_path: Path) -> None:
    tokenizer = Tokenizer(sentence_piece(tmp_path / "m.gguf"))
    assert tokens(tokenizer, "banana") == ["<s>", "▁ban", "ana"]
    assert tokens(tokenizer, "b</s>ban") == ["<s>", "▁b", "</s>", "▁ban"]
    assert tokens(tokenizer, "é\n", add_special_tokens=False) == ["▁", "<0xC3>", "<0xA9>", "<0x0A>"]
    assert tokenizer.decode(tokenizer.encode("é ban\n")) == "é ban\n"
    bare = sentence_piece(tmp_path / "n.gguf", add_space_prefix=False, add_bos_token=False)
    assert tokens(Tokenizer(bare), "anan") == ["an", "an"]
    assert Tokenizer(bare).decode([6, 7]) == " a"


def test_tokens_that_end_an_answer(tmp_path: Path) -> None:
    words = ["<|endoftext|>", "<|im_end|>", "<|call|>", "<|return|>", "<|end|>", "a"]
    types = [CONTROL, CONTROL, CONTROL, CONTROL, USER_DEFINED, NORMAL]
    base = {"general.architecture": "llama", "tokenizer.ggml.model": "gpt2"}
    file = tmp_path / "m.gguf"

    def ends(count: int, **more: int) -> list[int]:
        from slipstream.models.gguf.container import read_container
        from slipstream.models.gguf.tokenizer import end_ids

        keys = {"tokens": words[:count], "token_type": types[:count], **more}
        metadata = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
        file.unlink(missing_ok=True)
        return end_ids(read_container(write_gguf(file, {**base, **metadata}, {})))

    assert ends(2, eos_token_id=1) == [1, 0]
    assert ends(2, eos_token_id=0, eot_token_id=7) == [0, 1]
    assert ends(6) == [0, 1, 2, 3]  # a message of several ends by <|end|>


def test_chat_templates(tmp_path: Path) -> None:
    message = [{"role": "user", "content": "x"}]
    file = byte_level(tmp_path / "m.gguf")
    assert ChatTemplate(Tokenizer(file)).render(message) == "<|bos|>"
    named = {"tokenizer.chat_template.tool_use": "tools!", "tokenizer.chat_templates": ["tool_use"]}
    metadata = {**Checkpoint(file).container.metadata, **named}
    more = ChatTemplate(Tokenizer(write_gguf(tmp_path / "n.gguf", metadata, {})))
    assert more.render(message, tools=[{"type": "function", "function": {"name": "f"}}]) == "tools!"
    assert more.render(message) == "<|bos|>"
    assert not ChatTemplate(Tokenizer(sentence_piece(tmp_path / "o.gguf"))).exists


def test_vocabularies_are_compared(tmp_path: Path) -> None:
    one, same = byte_level(tmp_path / "a.gguf"), byte_level(tmp_path / "b.gguf", pre="qwen2")
    assert has_tokenizer(one)
    assert vocabularies_agree(one, same)
    assert not vocabularies_agree(one, sentence_piece(tmp_path / "c.gguf"))
    assert not has_tokenizer(write_gguf(tmp_path / "d.gguf", {}, {}))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"model": "t5"}, "has a tokenizer of the kind 't5'; supported are gpt2, llama. Name .*"),
        ({"model": None}, "has a tokenizer of the kind 'none'"),
        ({"model": 3}, "tokenizer.ggml.model must be of the type str"),
        ({"pre": "klingon"}, "splits texts as 'klingon'"),
        ({"tokens": []}, "has no vocabulary; name the directory .*--tokenizer"),
        ({"tokens": [1, 2]}, "tokenizer.ggml.tokens must be texts"),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, "has two tokens of the same text"),
        ({"token_type": [1]}, "tokenizer.ggml.token_type must have a number for each of"),
        ({"merges": ["x y"]}, "cannot be used .*; download it again, or name another"),
        ({"merges": ["ab"]}, "cannot be used .*; download it again, or name another"),
        ({"add_bos_token": 3}, "tokenizer.ggml.add_bos_token must be of the type bool"),
    ],
)
def test_what_is_refused(more: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=words):
        Tokenizer(byte_level(tmp_path / "m.gguf", **more))
