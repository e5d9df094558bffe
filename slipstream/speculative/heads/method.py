"""Methods whose drafter is a drafting head: how heads are read, checked and loaded."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from slipstream.cache.spec import CacheLayout
from slipstream.core.errors import CheckpointError, UsageError
from slipstream.models.checkpoint import resolve_checkpoint
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.loading import LoadOptions
from slipstream.speculative.catalogue import LANGUAGE_MODEL, recognise
from slipstream.speculative.draft_sampling import DraftSampling
from slipstream.speculative.drafter import Drafter, DrafterResources, LoadedDrafter
from slipstream.speculative.heads.checkpoint import HeadCheckpoint
from slipstream.speculative.heads.kinds import HeadConfig
from slipstream.speculative.heads.loading import DraftingNetwork
from slipstream.speculative.model_options import ModelKeys, ModelOptions, read_model_options
from slipstream.speculative.options import Options, TargetModel
from slipstream.speculative.trees.shapes import TokenTree, require_fit

C = TypeVar("C", bound=HeadConfig)
N = TypeVar("N", bound=DraftingNetwork)
_USUAL_KEYS = ModelKeys()


@dataclass(frozen=True, eq=False)
class Head(Generic[C, N]):
    """A head in memory, before its drafter is built.

    Attributes:
        greedy_only: it drafts the argmax, whatever a request's temperature.
        dtype: dtype in which it computes.
        max_model_len: see `DrafterLimits`.
        window: the number of last tokens that it attends to; None: all.
    """

    config: C
    network: N
    greedy_only: bool
    layout: CacheLayout | None
    dtype: torch.dtype
    max_model_len: int | None
    target: DecoderConfig
    window: int | None = None

    def sampling(self, resources: DrafterResources) -> DraftSampling:
        """How draft tokens are sampled from its logits; called after `share`."""
        network = self.network
        tokens = network.vocabulary, network.num_legal_tokens
        return DraftSampling(*tokens, self.greedy_only, network.num_ranks, resources)


@dataclass(frozen=True)
class HeadMethod(Generic[C, N]):
    """The functions of a method for drafting heads.

    Attributes:
        read: reads a head's config from its checkpoint; CheckpointError if it is not supported.
        network: builds the network with its weights, from checkpoint, config, target and options.
        drafter: builds the drafter of a head.
        tree_drafter: builds the drafter of a head that drafts token trees; None: it cannot.
        adapts: whether its layers may have LoRA adapters.
        checkpoint: the class for the head's checkpoint, with its tensor names.
        keys: the keys of a `speculative_config` that it supports.
    """

    name: str
    read: Callable[[Any], C]
    network: Callable[[Any, C, DecoderConfig, LoadOptions], N]
    drafter: Callable[[Head[C, N], DrafterResources], Drafter]
    tree_drafter: Callable[[Head[C, N], TokenTree, DrafterResources], Drafter] | None = None
    checkpoint: type[HeadCheckpoint] = HeadCheckpoint
    adapts: bool = False
    keys: ModelKeys = _USUAL_KEYS

    def read_options(self, options: Options) -> ModelOptions:
        """Read the keys of a `speculative_config` that heads of this method support."""
        return read_model_options(options, self.name, self.keys)

    def describe(self, checkpoint: HeadCheckpoint) -> C:
        """Read the config of a head, without its weights."""
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
            own, others = (str(it).removeprefix("torch.") for it in (load.dtype, target.load.dtype))
            raise UsageError(
                f"speculative_config: dtype {own} differs from the target's {others}, but "
                f"{config.shared}; leave dtype out"
            )
        load = load if self.adapts else replace(load, adapters=None)
        network = self.network(checkpoint, config, shape, load)
        window = options.window_within(load.max_positions)
        pages = options.pages_in(load)
        identity = (
            f"{self.name}:{checkpoint.path}:{load.dtype}:{pages}:{options.quantization}:{window}"
        )
        limits = config.limits(options, target.load.max_positions, identity)
        head = Head(
            config=config,
            network=network,
            greedy_only=options.greedy_only,
            layout=config.layout(pages, load.dtype),
            dtype=load.dtype,
            max_model_len=limits.max_model_len,
            target=shape,
            window=window,
        )
        build = partial(self.drafter, head)
        if tree is not None:
            assert self.tree_drafter is not None, "the catalogue asks only methods with trees"
            require_fit(tree, network.num_legal_tokens, shape)
            build = partial(self.tree_drafter, head, tree)
            limits = replace(limits, tree_depth=tree.depth)
        return LoadedDrafter(
            build=build,
            limits=limits,
            needs=config.needs(shape),
            layout=head.layout,
            adapters=network.adapters,
        )

    def _open(self, options: ModelOptions, target: TargetModel) -> HeadCheckpoint:
        """The head's checkpoint; CheckpointError if it is a drafter of another method."""
        if options.model is None:
            return self.checkpoint(target.path, target.replaced)
        path = resolve_checkpoint(options.model, options.revision, pickled=True)
        checkpoint, own = HeadCheckpoint(path), self.checkpoint(path)
        kind = recognise(checkpoint.config, checkpoint.tensor_names)
        if kind == self.name or (kind == LANGUAGE_MODEL and own.may_be_head):
            return own
        raise CheckpointError(
            f"{path} is no checkpoint for method {self.name}: by its config.json and tensors it is "
            f"one for {kind}; leave method out, or choose another checkpoint"
        )
