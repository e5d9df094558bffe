"""Reads `speculative_config` strictly: every key takes effect or is refused.

By default, requests with a seed are verified by coupling, so that the seed gives the same text as
plain decoding; all others are verified by rejection sampling, which accepts more tokens.

Synthetic verification, for benchmarks only, draws the number of accepted tokens at random, since
with random weights no draft would be accepted. The rest of the step is unchanged; the output is
meaningless.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from slipstream.core.config_values import known_quantization
from slipstream.core.errors import CheckpointError, UsageError
from slipstream.core.sampling_params import Verification
from slipstream.models.catalogue import read_decoder_config
from slipstream.models.checkpoint import Checkpoint, Replaced
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.loading import LoadOptions
from slipstream.speculative.catalogue import LANGUAGE_MODEL, recognise

T = TypeVar("T")


@dataclass(frozen=True)
class TargetModel:
    """The target model, as the methods see it when they load a drafter.

    Attributes:
        replaced: contents that replace files of the target's directory.
    """

    path: Path
    vocab_size: int
    load: LoadOptions
    max_num_seqs: int = 1
    replaced: Replaced = field(default_factory=Replaced)

    @property
    def shape(self) -> DecoderConfig:
        """The config of the target's network, read from config.json."""
        return read_decoder_config(Checkpoint(self.path, self.replaced))


def read_target_config(checkpoint: Checkpoint) -> DecoderConfig:
    """The decoder config of a target; CheckpointError if a drafter is given in its place."""
    try:
        return read_decoder_config(checkpoint)
    except CheckpointError as error:
        kind = recognise(checkpoint.config, ())
        if kind == LANGUAGE_MODEL:
            raise
        raise CheckpointError(
            f"{checkpoint.path} is a drafter of the kind {kind}, which goes with a target: give "
            "the target as the model, and this as the drafter (--drafter)"
        ) from error


class Options:
    """The keys of a `speculative_config`, each read once; hyphens are read as underscores."""

    def __init__(self, mapping: Mapping[str, Any]) -> None:
        self._left: dict[str, Any] = {}
        for key, value in mapping.items():
            name = key.replace("-", "_") if isinstance(key, str) else key
            if not isinstance(name, str) or name in self._left:
                raise UsageError(
                    f"speculative_config: key {key!r} must be a name, and be given once"
                )
            self._left[name] = value
        self._known_keys: set[str] = set()

    def take(self, key: str, default: Any = None) -> Any:
        self._known_keys.add(key)
        value = self._left.pop(key, None)
        return default if value is None else value

    def peek(self, key: str) -> Any:
        return self._left.get(key)

    def fill(self, key: str, value: Any) -> None:
        """Set a key if it was not given."""
        if self._left.get(key) is None:
            self._left[key] = value

    def take_int(self, key: str, default: int | None) -> int | None:
        return self._typed(key, default, int, "an integer")

    def take_str(self, key: str, default: str | None) -> str | None:
        return self._typed(key, default, str, "a string")

    def take_bool(self, key: str) -> bool:
        """Read a boolean; False if it is not given."""
        return self._typed(key, False, bool, "true or false") or False

    def _typed(self, key: str, default: T | None, kind: type[T], words: str) -> T | None:
        value = self.take(key, default)
        if value is None or (isinstance(value, kind) and isinstance(value, bool) == (kind is bool)):
            return value
        raise UsageError(f"speculative_config: {key} must be {words}, not {value!r}")

    def take_quantization(self) -> str | None:
        """Read `quantization`, the drafter's quantisation method; None if it is not given."""
        value = self.take("quantization")
        if value is None:
            return None
        return known_quantization("speculative_config: quantization", value)

    def take_greedy_only(self) -> bool:
        """Read `draft_sample_method`; True if it is greedy, so that q is one-hot."""
        sampling = self.take_str("draft_sample_method", "probabilistic")
        if sampling not in ("probabilistic", "greedy"):
            raise UsageError(
                "speculative_config: draft_sample_method must be probabilistic or greedy, not "
                f"{sampling!r}"
            )
        return sampling == "greedy"

    def take_positive(self, key: str) -> int | None:
        """Read a positive integer; None if it is not given."""
        count = self.take_int(key, None)
        if count is not None and count < 1:
            raise UsageError(f"speculative_config: {key} must be positive, not {count}")
        return count

    def take_only(self, key: str, supported: Any, remedy: str) -> None:
        """Read a key of other engines; any value but `supported` is refused, so that the key is not
        named among those that the method takes."""
        value = self._left.pop(key, None)
        value = supported if value is None else value
        if value != supported:
            raise UsageError(f"speculative_config: {key}={value!r} is not supported; {remedy}")

    def finish(self, method: str, refused: Collection[str] = ()) -> None:
        """Refuse what is left.

        Args:
            refused: keys that were read and that this method takes no value of.
        """
        if self._left:
            flags = {"quantization": "quantization (--drafter-quantization)"}
            unknown = ", ".join(flags.get(key, key) for key in sorted(self._left))
            known = ", ".join(sorted(self._known_keys.difference(refused)))
            place = ""
            if "drafters" in self._known_keys:
                place = "; options of one drafter belong in its own entry of drafters"
            raise UsageError(
                f"speculative_config: unknown key {unknown} for method {method}; it takes {known}"
                f"{place}"
            )


