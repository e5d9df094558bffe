"""Every drafting method: its name and its module. A new method is one line here."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol, cast

from slipstream.core.errors import CheckpointError, UsageError
from slipstream.models.checkpoint import resolve_checkpoint
from slipstream.models.modules_beside import own_drafter_tensors
from slipstream.speculative.drafter import LoadedDrafter, NoDrafter
from slipstream.speculative.heads.checkpoint import HeadCheckpoint
from slipstream.speculative.heads.config import wrapped_num_tokens
from slipstream.speculative.heads.options import HeadFacts, target_config
from slipstream.speculative.options import Options, TargetModel
from slipstream.speculative.recognition import (
    CHAIN_HEAD,
    DRAFT_MODEL,
    PARALLEL,
    PARALLEL_HEAD,
    recognise,
)
from slipstream.speculative.trees.drafter import draft_trees
from slipstream.speculative.trees.shapes import read_tree, require_count
from slipstream.speculative.verification_options import read_verification

METHODS = {
    "draft_model": "slipstream.speculative.draft_model.drafter",
    "dflash": "slipstream.speculative.dflash.drafter",
    "eagle": "slipstream.speculative.eagle.drafter",
    "eagle3": "slipstream.speculative.eagle3.drafter",
    "gemma4_assistant": "slipstream.speculative.gemma4_assistant.drafter",
    "ngram": "slipstream.speculative.ngram.drafter",
    "p-eagle": "slipstream.speculative.p_eagle.drafter",
    "pard": "slipstream.speculative.pard.drafter",
    "suffix": "slipstream.speculative.suffix.drafter",
    "custom": "slipstream.speculative.custom.drafter",
    "custom_class": "slipstream.speculative.custom.drafter",
    "combination": "slipstream.speculative.combination.drafter",
    "medusa": "slipstream.speculative.medusa.drafter",
    "mlp_speculator": "slipstream.speculative.mlp_speculator.drafter",
    "mtp": "slipstream.speculative.mtp.drafter",
}

# Other spellings, some by the target's family.
_SPELLINGS = {
    **dict.fromkeys(("p_eagle", "peagle"), PARALLEL_HEAD),
    **dict.fromkeys(
        ("deepseek_mtp", "glm4_moe_mtp", "mimo_mtp", "qwen3_5_mtp", "qwen3_next_mtp"), "mtp"
    ),
}

# Methods whose checkpoints may say how many tokens they draft.
_HEADS = (
    *("dflash", "eagle", "eagle3", "gemma4_assistant"),
    *("medusa", "mlp_speculator", "mtp", "p-eagle"),
)
OWN_HEAD = "mtp"  # the one that may lie in the target's own checkpoint
_TREES = ("eagle", "eagle3")
DEFAULT_NUM_SPECULATIVE_TOKENS = 4
COMBINATION = "combination"


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


@dataclass(frozen=True)
class Choice:
    """A drafter that was named and is not loaded yet.

    Attributes:
        told: `num_speculative_tokens`, if it was given.
        own: how many tokens the drafter itself has in mind, if it has.
        config: its method's own.
    """

    name: str
    told: int | None
    own: int | None
    config: Any

    def load(self, target: TargetModel) -> LoadedDrafter:
        """Its weights, checked against the target."""
        method = cast(Method, import_module(METHODS[self.name]))
        return method.load(self.config, target)


def choose(options: Options) -> Choice:
    """Take the method and what it wants to know; UsageError for an unknown method or value."""
    found = _find(options)
    name = _method(options, found)
    method = cast(Method, import_module(METHODS[name]))
    config = method.read_options(options)
    own = getattr(config, "num_speculative_tokens", found.num_speculative_tokens)
    return Choice(name, _num_speculative_tokens(options), own, config)


def describe_head(kind: str, checkpoint: HeadCheckpoint) -> HeadFacts | None:
    """What a checkpoint of this kind (`recognise`) is; None for whole language models."""
    module = import_module(METHODS[kind]) if kind in _HEADS else None
    return None if module is None else cast(HeadFacts, module.describe(checkpoint))


def describe_own_head(checkpoint: HeadCheckpoint) -> str | None:
    """What a language model's checkpoint has beside it to draft with, or why that cannot be used;
    None for nothing."""
    if not own_drafter_tensors(checkpoint.tensor_names):
        return None
    try:
        facts = describe_head(OWN_HEAD, checkpoint)
    except CheckpointError as error:
        return f"not usable: {error}"
    return None if facts is None else f"method {OWN_HEAD}, which reads {facts.features}"


def load_drafter(config: Mapping[str, Any] | None, target: TargetModel) -> Speculation:
    """Load what `config` names; None, or K = 0, is plain decoding.

    Raises:
        UsageError: an unknown key, method or value.
        CheckpointError: the drafter's checkpoint is broken or does not fit the target.
    """
    if config is None or dict(config) == {"num_speculative_tokens": 0}:
        return Speculation(None, 0, NoDrafter())
    options = Options(config)
    tree = read_tree(options)
    choice = choose(options)
    count = choice.told
    if count is None:
        count = choice.own or DEFAULT_NUM_SPECULATIVE_TOKENS
        count = count if tree is None else tree.num_nodes
    rates = read_verification(options, count)
    if tree is not None:
        _require_trees(choice.name, rates)
    eager = _enforce_eager(options)
    options.finish(choice.name)
    if count == 0:
        return Speculation(None, 0, NoDrafter())
    drafter = choice.load(target)
    if tree is not None:
        require_count(tree, count)
        drafter = draft_trees(drafter, tree, choice.name, target_config(target))
    return Speculation(choice.name, count, drafter, rates, eager)


@dataclass(frozen=True)
class _Found:
    """What a drafter's checkpoint says of itself: its kind, and its own K if it has one."""

    kind: str = DRAFT_MODEL
    num_speculative_tokens: int | None = None


