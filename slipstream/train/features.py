"""The target's features on disk: computed once, read in every epoch.

    features/00000.safetensors   hidden [n, S, H], stream.{layer} [n, S, H] of the first n sequences
    features/00001.safetensors   of the next, and so on

A shard is there whole or not at all, so a run that was interrupted goes on with the next one.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from slipstream.core.errors import CheckpointError, UsageError
from slipstream.models.safetensors_file import TensorEntry, read_entries
from slipstream.train.sequences import Sequences
from slipstream.train.target import Seen, Target
from slipstream.train.tensor_file import read_tensors, write_tensors

_SHARD_BYTES = 256 << 20
_HIDDEN, _SOURCE = "hidden", "source"


class DiskFeatures:
    """Reads what `capture` wrote.

    Args:
        sequences: the first of them are those on disk.
    """

    def __init__(
        self, folder: Path, sequences: Sequences, target: Target, stream_layers: Sequence[int]
    ) -> None:
        self.sequences = sequences
        self._device = target.device
        self._names = [_HIDDEN, *(_stream_name(layer) for layer in stream_layers)]
        self._shards: list[dict[str, np.ndarray]] = []
        self._dtype: torch.dtype | None = None
        self._per_shard = 0
        for file in sorted(folder.glob("*.safetensors")):
            self._shards.append(self._open(file, target))
        found = sum(len(shard[_HIDDEN]) for shard in self._shards)
        if found < len(sequences):
            raise CheckpointError(
                f"{folder} holds features of {found} sequences and {len(sequences)} are to be "
                "trained on; remove the folder to capture them again"
            )

    def seen(self, index: Tensor) -> Seen:
        tensors = [self._rows(name, index.tolist()) for name in self._names]
        return Seen(tensors[0], tuple(tensors[1:]))

    def _rows(self, name: str, index: Sequence[int]) -> Tensor:
        rows = [self._shards[i // self._per_shard][name][i % self._per_shard] for i in index]
        assert self._dtype is not None
        return torch.from_numpy(np.stack(rows)).view(self._dtype).to(self._device)

    def _open(self, file: Path, target: Target) -> dict[str, np.ndarray]:
        entries = read_entries(file)
        arrays = {}
        for name in self._names:
            entry = entries.get(name)
            if entry is None or entry.shape[1:] != (
                self.sequences.length,
                target.config.hidden_size,
            ):
                raise CheckpointError(
                    f"{file} has no {name} of {self.sequences.length} tokens of "
                    f"{target.config.hidden_size} numbers, so it was captured for another run; "
                    "remove its folder to capture them again"
                )
            arrays[name] = _mapped(entry)
            self._dtype = entry.dtype
        self._per_shard = self._per_shard or len(arrays[_HIDDEN])
        return arrays


def _mapped(entry: TensorEntry) -> np.ndarray:
    """The bits of a tensor, read when they are wanted."""
    bits = {2: np.int16, 4: np.int32}[entry.dtype.itemsize]
    return np.memmap(entry.file, bits, "r", entry.offset, entry.shape)


def how_many(sequences: Sequences, target: Target, num_streams: int, max_gigabytes: float) -> int:
    """Sequences whose features fit.

    Raises UsageError where not even one does.
    """
    size = sequences.length * target.config.hidden_size * (1 + num_streams) * target.dtype.itemsize
    count = int(max_gigabytes * 1e9 // size)
    if count < 1:
        raise UsageError(
            f"--max-feature-gb {max_gigabytes:g} has no room for one sequence ({size / 1e9:.3f} "
            "GB); raise it, or use --features online"
        )
    return min(count, len(sequences))


def capture(
    folder: Path,
    sequences: Sequences,
    target: Target,
    stream_layers: Sequence[int],
    batch_size: int,
    progress: Callable[[int], None],
) -> None:
    """Write the features of all sequences; shards of the same that are whole are left.

    Args:
        progress: is called with the number of sequences just done.
    """
    folder.mkdir(parents=True, exist_ok=True)
    hidden = sequences.length * target.config.hidden_size * target.dtype.itemsize
    per_shard = max(1, _SHARD_BYTES // (hidden * (1 + len(stream_layers))))
    for number, start in enumerate(range(0, len(sequences), per_shard)):
        file = folder / f"{number:05d}.safetensors"
        part = sequences.at(slice(start, start + per_shard))
        source = _source(part, target, stream_layers)
        if not _holds(file, source):
            _write(file, part, target, stream_layers, batch_size, source)
        progress(len(part))


def _write(
    file: Path,
    part: Sequences,
    target: Target,
    stream_layers: Sequence[int],
    batch_size: int,
    source: Tensor,
) -> None:
    seen = [
        target.read(ids.to(target.device).long(), stream_layers)
        for ids in torch.split(part.token_ids, batch_size)
    ]
    tensors = {_HIDDEN: torch.cat([one.hidden.cpu() for one in seen])}
    for index, layer in enumerate(stream_layers):
        tensors[_stream_name(layer)] = torch.cat([one.streams[index].cpu() for one in seen])
    write_tensors(file, tensors | {_SOURCE: source})


def _source(part: Sequences, target: Target, stream_layers: Sequence[int]) -> Tensor:
    """[n] uint8, tells features of these sequences from those of others, as when the seed of the
    split, the layers or the target are not those of the run that was interrupted."""
    told = f"{part.digest} {target.path} {target.dtype} {list(stream_layers)}"
    return torch.tensor(list(told.encode()), dtype=torch.uint8)


def _holds(file: Path, source: Tensor) -> bool:
    """Whether a shard is there, whole and of this source."""
    try:
        return torch.equal(read_tensors(file, (_SOURCE,))[_SOURCE], source)
    except (CheckpointError, OSError):
        return False


def _stream_name(layer: int) -> str:
    return f"stream.{layer}"
