"""Every drafting method: its name and its module. A new method is one line here."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol, cast

from slipstream.core.errors import CheckpointError, UsageError
from slipstream.models.checkpoint import Checkpoint, resolve_checkpoint
from slipstream.speculative.drafter import LoadedDrafter, NoDrafter
from slipstream.speculative.mask_token import drafts_in_parallel
from slipstream.speculative.options import Options, TargetModel
from slipstream.speculative.verification_options import read_verification

METHODS = {
    "draft_model": "slipstream.speculative.draft_model",
    "ngram": "slipstream.speculative.ngram",
    "pard": "slipstream.speculative.pard",
    "suffix": "slipstream.speculative.suffix",
    "custom": "slipstream.speculative.custom",
    "custom_class": "slipstream.speculative.custom",
    "medusa": "slipstream.speculative.medusa",
    "mlp_speculator": "slipstream.speculative.mlp_speculator",
}

DEFAULT_NUM_SPECULATIVE_TOKENS = 4


class Method(Protocol):
    """What the module of a drafting method offers."""

    def read_options(self, options: Options) -> Any:
        """The method's own frozen config."""

    def load(self, config: Any, target: TargetModel) -> LoadedDrafter:
        """Its weights, checked against the target."""


@dataclass(frozen=True)
class Speculation:
    """A resolved `speculative_config`: the drafter and the most tokens it guesses a step.

    `synthetic_rates` are a benchmark's conditional acceptance rates; None verifies for real.
    `enforce_eager`: no step is to be captured, since target and drafter are captured together.
    """

    method: str | None
    num_speculative_tokens: int
    drafter: LoadedDrafter
    synthetic_rates: tuple[float, ...] | None = None
    enforce_eager: bool = False


def load_drafter(config: Mapping[str, Any] | None, target: TargetModel) -> Speculation:
    """Load what `config` names; None, or K = 0, is plain decoding.

    Raises:
        UsageError: an unknown key, method or value.
        CheckpointError: the drafter's checkpoint is broken or does not fit the target.
    """
    if config is None:
        return Speculation(None, 0, NoDrafter())
    options = Options(config)
    name = _method(options)
    count = _num_speculative_tokens(options)
    rates = read_verification(options, count)
    eager = _enforce_eager(options)
    method: Method = cast(Method, import_module(METHODS[name]))
    method_config = method.read_options(options)
    options.finish(name)
    if count == 0:
        return Speculation(None, 0, NoDrafter())
    return Speculation(name, count, method.load(method_config, target), rates, eager)


def _method(options: Options) -> str:
    name = options.take_str("method", None)
    model = options.peek("model")
    if name is None and model is None:
        raise UsageError(
            f"speculative_config needs method (one of {', '.join(METHODS)}) or model, the "
            "drafter's checkpoint"
        )
    name = name or (model if model in METHODS else _recognised(options))
    if name == "draft_model" and options.peek("parallel_drafting") is True:
        name = "pard"
    if name not in METHODS:
        raise UsageError(
            f"speculative_config: unknown method {name!r}; known methods: {', '.join(METHODS)}"
        )
    return name


def _recognised(options: Options) -> str:
    """The method of a checkpoint, by its config.json and the other keys."""
    model, revision = options.peek("model"), options.peek("revision")
    if options.peek("pard_token") is not None:
        return "pard"
    if options.peek("num_speculative_tokens") == 0 or options.peek("parallel_drafting") is False:
        return "draft_model"
    if not isinstance(model, str):
        return "draft_model"
    try:
        config = Checkpoint(resolve_checkpoint(model, revision)).config
    except (CheckpointError, UsageError):  # whoever loads it says what is wrong
        return "draft_model"
    return "pard" if drafts_in_parallel(config) else "draft_model"


def _num_speculative_tokens(options: Options) -> int:
    count = options.take("num_speculative_tokens", DEFAULT_NUM_SPECULATIVE_TOKENS)
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise UsageError(
            "speculative_config: num_speculative_tokens must be an integer, 0 (plain decoding) or "
            f"more, not {count!r}"
        )
    return count


def _enforce_eager(options: Options) -> bool:
    eager = options.take("enforce_eager", None)
    if not isinstance(eager, bool | None):
        raise UsageError(f"speculative_config: enforce_eager must be true or false, not {eager!r}")
    return bool(eager)
