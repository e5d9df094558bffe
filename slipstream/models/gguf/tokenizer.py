"""The tokenizer and the chat templates of a GGUF file, from its metadata.

A text gets the tokens that llama.cpp gives it, where it reads special tokens in a text as such.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.core.errors import CheckpointError
from slipstream.models.gguf.container import Container, read_container
from slipstream.models.gguf.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from slipstream.models.gguf.vocabulary import (
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    end_ids,
    numbers,
    take,
    texts,
    token_id,
)

if TYPE_CHECKING:
    import tokenizers

_SPACE = "\u2581"  # what SentencePiece writes for a space
_PADDING = re.compile(r"\[PAD\d+\]")
_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_TEMPLATE = "tokenizer.chat_template"


def has_vocabulary(path: Path) -> bool:
    """Whether a GGUF file holds a tokenizer."""
    return bool(texts(read_container(path)))


def read_settings(path: Path) -> dict[str, Any]:
    """What tokenizer_config.json would say: named special tokens and chat templates."""
    container = read_container(path)
    words = texts(container)
    ids = {name: token_id(container, role) for name, role in _ROLES.items()}
    settings: dict[str, Any] = {name: words[it] for name, it in ids.items() if it is not None}
    templates = {
        key.removeprefix(_TEMPLATE).removeprefix(".") or "default": value
        for key, value in container.metadata.items()
        if key == _TEMPLATE or key.startswith(f"{_TEMPLATE}.")
    }
    if templates:
        settings["chat_template"] = [
            {"name": name, "template": template} for name, template in templates.items()
        ]
    return settings


def read_tokenizer(path: Path) -> "tokenizers.Tokenizer":
    """The tokenizer of a GGUF file.

    Raises:
        CheckpointError: there is none, or none of a kind that is read.
    """
    container = read_container(path)
    kind = take(container, "model", str, "none")
    if kind not in _KINDS:
        raise CheckpointError(
            f"{path} has a tokenizer of the kind {kind!r}; read are {', '.join(_KINDS)}. Name the "
            "directory or hub name of another tokenizer for this model (--tokenizer)"
        )
    if not texts(container):
        raise CheckpointError(
            f"{path} has no vocabulary; name the directory or hub name of a tokenizer for this "
            "model (--tokenizer)"
        )
    try:
        backend = _KINDS[kind](container)
        _add_special(backend, container)
        _add_ends(backend, container, kind)
    except CheckpointError:
        raise
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(
            f"the tokenizer of {path} cannot be used ({error}); download it again, or name another "
            "(--tokenizer)"
        ) from error
    return backend


def _vocabulary(container: Container) -> dict[str, int]:
    """Ids by text, without those that only fill up the table."""
    words, types = texts(container), numbers(container, "token_type", NORMAL)
    found = {word: index for index, word in enumerate(words)}
    if len(found) != len(words):
        raise CheckpointError(
            f"{container.path} has two tokens of the same text; download it again, or name another "
            "tokenizer (--tokenizer)"
        )
    unused = [index for index, kind in enumerate(types) if kind == UNUSED]
    for index in unused:
        if _PADDING.fullmatch(words[index]):
            del found[words[index]]
    return found


def _pre_tokenizer(container: Container) -> PreTokenizer:
    name = take(container, "pre", str, "")
    if name not in PRE_TOKENIZERS:
        raise CheckpointError(
            f"{container.path} splits texts as {name!r} (tokenizer.ggml.pre), which is not known; "
            "name the directory or hub name of a tokenizer for this model (--tokenizer)"
        )
    return PRE_TOKENIZERS[name]


def _byte_level(container: Container) -> "tokenizers.Tokenizer":
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    pre = _pre_tokenizer(container)
    merges = [_pair(text) for text in take(container, "merges", list, [])]
    backend = Tokenizer(models.BPE(_vocabulary(container), merges, ignore_merges=pre.whole_words))
    splits = [pre_tokenizers.Split(Regex(split), "isolated") for split in pre.splits]
    alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, alphabet])
    backend.decoder = decoders.ByteLevel()
    return backend


def _pair(merge: str) -> tuple[str, str]:
    """What is merged: two texts, the first of which may begin with a space."""
    cut = merge.find(" ", 1)
    return merge[:cut], merge[cut + 1 :]


def _sentence_piece(container: Container) -> "tokenizers.Tokenizer":
    from tokenizers import Tokenizer, decoders, models, normalizers

    words = _vocabulary(container)
    unknown = token_id(container, "unknown")
    text = None if unknown is None else texts(container)[unknown]
    merges = _merges(words, numbers(container, "scores", 0.0))
    backend = Tokenizer(
        models.BPE(words, merges, unk_token=text, fuse_unk=True, byte_fallback=True)
    )
    prefixed = take(container, "add_space_prefix", bool, True)
    first = [normalizers.Prepend(_SPACE)] if prefixed else []
    backend.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", _SPACE)])
    last = [decoders.Strip(" ", 1, 0)] if prefixed else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *last]
    )
    return backend


def _merges(words: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every pair of tokens that makes a token, the best of these first.

    Of several ways to make one token, that with the longer beginning comes first: where two of
    them overlap in a text, it is most often the one further left, which llama.cpp takes.
    """
    by_score = sorted(words, key=lambda word: (-scores[words[word]], words[word]))
    return [
        (word[:cut], word[cut:])
        for word in by_score
        for cut in range(len(word) - 1, 0, -1)
        if word[:cut] in words and word[cut:] in words
    ]


_KINDS = {"gpt2": _byte_level, "llama": _sentence_piece}
"""The readers of vocabularies, by `tokenizer.ggml.model`."""


def _add_special(backend: "tokenizers.Tokenizer", container: Container) -> None:
    """Tokens that are found in a text before anything else."""
    from tokenizers import AddedToken

    words, types = texts(container), numbers(container, "token_type", NORMAL)
    special = {index for index, kind in enumerate(types) if kind in (CONTROL, UNKNOWN)}
    special.update(end_ids(container))
    defined = {index for index, kind in enumerate(types) if kind == USER_DEFINED} - special
    found = [
        AddedToken(words[index], normalized=False, special=index in special)
        for index in sorted(special | defined)
        if words[index]
    ]
    backend.add_tokens(found)


def _add_ends(backend: "tokenizers.Tokenizer", container: Container, kind: str) -> None:
    """The tokens that stand before and behind every text."""
    from tokenizers import processors

    begins = kind == "llama" or _pre_tokenizer(container).begins
    asked = {
        "bos": take(container, "add_bos_token", bool, begins),
        "eos": take(container, "add_eos_token", bool, False),
    }
    ids = {role: token_id(container, role) for role, is_asked in asked.items() if is_asked}
    named = [(texts(container)[it], it) for it in ids.values() if it is not None]
    before = [f"{name}:0" for name, it in named if it == ids.get("bos")]
    behind = [f"{name}:0" for name, it in named if "eos" in ids and it == ids["eos"]]
    if named:
        backend.post_processor = processors.TemplateProcessing(
            single=[*before, "$A:0", *behind], special_tokens=named
        )
