"""Filling a network's parameters: from a checkpoint, or at random for benchmarks."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.core.errors import CheckpointError, UsageError
from slipstream.kernels.table import ops_for
from slipstream.layers.parameters import Part
from slipstream.models.catalogue import read_decoder_config
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.decoder import Decoder
from slipstream.models.safetensors_file import TensorEntry, read_into

Progress = Callable[[int], None]  # called with the bytes just read
# Called with a name and a size in bytes, gives a context for the loading of that many.
ProgressBar = Callable[[str, int], AbstractContextManager[Progress]]

# Buffers that some exporters write and that follow from the config.
_DERIVED = ("rotary_emb.inv_freq", "masked_bias", "attn.bias")


def no_progress(_: int) -> None:
    """Tell nobody."""


def no_progress_bar(name: str, size: int) -> AbstractContextManager[Progress]:
    """Show nothing."""
    del name, size
    return nullcontext(no_progress)


class CheckpointSource:
    """Reads each parameter straight from the files into its place, converted to `dtype`.

    Raises CheckpointError for a missing tensor (naming it), a wrong shape (naming both shapes) and,
    in `finish`, for tensors that no layer asked for.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress = no_progress,
    ) -> None:
        self._checkpoint, self._dtype, self._device = checkpoint, dtype, device
        self._progress = progress
        self._unused = set(checkpoint.entries)

    def matrix(self, parts: Sequence[Part], columns: int) -> Tensor:
        return self._fill(parts, (columns,))

    def vector(self, parts: Sequence[Part]) -> Tensor:
        return self._fill(parts, ())

    def finish(self, ignored: Sequence[str] = ()) -> None:
        """Refuse a checkpoint that holds more than the network: its maths would differ.

        Args:
            ignored: tensor names that may be there for no use (a tied head).
        """
        surplus = sorted(
            name for name in self._unused if name not in ignored and not name.endswith(_DERIVED)
        )
        if surplus:
            more = f" and {len(surplus) - 3} more" if len(surplus) > 3 else ""
            raise CheckpointError(
                f"{self._checkpoint.path} holds tensors that this architecture does not use "
                f"({', '.join(surplus[:3])}{more}); its config.json names another model"
            )

    def _fill(self, parts: Sequence[Part], tail: tuple[int, ...]) -> Tensor:
        entries = [self._entry(part.name, (part.rows, *tail)) for part in parts]
        rows = sum(part.rows for part in parts)
        parameter = torch.empty((rows, *tail), dtype=self._dtype, device=self._device)
        start = 0
        for part, entry in zip(parts, entries, strict=True):
            read_into(entry, parameter[start : start + part.rows])
            self._progress(entry.nbytes)
            start += part.rows
        return parameter

    def _entry(self, name: str, shape: tuple[int, ...]) -> TensorEntry:
        entry = self._checkpoint.entries.get(name)
        if entry is None:
            raise CheckpointError(
                f"{self._checkpoint.path} has no tensor {name}, which its config.json asks for "
                f"with shape {list(shape)}"
            )
        if tuple(entry.shape) != shape:
            raise CheckpointError(
                f"tensor {name} in {self._checkpoint.path} has shape {list(entry.shape)}, but its "
                f"config.json asks for {list(shape)}"
            )
        self._unused.discard(name)
        return entry


class DummySource:
    """Random weights of a sane scale from a fixed seed, so that a config alone can be timed."""

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
        self._dtype, self._device = dtype, device
        self._generator = torch.Generator(device).manual_seed(seed)

    def matrix(self, parts: Sequence[Part], columns: int) -> Tensor:
        rows = sum(part.rows for part in parts)
        parameter = torch.empty((rows, columns), dtype=self._dtype, device=self._device)
        return parameter.normal_(std=0.02, generator=self._generator)

    def vector(self, parts: Sequence[Part]) -> Tensor:
        rows = sum(part.rows for part in parts)
        value = 1.0 if parts[0].name.endswith("norm.weight") else 0.0
        return torch.full((rows,), value, dtype=self._dtype, device=self._device)


@dataclass(frozen=True)
class LoadOptions:
    """How a model's weights come into memory.

    Attributes:
        dtype: of the parameters; the files' numbers are converted.
        device: where they live.
        load_format: "auto" reads the checkpoint, "dummy" makes random weights from its config.
        max_positions: length of the table of rotary embeddings.
        seed: of random weights.
        progress_bar: shows how the reading goes on.
    """

    dtype: torch.dtype
    device: torch.device
    load_format: str
    max_positions: int
    seed: int = 0
    progress_bar: ProgressBar = no_progress_bar


def load_decoder(checkpoint: Checkpoint, options: LoadOptions) -> Decoder:
    """Build the network that `checkpoint` describes, with its weights."""
    config = read_decoder_config(checkpoint)
    ops = ops_for(options.device)
    if options.load_format == "dummy":
        dummy = DummySource(options.dtype, options.device, options.seed)
        return Decoder(ops, dummy, config, options.max_positions)
    with options.progress_bar(checkpoint.path.name, checkpoint.size_bytes) as progress:
        source = CheckpointSource(checkpoint, options.dtype, options.device, progress)
        network = Decoder(ops, source, config, options.max_positions)
    source.finish(ignored=("lm_head.weight",) if config.tie_word_embeddings else ())
    return network


_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}


def dtype_named(name: str) -> torch.dtype:
    """The torch dtype of a user's word for it."""
    dtype = _DTYPES.get(_SHORT_DTYPES.get(name, name))
    if dtype is None:
        raise UsageError(f"dtype must be one of auto, {', '.join(_DTYPES)}, not {name!r}")
    return dtype
