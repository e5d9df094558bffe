"""`pard`: a language model that drafts all K tokens in one pass (An et al. 2025, PARD).

The pass has rows for committed tokens not computed yet, and for the mask tokens after them
(`parallel/rows.py`). PARD-2 adds the target's features to the inputs (`features.py`): each token
gets the feature of the token before it, and mask tokens get the last known feature.
"""

from dataclasses import replace

from slipstream.models.catalogue import read_decoder_config
from slipstream.models.checkpoint import Checkpoint, resolve_checkpoint
from slipstream.runner.device_batch import DeviceBatch
from slipstream.runner.model_runner import Forward
from slipstream.sampling.verification import Verdict
from slipstream.speculative.catalogue import DRAFTING_KEYS
from slipstream.speculative.draft_model.context import ContextDrafter
from slipstream.speculative.draft_model.drafter import DraftNetwork
from slipstream.speculative.drafter import Draft, Drafter, DrafterResources, LoadedDrafter, Needs
from slipstream.speculative.method import CheckpointSigns
from slipstream.speculative.model_options import ModelKeys, ModelOptions, read_model_options
from slipstream.speculative.options import Options, TargetModel
from slipstream.speculative.parallel.rows import (
    choose_mask_token,
    most_rows,
    parallel_rows,
    read_mask_token,
    warn_untrained,
)
from slipstream.speculative.pard import METHOD, PARD2
from slipstream.speculative.pard.features import (
    FeatureFedRunner,
    FeaturePages,
    TargetProjection,
    load_projection,
    read_pard2_config,
)


def read_options(options: Options) -> ModelOptions:
    """Read the keys of a draft model, and `pard_token`."""
    keys = ModelKeys(
        parallel=True,
        remedy="use method draft_model to draft one by one",
        mask_token=True,
        vocabulary=True,
        other_tokenizer=True,
        cache=True,
        window=True,
        splits=True,
    )
    return read_model_options(options, "pard", keys)


def load(options: ModelOptions, target: TargetModel) -> LoadedDrafter:
    """Load the weights and find the mask token."""
    assert options.model is not None, "it has a checkpoint of its own"
    checkpoint = Checkpoint(resolve_checkpoint(options.model, options.revision))
    mask = read_mask_token(checkpoint)
    shape = read_decoder_config(checkpoint, DRAFTING_KEYS)
    otherwise = ", or leave out parallel_drafting if the drafter was not trained for it"
    token = choose_mask_token(
        checkpoint.config_file, mask, options.mask_token, shape.vocab_size, otherwise
    )
    network = DraftNetwork(options, target, "pard", token)
    needs, projection, kept = Needs(), None, network.kept
    limits = replace(network.limits, parallel=True)
    if options.adaptive:
        limits = replace(limits, max_speculative_tokens=mask.trained_tokens)
    if METHOD.kind_of(CheckpointSigns(checkpoint.config, frozenset())) == PARD2:
        config = read_pard2_config(checkpoint, network.width, target.shape)
        load = replace(target.load, dtype=network.dtype)
        projection = load_projection(checkpoint, config, load)
        # Features are stored in the blocks, so no token is recomputed for them.
        needs = Needs(stream_layers=config.stream_layers, hidden=True)
        own = kept["layout"] or replace(network.layout, specs=())
        extra = network.width * network.dtype.itemsize
        kept["layout"] = replace(own, extra_bytes_per_token=extra)
        limits = replace(limits, cache_identity=network.identity)

    def build(resources: DrafterResources) -> Drafter:
        warn_untrained(mask.trained_tokens, resources.num_speculative_tokens)
        return PardDrafter(network, projection, resources)

    return LoadedDrafter(build=build, limits=limits, needs=needs, **kept)


class PardDrafter(ContextDrafter):
    """Drafts all K tokens in one pass."""

    def __init__(
        self,
        network: DraftNetwork,
        projection: TargetProjection | None,
        resources: DrafterResources,
    ) -> None:
        self._features: FeaturePages | None = None
        if projection is None:
            runner = network.runner(resources)
        else:
            self._features = FeaturePages.empty(projection, network.width, resources)
            given = network.decoder, network.cache(resources), self._features
            runner = FeatureFedRunner(*given, resources)
        count, window = resources.num_speculative_tokens, network.excerpt_sizes(resources)
        # After a round with drafts its draft tokens and one more may wait.
        super().__init__(runner, resources, network.max_model_len, count + 1, None, window)
        assert network.mask_token is not None
        self._drafting, self._mask_token = network.sampling(resources), network.mask_token
        self._most_rows = most_rows(count)

    def propose(self, batch: DeviceBatch) -> Draft:
        """Run one ragged pass over the uncomputed committed tokens and the mask tokens."""
        state, slots, wanted = self._state, batch.slots, batch.num_draft_tokens
        known = state.num_tokens.index_select(0, slots)
        starts = self._computed.index_select(0, slots)
        rows = parallel_rows(
            *(batch, known, starts, wanted, self._most_rows, self._mask_token),
            self._excerpt(slots),
        )
        forward = self._runner.forward(rows)
        places = wanted, batch.width, batch.drafts_fill
        logits = self._runner.logits(forward.layout.tails(forward.hidden, *places).flatten(0, 1))
        self._computed.index_copy_(0, slots, batch.where_drafts(wanted, known, starts))
        return self._drafting.draft_at_once(batch, wanted, logits)

    def observe(self, batch: DeviceBatch, verdict: Verdict, forward: Forward) -> None:
        """Store PARD-2's features; the count of computed tokens never includes draft tokens."""
        if self._features is not None:
            self._features.write(forward)
