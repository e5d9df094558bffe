"""Builds drafting heads with their weights, and shares the target's embedding and lm_head."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from slipstream.core.errors import CheckpointError
from slipstream.kernels.formats.weight import Weight
from slipstream.kernels.ops import Ops
from slipstream.kernels.pass_inputs import PassInputs
from slipstream.kernels.registry import kernels_for
from slipstream.layers.adapters import AdapterSlots
from slipstream.layers.embedding import Embedding, LanguageModelHead
from slipstream.layers.layer import BuildContext, Layer, LayerSpec, build_layers
from slipstream.layers.parameters import ParameterSource, Part
from slipstream.layers.rope import RopeTables
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.loading import (
    RANDOM_FORMATS,
    LoadOptions,
    in_stored_form,
    open_quantized,
    tensor_bytes,
)
from slipstream.models.parameter_sources import CheckpointSource, DummySource, TensorSource
from slipstream.models.precision import in_precision
from slipstream.models.quantized.module import StoredQuantization
from slipstream.speculative.heads.checkpoint import HeadCheckpoint, fill
from slipstream.speculative.heads.kinds import DRAFT_IDS, EMBEDDING, HEAD, DecoderHeadConfig

T = TypeVar("T")
C = TypeVar("C", bound=DecoderHeadConfig)
N = TypeVar("N", bound="HeadNetwork")
_COMPARED = 1 << 14  # tokens that are compared at a time


@dataclass(frozen=True, eq=False)
class HeadContext:
    """The arguments for building a head's network, besides its config.

    Attributes:
        target_width: hidden size of the target.
        adapters: receives slots for LoRA adapters of the layers; None: there are no adapters.
    """

    ops: Ops
    source: ParameterSource
    target_width: int
    options: LoadOptions
    adapters: AdapterSlots | None = None

    def layers(
        self, config: DecoderConfig, specs: Sequence[LayerSpec] | None = None, shifted: bool = False
    ) -> list[Layer]:
        """Build the decoder layers.

        Args:
            specs: replace the config's layer specs.
            shifted: see `RopeTables`.
        """
        ropes = RopeTables(self.options.max_positions, self.options.device, shifted=shifted)
        built = BuildContext(self.source, config.hidden_size, ropes, adapters=self.adapters)
        return build_layers(config.layers if specs is None else specs, built)


class DraftingNetwork:
    """The network of a head.

    Attributes:
        vocabulary: [num_legal_tokens] int64, rising: the target's token id of each column of its
            logits; None: column i is token i.
        num_legal_tokens: number of columns that are tokens; further columns are padding.
        adapters: slots for LoRA adapters of its layers; None: there are none.
    """

    vocabulary: Tensor | None = None
    num_legal_tokens: int
    adapters: AdapterSlots | None = None

    @property
    def num_ranks(self) -> int:
        """Number of ranks over which the columns are split equally."""
        return 1

    def share(self, embedding: Embedding, head: LanguageModelHead) -> None:
        """Use the target's embedding and lm_head where the checkpoint has none."""


class HeadNetwork(DraftingNetwork):
    """A drafting head, with its own embedding and lm_head if the checkpoint has them.

    Attributes:
        feature_size: F, the size of the features that are kept of each target token.
    """

    def __init__(
        self,
        context: HeadContext,
        config: DecoderHeadConfig,
        names: tuple[str, str] = (EMBEDDING, HEAD),
    ) -> None:
        layers, parts, source = config.layers, config.parts, context.source
        self.feature_size, self.adapters = layers.hidden_size, context.adapters
        width = layers.hidden_size
        self.num_legal_tokens = config.draft_vocab_size
        self._embedding: Embedding | None = None
        self._head: LanguageModelHead | None = None
        embedding, head = names
        if parts.embedding:
            self._embedding = Embedding(source, embedding, layers.vocab_size, width)
        if parts.head:
            weight = source.head([Part(f"{head}.weight", config.draft_vocab_size)], width)
            self._head = LanguageModelHead(context.ops, weight)

    def share(self, embedding: Embedding, head: LanguageModelHead) -> None:
        """Use the target's embedding if the head has none or an equal one, and the target's lm_head
        if the head has none."""
        own = self._embedding
        if own is None or _same(own.weight, embedding.weight):
            self._embedding = embedding
        self._head = self._head or head

    def embedded(self, token_ids: Tensor, inputs: PassInputs | None = None) -> Tensor:
        """token_ids [T] -> [T, width]; images use the target's embeddings if the width is equal."""
        assert self._embedding is not None, "share() comes first"
        embedded: Tensor = self._embedding(token_ids)
        given = None if inputs is None else inputs.embedded
        return given if given is not None and given.shape == embedded.shape else embedded

    @property
    def head(self) -> LanguageModelHead:
        """The lm_head over the draft vocabulary."""
        assert self._head is not None, "share() comes first"
        return self._head

    @property
    def num_ranks(self) -> int:
        return self.head.columns.num_ranks


