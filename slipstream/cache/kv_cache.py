"""The storage that blocks name: keys and values of every layer, target's and drafter's alike."""

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.kernels.table import SCALE_BYTES


@dataclass(frozen=True)
class KVLayout:
    """What one model's layers need per token.

    Attributes:
        num_layers, num_kv_heads, head_dim: sizes of each layer's keys (and of its values).
        dtype: of the stored numbers. int8: a head of a token is rounded to 8 bits with a scale of
            its own, a float32 in the 4 numbers behind its own (`kernels/table.py`).
        num_beside: numbers that are kept of a token beside them, for whoever makes pages for them.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    num_beside: int = 0

    @property
    def stored_dim(self) -> int:
        """Numbers of a head in a page."""
        return self.head_dim + (SCALE_BYTES if self.dtype == torch.int8 else 0)

    @property
    def bytes_per_token(self) -> int:
        numbers = 2 * self.num_layers * self.num_kv_heads * self.stored_dim + self.num_beside
        return numbers * self.dtype.itemsize


class KVCache:
    """One model's layers over `num_blocks` blocks; block ids are shared by all models.

    `layers[i]` is (keys, values), each [num_blocks, block_size, num_kv_heads, stored_dim]: views of
    `pages` [2 * layers, num_blocks, block_size, num_kv_heads, stored_dim]. Pages are not cleared:
    nothing reads a slot before it was written.
    """

    def __init__(
        self, layout: KVLayout, num_blocks: int, block_size: int, device: torch.device
    ) -> None:
        sizes = (num_blocks, block_size, layout.num_kv_heads, layout.stored_dim)
        shape = (2 * layout.num_layers, *sizes)
        self.pages = torch.empty(shape, dtype=layout.dtype, device=device)
        self.layers: list[tuple[Tensor, Tensor]] = [
            (self.pages[2 * layer], self.pages[2 * layer + 1]) for layer in range(layout.num_layers)
        ]
