"""Reads config.json strictly: a key that may change the computation is never ignored. Also merges a
user's overrides into a config."""

import json
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from slipstream.core.errors import CheckpointError, UsageError

T = TypeVar("T")


# Names that some families have for keys whose values are checked under their usual names.
_OTHER_NAMES: Final = {
    "num_experts": ("num_local_experts", "n_routed_experts"),
    "num_experts_per_tok": ("experts_per_token", "top_k_experts"),
    "moe_intermediate_size": ("intermediate_size",),
}


class _Required:
    """Marks a key without a default."""


REQUIRED: Final = _Required()

TARGET_ADAPTER: Final = "target_adapter"
"""Key of drafters: the adapter of the target that they were trained for. It may be missing."""

# Keys that name or describe the model, or that only tools use.
_BOOKKEEPING = set(
    """
    _commit_hash _model_name_or_path _name_or_path architectures auto_map custom_pipelines
    finetuning_task id2label keys_to_ignore_at_inference label2id license model_name model_type
    name_or_path num_labels
    problem_type task_specific_params tokenizer_class transformers.js_config transformers_version
    unsloth_fixed unsloth_version
    """.split()
)

# Token ids and lengths for tokenizing; the network does not depend on them.
_TOKENS = set(
    """
    bos_token_id decoder_start_token_id eos_token_id max_sequence_length model_max_length
    pad_token_id prefix sep_token_id seq_length tokenizer_model_max_length unk_token_id
    """.split()
)

# How another framework runs the model or returns results; the computation is the same.
_EXECUTION = set(
    """
    _attn_implementation _attn_implementation_autoset _experts_implementation
    _flash_attn_2_enabled attn_implementation cache_implementation chunk_size_feed_forward dtype
    ep_size is_decoder output_attentions output_hidden_states output_router_logits pretraining_tp
    return_dict tie_last_hidden_states torch_dtype torchscript use_bfloat16 use_cache
    use_flash_attention_2 use_flash_attn
    """.split()
)

# Training only.
_TRAINING = set(
    """
    attention_dropout attn_pdrop aux_loss_alpha classifier_dropout embd_pdrop embedding_dropout
    gradient_checkpointing hidden_dropout hidden_dropout_prob initializer_range
    neftune_noise_alpha resid_pdrop residual_dropout router_aux_loss_coef seq_aux
    """.split()
) | {TARGET_ADAPTER}

# Settings of generate(), which old exporters wrote into config.json; here requests set them.
_GENERATION = set(
    """
    assistant_confidence_threshold assistant_lookbehind bad_words_ids begin_suppress_tokens
    diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
    encoder_repetition_penalty epsilon_cutoff eta_cutoff exponential_decay_length_penalty
    forced_bos_token_id forced_eos_token_id length_penalty max_length max_new_tokens min_length
    no_repeat_ngram_size num_assistant_tokens num_assistant_tokens_schedule num_beam_groups
    num_beams num_return_sequences output_scores remove_invalid_values repetition_penalty
    return_dict_in_generate suppress_tokens target_lookbehind temperature top_k top_p typical_p
    """.split()
)

HARMLESS_KEYS: Final = frozenset(_BOOKKEEPING | _TOKENS | _EXECUTION | _TRAINING | _GENERATION)
"""Keys of config.json that do not change what the network computes."""


