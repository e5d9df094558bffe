"""Memory behind the rows that a matmul reads.

The copy engine is slow where a tile reaches past the end of what it reads: 40 rows in tiles of 64
took longer than 64 (8B on an H200: 118 us a layer, not 109). So whoever makes what a matmul reads
leaves memory behind it, and the tiles read numbers there that mean nothing to anyone.
"""

import torch
import triton
from torch import Tensor


def empty_rows(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[rows, width], unset, with room for whole tiles behind it."""
    room = max(8, triton.next_power_of_2(rows)) if rows <= 64 else triton.cdiv(rows, 64) * 64
    return torch.empty(room, width, dtype=dtype, device=device)[:rows]


def with_spare(x: Tensor, rows: int) -> Tensor:
    """x [T, K] with what lies behind it in its memory, `rows` rows at most."""
    memory = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    if len(x) >= rows or x.stride(0) < x.shape[1]:
        return x
    there = (memory - x.shape[1]) // x.stride(0) + 1
    return x.as_strided((max(len(x), min(rows, there)), x.shape[1]), x.stride())
