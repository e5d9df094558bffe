"""`draft_model`: any smaller language model of the same tokenizer (Leviathan et al. 2023).

The draft model's layers are stored in the same blocks as the target's. A round is one ragged pass
over the committed tokens that it has not computed (including the bonus token), whose last row gives
draft token 1, and then K - 1 passes of a single row per request. A draft model with another
tokenizer drafts only the tokens that both have (`vocabularies.py`).
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from slipstream.cache.spec import CacheLayout, ModelCache
from slipstream.core.errors import UsageError
from slipstream.layers.embedding import WholeRows
from slipstream.models.catalogue import read_decoder_config
from slipstream.models.checkpoint import Checkpoint, resolve_checkpoint
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.loading import RANDOM_FORMATS, LoadOptions, load_decoder
from slipstream.models.sharing import require_equal_shares
from slipstream.runner.device_batch import DeviceBatch
from slipstream.runner.excerpts import ExcerptSizes
from slipstream.runner.memory import device_memory
from slipstream.runner.model_runner import Forward, ModelRunner
from slipstream.runner.rows import PassRows
from slipstream.sampling.verification import Verdict
from slipstream.speculative.catalogue import DRAFTING_KEYS
from slipstream.speculative.draft_model.context import ContextDrafter
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
    DrafterLimits,
    DrafterResources,
    DraftWindow,
    LoadedDrafter,
)
from slipstream.speculative.model_options import ModelKeys, ModelOptions, read_model_options
from slipstream.speculative.options import Options, TargetModel

_SHARED_PARAMETERS = 10**9  # from this size on it is split over ranks: 1.7B was measured
_MEMORY_SHARE = 8  # windows by default take at most 1 / 8 of the free memory


def _token_map(
    config: ModelOptions, target: TargetModel, checkpoint: Checkpoint, vocab_size: int
) -> TokenMap | None:
    """The map from the target's token ids to the draft model's; None for equal vocabularies."""
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


def _window(
    config: ModelOptions, target: TargetModel, load: LoadOptions, layout: CacheLayout
) -> int | None:
    """The window in tokens; None: there is none, or a default one would take much memory."""
    window = config.window_within(load.max_positions)
    if window is None or config.draft_window is not None:
        return window
    size = target.max_num_seqs * window * layout.bytes_per_token
    free = target.load.share.least(device_memory(load.device).free)
    return window if size <= free // _MEMORY_SHARE else None


def usual_ranks(
    checkpoint: Checkpoint, shape: DecoderConfig, target: TargetModel, tokens: TokenMap | None
) -> int:
    """The default number of ranks over which a draft model is split: all of the target's if that is
    faster than replicating it (docs/several_gpus.md), which is the case for large ones with the
    target's vocabulary if sums over the ranks are fast; else 1."""
    share, random = target.load.share, target.load.load_format in RANDOM_FORMATS
    own_tokens = tokens is None and shape.vocab_size == target.vocab_size
    large = shape.num_matrix_parameters >= _SHARED_PARAMETERS
    if not (share.reaches_memory and own_tokens and large):
        return 1
    try:
        require_equal_shares(checkpoint, shape, share.size, random)
    except UsageError:
        return 1
    return share.size


