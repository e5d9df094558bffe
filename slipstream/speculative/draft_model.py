"""`draft_model`: any smaller language model of the same tokenizer (Leviathan et al. 2023).

The draft model's layers live in the same blocks as the target's. A round is one ragged pass over
the committed tokens that it has not seen (the bonus token among them), whose last row gives draft
token 1, and then K-1 passes of a single row per request.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.cache.kv_cache import KVCache, KVLayout
from slipstream.core.batch import Batch
from slipstream.core.errors import UsageError
from slipstream.core.request import Request
from slipstream.kernels.preparation import preparation_for
from slipstream.models.catalogue import read_decoder_config
from slipstream.models.checkpoint import Checkpoint, resolve_checkpoint
from slipstream.models.decoder import Decoder
from slipstream.models.loading import dtype_named, load_decoder
from slipstream.runner.model_runner import Forward, ModelRunner, Rows
from slipstream.runner.turn import Turn
from slipstream.sampling.state import Uses
from slipstream.sampling.verification import Verdict, sample_draft
from slipstream.speculative.draft_vocabulary import (
    DraftVocabularyConfig,
    choose_draft_vocabulary,
    read_draft_vocabulary,
)
from slipstream.speculative.drafter import Draft, Drafter, DrafterLimits, DrafterResources, Needs
from slipstream.speculative.options import Options, TargetModel
from slipstream.speculative.vocabulary import require_same_vocabulary

# Known tokens whose keys and values may be missing when a draft begins.
MOST_MISSING = 2


@dataclass(frozen=True)
class DraftModelConfig:
    """How the draft model is loaded and sampled."""

    model: str
    revision: str | None
    dtype: str | None
    quantization: str | None
    max_model_len: int | None
    greedy_only: bool  # draft_sample_method: greedy
    vocabulary: DraftVocabularyConfig | None


def read_options(options: Options) -> DraftModelConfig:
    """Honour or refuse every key that other engines know for a draft model."""
    model = options.take_str("model", None)
    if model is None:
        raise UsageError("speculative_config: method draft_model needs model, a checkpoint")
    options.take_only("parallel_drafting", False, "leave it out")
    options.take_only("draft_tensor_parallel_size", 1, "a draft model runs on one device")
    sampling = options.take_str("draft_sample_method", "probabilistic")
    if sampling not in ("probabilistic", "greedy"):
        raise UsageError(
            "speculative_config: draft_sample_method must be probabilistic or greedy, not "
            f"{sampling!r}"
        )
    max_model_len = options.take_int("max_model_len", None)
    if max_model_len is not None and max_model_len < 1:
        raise UsageError(f"speculative_config: max_model_len must be positive, not {max_model_len}")
    return DraftModelConfig(
        model=model,
        revision=options.take_str("revision", None),
        dtype=options.take_str("dtype", None),
        quantization=options.take_quantization(),
        max_model_len=max_model_len,
        greedy_only=sampling == "greedy",
        vocabulary=read_draft_vocabulary(options),
    )


def load(config: DraftModelConfig, target: TargetModel) -> "LoadedDraftModel":
    """Load the draft model's weights and check that it fits the target."""
    checkpoint = Checkpoint(resolve_checkpoint(config.model, config.revision))
    network_config = read_decoder_config(checkpoint)
    require_same_vocabulary(
        target.path, target.vocab_size, checkpoint.path, network_config.vocab_size
    )
    dtype = dtype_named(config.dtype) if config.dtype else target.load.dtype
    load = replace(target.load, dtype=dtype, quantization=config.quantization, drafts=True)
    network = load_decoder(checkpoint, load)
    vocabulary: Tensor | None = None
    if config.vocabulary is not None:
        legal = min(target.vocab_size, network_config.vocab_size)
        chosen = choose_draft_vocabulary(config.vocabulary, target.path, legal)
        vocabulary = torch.tensor(chosen, device=target.load.device)
    identity = f"draft_model:{checkpoint.path}:{dtype}:{config.quantization}"
    return LoadedDraftModel(config, network, target, dtype, identity, vocabulary)


class LoadedDraftModel:
    """A draft model in memory, waiting for its share of the cache."""

    needs = Needs()

    def __init__(
        self,
        config: DraftModelConfig,
        network: Decoder,
        target: TargetModel,
        dtype: torch.dtype,
        identity: str,
        vocabulary: Tensor | None,
    ) -> None:
        self._config, self._network, self._vocabulary = config, network, vocabulary
        shape = network.config
        self._num_legal_tokens = min(target.vocab_size, shape.vocab_size)
        longest = config.max_model_len or shape.max_position_embeddings
        self.limits = DrafterLimits(
            max_model_len=min(longest, shape.max_position_embeddings, target.load.max_positions),
            cache_identity=identity,
        )
        self.layout = KVLayout(shape.num_layers, shape.num_kv_heads, shape.head_dim, dtype)

    def build(self, resources: DrafterResources) -> Drafter:
        state = resources.state
        cache = KVCache(self.layout, resources.num_blocks, state.block_size, state.device)
        head = None if self._vocabulary is None else self._network.head.over(self._vocabulary)
        runner = ModelRunner(self._network, cache, state, head)
        return DraftModelDrafter(
            runner,
            resources,
            self.limits,
            self._num_legal_tokens,
            self._config.greedy_only,
            self._vocabulary,
        )


