"""Tensors of drafters whose files have names of their own, or that were published as pickles."""

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from slipstream.core.errors import CheckpointError, UsageError
from slipstream.kernels.table import Ops, ops_for
from slipstream.layers.parameters import ParameterSource, Part
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.loading import LoadOptions
from slipstream.models.parameter_sources import DummySource, Progress
from slipstream.models.precision import in_precision
from slipstream.models.safetensors_file import TensorEntry, read_entries, read_into

T = TypeVar("T")
Held = TensorEntry | Tensor  # in a safetensors file; in memory, from a pickle

_PICKLED = "pytorch_model*.bin"


class TensorFiles(Mapping[str, Held]):
    """The tensors of a drafter's directory by name; those of safetensors files are not read yet."""

    def __init__(self, directory: Path, tensors: Mapping[str, Held]) -> None:
        self.directory = directory
        self._tensors = dict(tensors)

    @classmethod
    def find(cls, checkpoint: Checkpoint, own_names: Sequence[str] = ()) -> "TensorFiles":
        """The first of the files with these names, or else what language models call theirs."""
        path = checkpoint.path
        for file in (path / name for name in own_names):
            if file.is_file():
                is_pickle = file.suffix != ".safetensors"
                return cls(path, _read_pickle(file) if is_pickle else read_entries(file))
        pickles = sorted(path.glob(_PICKLED))
        if checkpoint.has_weights or not pickles:
            return cls(path, checkpoint.entries)
        tensors: dict[str, Held] = {}
        for file in pickles:
            tensors |= _read_pickle(file)
        return cls(path, tensors)

    def __getitem__(self, name: str) -> Held:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the tensor of this name."""
        return tuple(self[name].shape)

    def renamed(self, rename: Callable[[str], str]) -> "TensorFiles":
        """The same tensors under other names."""
        tensors: dict[str, Held] = {}
        for name, tensor in self._tensors.items():
            short = rename(name)
            if short in tensors:
                raise CheckpointError(
                    f"{self.directory} holds {short} twice, the second time as {name}; remove one"
                )
            tensors[short] = tensor
        return TensorFiles(self.directory, tensors)

    def integers(self, name: str) -> Tensor:
        """A one-dimensional table of integers [n], as int64."""
        held = self[name]
        if held.dtype.is_floating_point or len(held.shape) != 1:
            raise CheckpointError(
                f"tensor {name} in {self.directory} must be a list of integers, not "
                f"{list(held.shape)} of {held.dtype}"
            )
        if isinstance(held, Tensor):
            return held.long()
        table = torch.empty(held.shape, dtype=held.dtype)
        read_into(held, table, raw=True)
        return table.long()

    def read(self, name: str, destination: Tensor) -> None:
        """Fill `destination`, of any floating-point dtype and on any device, with a tensor."""
        held = self[name]
        if tuple(held.shape) != tuple(destination.shape):
            raise CheckpointError(
                f"tensor {name} in {self.directory} has shape {list(held.shape)}, but its config "
                f"and its other tensors ask for {list(destination.shape)}"
            )
        if isinstance(held, TensorEntry):
            read_into(held, destination)
        elif held.dtype.is_floating_point:
            destination.copy_(held)
        else:
            raise CheckpointError(
                f"tensor {name} in {self.directory} is stored as {held.dtype}; weights must be "
                "bfloat16, float16 or float32"
            )

    def num_values(self) -> int:
        """Numbers in all tensors together."""
        return sum(torch.Size(held.shape).numel() for held in self.values())


class FileSource:
    """A `TensorSource` over such files, which knows in the end what nobody asked for."""

    def __init__(
        self, files: TensorFiles, dtype: torch.dtype, device: torch.device, progress: Progress
    ) -> None:
        self._files, self._dtype, self._device = files, dtype, device
        self._progress = progress
        self._unused = set(files)

    def matrix(self, parts: Sequence[Part], columns: int) -> Tensor:
        return self._fill(parts, (columns,))

    def vector(self, parts: Sequence[Part]) -> Tensor:
        return self._fill(parts, ())

    def finish(self, ignored: Sequence[str]) -> None:
        """Refuse files that hold more than the network: its maths would differ."""
        surplus = sorted(self._unused.difference(ignored))
        if surplus:
            more = f" and {len(surplus) - 3} more" if len(surplus) > 3 else ""
            raise CheckpointError(
                f"{self._files.directory} holds tensors that this kind of drafter does not use "
                f"({', '.join(surplus[:3])}{more}); it is of another kind, or its config.json is "
                "of another checkpoint"
            )

    def _fill(self, parts: Sequence[Part], tail: tuple[int, ...]) -> Tensor:
        shape = (sum(part.rows for part in parts), *tail)
        parameter = torch.empty(shape, dtype=self._dtype, device=self._device)
        start = 0
        for part in parts:
            if part.name not in self._files:
                raise CheckpointError(
                    f"{self._files.directory} has no tensor {part.name}, which this drafter needs "
                    f"with shape {[part.rows, *tail]}"
                )
            destination = parameter[start : start + part.rows]
            self._files.read(part.name, destination)
            self._unused.discard(part.name)
            self._progress(destination.nbytes)
            start += part.rows
        return parameter


def build_from_files(
    files: TensorFiles | None,
    name: str,
    options: LoadOptions,
    build: Callable[[Ops, ParameterSource], T],
    ignored: Sequence[str] = (),
) -> T:
    """The network that `build` makes of the files' tensors.

    Args:
        files: None where random weights are asked for.
        name: of the checkpoint, for the user.
        ignored: tensors that may be there and are read elsewhere, or are copies of others.
    """
    ops = ops_for(options.device, options.batch_invariant)
    if files is None:
        dummy = DummySource(options.dtype, options.device, options.seed)
        return build(ops, in_precision(dummy, options.quantization))
    size = files.num_values() * options.dtype.itemsize
    options.memory_check(name, size, None)
    with options.progress_bar(f"loading {name}", size, "bytes") as progress:
        source = FileSource(files, options.dtype, options.device, progress)
        network = build(ops, in_precision(source, options.quantization))
    source.finish(ignored)
    return network


def require_known_format(options: LoadOptions) -> None:
    """Raise UsageError for made-up weights that only language models can have."""
    if options.load_format == "twin":
        raise UsageError(
            "load_format twin makes weights for draft models only; use dummy for this drafter"
        )


def _read_pickle(file: Path) -> dict[str, Held]:
    """The tensors of a torch.save file; no code in it is run."""
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except OSError as error:
        raise CheckpointError(f"cannot open {file}: {error.strerror}") from error
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"{file} cannot be read as a file of tensors alone ({reason}); download it again, or "
            "convert it to safetensors"
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} holds a {type(content).__name__}, not tensors by name")
    for name, value in content.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"{name} in {file} is a {type(value).__name__} and no tensor; convert the file to "
                "safetensors"
            )
    return {str(name): value.detach() for name, value in content.items()}
