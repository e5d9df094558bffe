"""The tokenizer and the chat templates of a GGUF file, from its metadata.

Texts get the same tokens as in llama.cpp with parsing of special tokens.

Byte-level vocabularies split a text before merges, as `tokenizer.ggml.pre` says. Each of its values
stands for a list of regular expressions; each one splits the pieces that the previous one left. The
expressions are those of https://github.com/ggml-org/llama.cpp, `src/llama-vocab.cpp`.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from slipstream.core.errors import CheckpointError
from slipstream.models.gguf.container import Container, read_container

if TYPE_CHECKING:
    import tokenizers


T = TypeVar("T")

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of tokens."""

_PREFIX = "tokenizer.ggml."
_ENDS: Final = ("eos", "eot", "eom")
# Texts of control tokens that end an answer but have no metadata key.
_END_TEXTS: Final = {
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>"),
    *("<|endoftext|>", "<|eom_id|>", "<|end_of_text|>", "<end_of_utterance>", "<EOT>", "[EOT]"),
}
# In the harmony format <|end|> only ends a message, and the answer goes on.
_HARMONY = ("<|return|>", "<|call|>", "<|end|>")


def key(name: str) -> str:
    """The full name of one of the tokenizer's metadata keys."""
    return _PREFIX + name


def take(container: Container, name: str, kind: type[T], default: T) -> T:
    """The value of a tokenizer key, or the default; CheckpointError if it has another type."""
    value = container.metadata.get(key(name), default)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise CheckpointError(
            f"{container.path}: {key(name)} must be of the type {kind.__name__}, not {value!r:.80}"
        )
    return value


def texts(container: Container) -> list[str]:
    """The texts of all tokens; empty without a vocabulary."""
    found = take(container, "tokens", list, [])
    if not all(isinstance(text, str) for text in found[:1]):
        raise CheckpointError(f"{container.path}: {key('tokens')} must be texts")
    return found


def numbers(container: Container, name: str, default: float) -> list[float]:
    """One number for each token, the default for all if the key is missing."""
    count = len(texts(container))
    found = take(container, name, list, [])
    if not found:
        return [default] * count
    if len(found) != count or isinstance(found[0], str):
        raise CheckpointError(
            f"{container.path}: {key(name)} must have a number for each of {count} tokens; "
            "download the file again"
        )
    return found


def token_id(container: Container, role: str) -> int | None:
    """The id of the token with a role: "bos", "eos", "unknown", ...; None if there is none."""
    name = f"{role}_token_id"
    if key(name) not in container.metadata:
        return None
    value = take(container, name, int, 0)
    # Exporters write -1 (as 2 ** 32 - 1), or ids beyond the vocabulary, for none.
    return value if 0 <= value < len(texts(container)) else None


def end_ids(container: Container) -> list[int]:
    """The ids that end an output: tokens with an end role, and control tokens with an end text."""
    named = [token_id(container, role) for role in _ENDS]
    return list(dict.fromkeys([*(it for it in named if it is not None), *_by_text(container)]))


def _by_text(container: Container) -> list[int]:
    types = numbers(container, "token_type", NORMAL)
    wanted = {text: place for place, text in enumerate(texts(container)) if text in _END_TEXTS}
    found = {text: it for text, it in wanted.items() if types[it] in (CONTROL, USER_DEFINED)}
    if all(text in wanted for text in _HARMONY):
        found.pop(_HARMONY[-1], None)
    return sorted(found.values())


