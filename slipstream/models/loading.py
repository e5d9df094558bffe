"""Builds a decoder and loads its weights."""

import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import torch

from slipstream.core.errors import UsageError
from slipstream.kernels.formats.blocks import BlockMatrix
from slipstream.kernels.formats.catalogue import kept_on
from slipstream.kernels.formats.float8 import Float8Matrix
from slipstream.kernels.formats.float8_blocks import Float8BlockMatrix
from slipstream.kernels.formats.weight import Rounding, Weight
from slipstream.kernels.ops import Ops
from slipstream.kernels.registry import kernels_for
from slipstream.layers.adapters import AdapterSlots
from slipstream.layers.expert_pool import ExpertPool, Unsplit
from slipstream.layers.parameters import WHOLE, ParameterSource, Share
from slipstream.models.catalogue import read_decoder_config
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.config_keys import DTYPES
from slipstream.models.decoder import Decoder
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.own_drafter import own_drafter_tensors
from slipstream.models.parameter_sources import (
    CheckpointSource,
    DummySource,
    Progress,
    TensorSource,
    no_progress,
)
from slipstream.models.precision import (
    PRECISIONS,
    head_bytes,
    in_precision,
    names_stored_form,
    weight_bytes,
)
from slipstream.models.quantized.catalogue import read_quantization
from slipstream.models.quantized.module import StoredQuantization
from slipstream.models.quantized.source import (
    QuantizedSource,
    RandomQuantizedSource,
    stored_bytes,
    stored_rounding,
)
from slipstream.models.safetensors_file import TensorEntry
from slipstream.models.sharing import shared_unit, without_experts
from slipstream.models.tensor_check import require_tensors
from slipstream.models.twin import TwinSource, require_twin

logger = logging.getLogger("slipstream")

RANDOM_FORMATS = ("dummy", "twin")  # of `load_format`
KEPT_ON_CPU: Final = kept_on("cpu")  # also by plain torch

# (name, size, unit) -> a context manager; call its value with each amount that has been loaded.
ProgressBar = Callable[[str, int, str], AbstractContextManager[Progress]]
# The bytes of a model's weights with a value of `quantization`.
RoundedBytes = Callable[[str], int]
# (model name, bytes of its weights, bytes once quantised): called before weights are allocated;
# raises UsageError if they do not fit. The last is None for weights that are quantised already.
MemoryCheck = Callable[[str, int, RoundedBytes | None], None]
# (model name, the checkpoint's quantization): raises an error if the format cannot be used.
StoredCheck = Callable[[str, StoredQuantization], None]


def every_quantization(name: str, stored: StoredQuantization) -> None:
    """Accept every stored quantization."""


def no_progress_bar(name: str, size: int, unit: str) -> AbstractContextManager[Progress]:
    return nullcontext(no_progress)


def no_memory_check(name: str, size: int, rounded: RoundedBytes | None) -> None:
    """Check nothing."""


@dataclass(frozen=True)
class LoadOptions:
    """How a model's weights are loaded.

    Attributes:
        dtype: dtype of the parameters; the checkpoint's numbers are converted to it.
        load_format: "auto" and "safetensors" read the checkpoint; "dummy" makes random weights from
            the config; "twin" makes random weights whose drafts get accepted (`twin.py`).
        max_positions: number of rows of the rotary embedding tables.
        quantization: key of `PRECISIONS` to quantise matrices to while loading, or None.
        kept: weight classes that the device multiplies in the checkpoint's format; matrices of
            other formats are dequantised. "fp8" also keeps e4m3 matrices with one scale a row.
        stored_check: called before a quantised checkpoint is read.
        batch_invariant: whether a row's result must not depend on the other rows of the batch.
        twin_of: config of the target whose first layers (or all layers) a twin copies.
        num_composed: see `Decoder`.
        share: this rank's share under tensor parallelism.
        experts: this rank's share of experts, if ranks share only these; `share` is then `WHOLE`.
        adapters: (number of slots, largest LoRA rank); None: no adapters can be loaded.
        progress_bar: reports the bytes that have been read.
        memory_check: called before anything is allocated.
    """

    dtype: torch.dtype
    device: torch.device
    load_format: str
    max_positions: int
    seed: int = 0
    quantization: str | None = None
    kept: frozenset[type[Weight]] = KEPT_ON_CPU
    stored_check: StoredCheck = every_quantization
    batch_invariant: bool = False
    twin_of: DecoderConfig | None = None
    num_composed: int = 0
    share: Share = WHOLE
    experts: Share = WHOLE
    adapters: tuple[int, int] | None = None
    progress_bar: ProgressBar = no_progress_bar
    memory_check: MemoryCheck = no_memory_check

    @property
    def cut(self) -> Share:
        """The share to which sources cut the parts that ranks share."""
        return self.experts if self.experts.size > 1 else self.share


