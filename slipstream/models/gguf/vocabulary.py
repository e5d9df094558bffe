"""What the metadata of a GGUF file says of its tokens: their texts, types and roles."""

from collections.abc import Collection
from typing import Final, TypeVar

from slipstream.core.errors import CheckpointError
from slipstream.models.gguf.container import Container

T = TypeVar("T")

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of tokens."""

_PREFIX = "tokenizer.ggml."
_ENDS: Final = ("eos", "eot", "eom")
# Texts of control tokens that end an answer, which files do not name by a key of their own.
_END_TEXTS: Final = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>"),
    *("<|endoftext|>", "<|eom_id|>", "<|end_of_text|>", "<end_of_utterance>", "<EOT>", "[EOT]"),
)
# In the harmony format a message ends so, and the answer goes on.
_HARMONY = ("<|return|>", "<|call|>", "<|end|>")


def key(name: str) -> str:
    """The whole name of a key of the tokenizer."""
    return _PREFIX + name


def take(container: Container, name: str, kind: type[T], default: T) -> T:
    """The value of a key of the tokenizer; CheckpointError if it is of another type."""
    value = container.metadata.get(key(name), default)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise CheckpointError(
            f"{container.path}: {key(name)} must be of the type {kind.__name__}, not {value!r:.80}"
        )
    return value


def texts(container: Container) -> list[str]:
    """The text of every token; empty without a vocabulary."""
    found = take(container, "tokens", list, [])
    if not all(isinstance(text, str) for text in found[:1]):
        raise CheckpointError(f"{container.path}: {key('tokens')} must be texts")
    return found


def numbers(container: Container, name: str, default: float) -> list[float]:
    """A number for every token."""
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
    """The tokens that end an output: those with such a role, and control tokens that by their texts
    do the same."""
    named = [token_id(container, role) for role in _ENDS]
    return list(dict.fromkeys([*(it for it in named if it is not None), *_by_text(container)]))


def _by_text(container: Container) -> list[int]:
    types = numbers(container, "token_type", NORMAL)
    wanted = _places(texts(container), _END_TEXTS)
    found = {text: it for text, it in wanted.items() if types[it] in (CONTROL, USER_DEFINED)}
    if all(text in wanted for text in _HARMONY):
        found.pop(_HARMONY[-1], None)
    return sorted(found.values())


def _places(words: list[str], wanted: Collection[str]) -> dict[str, int]:
    """Where each of these texts stands, if it does."""
    known = set(wanted)
    return {word: place for place, word in enumerate(words) if word in known}