class DraftModelDrafter:
    """Drafts with its own network over the shared blocks.

    `_computed[slot]` counts the leading tokens whose keys and values this model has; it never
    exceeds what the target has once a step is over. Behind a step that drafted at most two known
    tokens are missing: the bonus token and, when all was accepted, the last draft token.
    """

    def __init__(
        self,
        runner: ModelRunner,
        resources: DrafterResources,
        limits: DrafterLimits,
        num_legal_tokens: int,
        greedy_only: bool,
        vocabulary: Tensor | None,
    ) -> None:
        self._vocabulary = vocabulary
        self._runner, self._resources = runner, resources
        self._state, self._sampling = resources.state, resources.sampling
        self._num_legal_tokens, self._greedy_only = num_legal_tokens, greedy_only
        assert limits.max_model_len is not None
        self._max_model_len = limits.max_model_len
        self._advance = preparation_for(self._state.device).advance_drafts
        self._computed = torch.zeros_like(self._state.num_computed)
        # On the host: no more known tokens of a slot are missing when the next step begins.
        self._missing = [0] * self._state.num_slots

    def prepare(self, batch: Batch) -> None:
        behind: list[int] = []
        for item in batch.requests:
            slot = item.request.slot
            if item.admitted:
                self._computed[slot] = min(item.start, self._max_model_len)
                self._missing[slot] = 1
            if item.is_prompt_chunk:  # `read_prompts` will catch up
                self._missing[slot] = 1
            elif not item.num_draft_tokens:
                self._missing[slot] += 1
            else:
                if self._missing[slot] > MOST_MISSING:
                    behind.append(slot)
                self._missing[slot] = MOST_MISSING
        if behind:
            self._catch_up(torch.tensor(behind, device=self._state.device))

    def propose(self, turn: Turn) -> Draft:
        """One ragged pass over what is missing, then single rows."""
        state, slots = self._state, turn.slots
        known, wanted = state.num_tokens[slots], turn.num_draft_tokens
        tokens = slots.new_zeros((turn.num_requests, turn.width))
        probs = self._probabilities(turn)
        starts = self._computed[slots]
        lengths, most = torch.where(wanted > 0, known - starts, 0), turn.most_rows(MOST_MISSING)
        for index in range(turn.width):
            forward = self._runner.forward(Rows(slots, starts, lengths, most))
            picked = sample_draft(
                self._runner.logits(forward.last()),
                slots,
                known + index,
                self._sampling,
                turn.uses,
                self._num_legal_tokens,
                greedy_only=self._greedy_only,
                use_fp64_gumbel=self._resources.use_fp64_gumbel,
                probs_out=None if probs is None else probs[:, index],
            )
            starts, lengths = self._advance(
                state.tables, slots, known, wanted, picked, self._vocabulary, tokens, index
            )
            most = turn.most_rows(1)
        computed = torch.where(wanted > 0, known + wanted - 1, self._computed[slots])
        self._computed.index_copy_(0, slots, computed)
        certain = self._sampling.temperature[slots] == 0
        one_hot = torch.ones_like(certain) if self._greedy_only else certain
        return Draft(tokens, wanted, one_hot, probs, self._vocabulary, written=True)

    def observe(self, turn: Turn, verdict: Verdict, forward: Forward) -> None:
        slots = turn.slots
        computed = torch.minimum(self._computed[slots], self._state.num_computed[slots])
        self._computed.index_copy_(0, slots, computed)

    def read_prompts(self, batch: Batch, forward: Forward) -> None:
        slots = [
            item.request.slot
            for item in batch.requests
            if item.is_prompt_chunk and item.request.num_speculative_tokens
        ]
        if slots:
            self._catch_up(torch.tensor(slots, device=self._state.device))

    def forget(self, requests: Sequence[Request]) -> None:
        """A slot's counter is set anew when the slot is next given out."""

    def cached_tokens(self, slots: Tensor) -> Tensor:
        return self._computed[slots]

    def _probabilities(self, turn: Turn) -> Tensor | None:
        """[R, K, Vq], to be filled with what the drafts are sampled from, if any is."""
        if self._greedy_only or Uses.SAMPLING not in turn.uses:
            return None
        columns = self._num_legal_tokens if self._vocabulary is None else len(self._vocabulary)
        shape = (turn.num_requests, turn.width, columns)
        return torch.empty(shape, dtype=torch.float32, device=self._state.device)

    def _catch_up(self, slots: Tensor) -> None:
        """Compute what the target has computed and this model has not."""
        starts = self._computed[slots]
        ends = self._state.num_computed[slots].clamp(max=self._max_model_len)
        lengths = (ends - starts).clamp(min=0)
        if lengths.any():
            self._runner.forward(Rows(slots, starts, lengths, None))
            self._computed[slots] = starts + lengths
