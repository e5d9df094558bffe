"""The matrices of a quantised checkpoint, with the numbers that it stores."""

import logging
from collections.abc import Sequence
from math import prod

import torch

from slipstream.core.errors import CheckpointError
from slipstream.kernels.formats.dense import DenseMatrix
from slipstream.kernels.formats.float8 import Float8Matrix
from slipstream.kernels.formats.weight import Weight, stacked
from slipstream.layers.parameters import ROWS, WHOLE, Part, Share
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.parameter_sources import CheckpointSource, Progress
from slipstream.models.quantized.module import StoredModule, StoredQuantization
from slipstream.models.safetensors_file import WEIGHT_DTYPES, TensorEntry, read_into

logger = logging.getLogger("slipstream")

_WEIGHT, _BIAS = ".weight", ".bias"
_VALUES = ("qweight", "weight_packed", "weight")


class QuantizedSource(CheckpointSource):
    """Reads matrices as they are stored, and what is not quantised like `CheckpointSource`.

    Args:
        keeps_float8: matrices of e4m3 stay what they are; false: they become floats.
        whole_dtype: of matrices that become floats.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        stored: StoredQuantization,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress,
        keeps_float8: bool,
        whole_dtype: torch.dtype,
        share: Share = WHOLE,
    ) -> None:
        super().__init__(checkpoint, dtype, device, progress, share=share)
        self._stored, self._whole_dtype = stored, whole_dtype
        self._becomes_floats = {DenseMatrix} if keeps_float8 else {DenseMatrix, Float8Matrix}
        self._modules: set[str] = set()  # whose matrices are quantised
        self._by_module: dict[str, dict[str, TensorEntry]] = {}
        for name, entry in checkpoint.entries.items():
            module, _, ending = name.rpartition(".")
            self._by_module.setdefault(module, {})[ending] = entry

    def weight(self, parts: Sequence[Part], columns: int) -> Weight:
        """[sum of rows, columns], a factor of products, as few bits as are stored.

        Parts that are stored in ways that do not go together become one matrix of floats.
        """
        if not any(self._is_quantised(part.name) for part in parts):
            return DenseMatrix(self.matrix(parts, columns))
        weights = [self._read_weight(part, columns) for part in parts]
        joined = stacked(weights)
        if joined is None:
            logger.info(
                "%s and the matrices beside it are stored in several ways and become %s",
                parts[0].name,
                self._whole_dtype,
            )
            joined = stacked([self._whole(weight) for weight in weights])
        assert joined is not None, "floats can be stacked"
        return joined

    def finish(self, ignored: Sequence[str] = ()) -> None:
        """See `CheckpointSource`. Some exporters give every quantised module a bias of zeros."""
        biases = [
            name
            for name in self._unused
            if name.removesuffix(_BIAS) in self._modules and self._is_zero(name)
        ]
        super().finish((*ignored, *biases))

    def _is_quantised(self, name: str) -> bool:
        entry = self._checkpoint.entries.get(name)
        return entry is None or entry.dtype not in WEIGHT_DTYPES

    def _read_weight(self, part: Part, columns: int) -> Weight:
        if not self._is_quantised(part.name):
            return DenseMatrix(self.matrix([part], columns).to(self._whole_dtype))
        name = part.name.removesuffix(_WEIGHT)
        entries = self._by_module.get(name, {})
        if not entries:
            raise CheckpointError(
                f"{self._checkpoint.path} has no tensor {part.name}, nor one of its quantised "
                f"form, which its config.json asks for with shape {[part.rows, columns]}"
            )
        module = StoredModule(name, self._checkpoint.path, entries, self._take)
        weight = self._stored.read(module, part.rows, columns)
        self._modules.add(name)
        weight = self._cut(weight, part)
        return (
            self._whole(weight) if type(weight) in self._becomes_floats else weight.to(self._device)
        )

    def _cut(self, weight: Weight, part: Part) -> Weight:
        """This rank's share of a matrix."""
        if self._share.size == 1 or part.split is None:
            return weight
        span = self._share.span(weight.shape[part.split], part.name)
        return weight.rows(*span) if part.split == ROWS else weight.columns(*span)

    def _whole(self, weight: Weight) -> DenseMatrix:
        numbers = weight.dequantised() if weight.floats is None else weight.floats
        return DenseMatrix(numbers.to(device=self._device, dtype=self._whole_dtype))

    def _take(self, entry: TensorEntry) -> None:
        self._unused.discard(entry.name)
        self._progress(entry.nbytes)

    def _is_zero(self, name: str) -> bool:
        entry = self._checkpoint.entries[name]
        values = torch.empty(entry.shape, dtype=entry.dtype)
        read_into(entry, values, raw=True)
        return not bool(values.any())


def stored_bytes(
    checkpoint: Checkpoint, stored: StoredQuantization, itemsize: int, float8_itemsize: int
) -> int:
    """What the tensors of a quantised checkpoint take in memory.

    Args:
        itemsize: bytes of a number that is not quantised, or cannot stay so.
        float8_itemsize: the same for matrices of e4m3.
    """
    total = 0
    for name, entry in checkpoint.entries.items():
        module, _, ending = name.rpartition(".")
        count = prod(entry.shape)
        if ending in ("weight", "bias") and entry.dtype in WEIGHT_DTYPES:
            total += count * itemsize
        elif ending == "weight" and entry.dtype.is_floating_point:
            total += count * float8_itemsize
        elif stored.keeps(module):  # with its scales, in float32, and zeros
            total += count * torch.float32.itemsize if "scale" in ending else entry.nbytes
        elif ending in _VALUES:
            total += entry.nbytes * 8 // stored.bits(module) * itemsize
    return total
