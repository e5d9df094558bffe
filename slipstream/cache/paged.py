"""Paged keys and values (Kwon et al. 2023, "PagedAttention")."""

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.cache.spec import CacheSizes
from slipstream.core.errors import UsageError
from slipstream.kernels.attention import FLOAT8_PAGES, SCALE_BYTES, stored_dim
from slipstream.kernels.preparation import RequestTables
from slipstream.kernels.registry import kernels_for


@dataclass(frozen=True)
class KVSpec:
    """Keys and values of one layer.

    Attributes:
        num_kv_heads, head_dim: shape of a token's keys, and of its values.
        dtype: dtype of the stored numbers. If it has one byte, each head of a token is quantised to
            8 bits (see `kernels/attention.py`) with a float32 scale, which takes 4 more numbers.
        window: sliding window in tokens, the token itself included; None: full attention.
    """

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    window: int | None = None

    bytes_per_request = 0
    bytes_per_draft_token = 0

    def __post_init__(self) -> None:
        if self.dtype == FLOAT8_PAGES and self.head_dim % SCALE_BYTES:
            raise UsageError(
                f"kv_cache_dtype=fp8 is for heads of multiples of {SCALE_BYTES} numbers, not of "
                f"{self.head_dim}; leave it out"
            )

    @property
    def stored_dim(self) -> int:
        return stored_dim(self.head_dim, self.dtype)

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_kv_heads * self.stored_dim * self.dtype.itemsize

    def allocate(self, num_layers: int, sizes: CacheSizes) -> "KVPool":
        return KVPool(self, num_layers, sizes)


class KVPool:
    """Pages of several layers.

    Attributes:
        pages: [2 * layers, num_blocks, block_size, num_kv_heads, stored_dim], with strides as
            `Kernels.splits_heads` says. Pages are not cleared, since no slot is read before it is
            written. If layers with a window have their own blocks, there are `num_window_blocks`
            and the null block instead.
        layers: (keys, values) of each layer, views of `pages`.
    """

    def __init__(self, spec: KVSpec, num_layers: int, sizes: CacheSizes) -> None:
        self._windowed = spec.window is not None and sizes.num_window_blocks > 0
        num_blocks = sizes.num_window_blocks + 1 if self._windowed else sizes.num_blocks
        kernels = kernels_for(sizes.device)
        page = (sizes.block_size, spec.num_kv_heads)
        if kernels.splits_heads:
            page = page[::-1]
        shape = (2 * num_layers, num_blocks, *page)
        self.pages = torch.empty((*shape, spec.stored_dim), dtype=spec.dtype, device=sizes.device)
        if kernels.splits_heads:
            self.pages = self.pages.transpose(2, 3)
        if self._windowed:
            self.pages[:, -1].zero_()
        self._preparation = kernels.preparation
        self.layers: list[tuple[Tensor, Tensor]] = [
            (self.pages[2 * layer], self.pages[2 * layer + 1]) for layer in range(num_layers)
        ]

    def keep_path(
        self, tables: RequestTables, slots: Tensor, roots: Tensor, path: Tensor, counts: Tensor
    ) -> None:
        self._preparation.keep_path(tables, slots, roots, path, counts, self.pages, self._windowed)
