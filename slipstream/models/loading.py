"""Building a network with its weights."""

import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import torch

from slipstream.core.errors import UsageError
from slipstream.kernels.formats.blocks import BlockMatrix
from slipstream.kernels.formats.float8 import Float8Matrix
from slipstream.kernels.formats.float8_blocks import Float8BlockMatrix
from slipstream.kernels.formats.int4 import Int4Matrix
from slipstream.kernels.formats.int8 import Int8Matrix
from slipstream.kernels.formats.mxfp4 import Mxfp4Matrix
from slipstream.kernels.formats.nvfp4 import Nvfp4Matrix
from slipstream.kernels.formats.weight import Rounding, Weight
from slipstream.kernels.registry import kernels_for
from slipstream.kernels.table import Ops
from slipstream.layers.adapters import AdapterSlots
from slipstream.layers.parameters import WHOLE, Share
from slipstream.models.catalogue import read_decoder_config
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.config_keys import DTYPES
from slipstream.models.decoder import Decoder
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.modules_beside import own_drafter_tensors
from slipstream.models.parameter_sources import (
    CheckpointSource,
    DummySource,
    Progress,
    TensorSource,
    no_progress,
)
from slipstream.models.precision import PRECISIONS, head_bytes, in_precision, weight_bytes
from slipstream.models.quantized.catalogue import read_quantization
from slipstream.models.quantized.module import StoredQuantization
from slipstream.models.quantized.source import (
    QuantizedSource,
    RandomQuantizedSource,
    stored_bytes,
    stored_rounding,
)
from slipstream.models.safetensors_file import TensorEntry
from slipstream.models.sharing import shared_unit
from slipstream.models.twin import TwinSource, require_twin

__all__ = [
    "LoadOptions",
    "MemoryCheck",
    "Progress",
    "ProgressBar",
    "dtype_named",
    "load_decoder",
    "no_memory_check",
    "no_progress_bar",
]

logger = logging.getLogger("slipstream")

RANDOM_FORMATS = ("dummy", "twin")  # of `load_format`
# Classes of the matrices that C++ and plain torch multiply as they are stored.
KEPT_FORMATS: Final[frozenset[type[Weight]]] = frozenset(
    {Int8Matrix, Int4Matrix, Mxfp4Matrix, Nvfp4Matrix, BlockMatrix}
)

# (name, size, unit) -> a context whose function is called with each amount that is done.
ProgressBar = Callable[[str, int, str], AbstractContextManager[Progress]]
# (name, bytes, bytes by name of `quantization`): called before weights are allocated; raises
# UsageError when there is no room. The last is empty where the weights are quantised already.
MemoryCheck = Callable[[str, int, Mapping[str, int]], None]
# (name, how its matrices are stored): raises an error where they cannot be used.
StoredCheck = Callable[[str, StoredQuantization], None]


def every_quantization(name: str, stored: StoredQuantization) -> None:
    """Accept every stored quantization."""


def no_progress_bar(name: str, size: int, unit: str) -> AbstractContextManager[Progress]:
    """Report no progress."""
    del name, size, unit
    return nullcontext(no_progress)


def no_memory_check(name: str, size: int, rounded: Mapping[str, int]) -> None:
    """Check nothing."""


@dataclass(frozen=True)
class LoadOptions:
    """How a model's weights are loaded.

    Attributes:
        dtype: of the parameters; stored numbers are converted to it.
        device: where the parameters are allocated.
        load_format: "auto" and "safetensors" read the checkpoint; "dummy" makes random weights from
            its config, and "twin" such that a draft of fewer layers is accepted (`twin.py`).
        max_positions: rows of the tables of rotary embeddings.
        seed: for random weights.
        quantization: what matrices are rounded to, a key of `PRECISIONS`; None: nothing is rounded.
        kept: classes of the matrices that stay what a checkpoint stores, for the device; others
            become floats. Matrices of e4m3 with a scale a row also stay where such are asked for.
        stored_check: called before a quantised checkpoint is read.
        batch_invariant: whether a row of a result must not depend on the rows beside it.
        twin_of: the target whose first layers, or all of them, a twin has.
        num_composed: see `Decoder`.
        share: this process's part of a network that several processes hold together.
        adapters: (slots, largest rank) for adapters of the layers; None: there are none.
        progress_bar: reports the bytes that have been read.
        memory_check: called before anything is allocated.
    """

    dtype: torch.dtype
    device: torch.device
    load_format: str
    max_positions: int
    seed: int = 0
    quantization: str | None = None
    kept: frozenset[type[Weight]] = KEPT_FORMATS
    stored_check: StoredCheck = every_quantization
    batch_invariant: bool = False
    twin_of: DecoderConfig | None = None
    num_composed: int = 0
    share: Share = WHOLE
    adapters: tuple[int, int] | None = None
    progress_bar: ProgressBar = no_progress_bar
    memory_check: MemoryCheck = no_memory_check


