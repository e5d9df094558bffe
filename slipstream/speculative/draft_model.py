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
from slipstream.core.batch import Batch, ScheduledRequest
from slipstream.core.errors import UsageError
from slipstream.core.request import Request
from slipstream.models.catalogue import read_decoder_config
from slipstream.models.checkpoint import Checkpoint, resolve_checkpoint
from slipstream.models.decoder import Decoder
from slipstream.models.loading import dtype_named, load_decoder
from slipstream.runner.model_runner import ModelRunner, Rows
from slipstream.sampling.verification import Verdict, sample_draft
from slipstream.speculative.draft_vocabulary import (
    DraftVocabularyConfig,
    choose_draft_vocabulary,
    read_draft_vocabulary,
)
from slipstream.speculative.drafter import Draft, Drafter, DrafterLimits, DrafterResources
from slipstream.speculative.options import Options, TargetModel
from slipstream.speculative.vocabulary import require_same_vocabulary


@dataclass(frozen=True)
class DraftModelConfig:
    """How the draft model is loaded and sampled."""

    model: str
    revision: str | None
    dtype: str | None
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
    options.take_only("quantization", None, "leave it out")
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
    network = load_decoder(checkpoint, replace(target.load, dtype=dtype))
    vocabulary: Tensor | None = None
    if config.vocabulary is not None:
        legal = min(target.vocab_size, network_config.vocab_size)
        chosen = choose_draft_vocabulary(config.vocabulary, target.path, legal)
        vocabulary = torch.tensor(chosen, device=target.load.device)
    identity = f"draft_model:{checkpoint.path}:{dtype}"
    return LoadedDraftModel(config, network, target, dtype, identity, vocabulary)


class LoadedDraftModel:
    """A draft model in memory, waiting for its share of the cache."""

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
    exceeds what the target has once a step is over.
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
        self._computed = torch.zeros_like(self._state.num_computed)

    def propose(self, batch: Batch) -> Draft:
        for item in batch.requests:
            if item.admitted:
                self._computed[item.request.slot] = min(item.start, self._max_model_len)
        drafting = [item for item in batch.requests if item.num_draft_tokens]
        if not drafting:
            return Draft.empty(len(batch.requests), self._state.device)
        tokens, probs = self._chain(drafting)
        return self._spread(batch, drafting, tokens, probs)

    def observe(self, batch: Batch, verdict: Verdict, features: Tensor) -> None:
        items = [item for item in batch.requests if item.request.num_speculative_tokens]
        if not items:
            return
        slots = self._slots(items)
        computed = torch.minimum(self._computed[slots], self._state.num_computed[slots])
        self._computed[slots] = computed
        chunks = [i for i, item in enumerate(items) if item.is_prompt_chunk]
        if chunks:
            self._catch_up(slots[chunks])

    def forget(self, requests: Sequence[Request]) -> None:
        """A slot's counter is set anew when the slot is next given out."""

    def cached_tokens(self, requests: Sequence[Request]) -> Sequence[int]:
        slots = torch.tensor([request.slot for request in requests], device=self._state.device)
        cached: list[int] = self._computed[slots].tolist()
        return cached

    def _chain(self, drafting: Sequence[ScheduledRequest]) -> tuple[Tensor, Tensor | None]:
        """Draft for every item: (tokens [D, K] int64, probs [D, K, V] float32 or None)."""
        slots = self._slots(drafting)
        wanted = [item.num_draft_tokens for item in drafting]
        num_tokens = self._state.num_tokens[slots]
        tokens = torch.zeros((len(wanted), max(wanted)), dtype=torch.int64, device=slots.device)
        probs: Tensor | None = None
        starts = self._computed[slots]
        lengths: list[int] = (num_tokens - starts).tolist()
        for index in range(max(wanted)):
            alive = [i for i, count in enumerate(wanted) if count > index]
            rows = Rows(slots[alive], starts[alive], [lengths[i] for i in alive])
            forward = self._runner.forward(rows)
            last = forward.hidden[[end - 1 for end in forward.row_starts[1:]]]
            picked, q = sample_draft(
                self._runner.logits(last),
                slots[alive],
                [drafting[i].request.slot for i in alive],
                num_tokens[alive] + index,
                self._sampling,
                self._num_legal_tokens,
                greedy_only=self._greedy_only,
                use_fp64_gumbel=self._resources.use_fp64_gumbel,
            )
            if self._vocabulary is not None:
                picked = self._vocabulary[picked]
            tokens[alive, index] = picked
            if q is not None:
                if probs is None:
                    probs = q.new_zeros((*tokens.shape, q.shape[-1]))
                probs[alive, index] = q
            self._state.propose(slots[alive], index, picked)
            starts, lengths = num_tokens + index, [1] * len(wanted)
        wanted_tokens = torch.tensor(wanted, device=slots.device)
        self._computed[slots] = num_tokens + wanted_tokens - 1
        return tokens, probs

    def _spread(
        self,
        batch: Batch,
        drafting: Sequence[ScheduledRequest],
        tokens: Tensor,
        probs: Tensor | None,
    ) -> Draft:
        """From the items that draft to one row per scheduled request."""
        rows = [i for i, item in enumerate(batch.requests) if item.num_draft_tokens]
        if len(rows) < len(batch.requests):
            total = len(batch.requests)
            tokens = _placed(tokens, rows, total)
            probs = None if probs is None else _placed(probs, rows, total)
        counts = [item.num_draft_tokens for item in batch.requests]
        certain = [self._greedy_only or item.request.params.greedy for item in batch.requests]
        return Draft(
            token_ids=tokens,
            num_tokens=torch.tensor(counts, device=tokens.device),
            one_hot=torch.tensor(certain, device=tokens.device),
            probs=probs,
            vocabulary=self._vocabulary,
        )

    def _catch_up(self, slots: Tensor) -> None:
        """Compute what the target has computed and this model has not."""
        starts = self._computed[slots]
        ends = self._state.num_computed[slots].clamp(max=self._max_model_len)
        lengths: list[int] = (ends - starts).clamp(min=0).tolist()
        behind = [i for i, length in enumerate(lengths) if length]
        if not behind:
            return
        rows = Rows(slots[behind], starts[behind], [lengths[i] for i in behind])
        self._runner.forward(rows)
        self._computed[slots] = starts + torch.tensor(lengths, device=slots.device)

    def _slots(self, items: Sequence[ScheduledRequest]) -> Tensor:
        return torch.tensor([item.request.slot for item in items], device=self._state.device)


def _placed(rows: Tensor, places: Sequence[int], total: int) -> Tensor:
    """[len(places), ...] -> [total, ...], zeros elsewhere."""
    out = rows.new_zeros((total, *rows.shape[1:]))
    out[list(places)] = rows
    return out
