"""Text to ids and back, with transformers' AutoTokenizer as the oracle."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from slipstream import LLM
from slipstream.core.errors import CheckpointError, UsageError
from slipstream.models.tokenizer import Tokenizer
from tests.checkpoints import write_qwen3
from tests.tokenizers import write_tokenizer

TEXTS = [
    "",
    " ",
    "hello world",
    "  two  spaces , and a comma , it 's .",
    "naïve café — 東京 🙂\n\ttab",
    "<|begin|>hello<|im_start|>user<|end|>",
    "<think>deep</think>",
]
SAMPLE = [
    "hello world, the quick brown fox jumps over the lazy dog",
    "naïve café it 's a , b .",
] * 4


def train(first: str | None = "<|begin|>") -> tokenizers.Tokenizer:
    """A tiny byte-level BPE; `first` is put before every text."""
    result = tokenizers.Tokenizer(models.BPE())
    result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    result.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|begin|>", "<|end|>"],
    )
    result.train_from_iterator(SAMPLE, trainer)
    result.add_special_tokens(["<|im_start|>"])
    result.add_tokens(["<think>", "</think>"])
    if first is not None:
        result.post_processor = processors.TemplateProcessing(
            single=f"{first} $A", special_tokens=[(first, result.token_to_id(first))]
        )
    return result


def write(folder: Path, backend: tokenizers.Tokenizer, **settings: Any) -> Path:
    backend.save(str(folder / "tokenizer.json"))
    content = {"tokenizer_class": "PreTrainedTokenizerFast", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    return folder


@pytest.fixture(params=["<|begin|>", None], ids=["with-bos", "without-bos"])
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return write(
        tmp_path,
        train(request.param),
        bos_token="<|begin|>",
        eos_token={"content": "<|end|>", "__type": "AddedToken", "lstrip": False},
        clean_up_tokenization_spaces=True,
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("text", TEXTS)
def test_encoding_is_that_of_transformers(folder: Path, text: str) -> None:
    ours, oracle = Tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for special in (True, False):
        ids = ours.encode(text, add_special_tokens=special)
        assert ids == oracle.encode(text, add_special_tokens=special)
        for skip in (True, False):
            decoded = oracle.decode(ids, skip_special_tokens=skip)
            assert ours.decode(ids, skip_special_tokens=skip) == decoded


def test_text_survives_whatever_the_settings_say(folder: Path) -> None:
    ours = Tokenizer(folder)
    for text in TEXTS:
        assert ours.decode(ours.encode(text, False), skip_special_tokens=False) == text


def test_tokens_and_ids(folder: Path) -> None:
    ours, oracle = Tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.vocab_size == len(oracle)
    assert ours.vocabulary() == oracle.get_vocab()
    assert [ours.named_id(f"{it}_token") for it in ("bos", "eos", "pad")] == [0, 1, None]
    assert ours.special_tokens == {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
    assert ours.special_token_ids == {0, 1, ours.token_to_id("<|im_start|>")}
    assert ours.id_to_token(0) == "<|begin|>"
    assert ours.id_to_token(10**6) is None
    assert ours.token_to_id("no such token") is None
    assert ours.decode([5, 10**6, 6]) == ours.decode([5, 6])


def test_a_named_token_is_special_even_where_the_file_has_it_as_a_word(tmp_path: Path) -> None:
    write(tmp_path, train(None), eos_token="</think>", pad_token="[PAD]", unk_token="the")
    ours, oracle = Tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    text = "hello the</think>"
    ids = ours.encode(text)
    assert ids == oracle.encode(text)
    assert ours.decode(ids) == oracle.decode(ids, skip_special_tokens=True)
    assert ours.eos_token_id in ours.special_token_ids
    assert ours.named_id("pad_token") is None  # the model has no row for a new token
    assert (
        ours.vocab_size
        == tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")).get_vocab_size()
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"extra_special_tokens": ["<think>", "unheard of"]},
        {"additional_special_tokens": ["<think>"]},
        {"additional_special_tokens": [{"content": "<think>"}]},
        {"extra_special_tokens": {"thought_token": "<think>"}},
    ],
)
def test_special_tokens_without_a_name(tmp_path: Path, settings: dict[str, Any]) -> None:
    ours = Tokenizer(write(tmp_path, train(), **settings))
    assert ours.decode(ours.encode("<think>hello</think>")) == "hello</think>"


def test_special_tokens_keep_their_flags(tmp_path: Path) -> None:
    backend = train(None)
    backend.add_special_tokens([tokenizers.AddedToken("<mask>", lstrip=True)])
    ours = Tokenizer(write(tmp_path, backend, mask_token="<mask>"))
    assert ours.encode("hello  <mask>") == [*ours.encode("hello"), ours.token_to_id("<mask>")]


def test_neither_truncation_nor_padding(tmp_path: Path) -> None:
    backend = train()
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    ours, text = Tokenizer(write(tmp_path, backend)), "hello world, hello world"
    assert ours.decode(ours.encode(text)) == text


def test_without_settings(tmp_path: Path) -> None:
    train().save(str(tmp_path / "tokenizer.json"))
    ours = Tokenizer(tmp_path)
    assert (ours.settings, ours.special_tokens, ours.eos_token_id) == ({}, {}, None)
    assert ours.encode("hello")[0] == 0


def test_the_old_file_of_special_tokens(tmp_path: Path) -> None:
    write(tmp_path, train(), bos_token="<|end|>")
    names = {"bos_token": {"content": "<|begin|>"}, "additional_special_tokens": []}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(names))
    assert Tokenizer(tmp_path).named_id("bos_token") == 0
    assert AutoTokenizer.from_pretrained(tmp_path).bos_token_id == 0
    declared = {"0": {"content": "<|begin|>", "special": True}}
    write(tmp_path, train(), bos_token="<|end|>", added_tokens_decoder=declared)
    assert Tokenizer(tmp_path).named_id("bos_token") == 1
    assert AutoTokenizer.from_pretrained(tmp_path).bos_token_id == 1


def test_half_a_character_is_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match="half of a surrogate pair at character 1"):
        Tokenizer(folder).encode("a\ud83d")


def test_a_missing_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json; make one"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"version": "9.9"}'])
def test_a_broken_tokenizer(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("value", [3, {"text": "x"}, ["x"]])
def test_settings_that_are_no_token(tmp_path: Path, value: Any) -> None:
    write(tmp_path, train(), eos_token=value)
    with pytest.raises(CheckpointError, match=r'tokenizer_config\.json: "eos_token" must be'):
        Tokenizer(tmp_path)


@pytest.mark.parametrize(
    "declared", [{"1": {"content": "<|begin|>"}}, {"0": {"content": "unheard of"}}, {"0": "x"}]
)
def test_settings_that_give_other_ids(tmp_path: Path, declared: dict[str, Any]) -> None:
    write(tmp_path, train(), added_tokens_decoder=declared)
    with pytest.raises(CheckpointError, match="save the tokenizer again"):
        Tokenizer(tmp_path)


def test_what_transformers_saved_is_consistent(folder: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    AutoTokenizer.from_pretrained(folder).save_pretrained(saved)
    before, after = Tokenizer(folder), Tokenizer(saved)
    assert before.special_tokens == after.special_tokens
    assert [before.encode(text) for text in TEXTS] == [after.encode(text) for text in TEXTS]


def test_importing_is_lean() -> None:
    """Neither tokenizers nor jinja2 is imported before it is needed."""
    code = (
        "import sys, slipstream.models.tokenizer, slipstream.models.chat_template\n"
        "import slipstream.models.catalogue\n"
        "heavy = {'tokenizers', 'jinja2', 'transformers', 'safetensors', 'pydantic',\n"
        "         'huggingface_hub'}\n"
        "print(*sorted(heavy & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == []


def test_a_tokenizer_of_another_model_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    """The embedding table has fewer rows than the tokenizer; the weights do not even exist."""
    folder = write_qwen3(tmp_path / "model", vocab_size=96)
    (folder / "model.safetensors").unlink()
    write_tokenizer(folder, [f"w{number}" for number in range(97)])
    with pytest.raises(CheckpointError, match="has 97 tokens and the model 96: it belongs"):
        LLM(str(folder))