def load_decoder(
    checkpoint: Checkpoint,
    options: LoadOptions,
    config: DecoderConfig | None = None,
    ops: Ops | None = None,
) -> Decoder:
    """Build the network that `checkpoint` describes, with its weights.

    Args:
        config: the checkpoint's, where a caller has read it already; None: it is read here.
        ops: None: those that serve the device.
    """
    if ops is None:
        ops = kernels_for(options.device, options.dtype, options.batch_invariant).network
    if config is None:
        config = read_decoder_config(checkpoint)
    options = _in_units(checkpoint, config, options)
    stored = read_quantization(checkpoint.config, checkpoint.config_file)
    if stored is not None:
        options.stored_check(checkpoint.path.name, stored)
    size, rounded = decoder_bytes(checkpoint, config, options), {}
    if options.quantization is None and stored is None:
        rounded = {name: weight_bytes(config, options.dtype, name) for name in PRECISIONS}
    # What ranks do not share is little beside what they do.
    options.memory_check(checkpoint.path.name, size // options.share.size, rounded)
    if stored is not None:
        _tell_stored(checkpoint, stored, options)
    if options.quantization is not None:
        _tell_quantization(checkpoint, config, options.quantization, size)
    random = _random_weights(checkpoint, config, options)
    if random is not None:
        if stored is not None:
            random = RandomQuantizedSource(random, stored, _kept(options))
        return _build(ops, config, random, options)
    name = f"loading {checkpoint.path.name}"
    beside = own_drafter_tensors(checkpoint.entries)  # which only a drafter reads
    total = checkpoint.size_bytes - sum(checkpoint.entries[tensor].nbytes for tensor in beside)
    if stored is not None:
        modules = {tensor.rpartition(".")[0] for tensor in checkpoint.entries}
        stored.require_modules(modules, checkpoint.path)
    with options.progress_bar(name, total, "bytes") as progress:
        source = _open(checkpoint, stored, options, progress)
        network = _build(ops, config, source, options)
    source.finish(ignored=(*beside, *config.unread_tensors))
    return network


def _in_units(checkpoint: Checkpoint, config: DecoderConfig, options: LoadOptions) -> LoadOptions:
    """With the unit of its feed-forward parts, where ranks share them."""
    if options.share.size == 1:
        return options
    unit = shared_unit(checkpoint, config, options.load_format in RANDOM_FORMATS)
    return replace(options, share=replace(options.share, unit=unit))


def _random_weights(
    checkpoint: Checkpoint, config: DecoderConfig, options: LoadOptions
) -> TensorSource | None:
    """Where random weights come from; None for those of the checkpoint."""
    if options.load_format == "dummy":
        return DummySource(options.dtype, options.device, options.seed, options.share)
    if options.load_format != "twin":
        return None
    target = options.twin_of or config
    require_twin(config, target, checkpoint.config_file)
    return TwinSource(options.dtype, options.device, options.seed, target, options.share)


def _build(ops: Ops, config: DecoderConfig, tensors: TensorSource, options: LoadOptions) -> Decoder:
    source = in_precision(tensors, options.quantization, ops)
    slots: AdapterSlots | None = None
    if options.adapters is not None:
        slots = AdapterSlots(*options.adapters, options.dtype, options.device, options.share)
    sizes = options.max_positions, options.share, slots, options.num_composed
    network = Decoder(ops, source, config, *sizes)
    if slots is not None and not slots.modules:
        network.adapters = None
    return network


def decoder_bytes(checkpoint: Checkpoint, config: DecoderConfig, options: LoadOptions) -> int:
    """Bytes of a language model's weights once they are loaded."""
    stored = read_quantization(checkpoint.config, checkpoint.config_file)
    if stored is None:
        return weight_bytes(config, options.dtype, options.quantization)
    kept = _kept(options)
    if options.load_format in RANDOM_FORMATS or not checkpoint.has_weights:
        form = partial(_kept_rounding, stored, kept)
        return weight_bytes(config, options.dtype, options.quantization, form)
    beside = own_drafter_tensors(checkpoint.entries)
    own = {name: it for name, it in checkpoint.entries.items() if name not in beside}
    size = tensor_bytes(own, stored, options)
    precision = PRECISIONS[options.quantization] if options.quantization else None
    if precision is not None and precision.head is not None and config.tie_word_embeddings:
        size += int(head_bytes(config, options.dtype, options.quantization))  # a rounded copy
    return size


def tensor_bytes(
    entries: Mapping[str, TensorEntry], stored: StoredQuantization, options: LoadOptions
) -> int:
    """Bytes of these tensors of a quantised checkpoint once they are loaded."""
    kept = _kept(options)
    if options.quantization is not None:
        kept |= {Float8Matrix, Float8BlockMatrix}  # of as many bits as what they are rounded to
    return stored_bytes(entries, stored, options.dtype.itemsize, kept)


def _kept(options: LoadOptions) -> frozenset[type[Weight]]:
    if options.quantization is None:
        return options.kept
    # Blocks are rounded further where that is asked for.
    return (options.kept - {BlockMatrix}) | (
        {Float8Matrix} if options.quantization == "fp8" else set()
    )


def _kept_rounding(
    stored: StoredQuantization, kept: Collection[type[Weight]], tensor: str, columns: int
) -> Rounding | None:
    """What a random matrix is rounded to and stays; None: it becomes floats, or is not rounded."""
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
            checkpoint, options.dtype, options.device, progress, share=options.share
        )
    return open_quantized(checkpoint, stored, options, progress)


