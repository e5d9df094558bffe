"""The forms in which users give prompts, turned into token ids, and the tokenizer for that."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, TypedDict

from slipstream.core.adapters import NamedAdapter
from slipstream.core.config import EngineConfig
from slipstream.core.errors import CheckpointError, UsageError
from slipstream.core.sampling_params import SamplingParams
from slipstream.core.spans import Span
from slipstream.engine.images import ImageReader
from slipstream.models.checkpoint import Checkpoint, resolve_checkpoint
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.harmony import find_harmony
from slipstream.models.tokenizer import Tokenizer


def eos_token_ids(
    checkpoint: Checkpoint, tokenizer: Tokenizer | None, vocab_size: int
) -> tuple[int, ...]:
    """The token ids that end an output. If generation_config.json has no list of them, the end
    tokens of the harmony format are added, since config.json has room for only one.

    Raises:
        CheckpointError: an id is not below `vocab_size`, the rows of the model's head.
    """
    known = checkpoint.eos_token_ids
    for token in known:
        if token >= vocab_size:
            raise CheckpointError(
                f"{checkpoint.eos_file}: eos_token_id {token} is not a token of this model, whose "
                f"ids go from 0 to {vocab_size - 1}; correct it there"
            )
    if tokenizer is None or "eos_token_id" in checkpoint.generation_config:
        return known
    harmony = find_harmony(tokenizer)
    return known if harmony is None else tuple(dict.fromkeys((*known, *harmony.stops)))


def require_rows(tokenizer: Tokenizer, shape: DecoderConfig) -> None:
    """Raise CheckpointError if the vocabulary, without added tokens, exceeds the model's."""
    if tokenizer.num_usual_tokens > shape.vocab_size:
        raise CheckpointError(
            f"the tokenizer of {tokenizer.path} has {tokenizer.num_usual_tokens:,} tokens and the "
            f"model {shape.vocab_size:,}: it belongs to another model; name the right one "
            "(--tokenizer), or download the model again"
        )


def read_tokenizer(config: EngineConfig, checkpoint: Checkpoint) -> Tokenizer | None:
    """The tokenizer that the options ask for; None with `skip_tokenizer_init`."""
    if config.skip_tokenizer_init:
        return None
    if config.tokenizer is None:
        if config.tokenizer_revision not in (None, config.revision):
            return Tokenizer(resolve_checkpoint(config.model, config.tokenizer_revision))
        return Tokenizer(checkpoint.path)
    return Tokenizer(resolve_checkpoint(config.tokenizer, config.tokenizer_revision))


class _Placed(TypedDict, total=False):
    """Optional fields of prompts: see `EncodedPrompt`. Images are {"image": image or images}."""

    cache_salt: str
    priority: int
    multi_modal_data: Mapping[str, Any]
    mm_processor_kwargs: Mapping[str, Any]


class TextPrompt(_Placed):
    prompt: str


class TokensPrompt(_Placed):
    prompt_token_ids: Sequence[int]


