"""Building a drafting head with its weights, and what heads share with their target."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from slipstream.core.errors import CheckpointError, UsageError
from slipstream.kernels.formats.weight import Weight
from slipstream.kernels.table import Ops, ops_for
from slipstream.layers.embedding import Embedding, LanguageModelHead
from slipstream.layers.parameters import ParameterSource, Part
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.loading import LoadOptions
from slipstream.models.parameter_sources import CheckpointSource, DummySource, TensorSource
from slipstream.models.precision import in_precision
from slipstream.speculative.heads.checkpoint import HeadCheckpoint, fill

T = TypeVar("T")
_COMPARED = 1 << 14  # tokens at a time
EMBEDDING, HEAD, DRAFT_IDS = "embed_tokens", "lm_head", "d2t"


@dataclass(frozen=True)
class HeadParts:
    """Which optional tensors a head has of its own; without weights, as trainers mostly have it."""

    embedding: bool
    head: bool
    fc_bias: bool

    @staticmethod
    def of(checkpoint: HeadCheckpoint, head_by_default: bool) -> "HeadParts":
        if not checkpoint.has_weights:
            return HeadParts(False, head_by_default, False)
        names = checkpoint.tensor_names
        return HeadParts(
            embedding=f"{EMBEDDING}.weight" in names,
            head=f"{HEAD}.weight" in names,
            fc_bias="fc.bias" in names,
        )


class HeadEnds:
    """Embedding and lm_head: the head's own where it has them, else the target's."""

    def __init__(
        self,
        ops: Ops,
        source: ParameterSource,
        parts: HeadParts,
        vocab_size: int,
        draft_vocab_size: int,
        width: int,
        names: tuple[str, str] = (EMBEDDING, HEAD),
    ) -> None:
        self._embedding: Embedding | None = None
        self._head: LanguageModelHead | None = None
        embedding, head = names
        if parts.embedding:
            self._embedding = Embedding(source, embedding, vocab_size, width)
        if parts.head:
            weight = source.head([Part(f"{head}.weight", draft_vocab_size)], width)
            self._head = LanguageModelHead(ops, weight)

    def share(self, embedding: Embedding, head: LanguageModelHead) -> None:
        """Take the target's for what is missing, and for an embedding with the same numbers."""
        own = self._embedding
        if own is None or _same(own.weight, embedding.weight):
            self._embedding = embedding
        self._head = self._head or head

    def embedded(self, token_ids: Tensor) -> Tensor:
        """token_ids [T] -> [T, width]."""
        assert self._embedding is not None, "share() comes first"
        embedded: Tensor = self._embedding(token_ids)
        return embedded

    @property
    def head(self) -> LanguageModelHead:
        assert self._head is not None, "share() comes first"
        return self._head


def _same(own: Weight, other: Weight) -> bool:
    """Whether two tables have the same numbers, however they are stored."""
    if own.shape != other.shape or own.table_dtype != other.table_dtype:
        return False
    if own.floats is not None and other.floats is not None:
        return torch.equal(own.floats, other.floats)
    parts = torch.split(torch.arange(own.shape[0]), _COMPARED)  # tables are packed on CPUs only
    return all(torch.equal(own.look_up(part), other.look_up(part)) for part in parts)


def load_head(
    checkpoint: HeadCheckpoint,
    options: LoadOptions,
    build: Callable[[Ops, ParameterSource], T],
    ignored: Sequence[str] = (),
) -> T:
    """The network that `build` makes of the checkpoint's tensors.

    Args:
        ignored: tensors that may be there and are read elsewhere, or not at all.

    Raises:
        CheckpointError: a tensor is missing, of another shape, or of no use to the network.
        UsageError: weights that no drafting head has were asked for.
    """
    ops = ops_for(options.device, options.dtype, options.batch_invariant)
    if options.load_format == "twin":
        raise UsageError(
            "load_format twin makes weights for draft models only; use dummy for a drafting head"
        )

    def built(tensors: TensorSource) -> T:
        return build(ops, in_precision(tensors, options.quantization, ops))

    if options.load_format == "dummy":
        return built(DummySource(options.dtype, options.device, options.seed))
    size = sum(
        entry.nbytes // entry.dtype.itemsize * options.dtype.itemsize
        for entry in checkpoint.entries.values()
    )
    options.memory_check(checkpoint.path.name, size, {})
    name = f"loading {checkpoint.path.name}"
    with options.progress_bar(name, checkpoint.size_bytes, "bytes") as progress:
        source = CheckpointSource(checkpoint, options.dtype, options.device, progress, read=fill)
        network = built(source)
    source.finish(ignored)
    return network


def read_draft_ids(
    checkpoint: HeadCheckpoint, draft_vocab_size: int, vocab_size: int, device: torch.device
) -> Tensor | None:
    """[draft_vocab_size] int64, the target's token id of every column of the lm_head; None when
    they are the ids from 0 on.

    `d2t` holds offsets: column i stands for token i + d2t[i].
    """
    entry = checkpoint.entries.get(DRAFT_IDS) if checkpoint.has_weights else None
    if entry is None:
        return None
    if entry.shape != (draft_vocab_size,) or entry.dtype.is_floating_point:
        raise CheckpointError(
            f"tensor {DRAFT_IDS} in {checkpoint.path} must hold {draft_vocab_size} integers, one "
            f"for each token of the draft vocabulary, not {list(entry.shape)} of {entry.dtype}"
        )
    offsets = torch.empty(entry.shape, dtype=entry.dtype)
    fill(entry, offsets)
    ids = torch.arange(draft_vocab_size) + offsets.long()
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


def vocabulary_problem(head: DecoderConfig, target: DecoderConfig) -> str | None:
    """Why a head that reads the target's token ids cannot read this target's."""
    if head.vocab_size == target.vocab_size:
        return None
    return (
        f"it reads a vocabulary of {head.vocab_size} tokens and the target has "
        f"{target.vocab_size}; it was trained for another target"
    )


def vocabulary_problems(
    head: DecoderConfig, draft_vocab_size: int, has_draft_ids: bool, target: DecoderConfig
) -> list[str]:
    """The same, and why nobody knows which of the target's tokens a head drafts."""
    mismatch = vocabulary_problem(head, target)
    if mismatch is not None:
        return [mismatch]
    if draft_vocab_size == target.vocab_size or has_draft_ids:
        return []
    return [
        f"its draft vocabulary has {draft_vocab_size} of the target's "
        f"{target.vocab_size} tokens, and without a tensor {DRAFT_IDS} nobody knows which"
    ]


def sharing_problems(
    parts: HeadParts, head: DecoderConfig, draft_vocab_size: int, target: DecoderConfig
) -> list[str]:
    """Why what the head does not have cannot be taken from the target."""
    problems = []
    same_width = head.hidden_size == target.hidden_size
    widths = f"hidden size is {head.hidden_size} and the target's {target.hidden_size}"
    if not parts.embedding and not same_width:
        problems.append(f"it has no embed_tokens and cannot share the target's: its {widths}")
    if not parts.head and not same_width:
        problems.append(f"it has no lm_head and cannot share the target's: its {widths}")
    elif not parts.head and draft_vocab_size != target.vocab_size:
        problems.append(
            f"it has no lm_head, and the target's has {target.vocab_size} rows where its "
            f"draft_vocab_size asks for {draft_vocab_size}"
        )
    return problems