class DraftNetwork:
    """A draft model in memory, whose inputs and outputs are the target's token ids.

    Args:
        mask_token: the draft model's id of the mask token, for methods that have one.

    Attributes:
        mask_token: the input id of the mask token; None without one.
        identity: see `DrafterLimits.cache_identity`.
    """

    def __init__(
        self,
        config: ModelOptions,
        target: TargetModel,
        method: str,
        mask_token: int | None = None,
    ) -> None:
        """Load the weights and check that they fit the target."""
        assert config.model is not None, "a draft model has a checkpoint of its own"
        checkpoint = Checkpoint(resolve_checkpoint(config.model, config.revision))
        shape = read_decoder_config(checkpoint, DRAFTING_KEYS)
        tokens = _token_map(config, target, checkpoint, shape.vocab_size)
        num_legal = min(target.vocab_size, shape.vocab_size)
        vocabulary = _vocabulary(config, target, num_legal, tokens)
        load = config.load_options(target, usual_ranks(checkpoint, shape, target, tokens))
        self.decoder, self.width = load_decoder(checkpoint, load, shape), shape.hidden_size
        pages = config.pages_in(load)
        self.dtype, self.layout = load.dtype, shape.cache_layout(pages, load.share)
        self._window = _window(config, target, load, self.layout)
        self.identity = (
            f"{method}:{checkpoint.path}:{load.dtype}:{pages}:{config.quantization}:"
            f"{'tli' if tokens else 'same'}:{mask_token}"
        )
        same = shape.vocab_size == target.vocab_size and load.share.size == target.load.share.size
        if load.share.size > 1 and not same:
            self.decoder.head = WholeRows(self.decoder.head)  # the target's ranks have other tokens
        drafted: tuple[Tensor | None, int] = None, num_legal
        if vocabulary is not None:
            drafted = self._draft_only(vocabulary, tokens, load.device)
        self.mask_token = mask_token
        if tokens is not None:
            self._renumber(tokens, target.vocab_size, load.device)
        elif shape.vocab_size < target.vocab_size:
            self.decoder.read_larger_ids()
        self._sampling = *drafted, config.greedy_only, self.decoder.head.columns.num_ranks
        longest = config.max_model_len or shape.max_position_embeddings
        self.max_model_len = min(longest, shape.max_position_embeddings, target.load.max_positions)
        self.limits = DrafterLimits(
            max_model_len=self.max_model_len,
            cache_identity=self.identity if self._window is None else "",
            may_skip_steps=True,
        )

    def _draft_only(
        self, vocabulary: list[int], tokens: TokenMap | None, device: torch.device
    ) -> tuple[Tensor | None, int]:
        """Cut the head to these tokens; returns the target's ids of its columns, and how many."""
        own = vocabulary if tokens is None else [tokens.draft_ids[token] for token in vocabulary]
        head = self.decoder.head.over(torch.tensor(own, device=device))
        self.decoder.head = head  # frees the whole head
        if tokens is not None:
            return torch.tensor(vocabulary, device=device), len(vocabulary)
        return head.tokens, head.num_tokens

    def _renumber(self, tokens: TokenMap, vocab_size: int, device: torch.device) -> None:
        """Let the network read the target's ids, and the mask token after them."""
        inputs = [tokens.draft_ids.get(token, tokens.fallback) for token in range(vocab_size)]
        if self.mask_token is not None:
            inputs.append(self.mask_token)
            self.mask_token = vocab_size
        self.decoder.renumber(torch.tensor(inputs, device=device))

    @property
    def kept(self) -> dict[str, Any]:
        """The fields `layout`, `window` and `adapters` of its `LoadedDrafter`."""
        adapters = self.decoder.adapters
        if self._window is None:
            return {"layout": self.layout, "adapters": adapters}
        window = DraftWindow(self.layout, self._window)
        return {"layout": None, "window": window, "adapters": adapters}

    def excerpt_sizes(self, resources: DrafterResources) -> ExcerptSizes | None:
        """Sizes of the excerpts to which its rounds attend; None: they attend to whole texts."""
        if self._window is None:
            return None
        size = resources.cache_sizes.block_size
        return ExcerptSizes(self._window, resources.num_speculative_tokens, size)

    def sampling(self, resources: DrafterResources) -> DraftSampling:
        """How draft tokens are sampled from its logits."""
        return DraftSampling(*self._sampling, resources)

    def cache(self, resources: DrafterResources) -> ModelCache:
        sizes, window = resources.cache_sizes, self.excerpt_sizes(resources)
        if window is not None:
            sizes = replace(sizes, num_blocks=sizes.num_slots * window.num_blocks)
        return ModelCache(self.layout, sizes)

    def runner(self, resources: DrafterResources) -> ModelRunner:
        cache, record = self.cache(resources), resources.record
        return ModelRunner(self.decoder, cache, resources.state, record=record)


# Maximum number of known tokens that the draft model has not computed when a round begins: the
# bonus token of the last round and, if all its draft tokens were accepted, the last of those.
MOST_MISSING = 2


def read_options(options: Options) -> ModelOptions:
    """Read the options of a draft model, including keys of other engines."""
    keys = ModelKeys(
        remedy="leave it out, or use method pard",
        vocabulary=True,
        other_tokenizer=True,
        cache=True,
        window=True,
        splits=True,
    )
    return read_model_options(options, "draft_model", keys)


def load(options: ModelOptions, target: TargetModel) -> LoadedDrafter:
    """Load the draft model's weights and check that it fits the target."""
    network = DraftNetwork(options, target, "draft_model")
    return LoadedDrafter(
        build=partial(DraftModelDrafter, network), limits=network.limits, **network.kept
    )


class DraftModelDrafter(ContextDrafter):
    """Drafts with its own network over the shared blocks."""

    def __init__(self, network: DraftNetwork, resources: DrafterResources) -> None:
        # It has seen none of the tokens that another drafter drafted in the last round.
        combined = resources.in_combination
        most = resources.num_speculative_tokens + 1 if combined else MOST_MISSING
        window, longest = network.excerpt_sizes(resources), network.max_model_len
        super().__init__(network.runner(resources), resources, longest, most, most, window)
        self._drafting = network.sampling(resources)

    def propose(self, batch: DeviceBatch) -> Draft:
        """One ragged pass over the missing tokens, then one row per request and draft token."""
        slots, wanted = batch.slots, batch.num_draft_tokens
        known = self._state.num_tokens.index_select(0, slots)
        starts = self._computed.index_select(0, slots)
        runner = self._runner

        def logits(rows: PassRows, index: int) -> Tensor:
            forward = runner.forward(rows)
            return forward.layout.over_last(runner.logits, forward.hidden)

        places = known, starts, wanted, self._most_missing
        draft, passes = self._drafting.draft_chain(batch, *places, logits, self._excerpt(slots))
        computed = batch.where_drafts(wanted, known + passes - 1, starts)
        self._computed.index_copy_(0, slots, computed)
        return draft

    def observe(self, batch: DeviceBatch, verdict: Verdict, forward: Forward) -> None:
        self._settle(batch, verdict.num_tokens)
