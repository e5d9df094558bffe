"""`pard`: a language model that gives all K draft tokens from one pass (An et al. 2025, PARD).

Its rows are the committed tokens that it has not seen, the bonus token among them, and K-1 mask
tokens behind them, at the positions that follow and under the ordinary causal mask. The bonus
token's row gives draft token 1, mask j's row draft token j + 1. Mask rows write the slots of the
tokens that they stand for, which the blocks have room for, so that later masks of the pass see
them; what they wrote is never counted as computed, and the next pass writes these slots anew
before it reads them.

PARD-2 is the same model with the target's features added to its inputs (`feature_inputs.py`): each
token is shown the feature of the token before it, and masks the last feature that there is.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.cache.kv_cache import KVCache
from slipstream.core.batch import Batch
from slipstream.core.errors import UsageError
from slipstream.core.request import Request
from slipstream.models.catalogue import read_decoder_config
from slipstream.models.checkpoint import Checkpoint, resolve_checkpoint
from slipstream.models.drafters.pard2 import (
    Pard2Config,
    TargetProjection,
    load_projection,
    read_pard2_config,
)
from slipstream.runner.model_runner import Forward, ModelRunner, Rows
from slipstream.runner.turn import Turn
from slipstream.sampling.verification import Verdict
from slipstream.speculative.draft_context import DraftContext
from slipstream.speculative.draft_network import (
    DraftNetwork,
    DraftNetworkConfig,
    load_network,
    read_network_options,
)
from slipstream.speculative.drafter import Draft, Drafter, DrafterResources, Needs
from slipstream.speculative.feature_inputs import FeatureFedRunner, FeaturePages
from slipstream.speculative.mask_token import read_mask_token, reads_features
from slipstream.speculative.options import Options, TargetModel

logger = logging.getLogger("slipstream")


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
    path = resolve_checkpoint(config.network.model, config.network.revision)
    said = read_mask_token(Checkpoint(path))
    token = said.token_id if config.pard_token is None else config.pard_token
    if token is None:
        raise UsageError(
            f"speculative_config: parallel drafting needs the id of the drafter's mask token, and "
            f"{path / 'config.json'} has no pard_token; give it as pard_token, or leave out "
            "parallel_drafting if the drafter was not trained for it"
        )
    network = load_network(config.network, target, "pard", token)
    features = _load_features(Checkpoint(path), network, target)
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
        self.limits, self.layout, self.needs = network.limits, network.layout, Needs()
        self._projection: TargetProjection | None = None
        if features is not None:
            config, self._projection = features
            # They are kept in the blocks, so no token is computed again for them.
            self.needs = Needs(stream_layers=config.stream_layers)
            self.layout = replace(network.layout, num_beside=network.width)

    def build(self, resources: DrafterResources) -> Drafter:
        count, trained = resources.num_speculative_tokens, self._trained_tokens
        if trained is not None and count > trained:
            logger.warning(
                "the drafter was trained for %d tokens at once and is asked for %d: expect the "
                "last ones to be refused, and num_speculative_tokens=%d to be faster",
                trained,
                count,
                trained,
            )
        if self._projection is None:
            return PardDrafter(self._network, resources, self._network.runner(resources), None)
        network, state = self._network, resources.state
        cache = KVCache(network.layout, resources.num_blocks, state.block_size, state.device)
        shape = (resources.num_blocks * state.block_size + 1, network.width)
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
        # All the draft tokens of a round may be accepted, and one more follows them.
        self._most_missing = resources.num_speculative_tokens + 1
        self._context = DraftContext(
            self._runner, resources.state, network.max_model_len, self._most_missing
        )

    def prepare(self, batch: Batch) -> None:
        self._context.prepare(batch, None)

    def propose(self, turn: Turn) -> Draft:
        """One ragged pass over what is missing and the masks."""
        if not turn.width:
            return Draft.empty(turn)
        slots, network, width = turn.slots, self._network, turn.width
        known, wanted = self._state.num_tokens[slots], turn.num_draft_tokens
        starts = self._context.computed[slots]
        lengths = torch.where(wanted > 0, known - starts + wanted - 1, 0)
        most = turn.most_rows(self._most_missing + width - 1)
        rows = Rows(slots, starts, lengths, most, mask_token=network.mask_token)
        forward = self._runner.forward(rows)
        positions = known.unsqueeze(1) + torch.arange(width, device=slots.device)
        probs = network.probabilities(turn)
        picked = network.sample(
            self._runner.logits(forward.tails(wanted, width).flatten(0, 1)),
            slots.unsqueeze(1).expand(-1, width).flatten(),
            positions.flatten(),
            turn,
            self._resources,
            None if probs is None else probs.flatten(0, 1),
        )
        tokens = picked if network.vocabulary is None else network.vocabulary[picked]
        self._context.advance(slots, wanted, known)
        one_hot = network.one_hot(turn, self._resources)
        return Draft(tokens.view(-1, width), wanted, one_hot, probs, network.vocabulary)

    def observe(self, turn: Turn, verdict: Verdict, forward: Forward) -> None:
        """Only committed tokens were counted as computed, so there is nothing to take back."""
        if self._features is not None:
            self._features.write(forward)

    def read_prompts(self, batch: Batch, forward: Forward) -> None:
        self._context.read_prompts(batch)

    def forget(self, requests: Sequence[Request]) -> None:
        """A slot's counter is set anew when the slot is next given out."""

    def cached_tokens(self, slots: Tensor) -> Tensor:
        return self._context.computed[slots]