def load_decoder(
    checkpoint: Checkpoint,
    options: LoadOptions,
    config: DecoderConfig | None = None,
    ops: Ops | None = None,
    checked: bool = False,
) -> Decoder:
    """Build the decoder that `checkpoint` describes and load its weights.

    Args:
        config: the checkpoint's config, if the caller has already read it; None: read it here.
        ops: kernels to run the network with; None: the device's default kernels.
        checked: the headers have already been compared with the config.
    """
    if ops is None:
        ops = kernels_for(options.device, options.dtype, options.batch_invariant).network
    if config is None:
        config = read_decoder_config(checkpoint)
    options = _with_unit(checkpoint, config, options)
    stored = read_quantization(checkpoint.config, checkpoint.config_file)
    if stored is not None:
        options.stored_check(checkpoint.path.name, stored)
        options = in_stored_form(options, stored)
    size = decoder_bytes(checkpoint, config, options)
    rounded: RoundedBytes | None = None
    if options.quantization is None and stored is None:
        rounded = partial(weight_bytes, config, options.dtype)
    # Replicated parameters (norms, biases) are small enough to ignore.
    options.memory_check(checkpoint.path.name, _rank_bytes(config, options, size), rounded)
    if stored is not None:
        _log_stored(checkpoint, stored, options)
    if options.quantization is not None:
        _log_quantization(checkpoint, config, options.quantization, size)
    random = _random_weights(checkpoint, config, options)
    if random is not None:
        if stored is not None:
            random = RandomQuantizedSource(random, stored, _kept_formats(options))
        return _build(ops, config, random, options)
    if not checked:
        require_tensors(checkpoint, config)
    name = f"loading {checkpoint.path.name}"
    drafter_tensors = own_drafter_tensors(checkpoint.entries)  # only an MTP drafter reads them
    total = checkpoint.size_bytes - sum(checkpoint.entries[it].nbytes for it in drafter_tensors)
    with options.progress_bar(name, total, "bytes") as progress:
        source = _open(checkpoint, stored, options, progress)
        network = _build(ops, config, source, options)
    source.finish(ignored=(*drafter_tensors, *config.unread_tensors))
    return network


def in_stored_form(options: LoadOptions, stored: StoredQuantization) -> LoadOptions:
    """The options without a `quantization` that only names the checkpoint's own form."""
    named = options.quantization
    is_own = named is not None and names_stored_form(named, stored)
    return replace(options, quantization=None) if is_own else options


def _with_unit(checkpoint: Checkpoint, config: DecoderConfig, options: LoadOptions) -> LoadOptions:
    """The options with `Share.unit` set, under tensor parallelism."""
    if options.cut.size == 1:
        return options
    unit = shared_unit(checkpoint, config, options.load_format in RANDOM_FORMATS)
    if options.share.size == 1:
        return replace(options, experts=replace(options.experts, unit=unit))
    return replace(options, share=replace(options.share, unit=unit))


def _rank_bytes(config: DecoderConfig, options: LoadOptions, size: int) -> int:
    """Bytes of this rank's weights, if the whole network has `size` bytes. If ranks share only
    experts, all else is counted as unquantised, up to `size`."""
    if options.experts.size == 1:
        return size // options.share.size
    whole = without_experts(config)
    unshared = min(size, weight_bytes(whole, options.dtype, options.quantization))
    return unshared + (size - unshared) // options.experts.size


def _random_weights(
    checkpoint: Checkpoint, config: DecoderConfig, options: LoadOptions
) -> TensorSource | None:
    """The source of random weights; None if weights are read from the checkpoint."""
    if options.load_format == "dummy":
        return DummySource(options.dtype, options.device, options.seed, options.cut)
    if options.load_format != "twin":
        return None
    target = options.twin_of or config
    require_twin(config, target, checkpoint.config_file)
    return TwinSource(options.dtype, options.device, options.seed, target, options.cut)


def _build(ops: Ops, config: DecoderConfig, tensors: TensorSource, options: LoadOptions) -> Decoder:
    source: ParameterSource = in_precision(tensors, options.quantization, ops)
    slots: AdapterSlots | None = None
    if options.adapters is not None:
        slots = AdapterSlots(*options.adapters, options.dtype, options.device, options.share)
    sizes = options.max_positions, options.share, slots, options.num_composed
    pool: ExpertPool | None = None
    if options.experts.size > 1:
        pool, source = ExpertPool(options.experts, source), Unsplit(source)
    network = Decoder(ops, source, config, *sizes, pool)
    if slots is not None and not slots.modules:
        network.adapters = None
    return network


