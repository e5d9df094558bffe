"""The target's features on disk: computed once, read in every epoch.

    features/00000.safetensors   hidden [n, S, H], stream.{layer} [n, S, H] of the first n sequences
    features/00001.safetensors   of the next, and so on

A shard is there whole or not at all, so a run that was interrupted goes on with the next one.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from slipstream.core.errors import CheckpointError, UsageError
from slipstream.train.files import read_metadata, read_slices, write_tensors
from slipstream.train.sequences import Sequences
from slipstream.train.target import Seen, Target

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
        files = sorted(folder.glob("*.safetensors"))
        self._shards = [read_slices(file, self._names) for file in files]
        self._per_shard = _count(self._shards[0]) if self._shards else 0
        found = sum(map(_count, self._shards))
        if found < len(sequences):
            raise CheckpointError(
                f"{folder} holds features of {found} sequences and {len(sequences)} are to be "
                "trained on; remove the folder to capture them again"
            )

    def seen(self, index: Tensor) -> Seen:
        tensors = [
            torch.stack([self._row(name, number) for number in index.tolist()]).to(self._device)
            for name in self._names
        ]
        return Seen(tensors[0], tuple(tensors[1:]))

    def _row(self, name: str, number: int) -> Tensor:
        shard, row = divmod(number, self._per_shard)
        return cast(Tensor, self._shards[shard][name][row])


def _count(shard: dict[str, Any]) -> int:
    return int(shard[_HIDDEN].get_shape()[0])


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
    seen = [
        target.read(ids.to(target.device).long(), stream_layers)
        for ids in torch.split(part.token_ids, batch_size)
    ]
    tensors = {_HIDDEN: torch.cat([one.hidden.cpu() for one in seen])}
    for index, layer in enumerate(stream_layers):
        tensors[_stream_name(layer)] = torch.cat([one.streams[index].cpu() for one in seen])
    write_tensors(file, tensors, {_SOURCE: source})


def _source(part: Sequences, target: Target, stream_layers: Sequence[int]) -> str:
    """Tell features of these sequences from those of others, as when the seed of the
    split, the layers or the target are not those of the run that was interrupted."""
    return f"{part.digest} {target.path} {target.dtype} {list(stream_layers)}"


def _holds(file: Path, source: str) -> bool:
    """Whether a shard is there, whole and of this source."""
    try:
        return read_metadata(file).get(_SOURCE) == source
    except CheckpointError:
        return False


def _stream_name(layer: int) -> str:
    return f"stream.{layer}"
