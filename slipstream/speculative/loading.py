"""Reads a `speculative_config` and loads the drafter that it names."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Protocol, cast

from slipstream.core.config_values import MOST_DRAFTS
from slipstream.core.errors import CheckpointError, UsageError
from slipstream.core.sampling_params import Verification
from slipstream.models.catalogue import read_decoder_config
from slipstream.models.checkpoint import Checkpoint, resolve_checkpoint
from slipstream.models.own_drafter import own_drafter_tensors
from slipstream.models.sharing import require_equal_shares
from slipstream.speculative.catalogue import (
    DRAFTING_KEYS,
    LANGUAGE_MODEL,
    METHODS,
    method_named,
    recognise,
)
from slipstream.speculative.drafter import PLAIN_DECODING, LoadedDrafter
from slipstream.speculative.heads.checkpoint import HeadCheckpoint
from slipstream.speculative.heads.config import wrapped_num_tokens
from slipstream.speculative.heads.kinds import HeadConfig
from slipstream.speculative.heads.method import HeadMethod
from slipstream.speculative.method import Method
from slipstream.speculative.model_options import ModelOptions
from slipstream.speculative.options import Options, TargetModel, read_verification
from slipstream.speculative.trees.shapes import TREE_KEYS, TokenTree, read_tree, require_count

DEFAULT_NUM_SPECULATIVE_TOKENS = 4
AUTO = "auto"


class Loader(Protocol):
    """The interface of a method's module, or for heads of its `HEAD`."""

    def read_options(self, options: Options) -> Any:
        """The method's own frozen config."""

    def load(self, config: Any, target: TargetModel) -> LoadedDrafter:
        """Load the weights, and check that they fit the target."""


@dataclass(frozen=True)
class Speculation:
    """A resolved `speculative_config`.

    Attributes:
        num_speculative_tokens: maximum number of draft tokens per step.
        adaptive: the number is chosen in every step.
        verification: verification of all requests; None: coupled for requests with a seed,
            rejection for others.
        synthetic_rates: a benchmark's lists of conditional acceptance rates, one of which is chosen
            for each request by its seed; empty: verification is real.
        enforce_eager: no step is captured. (Target and drafter are captured together.)
    """

    method: str | None
    num_speculative_tokens: int
    drafter: LoadedDrafter
    adaptive: bool = False
    verification: Verification | None = Verification.REJECTION
    synthetic_rates: tuple[tuple[float, ...], ...] = ()
    enforce_eager: bool = False


@dataclass(frozen=True)
class ChosenDrafter:
    """A drafter that is chosen, but not loaded yet.

    Attributes:
        given: `num_speculative_tokens`, if it was given; for "auto" the maximum.
        adaptive: whether it is "auto".
        proposed: the number that the drafter's checkpoint proposes, if there is one.
        config: the method's own config.
    """

    method: Method
    given: int | None
    proposed: int | None
    config: Any
    adaptive: bool = False

    @property
    def name(self) -> str:
        return self.method.name

    def load(self, target: TargetModel, tree: TokenTree | None = None) -> LoadedDrafter:
        """Load the weights, and check that they fit the target and the tree, if there is one."""
        loader, config = _loader(self.method), self.config
        if isinstance(config, ModelOptions):
            config = replace(config, adaptive=self.adaptive)
        if tree is None:
            return loader.load(config, target)
        assert isinstance(loader, HeadMethod), "only heads draft trees"
        return loader.load(config, target, tree)

    def require_ranks(self, num_ranks: int, random: bool) -> None:
        """Raise UsageError as the function `require_ranks` does."""
        config = self.config
        if isinstance(config, ModelOptions):
            config.require_ranks(num_ranks)
            split = config.num_ranks or 1
            if split > 1 and config.model is not None:
                checkpoint = Checkpoint(resolve_checkpoint(config.model, config.revision))
                shape = read_decoder_config(checkpoint, DRAFTING_KEYS)
                require_equal_shares(checkpoint, shape, split, random)
        for member in getattr(config, "members", ()):  # of a combination
            member.require_ranks(num_ranks, random)