def _find(options: Options) -> _Found:
    """Looked at only where there is a checkpoint that will be loaded."""
    model, revision = options.peek("model"), options.peek("revision")
    if not isinstance(model, str) or model in METHODS:
        return _Found()
    if options.peek("num_speculative_tokens") == 0 or not isinstance(revision, str | None):
        return _Found()
    if _named(options.peek("method")) not in (None, DRAFT_MODEL, *_HEADS):
        return _Found()
    checkpoint = HeadCheckpoint(resolve_checkpoint(model, revision, pickled=True))
    kind = recognise(checkpoint.config, checkpoint.tensor_names)
    own = wrapped_num_tokens(checkpoint.config)
    facts = describe_head(kind, checkpoint) if own is None else None
    return _Found(kind, own if facts is None else facts.num_tokens)


def _method(options: Options, found: _Found) -> str:
    name = options.take_str("method", None)
    model = options.peek("model")
    if name is None and options.peek("drafters") is not None:
        return COMBINATION
    if name is None and model is None:
        raise UsageError(
            f"speculative_config needs method (one of {', '.join(METHODS)}) or model, the "
            "drafter's checkpoint (--drafter)"
        )
    if name is None:
        name = model if model in METHODS else _method_of(options, found.kind)
        if name not in METHODS:
            raise CheckpointError(
                f"{model} is a drafter of the kind {name}, which is not supported; supported are "
                f"{', '.join(METHODS)}"
            )
    name = _named(name)
    if options.peek("parallel_drafting") is True:  # engines that have it as a flag beside a method
        if name == DRAFT_MODEL:
            name = PARALLEL
        elif name == CHAIN_HEAD and found.kind == PARALLEL_HEAD:
            name = PARALLEL_HEAD
    if name not in METHODS:
        raise UsageError(
            f"speculative_config: unknown method {name!r}; known methods: {', '.join(METHODS)}"
        )
    return name


def _named(method: Any) -> Any:
    """A method by the name that it has here; anything else as it is."""
    return _SPELLINGS.get(method, method) if isinstance(method, str) else method


def _method_of(options: Options, kind: str) -> str:
    """The method for a checkpoint's kind: language models can draft in more than one way."""
    if kind == DRAFT_MODEL:
        return PARALLEL if options.peek("pard_token") is not None else kind
    if kind == PARALLEL and options.peek("parallel_drafting") is False:
        return DRAFT_MODEL
    return PARALLEL if kind == "pard2" else kind


def _num_speculative_tokens(options: Options) -> int | None:
    count = options.take("num_speculative_tokens")
    if count is None:
        return None
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise UsageError(
            "speculative_config: num_speculative_tokens must be an integer, 0 (plain decoding) or "
            f"more, not {count!r}"
        )
    return count


def _require_trees(name: str, rates: tuple[float, ...] | None) -> None:
    """Raise UsageError where there are no trees."""
    if name not in _TREES:
        raise UsageError(
            f"speculative_config: {name} drafts no trees, {' and '.join(_TREES)} do; leave out "
            "the keys of the tree"
        )
    if rates is not None:
        raise UsageError(
            "speculative_config: forced acceptance is along a chain; leave out either the tree or "
            'rejection_sample_method "synthetic"'
        )


def _enforce_eager(options: Options) -> bool:
    eager = options.take("enforce_eager", None)
    if not isinstance(eager, bool | None):
        raise UsageError(f"speculative_config: enforce_eager must be true or false, not {eager!r}")
    return bool(eager)
