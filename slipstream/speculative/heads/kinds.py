"""Configs of drafting heads: their sizes, the features they read, and the targets they fit."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from slipstream.cache.spec import CacheLayout
from slipstream.models.decoder_config import DecoderConfig
from slipstream.speculative.drafter import DrafterLimits, Needs
from slipstream.speculative.heads.checkpoint import HeadCheckpoint
from slipstream.speculative.heads.config import wrapped_num_tokens
from slipstream.speculative.model_options import ModelOptions
from slipstream.speculative.options import TargetModel

EMBEDDING, HEAD, DRAFT_IDS = "embed_tokens", "lm_head", "d2t"


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """A head's config, from its config.json and the names and shapes of its tensors.

    The defaults are those of a head without a KV cache.

    Attributes:
        layers: the config of its decoder layers; None if it has none.
        num_tokens: draft tokens per step that the checkpoint proposes; None if not stated.
        trained_tokens: draft tokens per pass that it was trained for; None if not stated.
    """

    keeps_blocks: ClassVar[bool] = False

    layers: DecoderConfig | None
    num_tokens: int | None = None
    trained_tokens: int | None = None

    @property
    def features(self) -> str:
        """The features of the target that the head reads, in words."""
        raise NotImplementedError

    @property
    def sizes(self) -> Mapping[str, int | None]:
        """hidden_size and vocab_size of heads without `layers`."""
        return {}

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on this head for the user."""
        return ()

    @property
    def shared(self) -> str | None:
        """Why the head must have the target's dtype (shared weights); None if it need not."""
        return None

    def problems(self, target: DecoderConfig) -> list[str]:
        """The reasons why the head cannot draft for this target; empty if it can."""
        raise NotImplementedError

    def with_options(self, options: ModelOptions, target: TargetModel) -> Self:
        """This config with the user's options; UsageError if a required one is missing."""
        return self

    def needs(self, target: DecoderConfig) -> Needs:
        """The parts of the target's passes that the head needs."""
        return Needs()

    def layout(self, pages: torch.dtype, dtype: torch.dtype) -> CacheLayout | None:
        """The cache that the head adds to every block; None if it has none.

        Args:
            pages: dtype of keys and values.
            dtype: dtype in which the head computes.
        """
        return None

    def limits(self, options: ModelOptions, longest: int, identity: str) -> DrafterLimits:
        """The limits of drafting with this head.

        Args:
            longest: the target's maximum length in tokens.
            identity: identifies the head and its precision.
        """
        return DrafterLimits(
            max_speculative_tokens=self.num_tokens,
            max_model_len=options.max_model_len,
            keeps_probabilities=not options.greedy_only,
            may_skip_steps=True,
        )


@dataclass(frozen=True)
class HeadParts:
    """The optional tensors that a head has; without weights, the usual ones."""

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


@dataclass(frozen=True, kw_only=True)
class DecoderHeadConfig(HeadConfig):
    """A head of decoder layers over the target's features, with a KV cache in the blocks.

    Attributes:
        layers: the config of its layers; the vocabulary is the target's.
        draft_vocab_size: rows of its lm_head.
        has_draft_ids: whether a tensor maps these rows to token ids; true without weights.
    """

    keeps_blocks: ClassVar[bool] = True

    layers: DecoderConfig
    parts: HeadParts
    draft_vocab_size: int
    has_draft_ids: bool = True

    @property
    def features(self) -> str:
        return "the last hidden state, after the final norm"

    @property
    def shared(self) -> str | None:
        own = self.parts.embedding and self.parts.head
        return None if own else "this head shares the target's embedding or lm_head"

    def problems(self, target: DecoderConfig) -> list[str]:
        problem = width_problem(self.layers.hidden_size, target)
        return [problem] if problem else [*self._vocabulary(target), *self._sharing(target)]

    def needs(self, target: DecoderConfig) -> Needs:
        return Needs(features=True, hidden=True)

    def layout(self, pages: torch.dtype, dtype: torch.dtype) -> CacheLayout:
        return self.layers.cache_layout(pages)

    def limits(self, options: ModelOptions, longest: int, identity: str) -> DrafterLimits:
        """A head drafts up to the target's maximum length, whatever length it was trained with."""
        return DrafterLimits(
            max_model_len=min(options.max_model_len or longest, longest), cache_identity=identity
        )

    def _vocabulary(self, target: DecoderConfig) -> list[str]:
        problem = vocabulary_problem(self.layers.vocab_size, target)
        if problem or self.draft_vocab_size == target.vocab_size or self.has_draft_ids:
            return [problem] if problem else []
        return [
            f"its draft vocabulary has {self.draft_vocab_size} of the target's "
            f"{target.vocab_size} tokens, and without a tensor {DRAFT_IDS} it is unknown which"
        ]

    def _sharing(self, target: DecoderConfig) -> list[str]:
        """The reasons why the head cannot share the target's embedding or lm_head."""
        width, parts = self.layers.hidden_size, self.parts
        names = [(EMBEDDING, parts.embedding), (HEAD, parts.head)]
        if width != target.hidden_size:
            return [
                f"it has no {name} and cannot share the target's: its hidden size is {width} and "
                f"the target's {target.hidden_size}"
                for name, is_own in names
                if not is_own
            ]
        if parts.head or self.draft_vocab_size == target.vocab_size:
            return []
        return [
            f"it has no lm_head, and the target's has {target.vocab_size} rows where its "
            f"draft_vocab_size asks for {self.draft_vocab_size}"
        ]