def choose(options: Options, usual: str | None = None) -> ChosenDrafter:
    """Take the method and its options; UsageError for an unknown method or value.

    Args:
        usual: `num_speculative_tokens` if it is not given.
    """
    kind, num_tokens = _find(options)
    method = _method(options, kind)
    options.fill("num_speculative_tokens", usual)
    adaptive = options.peek("num_speculative_tokens") == AUTO
    if adaptive:
        options.take("num_speculative_tokens")
        most = min(method.most_chosen, num_tokens or method.most_chosen)
        options.fill("num_speculative_tokens", most)
    config = _loader(method).read_options(options)
    proposed = getattr(config, "num_speculative_tokens", num_tokens)
    return ChosenDrafter(method, _num_speculative_tokens(options), proposed, config, adaptive)


def describe_head(kind: str, checkpoint: HeadCheckpoint) -> HeadConfig | None:
    """The config of a head of this kind (see `recognise`); None for whole language models."""
    method = METHODS.get(kind)
    loader = _loader(method) if method is not None and method.is_head else None
    return loader.describe(checkpoint) if isinstance(loader, HeadMethod) else None


def describe_own_head(checkpoint: HeadCheckpoint) -> str | None:
    """A description of the drafting head in a language model's checkpoint, or the reason why it
    cannot be used; None if there is none."""
    if not own_drafter_tensors(checkpoint.tensor_names):
        return None
    name = next(method.name for method in METHODS.values() if method.in_target)
    try:
        head = describe_head(name, checkpoint)
    except CheckpointError as error:
        return f"not usable: {error}"
    return None if head is None else f"method {name}, which reads {head.features}"


def load_drafter(config: Mapping[str, Any] | None, target: TargetModel) -> Speculation:
    """Load the drafter that `config` names; None, or K = 0: plain decoding.

    Raises:
        UsageError: an unknown key, method or value.
        CheckpointError: the drafter's checkpoint is broken or does not fit the target.
    """
    found = _read(config)
    if found is None:
        return Speculation(None, 0, PLAIN_DECODING)
    choice, tree, asked = found
    drafter, count = choice.load(target, tree), asked.num_speculative_tokens
    if choice.adaptive:
        count = min(count, drafter.limits.max_speculative_tokens or count)
    return replace(asked, num_speculative_tokens=count, drafter=drafter)


def _read(
    config: Mapping[str, Any] | None,
) -> tuple[ChosenDrafter, TokenTree | None, Speculation] | None:
    """Read all keys of a `speculative_config`; the drafter is not loaded, and K is for "auto" the
    largest. None for plain decoding. Raises UsageError for an unknown key or value."""
    if config is None or dict(config) == {"num_speculative_tokens": 0}:
        return None
    options = Options(config)
    tree = read_tree(options)
    choice = choose(options, _usual_number(options))
    count = choice.given
    if count is None or (choice.adaptive and tree is not None):
        count = choice.proposed or DEFAULT_NUM_SPECULATIVE_TOKENS
        count = count if tree is None else tree.num_nodes
    verification, rates = read_verification(options, count)
    if tree is not None:
        _require_trees(choice.method, verification, rates)
    eager = options.take_bool("enforce_eager")
    options.finish(choice.name, () if choice.method.drafts_trees else TREE_KEYS)
    if count == 0:
        return None
    if tree is not None:
        require_count(tree, count)
    how = choice.adaptive, verification, rates, eager
    return choice, tree, Speculation(choice.name, count, PLAIN_DECODING, *how)


def _usual_number(options: Options) -> str | None:
    """AUTO, unless other options are about a fixed number of draft tokens."""
    members = options.peek("drafters")
    for member in members if isinstance(members, list | tuple) else ():
        if isinstance(member, Mapping) and member.get("num_speculative_tokens") is not None:
            return None
    return None if options.peek("rejection_sample_method") == "synthetic" else AUTO


def require_ranks(config: Mapping[str, Any] | None, num_ranks: int, random: bool) -> None:
    """Raise UsageError if `config` is wrong, or if the drafter that it names cannot run on
    `num_ranks` ranks, more than one; `random` as in `require_equal_shares`."""
    found = _read(config)
    if found is not None:
        found[0].require_ranks(num_ranks, random)


def _loader(method: Method) -> Loader:
    module = import_module(method.module)
    return cast(Loader, module.HEAD if method.is_head else module)


