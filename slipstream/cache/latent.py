"""Paged rows of latent attention: one row per token, for all heads."""

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.cache.spec import CacheSizes
from slipstream.core.errors import UsageError
from slipstream.kernels.preparation import RequestTables
from slipstream.kernels.registry import kernels_for


@dataclass(frozen=True)
class LatentSpec:
    """The latent rows of one layer.

    Attributes:
        width: size of a token's latent row, its rotated part included.
        dtype: dtype of the stored numbers.

    Raises:
        UsageError: the dtype has 8 bits.
    """

    width: int
    dtype: torch.dtype

    bytes_per_request = 0
    bytes_per_draft_token = 0
    window = None

    def __post_init__(self) -> None:
        if not self.dtype.is_floating_point:
            raise UsageError("kv_cache_dtype of 8 bits is not for latent attention; leave it out")

    @property
    def bytes_per_token(self) -> int:
        return self.width * self.dtype.itemsize

    def allocate(self, num_layers: int, sizes: CacheSizes) -> "LatentPool":
        return LatentPool(self, num_layers, sizes)


class LatentPool:
    """Pages of several layers.

    Attributes:
        pages: [layers, num_blocks, block_size, 1, width]; not cleared, like those of `KVPool`.
        layers: [num_blocks, block_size, width] of each layer, views of `pages`.
    """

    def __init__(self, spec: LatentSpec, num_layers: int, sizes: CacheSizes) -> None:
        shape = num_layers, sizes.num_blocks, sizes.block_size, 1, spec.width
        self.pages = torch.empty(shape, dtype=spec.dtype, device=sizes.device)
        self._preparation = kernels_for(sizes.device).preparation
        self.layers: list[Tensor] = list(self.pages.squeeze(3))

    def keep_path(
        self, tables: RequestTables, slots: Tensor, roots: Tensor, path: Tensor, counts: Tensor
    ) -> None:
        self._preparation.keep_path(tables, slots, roots, path, counts, self.pages)
