"""What every method shares whose drafter is a drafting head: how it is read, checked and loaded."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from slipstream.cache.spec import CacheLayout
from slipstream.core.errors import CheckpointError, UsageError
from slipstream.models.checkpoint import resolve_checkpoint
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.loading import LoadOptions
from slipstream.speculative.catalogue import DRAFT_MODEL, recognise
from slipstream.speculative.draft_sampling import DraftSampling
from slipstream.speculative.drafter import Drafter, DrafterResources, LoadedDrafter
from slipstream.speculative.heads.checkpoint import HeadCheckpoint
from slipstream.speculative.heads.kinds import HeadConfig
from slipstream.speculative.model_options import ModelKeys, ModelOptions, read_model_options
from slipstream.speculative.options import Options, TargetModel
from slipstream.speculative.trees.shapes import TokenTree, require_fit


class DraftingNetwork(Protocol):
    """The tokens that a head gives.

    Attributes:
        vocabulary: [num_legal_tokens] int64, rising: the target's token ids of the columns of its
            logits; None when they are the ids from 0 on.
        num_legal_tokens: columns from here on are padding.
        num_ranks: that share the columns, as many each, where they are the target's.
    """

    vocabulary: Tensor | None
    num_legal_tokens: int

    @property
    def num_ranks(self) -> int: ...


C = TypeVar("C", bound=HeadConfig)
N = TypeVar("N", bound=DraftingNetwork)
_USUAL_KEYS = ModelKeys()


@dataclass(frozen=True, eq=False)
class Head(Generic[C, N]):
    """A head in memory, waiting for its share of the cache.

    Attributes:
        greedy_only: it drafts the likeliest tokens, whatever a request's temperature.
        max_model_len: beyond so many tokens of a request it does not draft; None: no limit.
        window: how many of the last tokens it attends to, besides the first few; None: all.
    """

    config: C
    network: N
    greedy_only: bool
    layout: CacheLayout | None
    max_model_len: int | None
    target: DecoderConfig
    window: int | None = None

    @property
    def sampling(self) -> DraftSampling:
        """How its logits become draft tokens, once it has what it takes of the target."""
        network = self.network
        tokens = network.vocabulary, network.num_legal_tokens
        return DraftSampling(*tokens, self.greedy_only, network.num_ranks)


@dataclass(frozen=True)
class HeadMethod(Generic[C, N]):
    """A method by its parts.

    Attributes:
        read: a head's config, from its checkpoint; CheckpointError for what cannot run.
        network: it with its weights, from checkpoint, config, target and options.
        drafter: makes the drafter of a head.
        tree_drafter: the same for a tree of draft tokens; None where there are none.
        checkpoint: knows the names of a head's tensors.
        keys: how its keys of a `speculative_config` differ from those of all heads.
    """

    name: str
    read: Callable[[Any], C]
    network: Callable[[Any, C, DecoderConfig, LoadOptions], N]
    drafter: Callable[[Head[C, N], DrafterResources], Drafter]
    tree_drafter: Callable[[Head[C, N], TokenTree, DrafterResources], Drafter] | None = None
    checkpoint: type[HeadCheckpoint] = HeadCheckpoint
    keys: ModelKeys = _USUAL_KEYS

    def read_options(self, options: Options) -> ModelOptions:
        """The keys of a `speculative_config` that say how it is loaded."""
        return read_model_options(options, self.name, self.keys)

    def describe(self, checkpoint: HeadCheckpoint) -> C:
        """What a head is, without its weights."""
        return self.read(self.checkpoint(checkpoint.path))

    def load(
        self, options: ModelOptions, target: TargetModel, tree: TokenTree | None = None
    ) -> LoadedDrafter:
        """Load a head and check that it fits the target."""
        checkpoint = self._open(options, target)
        config, shape = self.read(checkpoint), target.shape
        if problems := config.problems(shape):
            raise CheckpointError(
                f"{checkpoint.path} cannot draft for {target.path}: {'; '.join(problems)}"
            )
        config = config.with_options(options, target)
        load = options.load_options(target)
        if config.shared is not None and load.dtype != target.load.dtype:
            raise UsageError(
                f"speculative_config: dtype {load.dtype} differs from the target's "
                f"{target.load.dtype}, but {config.shared}; leave dtype out"
            )
        network = self.network(checkpoint, config, shape, load)
        window = options.window_within(load.max_positions)
        identity = f"{self.name}:{checkpoint.path}:{load.dtype}:{options.quantization}:{window}"
        limits = config.limits(options, target.load.max_positions, identity)
        head = Head(
            config=config,
            network=network,
            greedy_only=options.greedy_only,
            layout=config.layout(load.dtype),
            max_model_len=limits.max_model_len,
            target=shape,
            window=window,
        )
        build = partial(self.drafter, head)
        if tree is not None:
            assert self.tree_drafter is not None, "the catalogue asks for trees of who has them"
            require_fit(tree, network.num_legal_tokens, shape)
            build = partial(self.tree_drafter, head, tree)
            limits = replace(limits, tree_depth=tree.depth)
        return LoadedDrafter(
            build=build, limits=limits, needs=config.needs(shape), layout=head.layout
        )

    def _open(self, options: ModelOptions, target: TargetModel) -> HeadCheckpoint:
        """The head's directory; CheckpointError when it holds a drafter of another method."""
        if options.model is None:
            return self.checkpoint(target.path, target.replaced)
        path = resolve_checkpoint(options.model, options.revision, pickled=True)
        checkpoint, own = HeadCheckpoint(path), self.checkpoint(path)
        kind = recognise(checkpoint.config, checkpoint.tensor_names)
        if kind == self.name or (kind == DRAFT_MODEL and own.may_be_head):
            return own
        raise CheckpointError(
            f"{path} is no checkpoint for method {self.name}: by its config.json and tensors it is "
            f"one for {kind}; leave method out, or choose another checkpoint"
        )
