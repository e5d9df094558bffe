"""Reading `speculative_config` strictly: every key is honoured or refused."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.core.config_values import known_quantization
from slipstream.core.errors import UsageError
from slipstream.models.catalogue import read_decoder_config
from slipstream.models.checkpoint import Checkpoint, Replaced
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.loading import LoadOptions


@dataclass(frozen=True)
class TargetModel:
    """What a drafter may want to know of the model that it drafts for.

    Attributes:
        replaced: what is read in place of its directory's files.
    """

    path: Path
    vocab_size: int
    load: LoadOptions
    max_num_seqs: int = 1
    replaced: Replaced = field(default_factory=Replaced)

    @property
    def shape(self) -> DecoderConfig:
        """As its config.json has it; its network is not loaded yet."""
        return read_decoder_config(Checkpoint(self.path, self.replaced))


class Options:
    """The keys of a `speculative_config`, each to be taken once; hyphens equal underscores."""

    def __init__(self, mapping: Mapping[str, Any]) -> None:
        self._left: dict[str, Any] = {}
        for key, value in mapping.items():
            name = key.replace("-", "_") if isinstance(key, str) else key
            if not isinstance(name, str) or name in self._left:
                raise UsageError(f"speculative_config: key {key!r} is no name, or comes twice")
            self._left[name] = value
        self._known: set[str] = set()

    def take(self, key: str, default: Any = None) -> Any:
        self._known.add(key)
        value = self._left.pop(key, None)
        return default if value is None else value

    def peek(self, key: str) -> Any:
        return self._left.get(key)

    def fill(self, key: str, value: Any) -> None:
        """Set a key that was not given."""
        if self._left.get(key) is None:
            self._left[key] = value

    def take_int(self, key: str, default: int | None) -> int | None:
        value = self.take(key, default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise UsageError(f"speculative_config: {key} must be an integer, not {value!r}")
        return value

    def take_str(self, key: str, default: str | None) -> str | None:
        value = self.take(key, default)
        if value is not None and not isinstance(value, str):
            raise UsageError(f"speculative_config: {key} must be a string, not {value!r}")
        return value

    def take_bool(self, key: str) -> bool:
        """False where it is not given."""
        value = self.take(key, False)
        if not isinstance(value, bool):
            raise UsageError(f"speculative_config: {key} must be true or false, not {value!r}")
        return value

    def take_quantization(self) -> str | None:
        """The precision of the drafter's matrices; None leaves them as they are."""
        value = self.take("quantization")
        if value is None:
            return None
        return known_quantization("speculative_config: quantization", value)

    def take_greedy_only(self) -> bool:
        """Whether drafts are to be one-hot: `draft_sample_method` is greedy."""
        sampling = self.take_str("draft_sample_method", "probabilistic")
        if sampling not in ("probabilistic", "greedy"):
            raise UsageError(
                "speculative_config: draft_sample_method must be probabilistic or greedy, not "
                f"{sampling!r}"
            )
        return sampling == "greedy"

    def take_positive(self, key: str) -> int | None:
        """A number of tokens; None where it is not given."""
        count = self.take_int(key, None)
        if count is not None and count < 1:
            raise UsageError(f"speculative_config: {key} must be positive, not {count}")
        return count

    def take_only(self, key: str, supported: Any, remedy: str) -> None:
        """A key of other engines that is honoured for one value only."""
        value = self.take(key, supported)
        if value != supported:
            raise UsageError(f"speculative_config: {key}={value!r} is not supported; {remedy}")

    def finish(self, method: str) -> None:
        if self._left:
            unknown = ", ".join(sorted(self._left))
            known = ", ".join(sorted(self._known))
            raise UsageError(
                f"speculative_config: unknown key {unknown} for method {method}; it takes {known}"
            )
