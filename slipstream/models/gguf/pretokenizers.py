"""How byte-level vocabularies split a text before anything is merged, by `tokenizer.ggml.pre`.

Each name stands for expressions, of which the second splits what the first has left together, and
so on. Source: https://github.com/ggml-org/llama.cpp, `src/llama-vocab.cpp`: its expressions, since
its tokens are those that users of a file expect.
"""

from dataclasses import dataclass
from typing import Final

_SHORT = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_LLAMA3 = rf"{_SHORT}|{_BEFORE}\p{{L}}+|\p{{N}}{{1,3}}|{_OTHERS}"
_QWEN2 = rf"{_SHORT}|{_BEFORE}\p{{L}}+|\p{{N}}|{_OTHERS}"
# Letters that are no lower (upper) ones of ASCII stand for those in upper (lower) case.
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
    """What a name means.

    Attributes:
        splits: expressions, one after the other.
        whole_words: a word that is a token is one, whatever merges say.
        begins: whether a text gets a first token where the file does not say.
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
