"""Encodes and decodes text, with the checkpoint's tokenizer.json or GGUF file."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.core.errors import CheckpointError, UsageError
from slipstream.models.checkpoint import read_json_object
from slipstream.models.gguf.files import is_gguf
from slipstream.models.gguf.tokenizer import has_vocabulary, read_settings, read_tokenizer
from slipstream.models.safetensors_file import require_content

if TYPE_CHECKING:
    import tokenizers

_LONG_TEXT = 8192  # characters, or tokens, that take milliseconds
NAMED_TOKENS = tuple(
    "bos_token eos_token unk_token sep_token pad_token cls_token mask_token".split()
)


def has_tokenizer(path: Path) -> bool:
    """Whether a model directory, or a GGUF file, has a tokenizer."""
    return has_vocabulary(path) if is_gguf(path) else (path / "tokenizer.json").is_file()


def tokenizer_settings(path: Path) -> dict[str, Any]:
    """The content of tokenizer_config.json, or its equivalent in a GGUF file; {} if missing."""
    return read_settings(path) if is_gguf(path) else _optional(path / "tokenizer_config.json")


def declared_token_ids(path: Path) -> dict[str, int]:
    """Ids of the added tokens in tokenizer_config.json, by their texts. What is malformed there is
    left out here; `Tokenizer` refuses it."""
    declared = tokenizer_settings(path).get("added_tokens_decoder")
    pairs = declared.items() if isinstance(declared, dict) else ()
    return {
        token["content"]: int(key)
        for key, token in pairs
        if key.isdecimal() and isinstance(token, dict) and isinstance(token.get("content"), str)
    }


class Tokenizer:
    """The tokenizer of a model directory, or of a GGUF file.

    `clean_up_tokenization_spaces` of tokenizer_config.json is never applied, since it removes
    spaces from the model's output (transformers disables it by default, and for BPE always).
    Truncation and padding of tokenizer.json are disabled.

    Attributes:
        settings: the content of tokenizer_config.json; empty if there is none.
        special_tokens: text of the named special tokens ("bos_token", ...), for chat templates.
        special_token_ids: ids that `skip_special_tokens` leaves out.
        added_token_ids: ids of tokens that are found in a text before it is split; includes the
            special ones.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.settings = tokenizer_settings(self.path)
        self._backend = read_tokenizer(self.path) if is_gguf(self.path) else _load(self.path)
        self.special_tokens = _special_tokens(self.path, self.settings)
        self._check_added_tokens()
        self._mark_special()
        added = self._backend.get_added_tokens_decoder()
        self.added_token_ids = frozenset(added)
        self.special_token_ids = frozenset(id for id, token in added.items() if token.special)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, by default with those of the post-processor, such as a first one."""
        _require_unicode(text)
        if len(text) < _LONG_TEXT:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        # `encode` holds the GIL, so all other threads would wait for it.
        batch = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return batch[0].ids

    def encode_parts(self, texts: Sequence[str]) -> list[int]:
        """Token ids of texts that follow one another; no token spans two of them."""
        for text in texts:
            _require_unicode(text)
        batch = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [token for encoding in batch for token in encoding.ids]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids; unknown ids are left out."""
        if len(ids) < _LONG_TEXT:
            return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return self._backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]

    def to_json(self) -> str:
        """The tokenizer as the text of a tokenizer.json, special tokens marked."""
        return self._backend.to_str()

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included (a model may have more rows)."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def num_usual_tokens(self) -> int:
        """Number of tokens, without added ones."""
        return self._backend.get_vocab_size(with_added_tokens=False)

    def vocabulary(self) -> dict[str, int]:
        """The ids of all tokens, added ones included, by the tokens' spelling."""
        return self._backend.get_vocab(with_added_tokens=True)

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it; None for an unknown id."""
        return self._backend.id_to_token(token_id)

    def token_to_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary spells it."""
        return self._backend.token_to_id(token)

    @cached_property
    def eos_token_id(self) -> int | None:
        """The id of the token that ends a text (generation may end at more: the checkpoint's)."""
        return self.named_id("eos_token")

    def named_id(self, name: str) -> int | None:
        """The id of a special token by its name in the settings, such as bos_token."""
        token = self.special_tokens.get(name)
        return None if token is None else self.token_to_id(token)

    def _mark_special(self) -> None:
        """Mark named special tokens as special, even if tokenizer.json does not."""
        from tokenizers import AddedToken

        added = self._backend.get_added_tokens_decoder()
        for token in (*self.special_tokens.values(), *_extra_special_tokens(self.settings)):
            index = self.token_to_id(token)
            if index is None:  # a new token would have no row in the model
                continue
            known = added.get(index) or AddedToken(token, normalized=False)
            if not known.special:
                known.special = True
                self._backend.add_special_tokens([known])

    def _check_added_tokens(self) -> None:
        """Raise CheckpointError if the settings give another id to an added token."""
        declared = self.settings.get("added_tokens_decoder")
        for index, token in declared.items() if isinstance(declared, dict) else ():
            text = token.get("content") if isinstance(token, dict) else None
            if not isinstance(text, str) or str(self.token_to_id(text)) != index:
                raise CheckpointError(
                    f"{self.path / 'tokenizer_config.json'} gives id {index} to {text!r}, but "
                    f"tokenizer.json has {self.token_to_id(str(text))} for it; save the tokenizer "
                    f"again with transformers"
                )


def _require_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(
            f"the text is not valid Unicode: it has half of a surrogate pair at character "
            f"{error.start}; send the whole character"
        ) from error


def _load(path: Path) -> "tokenizers.Tokenizer":
    import tokenizers

    file = path / "tokenizer.json"
    if not file.is_file():
        raise CheckpointError(
            f"{path} has no tokenizer.json; make one with transformers "
            f"(AutoTokenizer.from_pretrained(...).save_pretrained(...)), or name a directory that "
            f"has it as the tokenizer"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        require_content(file)
        raise CheckpointError(
            f"{file} cannot be read ({error}); download it again, or update the package tokenizers"
        ) from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def _optional(file: Path) -> dict[str, Any]:
    return read_json_object(file) if file.is_file() else {}


def _special_tokens(path: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """The named special tokens; with old settings special_tokens_map.json takes precedence."""
    result = _named_tokens(path / "tokenizer_config.json", settings)
    if "added_tokens_decoder" not in settings:
        old_file = path / "special_tokens_map.json"
        result |= _named_tokens(old_file, _optional(old_file))
    return result


def _extra_special_tokens(settings: Mapping[str, Any]) -> list[str]:
    """Special tokens without a name, under the key of transformers 5 or of earlier versions."""
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    tokens = extra.values() if isinstance(extra, dict) else extra
    texts = [token.get("content") if isinstance(token, dict) else token for token in tokens]
    return [text for text in texts if isinstance(text, str)]


def _named_tokens(file: Path, content: Mapping[str, Any]) -> dict[str, str]:
    result = {}
    for name in NAMED_TOKENS:
        value = content.get(name)
        text = value.get("content") if isinstance(value, Mapping) else value
        if text is None and value is None:
            continue
        if not isinstance(text, str):
            raise CheckpointError(
                f'{file}: "{name}" must be a text or an object with "content", not {value!r}'
            )
        result[name] = text
    return result