def decoder_bytes(checkpoint: Checkpoint, config: DecoderConfig, options: LoadOptions) -> int:
    """Memory in bytes of a language model's weights after loading, over all ranks."""
    stored = read_quantization(checkpoint.config, checkpoint.config_file)
    if stored is None:
        return weight_bytes(config, options.dtype, options.quantization)
    kept = _kept_formats(options)
    if options.load_format in RANDOM_FORMATS or not checkpoint.has_weights:
        form = partial(_kept_rounding, stored, kept)
        return weight_bytes(config, options.dtype, options.quantization, form)
    drafter_tensors = own_drafter_tensors(checkpoint.entries)
    own = {name: it for name, it in checkpoint.entries.items() if name not in drafter_tensors}
    size = tensor_bytes(own, stored, options)
    precision = PRECISIONS[options.quantization] if options.quantization else None
    if precision is not None and precision.head is not None and config.tie_word_embeddings:
        size += int(head_bytes(config, options.dtype, options.quantization))  # a quantised copy
    return size


def tensor_bytes(
    entries: Mapping[str, TensorEntry], stored: StoredQuantization, options: LoadOptions
) -> int:
    """Memory in bytes of these tensors of a quantised checkpoint after loading, over all ranks."""
    kept = _kept_formats(options)
    if options.quantization is not None:
        kept |= {Float8Matrix, Float8BlockMatrix}  # 8 bits, as after quantising to `quantization`
    return stored_bytes(entries, stored, options.dtype.itemsize, kept)


def _kept_formats(options: LoadOptions) -> frozenset[type[Weight]]:
    if options.quantization is None:
        return options.kept
    # GGUF's blocks are dequantised and quantised again to the requested precision.
    return (options.kept - {BlockMatrix}) | {PRECISIONS[options.quantization].matrix.weight}


def _kept_rounding(
    stored: StoredQuantization, kept: Collection[type[Weight]], tensor: str, columns: int
) -> Rounding | None:
    """The format that a random matrix is stored in; None: it is kept as floats."""
    form = stored_rounding(stored, tensor, columns)
    return form if stored.kind(tensor.removesuffix(".weight")) in kept else None


def _open(
    checkpoint: Checkpoint,
    stored: StoredQuantization | None,
    options: LoadOptions,
    progress: Progress,
) -> CheckpointSource:
    if stored is None:
        return CheckpointSource(
            checkpoint, options.dtype, options.device, progress, share=options.cut
        )
    return open_quantized(checkpoint, stored, options, progress)


def open_quantized(
    checkpoint: Checkpoint, stored: StoredQuantization, options: LoadOptions, progress: Progress
) -> QuantizedSource:
    """A source of the tensors of a quantised checkpoint; `checkpoint.entries` may be a subset."""
    return QuantizedSource(
        checkpoint,
        stored,
        options.dtype,
        options.device,
        progress,
        _kept_formats(options),
        # Dequantise to float32 if the matrices are quantised again, to round only once.
        options.dtype if options.quantization is None else torch.float32,
        options.cut,
    )


def _log_stored(checkpoint: Checkpoint, stored: StoredQuantization, options: LoadOptions) -> None:
    rest = "other matrices stay unquantised"
    if not stored.kinds <= options.kept:
        rest = f"matrices without a kernel are converted to {options.dtype}"
    if options.quantization is not None:
        rest = f"matrices without a kernel are quantised to {options.quantization}"
    logger.info("%s: stored as %s; %s", checkpoint.path.name, stored.description, rest)


def _log_quantization(
    checkpoint: Checkpoint, config: DecoderConfig, quantization: str, size: int
) -> None:
    precision = PRECISIONS[quantization]
    words = precision.words
    if precision.head is not None and config.tie_word_embeddings:
        words += "; the head, which is tied to the embedding, is a second copy of it"
    logger.info(
        "%s: matrices are rounded to %s as they are loaded (%s); weights take %.2f GB",
        checkpoint.path.name,
        quantization,
        words,
        size / 1e9,
    )


_OTHER_DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "float": "float32",
    "fp32": "float32",
}


def dtype_named(name: str) -> torch.dtype:
    """The torch dtype of this name, short forms like "bf16" included; UsageError for others."""
    dtype = DTYPES.get(_OTHER_DTYPES.get(name, name))
    if dtype is None:
        raise UsageError(f"dtype must be one of auto, {', '.join(DTYPES)}, not {name!r}")
    return dtype
