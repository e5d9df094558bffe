"""Gemma 4's assistant: a small network whose queries attend to the target's keys and values.

    x = pre_projection[target's embedding of the token * sqrt(target width), hidden state]
    layer: x = x + norm(attention(norm(x))), over the target's last layer of the same kind
           x = x + norm(mlp(norm(x))), then * layer_scalar
    y = norm(x); logits = lm_head(y); next hidden state = post_projection(y)

Some assistants compute logits for a part of the vocabulary only: tokens are grouped into clusters,
and only the tokens of the clusters with the likeliest centroids get logits.

The first row of a draft reads the target's hidden state of the last computed token and the newest
token; each further row reads the assistant's own hidden state and the draft token before it. All
rows have the position of the newest token and attend to the target's cache, but not to each other.
So the assistant has no cache of its own, and rejected drafts leave nothing to undo.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from slipstream.cache.spec import LayerCache
from slipstream.core.errors import CheckpointError
from slipstream.kernels.formats.dense import DenseMatrix
from slipstream.kernels.ops import Ops
from slipstream.kernels.pass_inputs import PassInputs, RowPlaces
from slipstream.kernels.table import InputProjection
from slipstream.layers.embedding import Embedding, LanguageModelHead
from slipstream.layers.linear import column_linear, row_linear
from slipstream.layers.norm import rms_norm
from slipstream.layers.parameters import ParameterSource, Part
from slipstream.layers.stack import Stack
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.loading import LoadOptions
from slipstream.runner.device_batch import DeviceBatch
from slipstream.speculative.drafter import DrafterResources
from slipstream.speculative.gemma4_assistant.config import (
    AssistantConfig,
    Centroids,
    read_assistant_config,
    target_layer,
)
from slipstream.speculative.heads.checkpoint import HeadCheckpoint
from slipstream.speculative.heads.last_hidden import LastHiddenDrafter
from slipstream.speculative.heads.loading import DraftingNetwork, HeadContext, load_head
from slipstream.speculative.heads.method import Head, HeadMethod
from slipstream.speculative.model_options import ModelKeys

_ORDERING = "masked_embedding.token_ordering"
_TABLE, _HEAD = "embed_tokens.weight", "lm_head.weight"  # tied weights


def load_assistant(
    checkpoint: HeadCheckpoint, config: AssistantConfig, target: DecoderConfig, options: LoadOptions
) -> "AssistantNetwork":
    read = [target_layer(layer, target) for layer in config.attention]
    read_layers = [layer for layer in read if layer is not None]
    ordering = _read_ordering(checkpoint, config, options)
    build = partial(AssistantNetwork, config=config, read_layers=read_layers, ordering=ordering)
    return load_head(checkpoint, target, options, build, ignored=(_ORDERING, _HEAD))


def _read_ordering(
    checkpoint: HeadCheckpoint, config: AssistantConfig, options: LoadOptions
) -> Tensor:
    """Read the token ids of all clusters, cluster by cluster, [V] int64."""
    vocab = config.layers.vocab_size
    entry = checkpoint.entries.get(_ORDERING) if checkpoint.has_weights else None
    if config.centroids is None or (entry is None and options.load_format == "dummy"):
        return torch.arange(vocab, device=options.device)
    if entry is None or entry.shape != (vocab,) or entry.dtype.is_floating_point:
        raise CheckpointError(
            f"{checkpoint.path} asks for use_ordered_embeddings, and needs a tensor {_ORDERING} of "
            f"{vocab} integers"
        )
    ordering = checkpoint.integers(_ORDERING)
    if not torch.equal(ordering.sort().values, torch.arange(vocab)):
        raise CheckpointError(
            f"tensor {_ORDERING} in {checkpoint.path} must hold every token id once"
        )
    return ordering.to(options.device)


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


class SomeLogits:
    """An lm_head that computes logits for the tokens of the likeliest clusters only."""

    def __init__(
        self,
        ops: Ops,
        source: ParameterSource,
        centroids: Centroids,
        ordering: Tensor,
        table: DenseMatrix,
        softcap: float | None,
    ) -> None:
        width = table.shape[1]
        parts = [Part("masked_embedding.centroids", centroids.count)]
        self._ops, self._chosen = ops, centroids.chosen
        self._table, self._softcap = table.values, softcap
        self._centroids = column_linear(source, parts, width, False)
        self._tokens = ordering.view(centroids.count, -1)

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [T, H] -> [T, V] float32, minus infinity for all other tokens."""
        likely = self._ops.logits(hidden, self._centroids.weight).topk(self._chosen).indices
        tokens = self._tokens[likely].flatten(1)
        logits = (self._table[tokens] @ hidden.unsqueeze(-1)).squeeze(-1)
        logits = _capped(logits.float(), self._softcap)
        everywhere = logits.new_full((len(hidden), len(self._table)), -torch.inf)
        return everywhere.scatter(1, tokens, logits)