class ConfigReader:
    """Reads the keys of a config and remembers which have been read.

    A key with the value null counts as missing.

    Args:
        config: the content of config.json, or an object within it.
        file: the file that error messages name.
        prefix: prefix of keys in error messages, for an object within the file ("rope_scaling.").
        harmless: keys that `finish` ignores.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        file: str | Path,
        prefix: str = "",
        harmless: Collection[str] = HARMLESS_KEYS,
    ) -> None:
        self.file = file
        self._config, self._prefix, self._harmless = config, prefix, harmless
        self._keys_read: set[str] = set()

    def take(self, key: str, kind: type[T], default: T | _Required = REQUIRED) -> T:
        """The value of `key`, which must have the type `kind`; `default` if missing or null."""
        value = self.take_optional(key, kind)
        if value is not None:
            return value
        if isinstance(default, _Required):
            raise self.error(key, "is missing; add it, or use a complete checkpoint")
        return default

    def take_optional(self, key: str, kind: type[T], default: T | None = None) -> T | None:
        """The value of `key`; None if it is null, and `default` if it is missing."""
        self._keys_read.add(key)
        if key not in self._config:
            return default
        value = self._config[key]
        return None if value is None else self._typed(key, value, kind)

    def take_named(self, keys: Sequence[str], kind: type[T]) -> T:
        """The value of a key that has several names; one of them must be present."""
        values = {key: self.take_optional(key, kind) for key in keys}
        found = [(key, value) for key, value in values.items() if value is not None]
        if not found:
            return self.take(keys[0], kind)
        if any(value != found[0][1] for _, value in found):
            raise self.error(
                found[0][0], f'and "{found[1][0]}" contradict each other; remove one of them'
            )
        return found[0][1]

    def take_any(self, key: str) -> object:
        """The value of `key`, which may have any type; None if it is missing."""
        self._keys_read.add(key)
        return self._config.get(key)

    def expect(self, key: str, value: object, default: object = REQUIRED) -> None:
        """Raise CheckpointError unless `key` has the only supported value, which a missing or null
        key stands for if there is no `default`."""
        self._keys_read.add(key)
        found = self._config.get(key)
        if found is None:
            found = value if default is REQUIRED else default
        if found != value:
            raise self.error(
                key, f"is {_shown(found)}, but only {_shown(value)} is supported; use another model"
            )

    def nested(self, key: str) -> "ConfigReader":
        """A reader of the object at `key`, empty if it is missing; call its own `finish`."""
        values = self.take(key, dict, {})
        return ConfigReader(values, self.file, f"{self._prefix}{key}.", harmless=())

    def each(self, key: str) -> list["ConfigReader"]:
        """Readers of the objects at `key`, which are values of an object or a list; none if it is
        missing."""
        given = self.take_any(key)
        own = self
        if isinstance(given, list):
            given = {str(place): value for place, value in enumerate(given)}
            own = ConfigReader({key: given}, self.file, self._prefix)
        objects = own.nested(key)
        return [objects.nested(name) for name in own.take(key, dict, {})]

    def finish(self) -> None:
        """Raise CheckpointError for keys that were not read and may change the computation."""
        for key, value in self._config.items():
            if key in self._keys_read or key in self._harmless or _is_off(value):
                continue
            raise self.error(
                key,
                f"is unknown (value {_shown(value)}) and might change what the model computes; if "
                f"it does not, remove it from the file (or from hf_overrides)",
            )

    def named(self, text: str) -> str:
        """A text about keys in quotes, with the names that this config has for them."""
        for key, others in _OTHER_NAMES.items():
            own = next((it for it in others if it in self._config), key)
            if key not in self._config:
                text = text.replace(f'"{key}"', f'"{own}"')
        return text

    def error(self, key: str, what: str) -> CheckpointError:
        """An error about `key`; its message is the file, the key, then `what`."""
        return CheckpointError(f'{self.file}: "{self._prefix}{key}" {what}')

    def _typed(self, key: str, value: object, kind: type[T]) -> T:
        # JSON writes 10000.0 as 10000 too, and true is an int in Python but not in JSON.
        if type(value) is int and kind in (int, float) and abs(value) > _LARGEST[kind]:
            raise self.error(key, f"must be {_KINDS[kind]} of ordinary size, not {_shown(value)}")
        if kind is float and type(value) is int:
            return cast(T, float(value))
        if (isinstance(value, bool) and kind is not bool) or not isinstance(value, kind):
            raise self.error(key, f"must be {_KINDS[kind]}, not {_shown(value)}")
        return value


# JSON's integers have no bound; sizes and their products would overflow.
_LARGEST: Final[dict[type, float]] = {int: 2**31 - 1, float: sys.float_info.max}

_KINDS: Final[dict[type, str]] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a text",
    list: "a list",
    dict: "an object",
}


def _is_off(value: object) -> bool:
    """Whether a value means "off": null, false, "", [] or {}; 0 may be an ordinary value."""
    return value is None or value is False or (isinstance(value, str | list | dict) and not value)


def _shown(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."


def architecture_names(config: Mapping[str, Any]) -> list[str]:
    """The names in `architectures`; none if it is missing or not a list."""
    names = config.get("architectures")
    return list(map(str, names)) if isinstance(names, list) else []


_OLD, _NEW = "rope_scaling", "rope_parameters"
_ROPE_KINDS = {"rope_type", "type"}
_OF_EVERY_KIND = ("rope_theta", "partial_rotary_factor")


def overridden(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A config with other values: objects are merged key by key, other values are replaced.

    RoPE parameters may be given under either key, and replace those under the key that the config
    has. If they name a RoPE type, the config's own parameters are dropped, except those that all
    types have.

    Raises:
        UsageError: the given RoPE parameters are not an object.
    """
    result, given = dict(config), dict(overrides)
    for key in (_OLD, _NEW):
        if not isinstance(given.get(key) or {}, Mapping):
            raise UsageError(f"hf_overrides: {key} must be an object, not {_shown(given[key])}")
    rope = {**(given.pop(_OLD, None) or {}), **(given.pop(_NEW, None) or {})}
    name = _NEW if _NEW in config else _OLD
    found = config.get(name)
    inner: Mapping[str, Any] = found if isinstance(found, Mapping) else {}
    if "rope_theta" in inner and "rope_theta" in given:
        rope.setdefault("rope_theta", given.pop("rope_theta"))
    if rope:
        if rope.keys() & _ROPE_KINDS:
            inner = {key: inner[key] for key in _OF_EVERY_KIND if key in inner}
        result[name] = _merged(inner, rope)
    elif overrides.keys() & {_OLD, _NEW}:  # null or empty: RoPE is not scaled
        result[name] = {key: inner[key] for key in _OF_EVERY_KIND if key in inner}
    return _merged(result, given)


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in changes.items():
        old = result.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            value = _merged(old, value)
        result[key] = value
    return result
