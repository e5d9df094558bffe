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

from slipstream.core.errors import UsageError
from slipstream.train.files import SOURCE, comes_from, read_slices, write_tensors
from slipstream.train.sequences import Sequences
from slipstream.train.target import Target, TargetStates

_SHARD_BYTES = 256 << 20


def count_that_fits(
    sequences: Sequences, target: Target, num_streams: int, max_gigabytes: float
) -> int:
    """The number of sequences whose features fit on disk; raises UsageError if none does."""
    size = _bytes_per_sequence(sequences, target, num_streams)
    count = int(max_gigabytes * 1e9 // size)
    if count < 1:
        raise UsageError(
            f"--max-feature-gb {max_gigabytes:g} has no room for one sequence ({size / 1e9:.3f} "
            "GB); raise it, or use --features online"
        )
    return min(count, len(sequences))


class DiskFeatures:
    """Writes the features of all sequences, but for shards that hold them already, and reads them.

    Args:
        batch_size: sequences of a pass of the target.
        progress: is called with the number of sequences of each shard.

    Raises CheckpointError if the disk is full.
    """

    def __init__(
        self,
        folder: Path,
        sequences: Sequences,
        target: Target,
        stream_layers: Sequence[int],
        batch_size: int,
        progress: Callable[[int], None],
    ) -> None:
        self.sequences = sequences
        self._target, self._stream_layers = target, tuple(stream_layers)
        self._names = ["hidden", *(f"stream.{layer}" for layer in stream_layers)]
        size = _bytes_per_sequence(sequences, target, len(stream_layers))
        self._per_shard = max(1, _SHARD_BYTES // size)
        self._shards: list[dict[str, Any]] = []
        for number, start in enumerate(range(0, len(sequences), self._per_shard)):
            file = folder / f"{number:05d}.safetensors"
            part = sequences.at(slice(start, start + self._per_shard))
            source = f"{part.digest} {target.path} {target.dtype} {list(stream_layers)}"
            if target.adapter is not None:
                source += f" {target.adapter.resolve()}"
            if not comes_from(file, source):
                write_tensors(file, self._capture(part, batch_size), {SOURCE: source})
            self._shards.append(read_slices(file, self._names))
            progress(len(part))

    def states(self, index: Tensor) -> TargetStates:
        hidden, *streams = (
            torch.stack([self._row(name, number) for number in index.tolist()])
            for name in self._names
        )
        device = self._target.device
        return TargetStates(hidden.to(device), tuple(stream.to(device) for stream in streams))

    def _row(self, name: str, number: int) -> Tensor:
        shard, row = divmod(number, self._per_shard)
        return cast(Tensor, self._shards[shard][name][row])

    def _capture(self, part: Sequences, batch_size: int) -> dict[str, Tensor]:
        states = [
            self._target.states(ids.to(self._target.device).long(), self._stream_layers)
            for ids in torch.split(part.token_ids, batch_size)
        ]
        columns = zip(*((one.hidden, *one.streams) for one in states), strict=True)
        return {
            name: torch.cat([tensor.cpu() for tensor in column])
            for name, column in zip(self._names, columns, strict=True)
        }


def _bytes_per_sequence(sequences: Sequences, target: Target, num_streams: int) -> int:
    numbers = sequences.length * target.config.hidden_size * (1 + num_streams)
    return numbers * target.dtype.itemsize
