"""`pard`: a language model that gives all K draft tokens from one pass (An et al. 2025, PARD).

Its rows are the committed tokens that it has not seen and masks behind them (`parallel/rows.py`).

PARD-2 is the same model with the target's features added to its inputs (`feature_inputs.py`): each
token is shown the feature of the token before it, and masks the last feature that there is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.cache.spec import ModelCache
from slipstream.core.batch import Batch
from slipstream.core.request import Request
from slipstream.models.catalogue import read_decoder_config
from slipstream.models.checkpoint import Checkpoint, resolve_checkpoint
from slipstream.runner.device_batch import DeviceBatch
from slipstream.runner.model_runner import Forward, ModelRunner
from slipstream.sampling.verification import Verdict
from slipstream.speculative.draft_model.context import DraftContext
from slipstream.speculative.draft_model.network import (
    DraftNetwork,
    DraftNetworkConfig,
    load_network,
    read_network_options,
)
from slipstream.speculative.drafter import Draft, Drafter, DrafterResources, Needs
from slipstream.speculative.options import Options, TargetModel
from slipstream.speculative.parallel.mask_token import (
    MASK_TOKEN_KEYS,
    choose_mask_token,
    read_mask_token,
    reads_features,
    warn_untrained,
)
from slipstream.speculative.parallel.rows import (
    most_rows,
    most_waiting,
    parallel_draft,
    parallel_rows,
)
from slipstream.speculative.pard.feature_inputs import FeatureFedRunner, FeaturePages
from slipstream.speculative.pard.projection import (
    Pard2Config,
    TargetProjection,
    load_projection,
    read_pard2_config,
)


@dataclass(frozen=True)
class PardConfig:
    """How the drafter is loaded and sampled.

    Attributes:
        pard_token: id of its mask token; None when the checkpoint says it.
    """

    network: DraftNetworkConfig
    pard_token: int | None


def read_options(options: Options) -> PardConfig:
    """The keys of a draft model, and `pard_token`."""
    options.take_only("parallel_drafting", True, "use method draft_model to draft one by one")
    token = options.take_int("pard_token", None)
    return PardConfig(read_network_options(options, "pard"), token)


def load(config: PardConfig, target: TargetModel) -> "LoadedPard":
    """Load the weights and find the mask token."""
    checkpoint = Checkpoint(resolve_checkpoint(config.network.model, config.network.revision))
    said = read_mask_token(checkpoint)
    shape = read_decoder_config(checkpoint, MASK_TOKEN_KEYS)
    otherwise = ", or leave out parallel_drafting if the drafter was not trained for it"
    token = choose_mask_token(checkpoint, said, config.pard_token, shape.vocab_size, otherwise)
    network = load_network(config.network, target, "pard", token)
    features = _load_features(checkpoint, network, target)
    return LoadedPard(network, said.trained_tokens, features)


def _load_features(
    checkpoint: Checkpoint, network: DraftNetwork, target: TargetModel
) -> tuple[Pard2Config, TargetProjection] | None:
    if not reads_features(checkpoint.config):
        return None
    shape = read_decoder_config(Checkpoint(target.path))
    config = read_pard2_config(checkpoint, network.width, shape)
    return config, load_projection(checkpoint, config, replace(target.load, dtype=network.dtype))


class LoadedPard:
    """The drafter in memory, waiting for its share of the cache."""

    def __init__(
        self,
        network: DraftNetwork,
        trained_tokens: int | None,
        features: tuple[Pard2Config, TargetProjection] | None,
    ) -> None:
        self._network, self._trained_tokens = network, trained_tokens
        self.limits = replace(network.limits, parallel=True)
        self.layout, self.needs = network.layout, Needs()
        self._projection: TargetProjection | None = None
        if features is not None:
            config, self._projection = features
            # They are kept in the blocks, so no token is computed again for them.
            self.needs = Needs(stream_layers=config.stream_layers)
            self.layout = replace(
                network.layout, extra_bytes_per_token=network.width * network.dtype.itemsize
            )

    def build(self, resources: DrafterResources) -> Drafter:
        warn_untrained(self._trained_tokens, resources.num_speculative_tokens)
        if self._projection is None:
            return PardDrafter(self._network, resources, self._network.runner(resources), None)
        network, state = self._network, resources.state
        cache = ModelCache(network.layout, resources.cache_sizes)
        shape = (resources.cache_sizes.num_blocks * state.block_size + 1, network.width)
        pages = torch.zeros(shape, dtype=network.dtype, device=state.device)
        features = FeaturePages(pages, self._projection)
        runner = FeatureFedRunner(network.decoder, cache, state, features)
        return PardDrafter(network, resources, runner, features)


class PardDrafter:
    """Drafts with one pass a round, whatever K."""

    def __init__(
        self,
        network: DraftNetwork,
        resources: DrafterResources,
        runner: ModelRunner,
        features: FeaturePages | None,
    ) -> None:
        self._network, self._resources = network, resources
        self._state, self._runner, self._features = resources.state, runner, features
        assert network.mask_token is not None
        self._mask_token = network.mask_token
        count = resources.num_speculative_tokens
        self._most_rows = most_rows(count)
        self._context = DraftContext(
            self._runner, resources.state, network.max_model_len, most_waiting(count)
        )

    def prepare(self, batch: Batch) -> None:
        self._context.prepare(batch, None)

    def propose(self, batch: DeviceBatch) -> Draft:
        """One ragged pass over what is missing and the masks."""
        if not batch.width:
            return Draft.empty(batch)
        state, slots, wanted = self._state, batch.slots, batch.num_draft_tokens
        starts = self._context.computed[slots]
        rows = parallel_rows(state, batch, starts, wanted, self._most_rows, self._mask_token)
        forward = self._runner.forward(rows)
        logits = self._runner.logits(
            forward.layout.tails(forward.hidden, wanted, batch.width).flatten(0, 1)
        )
        self._context.advance(slots, wanted, state.num_tokens[slots])
        return parallel_draft(state, batch, wanted, logits, self._network.drafting, self._resources)

    def observe(self, batch: DeviceBatch, verdict: Verdict, forward: Forward) -> None:
        """Only committed tokens were counted as computed, so there is nothing to take back."""
        if self._features is not None:
            self._features.write(forward)

    def read_prompts(self, batch: Batch, forward: Forward) -> None:
        self._context.read_prompts(batch)

    def forget(self, requests: Sequence[Request]) -> None:
        """A slot's counter is set anew when the slot is next given out."""

    def cached_tokens(self, slots: Tensor) -> Tensor:
        return self._context.computed[slots]
