"""The target's features on disk, computed once and read in every epoch.

    features/00000.safetensors   hidden [n, S, H], stream.{layer} [n, S, H] of the first n sequences
    features/00001.safetensors   those of the next n sequences, and so on

Shards are written as a whole, so an interrupted run continues with the first missing one.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from slipstream.core.errors import CheckpointError, UsageError
from slipstream.train.files import read_metadata, read_slices, write_tensors
from slipstream.train.sequences import Sequences
from slipstream.train.target import Target, TargetStates

_SHARD_BYTES = 256 << 20
_HIDDEN, _SOURCE = "hidden", "source"


class DiskFeatures:
    """Reads what `capture` wrote.

    Args:
        sequences: those whose features were captured, from the first on.
    """

    def __init__(
        self, folder: Path, sequences: Sequences, target: Target, stream_layers: Sequence[int]
    ) -> None:
        self.sequences = sequences
        self._device = target.device
        self._names = [_HIDDEN, *(_stream_name(layer) for layer in stream_layers)]
        files = sorted(folder.glob("*.safetensors"))
        self._shards = [read_slices(file, self._names) for file in files]
        self._per_shard = _count(self._shards[0]) if self._shards else 0
        found = sum(map(_count, self._shards))
        if found < len(sequences):
            raise CheckpointError(
                f"{folder} holds features of {found} sequences and {len(sequences)} are to be "
                "trained on; remove the folder to capture them again"
            )

    def states(self, index: Tensor) -> TargetStates:
        tensors = [
            torch.stack([self._row(name, number) for number in index.tolist()]).to(self._device)
            for name in self._names
        ]
        return TargetStates(tensors[0], tuple(tensors[1:]))

    def _row(self, name: str, number: int) -> Tensor:
        shard, row = divmod(number, self._per_shard)
        return cast(Tensor, self._shards[shard][name][row])


def _count(shard: dict[str, Any]) -> int:
    return int(shard[_HIDDEN].get_shape()[0])


def count_that_fits(
    sequences: Sequences, target: Target, num_streams: int, max_gigabytes: float
) -> int:
    """The number of sequences whose features fit on disk; raises UsageError if none does."""
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
    """Write the features of all sequences, but for shards that hold them already.

    Args:
        progress: is called with the number of sequences of each shard.
    """
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
    source: str,
) -> None:
    states = [
        target.states(ids.to(target.device).long(), stream_layers)
        for ids in torch.split(part.token_ids, batch_size)
    ]
    tensors = {_HIDDEN: torch.cat([one.hidden.cpu() for one in states])}
    for index, layer in enumerate(stream_layers):
        tensors[_stream_name(layer)] = torch.cat([one.streams[index].cpu() for one in states])
    write_tensors(file, tensors, {_SOURCE: source})


def _source(part: Sequences, target: Target, stream_layers: Sequence[int]) -> str:
    """Identifies the features of these sequences, layers and target."""
    return f"{part.digest} {target.path} {target.dtype} {list(stream_layers)}"


def _holds(file: Path, source: str) -> bool:
    """Whether a shard is whole and has this source."""
    try:
        return read_metadata(file).get(_SOURCE) == source
    except CheckpointError:
        return False


def _stream_name(layer: int) -> str:
    return f"stream.{layer}"