def open_quantized(
    checkpoint: Checkpoint, stored: StoredQuantization, options: LoadOptions, progress: Progress
) -> QuantizedSource:
    """The tensors of a quantised checkpoint, whose entries may be some of its directory's."""
    return QuantizedSource(
        checkpoint,
        stored,
        options.dtype,
        options.device,
        progress,
        _kept(options),
        # What is rounded once more should not be rounded in between.
        options.dtype if options.quantization is None else torch.float32,
        options.share,
    )


def _tell_stored(checkpoint: Checkpoint, stored: StoredQuantization, options: LoadOptions) -> None:
    rest = "what is not quantised stays so"
    if not stored.kinds <= options.kept:
        rest = f"what no kernel multiplies as stored becomes {options.dtype}"
    if options.quantization is not None:
        rest = f"what is not multiplied as stored is rounded to {options.quantization}"
    logger.info("%s: stored as %s; %s", checkpoint.path.name, stored.description, rest)


def _tell_quantization(
    checkpoint: Checkpoint, config: DecoderConfig, quantization: str, size: int
) -> None:
    head = "the head too"
    if PRECISIONS[quantization].head is None:
        head = "the head stays"
    elif config.tie_word_embeddings:
        head = "the head, which is tied to the embedding, as a second copy of it"
    logger.info(
        "%s: matrices are rounded to %s as they are loaded, %s; weights take %.2f GB",
        checkpoint.path.name,
        PRECISIONS[quantization].words,
        head,
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
    """The torch dtype that a user calls `name`; UsageError for an unknown name."""
    dtype = DTYPES.get(_OTHER_DTYPES.get(name, name))
    if dtype is None:
        raise UsageError(f"dtype must be one of auto, {', '.join(DTYPES)}, not {name!r}")
    return dtype