@dataclass(frozen=True, kw_only=True)
class StreamHeadConfig(DecoderHeadConfig):
    """A head whose fc reads the residual streams that enter several layers of the target.

    Attributes:
        entered_layers: these layers, in the order of fc's columns; None for defaults that depend
            on the target's number of layers.
        fc_columns: number of columns of the stored fc; None without weights.
    """

    entered_layers: tuple[int, ...] | None
    target_hidden_size: int | None
    fc_columns: int | None

    @property
    def num_read(self) -> int:
        """Number of streams that fc reads."""
        raise NotImplementedError

    def stream_layers(self, target_layers: int) -> tuple[int, ...]:
        """The layers whose input streams are read, for a target with `target_layers` layers."""
        raise NotImplementedError

    def problems(self, target: DecoderConfig) -> list[str]:
        return [*self._widths(target), *self._vocabulary(target), *self._sharing(target)]

    def needs(self, target: DecoderConfig) -> Needs:
        layers = self.stream_layers(target.num_layers)
        return Needs(layers, features=True, hidden=not layers)

    def _widths(self, target: DecoderConfig) -> list[str]:
        width, stated = target.hidden_size, self.target_hidden_size
        if stated not in (None, width):
            return [
                f"it was trained for a target of hidden size {stated}, and this one has {width}"
            ]
        if self.fc_columns in (None, self.num_read * width):
            return []
        return [
            f"its fc reads {self.fc_columns} numbers a token, and {self.num_read} layers of a "
            f"target of hidden size {width} give {self.num_read * width}; it was trained for "
            "another target, or its config.json does not list all layers that it reads"
        ]


def stream_fields(
    checkpoint: HeadCheckpoint, layers: DecoderConfig, draft_vocab_size: int | None, own_head: bool
) -> dict[str, Any]:
    """Read the common fields of stream heads; `own_head`: they have an lm_head by default."""
    fc = checkpoint.entries.get("fc.weight") if checkpoint.has_weights else None
    return {
        "layers": layers,
        "num_tokens": wrapped_num_tokens(checkpoint.config),
        "parts": HeadParts.of(checkpoint, own_head),
        "draft_vocab_size": draft_vocab_size or layers.vocab_size,
        "has_draft_ids": DRAFT_IDS in checkpoint.tensor_names or not checkpoint.has_weights,
        "fc_columns": None if fc is None or len(fc.shape) != 2 else fc.shape[1],
    }


def width_problem(width: int, target: DecoderConfig) -> str | None:
    """An error message if the target's hidden size is not `width`, which the head reads."""
    if width == target.hidden_size:
        return None
    return (
        f"it reads features of {width} numbers and the target's have {target.hidden_size}; it was "
        "trained for another target"
    )


def vocabulary_problem(vocab_size: int, target: DecoderConfig) -> str | None:
    """An error message if the target's vocabulary size is not `vocab_size`, the head's."""
    if vocab_size == target.vocab_size:
        return None
    return (
        f"it reads a vocabulary of {vocab_size} tokens and the target has {target.vocab_size}; it "
        "was trained for another target"
    )