class AssistantNetwork(DraftingNetwork):
    """Maps token ids and hidden states to the lm_head's input and the next hidden states."""

    def __init__(
        self,
        context: HeadContext,
        config: AssistantConfig,
        read_layers: Sequence[int],
        ordering: Tensor,
    ) -> None:
        ops, source = context.ops, context.source
        sizes, target_width = config.layers, config.target_width
        width, vocab = sizes.hidden_size, sizes.vocab_size
        self._ops, self._read_layers, self._softcap = ops, tuple(read_layers), config.softcap
        self._embedding: Embedding | None = None
        self.num_legal_tokens = vocab
        self._embedding_scale = target_width**0.5
        enter = column_linear(source, [Part("pre_projection", width)], 2 * target_width, False)
        self._leave = row_linear(source, "post_projection", target_width, width, False)
        reading = [
            replace(layer, mixer=replace(mixer, kv_source=read))
            for layer, mixer, read in zip(sizes.layers, config.attention, read_layers, strict=True)
        ]
        last = rms_norm(source, "norm", width, sizes.rms_norm_eps)
        entry = InputProjection(enter.product, (None, None))
        self._stack = Stack(ops, context.layers(sizes, reading), last, entry)
        table = source.table([Part(_TABLE, vocab)], width)
        self._head: LanguageModelHead | SomeLogits
        if config.centroids is None:
            self._head = LanguageModelHead(ops, source.tied(table))
        else:
            self._head = SomeLogits(ops, source, config.centroids, ordering, table, config.softcap)
        device = context.options.device
        self._suppressed = torch.tensor(config.suppressed, dtype=torch.int64, device=device)

    def share(self, embedding: Embedding, head: LanguageModelHead) -> None:
        self._embedding = embedding

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [T, H] -> [T, V] float32."""
        logits = self._head(hidden)
        if isinstance(self._head, LanguageModelHead):
            logits = _capped(logits, self._softcap)
        if len(self._suppressed):
            logits = logits.index_fill(1, self._suppressed, -torch.inf)
        return logits

    def __call__(
        self, token_ids: Tensor, hidden: Tensor, inputs: PassInputs, caches: Sequence[LayerCache]
    ) -> tuple[Tensor, Tensor]:
        """Run one row for each of several requests.

        Args:
            token_ids: [T], the target's token ids.
            hidden: [T, target width], the target's after its final norm, or returned by this call.
            inputs: positions and paging of the rows, without slots to write to.
            caches: the caches of all layers of the target.

        Returns:
            [T, H], the input of `logits`, and [T, target width], the next hidden states.
        """
        assert self._embedding is not None, "share() comes first"
        embedded = self._embedding(token_ids) * self._embedding_scale
        read = [caches[layer] for layer in self._read_layers]
        normed, _ = self._stack([embedded.to(hidden.dtype), hidden], inputs, read)
        return normed, self._ops.joined_linear([(normed, None)], self._leave.weight, None)


State = tuple[Tensor, PassInputs]  # hidden states [R, target width], and the rows' inputs


class AssistantDrafter(LastHiddenDrafter):
    """Drafts a chain with one row per request and pass, over the target's cache."""

    def __init__(
        self, head: Head[AssistantConfig, AssistantNetwork], resources: DrafterResources
    ) -> None:
        super().__init__(head, resources)
        self._assistant, self._caches = head.network, resources.target_cache.layers

    def _start(self, hidden: Tensor, batch: DeviceBatch, newest: Tensor) -> State:
        return hidden, self._rows(batch.slots, newest)

    def _next(self, index: int, state: State, last: Tensor) -> tuple[Tensor, State]:
        hidden, inputs = state
        normed, hidden = self._assistant(last, hidden, inputs, self._caches)
        return self._assistant.logits(normed), (hidden, inputs)

    def _rows(self, slots: Tensor, newest: Tensor) -> PassInputs:
        """The inputs of one row per request, at the position of its newest, uncomputed token."""
        tables = self._state.tables
        return tables.inputs(
            RowPlaces(torch.arange(len(slots) + 1, device=slots.device), newest, max_rows=1),
            tables.block_tables[slots],
            torch.minimum(newest, self._state.num_computed[slots]),
            slots.new_full((tables.num_tables * len(slots),), -1),
        )


HEAD = HeadMethod(
    name="gemma4_assistant",
    read=read_assistant_config,
    network=load_assistant,
    drafter=AssistantDrafter,
    keys=ModelKeys(whole_target=True),
)
