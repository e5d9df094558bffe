"""`draft_model`: any smaller language model of the same tokenizer (Leviathan et al. 2023).

The draft model's layers live in the same blocks as the target's. A round is one ragged pass over
the committed tokens that it has not seen (the bonus token among them), whose last row gives draft
token 1, and then K-1 passes of a single row per request. A draft model with another tokenizer
drafts only the tokens that both have (`vocabularies.py`).
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from slipstream.cache.spec import ModelCache
from slipstream.core.batch import Batch
from slipstream.layers.embedding import WholeRows
from slipstream.layers.parameters import Share
from slipstream.models.catalogue import read_decoder_config
from slipstream.models.checkpoint import Checkpoint, resolve_checkpoint
from slipstream.models.decoder import Decoder
from slipstream.models.loading import load_decoder
from slipstream.runner.device_batch import DeviceBatch
from slipstream.runner.excerpts import ExcerptSizes
from slipstream.runner.memory import device_memory
from slipstream.runner.model_runner import Forward, ModelRunner
from slipstream.runner.rows import PassRows
from slipstream.sampling.verification import Verdict
from slipstream.speculative.catalogue import DRAFTING_KEYS
from slipstream.speculative.draft_model.context import DraftContext
from slipstream.speculative.draft_model.vocabularies import (
    TokenMap,
    map_tokens,
    require_same_vocabulary,
    vocabularies_agree,
)
from slipstream.speculative.draft_sampling import DraftSampling
from slipstream.speculative.draft_vocabulary import choose_draft_vocabulary
from slipstream.speculative.drafter import (
    Draft,
    Drafter,
    DrafterLimits,
    DrafterResources,
    DraftWindow,
    LoadedDrafter,
)
from slipstream.speculative.model_options import ModelKeys, ModelOptions, read_model_options
from slipstream.speculative.options import Options, TargetModel

_MEMORY_SHARE = 8  # windows by default take at most 1 / 8 of the free memory


def load_network(
    config: ModelOptions, target: TargetModel, method: str, mask_token: int | None = None
) -> "DraftNetwork":
    """Load the draft model's weights and check that it fits the target.

    Args:
        mask_token: the draft model's id of the mask token, for methods that have one.
    """
    assert config.model is not None, "a draft model has a checkpoint of its own"
    checkpoint = Checkpoint(resolve_checkpoint(config.model, config.revision))
    shape = read_decoder_config(checkpoint, DRAFTING_KEYS)
    tokens = _token_map(config, target, checkpoint, shape.vocab_size)
    vocabulary = _vocabulary(config, target, min(target.vocab_size, shape.vocab_size), tokens)
    load = config.load_options(target)
    network, dtype = load_decoder(checkpoint, load, shape), load.dtype
    kind = "tli" if tokens else "same"
    window = config.window_within(load.max_positions)
    if window is not None and config.draft_window is None:  # it is a default
        size = target.max_num_seqs * window * shape.cache_layout(dtype, load.share).bytes_per_token
        free = target.load.share.least(device_memory(load.device).free)
        window = window if size <= free // _MEMORY_SHARE else None
    identity = f"{method}:{checkpoint.path}:{dtype}:{config.quantization}:{kind}:{mask_token}"
    drafting = identity, vocabulary, tokens, mask_token, window, load.share
    return DraftNetwork(config, network, target, dtype, *drafting)


def _token_map(
    config: ModelOptions, target: TargetModel, checkpoint: Checkpoint, vocab_size: int
) -> TokenMap | None:
    """How token ids of the target become the draft model's; None if the vocabularies are equal."""
    if config.maps_tokens and not vocabularies_agree(target.path, checkpoint.path):
        return map_tokens(target.path, target.vocab_size, checkpoint, vocab_size)
    require_same_vocabulary(target.path, target.vocab_size, checkpoint.path, vocab_size)
    return None


def _vocabulary(
    config: ModelOptions, target: TargetModel, num_legal: int, tokens: TokenMap | None
) -> list[int] | None:
    """The tokens that may be drafted, as rising ids of the target; None: all of them."""
    shared = None if tokens is None else sorted(tokens.draft_ids)
    if config.vocabulary is not None:
        return choose_draft_vocabulary(config.vocabulary, target.path, num_legal, shared)
    return shared


