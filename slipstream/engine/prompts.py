"""The forms in which users give prompts, turned into token ids."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, TypedDict

from slipstream.core.adapters import NamedAdapter
from slipstream.core.errors import UsageError
from slipstream.core.sampling_params import SamplingParams
from slipstream.models.tokenizer import Tokenizer


class _Placed(TypedDict, total=False):
    """As of `EncodedPrompt`."""

    cache_salt: str
    priority: int


class TextPrompt(_Placed):
    """A prompt as text."""

    prompt: str


class TokensPrompt(_Placed):
    """A prompt as token ids."""

    prompt_token_ids: Sequence[int]


_PLACED = {"cache_salt": str, "priority": int}
Prompt = str | TextPrompt | TokensPrompt
Message = Mapping[str, Any]


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt that the engine can run.

    Attributes:
        text: as given; None when it came as token ids.
        bad_words: the request's bad words as token sequences.
        cache_salt: the prefix cache is shared with prompts of the same salt alone.
        priority: the smaller goes first, where the engine schedules by priority.
        adapter: that the prompt and its continuation pass.
    """

    text: str | None
    token_ids: list[int]
    bad_words: tuple[tuple[int, ...], ...]
    cache_salt: str = ""
    priority: int = 0
    adapter: NamedAdapter | None = None


class PromptEncoder:
    """Checks prompts and encodes them.

    Args:
        tokenizer: None when the engine was told to do without.
        vocab_size: ids must be below it.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size

    def encode(
        self, prompt: Prompt, params: SamplingParams, add_special_tokens: bool = True
    ) -> EncodedPrompt:
        """Raises UsageError for an empty or malformed prompt, naming the remedy."""
        text, token_ids = self._read(prompt, add_special_tokens)
        if not token_ids:
            raise UsageError("the prompt is empty; give at least one token")
        self._check_ids("prompt_token_ids", token_ids)
        self._check_ids("logit_bias", params.logit_bias or ())
        self._check_ids("allowed_token_ids", params.allowed_token_ids or ())
        self._check_ids("logprob_token_ids", params.logprob_token_ids or ())
        self._check_ids("stop_token_ids", params.stop_token_ids or ())
        if self._tokenizer is None and params.stop_strings:
            raise UsageError("stop strings need a tokenizer; leave skip_tokenizer_init out")
        placed = _placed(prompt) if isinstance(prompt, Mapping) else {}
        return EncodedPrompt(text, token_ids, self._bad_words(params), **placed)

    def _read(self, prompt: Prompt, add_special_tokens: bool) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            return prompt, self._encode_text(prompt, add_special_tokens)
        given: Mapping[str, Any] = prompt if isinstance(prompt, Mapping) else {}
        given = {name: it for name, it in given.items() if name not in _PLACED}
        if set(given) == {"prompt"} and isinstance(given["prompt"], str):
            return self._read(given["prompt"], add_special_tokens)
        if set(given) == {"prompt_token_ids"}:
            return None, _token_ids(given["prompt_token_ids"])
        raise UsageError(
            'a prompt is a string, {"prompt": text} or {"prompt_token_ids": [ids]}, with '
            "cache_salt and priority besides; "
            "for chat messages use chat"
        )

    def _encode_text(self, text: str, add_special_tokens: bool) -> list[int]:
        if self._tokenizer is None:
            raise UsageError(
                "this engine has no tokenizer (skip_tokenizer_init); give prompt_token_ids"
            )
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _check_ids(self, name: str, ids: Sequence[int] | Mapping[int, float]) -> None:
        for token in ids:
            if not 0 <= token < self._vocab_size:
                raise UsageError(
                    f"{name} holds {token}, but token ids go from 0 to {self._vocab_size - 1}"
                )

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Each bad word as tokens, at the start of a text and behind a space."""
        if not params.bad_words:
            return ()
        if self._tokenizer is None:
            raise UsageError("bad_words need a tokenizer; leave skip_tokenizer_init out")
        sequences: dict[tuple[int, ...], None] = {}
        for word in params.bad_words:
            for text in (word, " " + word.lstrip()):
                sequences[tuple(self._tokenizer.encode(text, add_special_tokens=False))] = None
        return tuple(sequence for sequence in sequences if sequence)


def _placed(prompt: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: prompt[name] for name in _PLACED if prompt.get(name) is not None}
    for name, value in found.items():
        if not isinstance(value, _PLACED[name]) or isinstance(value, bool):
            kind = _PLACED[name].__name__
            raise UsageError(f"{name} of a prompt must be of type {kind}, not {value!r}")
    return found


def _token_ids(given: Any) -> list[int]:
    """Token ids of any kind of integer, from a list, an array or a tensor."""
    listed = given.tolist() if hasattr(given, "tolist") else given
    if not isinstance(listed, Iterable) or isinstance(listed, str | Mapping):
        raise UsageError(f"prompt_token_ids must be a list of token ids, not {given!r}")
    ids = list(listed)
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise UsageError(f"prompt_token_ids must hold integers, not {token!r}")
    return [int(token) for token in ids]