_SHORT = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_LLAMA3 = rf"{_SHORT}|{_BEFORE}\p{{L}}+|\p{{N}}{{1,3}}|{_OTHERS}"
_QWEN2 = rf"{_SHORT}|{_BEFORE}\p{{L}}+|\p{{N}}|{_OTHERS}"
# Non-ASCII letters that are not lower (upper) case count as upper (lower) case.
_UPPER, _LOWER = r"(?:(?=\p{L})[^a-z])", r"(?:(?=\p{L})[^A-Z])"
_WITH_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT4O = (
    rf"{_BEFORE}{_UPPER}*{_LOWER}+{_SHORT}?|{_BEFORE}{_UPPER}+{_LOWER}*{_SHORT}?|"
    rf"\p{{N}}{{1,3}}|{_WITH_SLASH}"
)
_TEKKEN = rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}|{_WITH_SLASH}"
_CASED = (  # letters of scripts with two cases
    "A-Za-z"
    "\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5"
    "\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-"
    "\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d"
    "\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    "\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126"
    "\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184"
    "\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-"
    "\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    "\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80"
    "-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_MARKS = "[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3001-\u3002]+"


@dataclass(frozen=True)
class PreTokenizer:
    """The meaning of a value of `tokenizer.ggml.pre`.

    Attributes:
        splits: regular expressions, applied one after the other.
        whole_words: a word that is in the vocabulary becomes that token, without merges.
        begins: whether texts begin with the BOS token if the file does not say.
    """

    splits: tuple[str, ...]
    whole_words: bool = False
    begins: bool = False


_OF_LLAMA3 = PreTokenizer((_LLAMA3,), whole_words=True, begins=True)
_OF_GPT2 = PreTokenizer((_GPT2,))
_DIGITS = PreTokenizer((r"\p{N}", _GPT2))
_OF_QWEN2 = PreTokenizer((_QWEN2,))
_DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))

PRE_TOKENIZERS: Final = {
    "": _DEFAULT,
    "default": _DEFAULT,
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral"), _OF_LLAMA3),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo"), _OF_GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), _DIGITS),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan"), _OF_QWEN2),
    "dbrx": PreTokenizer((_LLAMA3,)),
    "smaug-bpe": PreTokenizer((_LLAMA3,)),
    "gpt-4o": PreTokenizer((_GPT4O,)),
    "llama4": PreTokenizer((_GPT4O,)),
    "tekken": PreTokenizer((_TEKKEN,), whole_words=True, begins=True),
    "deepseek-llm": PreTokenizer(
        ("[\r\n]", rf"\s?[{_CASED}]+", rf"\s?{_MARKS}", r"\s+$", _ASIAN, r"\p{N}+")
    ),
    "deepseek-coder": PreTokenizer(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _ASIAN, r"\p{N}")),
}
"""The patterns, by name; "" where a file has none."""


SPACE_PIECE = "\u2581"  # SentencePiece's character for a space
_PADDING = re.compile(r"\[PAD\d+\]")
_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_TEMPLATE = "tokenizer.chat_template"


def has_vocabulary(path: Path) -> bool:
    return bool(texts(read_container(path)))


def read_settings(path: Path) -> dict[str, Any]:
    """The content of a tokenizer_config.json: named special tokens and chat templates."""
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
    """The tokenizer of a GGUF file; CheckpointError if there is none, or of an unknown kind."""
    container = read_container(path)
    kind = take(container, "model", str, "none")
    if kind not in _KINDS:
        raise CheckpointError(
            f"{path} has a tokenizer of the kind {kind!r}; supported are {', '.join(_KINDS)}. Name "
            "the directory or hub name of another tokenizer for this model (--tokenizer)"
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
    """Ids by text, without padding tokens."""
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
    """The two texts of a merge; the first may begin with a space."""
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
    first = [normalizers.Prepend(SPACE_PIECE)] if prefixed else []
    backend.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", SPACE_PIECE)])
    last = [decoders.Strip(" ", 1, 0)] if prefixed else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE_PIECE, " "), decoders.ByteFallback(), decoders.Fuse(), *last]
    )
    return backend


def _merges(words: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """All pairs of tokens that form a token, sorted by the token's score, best first.

    Among several pairs that form one token, the pair with the longer first part comes first: where
    two of them overlap in a text, it is usually the left one, which llama.cpp merges.
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
    """Add the tokens that are found in a text before it is split."""
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
    """Add the tokens that begin and end every text."""
    from tokenizers import processors

    begins = kind == "llama" or _pre_tokenizer(container).begins
    asked = {
        "bos": take(container, "add_bos_token", bool, begins),
        "eos": take(container, "add_eos_token", bool, False),
    }
    ids = {role: token_id(container, role) for role, is_asked in asked.items() if is_asked}
    named = [(texts(container)[it], it) for it in ids.values() if it is not None]
    leading = [f"{name}:0" for name, it in named if it == ids.get("bos")]
    trailing = [f"{name}:0" for name, it in named if "eos" in ids and it == ids["eos"]]
    if named:
        backend.post_processor = processors.TemplateProcessing(
            single=[*leading, "$A:0", *trailing], special_tokens=named
        )