def _find(options: Options) -> tuple[str, int | None]:
    """The kind of the drafter's checkpoint and the K that it proposes, if any. `LANGUAGE_MODEL` and
    None if no checkpoint will be loaded, or the named method does not need to know."""
    model, revision, given = map(options.peek, ("model", "revision", "method"))
    if not isinstance(model, str) or model in METHODS:
        return LANGUAGE_MODEL, None
    if options.peek("num_speculative_tokens") == 0 or not isinstance(revision, str | None):
        return LANGUAGE_MODEL, None
    method = method_named(given) if isinstance(given, str) else None
    if given is not None and (
        method is None or not (method.is_head or method.name == LANGUAGE_MODEL)
    ):
        return LANGUAGE_MODEL, None
    checkpoint = HeadCheckpoint(resolve_checkpoint(model, revision, pickled=True))
    kind = recognise(checkpoint.config, checkpoint.tensor_names)
    count = wrapped_num_tokens(checkpoint.config)
    head = describe_head(kind, checkpoint) if count is None else None
    return kind, count if head is None else head.num_tokens


def _method(options: Options, kind: str) -> Method:
    """The method that is named, or else the one of a checkpoint of this kind."""
    given, model = options.take_str("method", None), options.peek("model")
    method = _implied(options, None) if given is None else method_named(given)
    if method is None and given is not None:
        raise UsageError(
            f"speculative_config: unknown method {given!r}; known methods: "
            f"{', '.join(sorted(METHODS))}"
        )
    if method is None and model is None:
        raise UsageError(
            f"speculative_config needs method (one of {', '.join(sorted(METHODS))}) or model, the "
            "drafter's checkpoint (--drafter)"
        )
    named = METHODS.get(str(model))
    if named and named.without_model and method and method is not named:
        raise UsageError(
            f"speculative_config: model (--drafter) {named.name} is a method that needs no "
            f"checkpoint, and method {method.name} is another; leave one of them out, or give "
            f"./{named.name} for a folder of that name"
        )
    method = method or named or _method_of(options, kind)
    if (
        options.peek("parallel_drafting") is True
    ):  # engines that have it as a flag in addition to a method
        for other in METHODS.values():
            if other.parallel_of == method.name and (kind == other.name or not other.is_head):
                return other
    return method


def _implied(options: Options, kind: str | None) -> Method | None:
    """The method that a key implies for checkpoints of this kind; None: without a checkpoint."""
    for method in METHODS.values():
        key = method.implied_by
        if key is not None and method.parallel_of == kind and options.peek(key) is not None:
            return method
    return None


def _method_of(options: Options, kind: str) -> Method:
    """The method for a checkpoint of this kind; for a language model, keys may decide."""
    implied = _implied(options, kind)
    if implied is not None:
        return implied
    for method in METHODS.values():
        if kind == method.name or kind in method.variants:
            one_by_one = options.peek("parallel_drafting") is False and not method.is_head
            if kind == method.name and one_by_one and method.parallel_of is not None:
                return METHODS[method.parallel_of]
            return method
    raise CheckpointError(
        f"{options.peek('model')} is a drafter of the kind {kind}, which is not supported; "
        f"supported are {', '.join(sorted(METHODS))}"
    )


def _num_speculative_tokens(options: Options) -> int | None:
    count = options.take("num_speculative_tokens")
    if count is None:
        return None
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= MOST_DRAFTS:
        raise UsageError(
            f'speculative_config: num_speculative_tokens must be "{AUTO}" or an integer from 0 '
            f"(plain decoding) to {MOST_DRAFTS}, not {count!r}"
        )
    return count


def _require_trees(
    method: Method, verification: Verification | None, rates: tuple[tuple[float, ...], ...]
) -> None:
    """Raise UsageError if the method or the verification does not work with trees."""
    if not method.drafts_trees:
        names = " and ".join(sorted(it.name for it in METHODS.values() if it.drafts_trees))
        raise UsageError(
            f"speculative_config: {method.name} drafts no trees, {names} do; leave out the keys of "
            "the tree"
        )
    if rates:
        raise UsageError(
            "speculative_config: acceptance is forced for chains only; leave out the tree or "
            'rejection_sample_method "synthetic"'
        )
    if verification not in (None, Verification.COUPLED):
        raise UsageError(
            f"speculative_config: {verification.name.lower()} verification needs chains of sampled "
            "tokens, and trees are always verified by coupling; leave out either the tree or "
            "rejection_sample_method"
        )
