"""A whole language model as the network of a drafter: its options, weights and vocabulary."""

from dataclasses import dataclass, replace

import torch

from slipstream.cache.spec import ModelCache
from slipstream.core.errors import UsageError
from slipstream.layers.embedding import LanguageModelHead
from slipstream.models.catalogue import read_decoder_config
from slipstream.models.checkpoint import Checkpoint, resolve_checkpoint
from slipstream.models.decoder import Decoder
from slipstream.models.loading import dtype_named, load_decoder
from slipstream.runner.model_runner import ModelRunner
from slipstream.speculative.draft_model.draft_vocabulary import (
    DraftVocabularyConfig,
    choose_draft_vocabulary,
    read_draft_vocabulary,
)
from slipstream.speculative.draft_model.token_map import TokenMap, map_tokens
from slipstream.speculative.draft_model.vocabulary import (
    require_same_vocabulary,
    vocabularies_agree,
)
from slipstream.speculative.draft_sampling import DraftSampling
from slipstream.speculative.drafter import DrafterLimits, DrafterResources
from slipstream.speculative.options import Options, TargetModel
from slipstream.speculative.parallel.mask_token import MASK_TOKEN_KEYS


@dataclass(frozen=True)
class DraftNetworkConfig:
    """How a draft model is loaded and sampled.

    Attributes:
        greedy_only: `draft_sample_method` is greedy.
        vocabulary: the tokens to draft over; None is all.
        maps_tokens: `use_heterogeneous_vocab`: its tokenizer may be another one.
    """

    model: str
    revision: str | None
    dtype: str | None
    quantization: str | None
    max_model_len: int | None
    greedy_only: bool
    vocabulary: DraftVocabularyConfig | None
    maps_tokens: bool


def read_network_options(options: Options, method: str) -> DraftNetworkConfig:
    """Honour or refuse every key that other engines know for a draft model."""
    model = options.take_str("model", None)
    if model is None:
        raise UsageError(f"speculative_config: method {method} needs model, a checkpoint")
    options.take_only("draft_tensor_parallel_size", 1, "a draft model runs on one device")
    greedy_only, max_model_len = options.take_greedy_only(), options.take_max_model_len()
    maps_tokens = options.take("use_heterogeneous_vocab", False)
    if not isinstance(maps_tokens, bool):
        raise UsageError(
            "speculative_config: use_heterogeneous_vocab must be true or false, not "
            f"{maps_tokens!r}"
        )
    return DraftNetworkConfig(
        model=model,
        revision=options.take_str("revision", None),
        dtype=options.take_str("dtype", None),
        quantization=options.take_quantization(),
        max_model_len=max_model_len,
        greedy_only=greedy_only,
        vocabulary=read_draft_vocabulary(options),
        maps_tokens=maps_tokens,
    )


def load_network(
    config: DraftNetworkConfig, target: TargetModel, method: str, mask_token: int | None = None
) -> "DraftNetwork":
    """Load the draft model's weights and check that it fits the target.

    Args:
        mask_token: an id of the draft model's own that its inputs may hold besides tokens.
    """
    checkpoint = Checkpoint(resolve_checkpoint(config.model, config.revision))
    shape = read_decoder_config(checkpoint, MASK_TOKEN_KEYS)
    tokens = _token_map(config, target, checkpoint, shape.vocab_size)
    vocabulary = _vocabulary(config, target, min(target.vocab_size, shape.vocab_size), tokens)
    dtype = dtype_named(config.dtype) if config.dtype else target.load.dtype
    load = replace(target.load, dtype=dtype, quantization=config.quantization)
    network = load_decoder(checkpoint, load, shape)
    kind = "tli" if tokens else "same"
    identity = f"{method}:{checkpoint.path}:{dtype}:{config.quantization}:{kind}:{mask_token}"
    return DraftNetwork(config, network, target, dtype, identity, vocabulary, tokens, mask_token)


def _token_map(
    config: DraftNetworkConfig, target: TargetModel, checkpoint: Checkpoint, vocab_size: int
) -> TokenMap | None:
    """None where both speak of the same tokens."""
    if config.maps_tokens and not vocabularies_agree(target.path, checkpoint.path):
        return map_tokens(target.path, target.vocab_size, checkpoint, vocab_size)
    require_same_vocabulary(target.path, target.vocab_size, checkpoint.path, vocab_size)
    return None


def _vocabulary(
    config: DraftNetworkConfig, target: TargetModel, num_legal: int, tokens: TokenMap | None
) -> list[int] | None:
    """The target's ids of the tokens that are drafted, rising; None: all from 0 on."""
    shared = None if tokens is None else sorted(tokens.draft_ids)
    if config.vocabulary is not None:
        return choose_draft_vocabulary(config.vocabulary, target.path, num_legal, shared)
    return shared


class DraftNetwork:
    """A draft model in memory, whose inputs and outputs are the target's token ids.

    Attributes:
        drafting: how its logits become draft tokens.
        mask_token: its id among the inputs; None without one.
    """

    def __init__(
        self,
        config: DraftNetworkConfig,
        network: Decoder,
        target: TargetModel,
        dtype: torch.dtype,
        identity: str,
        vocabulary: list[int] | None,
        tokens: TokenMap | None,
        mask_token: int | None,
    ) -> None:
        device, shape = target.load.device, network.config
        self.mask_token = mask_token
        self._head: LanguageModelHead | None = None
        num_legal_tokens, ids = min(target.vocab_size, shape.vocab_size), None
        if vocabulary is not None:
            ids, num_legal_tokens = torch.tensor(vocabulary, device=device), len(vocabulary)
            own = (
                vocabulary if tokens is None else [tokens.draft_ids[token] for token in vocabulary]
            )
            self._head = network.head.over(torch.tensor(own, device=device))
            network.head = self._head  # the whole one's weight is not needed any more
        if tokens is not None:
            inputs = [
                tokens.draft_ids.get(token, tokens.fallback) for token in range(target.vocab_size)
            ]
            if mask_token is not None:
                self.mask_token = len(inputs)
                inputs.append(mask_token)
            network.embedding.renumber(torch.tensor(inputs, device=device))
        self.drafting = DraftSampling(ids, num_legal_tokens, config.greedy_only)
        longest = config.max_model_len or shape.max_position_embeddings
        self.max_model_len = min(longest, shape.max_position_embeddings, target.load.max_positions)
        self.limits = DrafterLimits(
            max_model_len=self.max_model_len, cache_identity=identity, catches_up=True
        )
        self.width = shape.hidden_size
        self.dtype = dtype
        self.decoder = network
        self.layout = shape.cache_layout(dtype)

    def runner(self, resources: DrafterResources) -> ModelRunner:
        """Its passes over the engine's blocks."""
        state = resources.state
        cache = ModelCache(self.layout, resources.cache_sizes)
        return ModelRunner(self.decoder, cache, state)
