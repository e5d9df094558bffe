"""The keys of a `speculative_config` that every drafting head takes, and what loading it needs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch

from slipstream.cache.spec import CacheLayout
from slipstream.core.errors import CheckpointError, UsageError
from slipstream.models.catalogue import read_decoder_config
from slipstream.models.checkpoint import Checkpoint, resolve_checkpoint
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.loading import LoadOptions, dtype_named
from slipstream.speculative.drafter import DrafterLimits
from slipstream.speculative.heads.checkpoint import HeadCheckpoint
from slipstream.speculative.heads.loading import HeadParts
from slipstream.speculative.options import Options, TargetModel
from slipstream.speculative.recognition import DRAFT_MODEL, recognise


@dataclass(frozen=True)
class HeadFacts:
    """What a drafting head is, from its config and the names and shapes of its tensors.

    Attributes:
        layers: their sizes; None where they are none of a language model.
        features: what it reads of the target, in words.
        problems: of a target's shape, why the head cannot draft for it.
        num_tokens: as many draft tokens as it has in mind for a step, if it has a number.
        sizes: hidden_size and vocab_size, where `layers` does not say them.
        notes: what to know when it is used.
        keeps_blocks: its layers have keys and values of their own.
        trained_tokens: as many as it has learned to give from one pass, if it says.
    """

    layers: DecoderConfig | None
    features: str
    problems: Callable[[DecoderConfig], list[str]]
    num_tokens: int | None = None
    sizes: Mapping[str, int | None] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    keeps_blocks: bool = True
    trained_tokens: int | None = None


@dataclass(frozen=True)
class HeadOptions:
    """How a drafting head is loaded and sampled.

    Attributes:
        model: None for a head that lies in the target's own checkpoint.
    """

    model: str | None
    revision: str | None
    dtype: str | None
    quantization: str | None
    max_model_len: int | None
    greedy_only: bool  # draft_sample_method: greedy


def read_head_options(options: Options, method: str, of_target: bool = False) -> HeadOptions:
    """Honour or refuse every key that other engines know for a drafting head.

    Args:
        of_target: without a model, the target's own checkpoint has the head.
    """
    model = options.take_str("model", None)
    if of_target and model == method:
        model = None
    if model is None and not of_target:
        raise UsageError(f"speculative_config: method {method} needs model, a checkpoint")
    options.take_only("parallel_drafting", False, "this method has one way to draft; leave it out")
    options.take_only("draft_tensor_parallel_size", 1, "a drafter runs on one device")
    greedy_only, max_model_len = options.take_greedy_only(), options.take_max_model_len()
    return HeadOptions(
        model=model,
        revision=options.take_str("revision", None),
        dtype=options.take_str("dtype", None),
        quantization=options.take_quantization(),
        max_model_len=max_model_len,
        greedy_only=greedy_only,
    )


def open_head(options: HeadOptions, method: str) -> HeadCheckpoint:
    """The head's directory; CheckpointError when it holds a drafter of another method."""
    assert options.model is not None, "this method's heads have folders of their own"
    path = resolve_checkpoint(options.model, options.revision, pickled=True)
    checkpoint = HeadCheckpoint(path)
    kind = recognise(checkpoint.config, checkpoint.tensor_names)
    unknown = kind == DRAFT_MODEL and not checkpoint.has_weights  # a bare config says no more
    if kind != method and not unknown:
        raise CheckpointError(
            f"{path} is no checkpoint for method {method}: by its config.json and tensors it is "
            f"one for {kind}; leave method out, or choose another checkpoint"
        )
    return checkpoint


def target_config(target: TargetModel) -> DecoderConfig:
    """The shape of the target, which is not loaded yet."""
    return read_decoder_config(Checkpoint(target.path))


def require_fit(checkpoint: HeadCheckpoint, target: TargetModel, problems: list[str]) -> None:
    """Raise CheckpointError with all that is wrong."""
    if problems:
        raise CheckpointError(
            f"{checkpoint.path} cannot draft for {target.path}: {'; '.join(problems)}"
        )


def load_options(options: HeadOptions, target: TargetModel) -> LoadOptions:
    """As the target is loaded, unless asked otherwise."""
    dtype = dtype_named(options.dtype) if options.dtype else target.load.dtype
    return replace(target.load, dtype=dtype, quantization=options.quantization)


def require_shared_dtype(parts: HeadParts, dtype: torch.dtype, target: TargetModel) -> None:
    """Raise UsageError where the head would multiply the target's matrices in another dtype."""
    if dtype != target.load.dtype and not (parts.embedding and parts.head):
        raise UsageError(
            f"speculative_config: dtype {dtype} differs from the target's {target.load.dtype}, "
            "but this head shares the target's embedding or lm_head; leave dtype out"
        )


def head_limits(
    options: HeadOptions, method: str, checkpoint: HeadCheckpoint, target: TargetModel
) -> DrafterLimits:
    """A head drafts as far as the target reads, whatever length it was trained with."""
    longest = target.load.max_positions
    dtype = load_options(options, target).dtype
    return DrafterLimits(
        max_model_len=min(options.max_model_len or longest, longest),
        cache_identity=f"{method}:{checkpoint.path}:{dtype}:{options.quantization}",
    )


def head_layout(layers: DecoderConfig, dtype: torch.dtype) -> CacheLayout:
    """What the head adds to every block."""
    return layers.cache_layout(dtype)