class DraftNetwork:
    """A draft model in memory, whose inputs and outputs are the target's token ids.

    Attributes:
        drafting: makes draft tokens of its logits.
        mask_token: the input id of the mask token; None without one.
        identity: see `DrafterLimits.cache_identity`.
    """

    def __init__(
        self,
        config: ModelOptions,
        network: Decoder,
        target: TargetModel,
        dtype: torch.dtype,
        identity: str,
        vocabulary: list[int] | None,
        tokens: TokenMap | None,
        mask_token: int | None,
        window: int | None,
        share: Share,
    ) -> None:
        device, shape = target.load.device, network.config
        self.mask_token, self.identity, self._window = mask_token, identity, window
        num_legal_tokens, ids = min(target.vocab_size, shape.vocab_size), None
        same = shape.vocab_size == target.vocab_size and share.size == target.load.share.size
        if share.size > 1 and not same:
            network.head = WholeRows(network.head)  # the target's ranks have other tokens
        if vocabulary is not None:
            ids, num_legal_tokens = torch.tensor(vocabulary, device=device), len(vocabulary)
            own = (
                vocabulary if tokens is None else [tokens.draft_ids[token] for token in vocabulary]
            )
            network.head = network.head.over(
                torch.tensor(own, device=device)
            )  # frees the whole head
            if tokens is None:
                ids, num_legal_tokens = network.head.tokens, network.head.num_tokens
        if tokens is not None:
            inputs = [
                tokens.draft_ids.get(token, tokens.fallback) for token in range(target.vocab_size)
            ]
            if mask_token is not None:
                self.mask_token = len(inputs)
                inputs.append(mask_token)
            network.renumber(torch.tensor(inputs, device=device))
        num_ranks = network.head.columns.num_ranks
        self.drafting = DraftSampling(ids, num_legal_tokens, config.greedy_only, num_ranks)
        longest = config.max_model_len or shape.max_position_embeddings
        self.max_model_len = min(longest, shape.max_position_embeddings, target.load.max_positions)
        self.limits = DrafterLimits(
            max_model_len=self.max_model_len,
            cache_identity=identity if window is None else "",
            may_skip_steps=True,
        )
        self.width = shape.hidden_size
        self.dtype = dtype
        self.decoder = network
        self.layout = shape.cache_layout(dtype, share)

    @property
    def kept(self) -> dict[str, Any]:
        """The fields `layout`, `window` and `adapters` of its `LoadedDrafter`."""
        adapters = self.decoder.adapters
        if self._window is None:
            return {"layout": self.layout, "adapters": adapters}
        window = DraftWindow(self.layout, self._window)
        return {"layout": None, "window": window, "adapters": adapters}

    def excerpt_sizes(self, resources: DrafterResources) -> ExcerptSizes | None:
        """Sizes of the excerpt that its rounds see of a request; None: they see all of it."""
        if self._window is None:
            return None
        size = resources.cache_sizes.block_size
        return ExcerptSizes(self._window, resources.num_speculative_tokens, size)

    def cache(self, resources: DrafterResources) -> ModelCache:
        sizes, window = resources.cache_sizes, self.excerpt_sizes(resources)
        if window is not None:
            sizes = replace(sizes, num_blocks=sizes.num_slots * window.num_blocks)
        return ModelCache(self.layout, sizes)

    def runner(self, resources: DrafterResources) -> ModelRunner:
        return ModelRunner(self.decoder, self.cache(resources), resources.state)


# The most known tokens whose keys and values the draft model lacks when a round begins: the bonus
# token of the last round and, if all its draft tokens were accepted, the last of those.
MOST_MISSING = 2


def read_options(options: Options) -> ModelOptions:
    """The options of a draft model, with the keys that other engines have for one."""
    keys = ModelKeys(
        remedy="leave it out, or use method pard",
        vocabulary=True,
        other_tokenizer=True,
        window=True,
        splits=True,
    )
    return read_model_options(options, "draft_model", keys)


def load(options: ModelOptions, target: TargetModel) -> LoadedDrafter:
    """Load the draft model's weights and check that it fits the target."""
    network = load_network(options, target, "draft_model")
    return LoadedDrafter(
        build=partial(DraftModelDrafter, network), limits=network.limits, **network.kept
    )


class DraftModelDrafter(Drafter):
    """Drafts with its own network over the shared blocks."""

    def __init__(self, network: DraftNetwork, resources: DrafterResources) -> None:
        super().__init__(resources.state)
        self._network, self._resources = network, resources
        self._runner = network.runner(resources)
        # It has seen none of the tokens that another drafter drafted in the last round.
        self._most_missing = (
            resources.num_speculative_tokens + 1 if resources.in_combination else MOST_MISSING
        )
        self._context = DraftContext(
            self._runner,
            resources.state,
            network.max_model_len,
            self._most_missing,
            resources.captured,
            network.excerpt_sizes(resources),
            resources.shares_prefixes,
        )

    def prepare(self, batch: Batch) -> None:
        self._context.prepare(batch, self._most_missing)

    def propose(self, batch: DeviceBatch) -> Draft:
        """One ragged pass over the missing tokens, then one row per request and draft token."""
        slots, wanted = batch.slots, batch.num_draft_tokens
        known, starts = self._state.num_tokens[slots], self._context.computed[slots]
        runner = self._runner

        def logits(rows: PassRows, index: int) -> Tensor:
            forward = runner.forward(rows)
            return forward.layout.over_last(runner.logits, forward.hidden)

        draft, passes = self._network.drafting.draft_chain(
            *(batch, self._resources, known, starts, wanted, self._most_missing, logits),
            self._context.excerpt(slots),
        )
        self._context.advance(slots, wanted, known + passes - 1)
        return draft

    def observe(self, batch: DeviceBatch, verdict: Verdict, forward: Forward) -> None:
        self._context.settle(batch, verdict.num_tokens)

    def read_prompts(self, batch: Batch, forward: Forward) -> None:
        self._context.read_prompts(batch)

    def cached_tokens(self, slots: Tensor) -> Tensor:
        return self._context.cached_tokens(slots)