def _same(own: Weight, other: Weight) -> bool:
    """Whether two embedding tables are equal, whatever their storage formats."""
    if own.shape != other.shape or own.table_dtype != other.table_dtype:
        return False
    if own.floats is not None and other.floats is not None:
        return torch.equal(own.floats, other.floats)
    parts = torch.split(torch.arange(own.shape[0]), _COMPARED)  # packed tables exist on CPUs only
    return all(torch.equal(own.look_up(part), other.look_up(part)) for part in parts)


def load_head(
    checkpoint: HeadCheckpoint,
    target: DecoderConfig,
    options: LoadOptions,
    build: Callable[[HeadContext], T],
    ignored: Sequence[str] = (),
    stored: StoredQuantization | None = None,
) -> T:
    """Build a network with `build` from the checkpoint's tensors.

    Args:
        ignored: tensors that may be present but are not read here.
        stored: the format of quantised matrices; None if there are none.

    Raises:
        CheckpointError: a tensor is missing, has a wrong shape, or is unexpected.
    """
    ops = kernels_for(options.device, options.dtype, options.batch_invariant).network
    if stored is not None:
        options = in_stored_form(options, stored)

    def built(tensors: TensorSource) -> T:
        source = in_precision(tensors, options.quantization, ops)
        slots: AdapterSlots | None = None
        if options.adapters is not None:
            sizes = *options.adapters, options.dtype, options.device
            slots = AdapterSlots(*sizes, canonical=checkpoint.canonical)
        return build(HeadContext(ops, source, target.hidden_size, options, slots))

    if options.load_format in RANDOM_FORMATS:  # random weights of a head predict nothing
        return built(DummySource(options.dtype, options.device, options.seed))
    if stored is None:
        size = sum(
            entry.nbytes // entry.dtype.itemsize * options.dtype.itemsize
            for entry in checkpoint.entries.values()
        )
    else:
        options.stored_check(checkpoint.path.name, stored)
        size = tensor_bytes(checkpoint.entries, stored, options)
    options.memory_check(checkpoint.path.name, size, None)
    name = f"loading {checkpoint.path.name}"
    with options.progress_bar(name, checkpoint.size_bytes, "bytes") as progress:
        if stored is None:
            source = CheckpointSource(
                checkpoint, options.dtype, options.device, progress, read=fill
            )
        else:
            source = open_quantized(checkpoint, stored, options, progress)
        network = built(source)
    source.finish(ignored)
    return network


def load_network(
    network: Callable[[HeadContext, C], N],
    checkpoint: HeadCheckpoint,
    config: C,
    target: DecoderConfig,
    options: LoadOptions,
) -> N:
    """Load a network of decoder layers with its weights and its draft vocabulary."""
    size = config.draft_vocab_size
    vocabulary = _read_draft_ids(checkpoint, size, target.vocab_size, options.device)
    loaded = load_head(
        checkpoint, target, options, lambda context: network(context, config), (DRAFT_IDS,)
    )
    loaded.vocabulary = vocabulary
    return loaded


def _read_draft_ids(
    checkpoint: HeadCheckpoint, draft_vocab_size: int, vocab_size: int, device: torch.device
) -> Tensor | None:
    """Read the token id of each column of the lm_head, [draft_vocab_size] int64; None if column i
    is token i.

    `d2t` holds offsets: column i is token i + d2t[i].
    """
    entry = checkpoint.entries.get(DRAFT_IDS) if checkpoint.has_weights else None
    if entry is None:
        return None
    if entry.shape != (draft_vocab_size,) or entry.dtype.is_floating_point:
        raise CheckpointError(
            f"tensor {DRAFT_IDS} in {checkpoint.path} must hold {draft_vocab_size} integers, one "
            f"for each token of the draft vocabulary, not {list(entry.shape)} of {entry.dtype}"
        )
    ids = torch.arange(draft_vocab_size) + checkpoint.integers(DRAFT_IDS)
    if bool((ids < 0).any()) or bool((ids >= vocab_size).any()):
        raise CheckpointError(
            f"tensor {DRAFT_IDS} in {checkpoint.path} leads to token ids from {int(ids.min())} to "
            f"{int(ids.max())}, outside the target's vocabulary of {vocab_size}; it must hold the "
            "offset of each draft token (token id minus its index)"
        )
    if bool((ids.diff() <= 0).any()):
        raise CheckpointError(
            f"tensor {DRAFT_IDS} in {checkpoint.path} does not lead to rising token ids, so its "
            "draft tokens are not in the order of the target's; sort it and the rows of lm_head"
        )
    return ids.to(device)