_LOSSLESS = {
    "rejection": Verification.REJECTION,
    "standard": Verification.REJECTION,
    "block": Verification.BLOCK,
    "coupled": Verification.COUPLED,
}
_SYNTHETIC = "synthetic"


def read_verification(
    options: Options, count: int
) -> tuple[Verification | None, tuple[tuple[float, ...], ...]]:
    """Read how requests are verified (None: depends on their seeds), and for synthetic verification
    the lists of conditional acceptance rates of `count` positions."""
    method = options.take_str("rejection_sample_method", None)
    length = options.take("synthetic_acceptance_length")
    rates = options.take("synthetic_acceptance_rates")
    if method == _SYNTHETIC:
        lists = _lists(length, rates, count)
        return Verification.REJECTION, tuple(conditional_rates(rates) for rates in lists)
    if method is not None and method not in _LOSSLESS:
        raise UsageError(
            f"speculative_config: rejection_sample_method {method!r} is not supported; use "
            f"{', '.join(_LOSSLESS)}, or {_SYNTHETIC} in a benchmark"
        )
    if length is not None or rates is not None:
        raise UsageError(
            "speculative_config: synthetic_acceptance_length and synthetic_acceptance_rates need "
            f'rejection_sample_method "{_SYNTHETIC}", which makes the output meaningless'
        )
    return None if method is None else _LOSSLESS[method], ()


def _lists(length: Any, rates: Any, count: int) -> list[tuple[float, ...]]:
    if (length is None) == (rates is None):
        raise UsageError(
            f'speculative_config: rejection_sample_method "{_SYNTHETIC}" needs either '
            "synthetic_acceptance_length or synthetic_acceptance_rates"
        )
    if rates is None:
        if not _is_number(length) or not 1 <= length <= count + 1:
            raise UsageError(
                f"speculative_config: synthetic_acceptance_length must be between 1 and "
                f"{count + 1} (num_speculative_tokens + 1), not {length!r}"
            )
        return [rates_for_length(float(length), count)]
    if isinstance(rates, list | tuple) and rates and isinstance(rates[0], list | tuple):
        return [_rates(one, count) for one in rates]
    return [_rates(rates, count)]


def _rates(rates: Any, count: int) -> tuple[float, ...]:
    if (
        not isinstance(rates, list | tuple)
        or len(rates) != count
        or not all(_is_number(rate) and 0 <= rate <= 1 for rate in rates)
        or any(later > earlier for earlier, later in pairwise(rates))
    ):
        raise UsageError(
            f"speculative_config: synthetic_acceptance_rates must be {count} numbers between 0 and "
            f"1 that never rise, one per position (or a list of such lists), not {rates!r}"
        )
    return tuple(float(rate) for rate in rates)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def rates_for_length(acceptance_length: float, num_speculative_tokens: int) -> tuple[float, ...]:
    """Unconditional acceptance rates per position whose sum is acceptance_length - 1.

    The schedule has least variance: first positions have rate 1, one a fraction, the rest 0.
    `acceptance_length` must be between 1 and num_speculative_tokens + 1.
    """
    left = acceptance_length - 1
    return tuple(min(1.0, max(0.0, left - place)) for place in range(num_speculative_tokens))


def conditional_rates(rates: Sequence[float]) -> tuple[float, ...]:
    """The probability that each position is accepted, given that all earlier ones are.

    Args:
        rates: unconditional acceptance rates, which must not rise.
    """
    return tuple(rate / before if before > 0 else 0.0 for before, rate in pairwise((1.0, *rates)))