_PLACED = {"cache_salt": str, "priority": int}
_MEDIA = ("multi_modal_data", "mm_processor_kwargs")
Prompt = str | TextPrompt | TokensPrompt
Message = Mapping[str, Any]


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt that the engine can run.

    Attributes:
        text: as given; None when it came as token ids.
        bad_words: the request's bad words as token sequences.
        cache_salt: the prefix cache is shared only with prompts of the same salt.
        priority: smaller values go first, if the engine schedules by priority.
        adapter: the LoRA adapter of the prompt and its output.
        spans: the images among the tokens, in order.
    """

    text: str | None
    token_ids: list[int]
    bad_words: tuple[tuple[int, ...], ...]
    cache_salt: str = ""
    priority: int = 0
    adapter: NamedAdapter | None = None
    spans: tuple[Span, ...] = ()


class PromptEncoder:
    """Checks prompts and encodes them.

    Args:
        tokenizer: None if the engine runs without one.
        vocab_size: ids must be below it.
        images: the image reader.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        images: ImageReader = ImageReader(),  # noqa: B008
    ) -> None:
        self._tokenizer, self._vocab_size, self._images = tokenizer, vocab_size, images

    def encode(
        self, prompt: Prompt, params: SamplingParams, add_special_tokens: bool = True
    ) -> EncodedPrompt:
        """Raises UsageError for an empty or malformed prompt, naming the remedy."""
        images, options = images_of(prompt)
        self._images.require(len(images))
        text, token_ids = self._read(prompt, add_special_tokens, bool(images))
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
        token_ids, spans = self._images.place(token_ids, images, options)
        return EncodedPrompt(text, token_ids, self._bad_words(params), spans=spans, **placed)

    def _read(
        self, prompt: Prompt, add_special_tokens: bool, has_images: bool
    ) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            written = self._images.written(prompt) if has_images else prompt
            return prompt, self._encode_text(written, add_special_tokens)
        given: Mapping[str, Any] = prompt if isinstance(prompt, Mapping) else {}
        given = {name: it for name, it in given.items() if name not in (*_PLACED, *_MEDIA)}
        if set(given) == {"prompt"} and isinstance(given["prompt"], str):
            return self._read(given["prompt"], add_special_tokens, has_images)
        if set(given) == {"prompt_token_ids"}:
            return None, _token_ids(given["prompt_token_ids"])
        raise UsageError(
            'a prompt is a string, {"prompt": text} or {"prompt_token_ids": [ids]}, the latter two '
            "also with cache_salt, priority, multi_modal_data and mm_processor_kwargs; "
            "for chat messages use chat"
        )

    def _encode_text(self, text: str, add_special_tokens: bool) -> list[int]:
        if self._tokenizer is None:
            raise UsageError(
                "this engine has no tokenizer (skip_tokenizer_init); give prompt_token_ids"
            )
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _check_ids(self, name: str, ids: Collection[int]) -> None:
        if not ids or (min(ids) >= 0 and max(ids) < self._vocab_size):
            return
        token = next(token for token in ids if not 0 <= token < self._vocab_size)
        raise UsageError(f"{name} holds {token}, but token ids go from 0 to {self._vocab_size - 1}")

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """The tokens of each bad word, at the start of a text and after a space."""
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


def images_of(prompt: Prompt) -> tuple[list[Any], Mapping[str, Any]]:
    """The images of a prompt, and its options for the image processor.

    Raises:
        UsageError: something is not an image, or is given as another medium.
    """
    if not isinstance(prompt, Mapping):
        return [], {}
    data, options = (prompt.get(name) or {} for name in _MEDIA)
    if not isinstance(data, Mapping) or not isinstance(options, Mapping):
        raise UsageError(f"{' and '.join(_MEDIA)} of a prompt must be objects")
    if others := [name for name, it in data.items() if name != "image" and it is not None]:
        raise UsageError(
            f"multi_modal_data holds {', '.join(map(repr, others))}, but only 'image' is read: "
            "neither video nor audio is supported; leave it out, or give frames as images"
        )
    given = data.get("image")
    images = list(given) if isinstance(given, list | tuple) else [given]
    images = [] if given is None else images
    for image in images:
        if not callable(getattr(image, "convert", None)) or not hasattr(image, "size"):
            raise UsageError(
                "an image of multi_modal_data must be a PIL image (Image.fromarray makes one of an "
                f"array), not {type(image).__name__}"
            )
    return images, options


def _token_ids(given: Any) -> list[int]:
    """Token ids of any kind of integer, from a list, an array or a tensor."""
    listed = given.tolist() if hasattr(given, "tolist") else given
    if not isinstance(listed, Iterable) or isinstance(listed, str | Mapping):
        raise UsageError(f"prompt_token_ids must be a list of token ids, not {given!r}")
    ids = list(listed)
    if set(map(type, ids)) <= {int}:  # as nearly always; the loop takes a millisecond for 2,000
        return ids
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise UsageError(f"prompt_token_ids must hold integers, not {token!r}")
    return [int(token) for token in ids]
