"""Attention of requests of few rows: plain decode and verification of 1+k rows.

The query heads that share a KV head and the rows of one request are folded into one axis, line
m = row * groups + head, so that keys are read once for all of them and meet the tensor cores.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from slipstream.kernels.table import AttentionInputs, Heads
from slipstream.kernels.triton.attend_kernels import combine_kernel, short_kernel
from slipstream.kernels.triton.launch import overlaps
from slipstream.kernels.triton.splits import most_groups, most_splits

SHORT_ROWS = 16
PROGRAMS = 1024
ENOUGH = 256
EARLY = False


@dataclass(frozen=True)
class Tiles:
    lines: int
    tokens: int
    warps: int
    stages: int
    registers: int | None = None


def short_tiles(lines: int, groups: int, block_d: int, dtype: torch.dtype) -> Tiles:
    if dtype == torch.float32:
        return Tiles(16, 32, 4, 1)
    lines = min(64, max(16, triton.next_power_of_2(lines)))
    return Tiles(lines, 64, 4, 5)


def attend_short(
    qkv: Tensor, heads: Heads, inputs: AttentionInputs, cache: tuple[Tensor, Tensor]
) -> Tensor:
    head_dim, kv_heads, groups = heads.head_dim, heads.num_kv_heads, heads.num_heads // heads.num_kv_heads
    total_rows = len(qkv)
    out = torch.empty((total_rows, heads.num_heads * head_dim), dtype=qkv.dtype, device=qkv.device)
    if not total_rows:
        return out
    keys, values = cache
    block_size = keys.shape[1]
    block_d = int(max(16, triton.next_power_of_2(head_dim)))
    most_rows = min(inputs.max_rows or total_rows, SHORT_ROWS)
    tiles = short_tiles(most_rows * groups, groups, block_d, qkv.dtype)
    requests = len(inputs.context_lens)
    tokens = int(inputs.block_tables.shape[1]) * block_size
    if inputs.max_context is not None:
        tokens = min(tokens, inputs.max_context)
    pairs = kv_heads * triton.cdiv(most_rows * groups, tiles.lines)
    programs = requests * pairs
    runs = max(most_groups(tokens), most_splits(min(tokens, (ENOUGH - 1) // programs * 4096)))
    sizes = (total_rows, heads.num_heads, runs)
    part = torch.empty((*sizes, head_dim), dtype=torch.float32, device=qkv.device)
    part_exponent, part_total = torch.empty((2, *sizes), dtype=torch.float32, device=qkv.device)
    lanes = min(runs, triton.cdiv(PROGRAMS, programs))
    pdl = overlaps(qkv.device)
    extra = {"launch_pdl": True} if pdl else {}
    more = {} if tiles.registers is None else {"maxnreg": tiles.registers}
    query_weight, key_weight, eps = None, None, 0.0
    if heads.norms is not None:
        query_weight, key_weight, eps = heads.norms[0].weight, heads.norms[1].weight, heads.norms[0].eps
    early = EARLY and pdl
    short_kernel[(pairs, requests, lanes)](
        qkv, keys, values, out, part, part_exponent, part_total, inputs.query_start,
        inputs.context_lens, inputs.block_tables, inputs.positions, inputs.slots, None, 0, None,
        query_weight, key_weight, eps, heads.cos_sin, qkv.stride(0), inputs.block_tables.stride(0),
        heads.scale, None, heads.window, most_rows, runs,
        kv_heads=kv_heads, groups=groups, head_dim=head_dim, block_size=block_size,
        block_m=tiles.lines, block_n=tiles.tokens, block_d=block_d, pdl=pdl, early=early,
        num_warps=tiles.warps, num_stages=tiles.stages, **extra, **more,
    )  # fmt: skip
    if runs == 1:
        return out
    lines = most_rows * heads.num_heads
    combine_kernel[(min(lines, triton.cdiv(PROGRAMS, requests)), requests)](
        part, part_exponent, part_total, out, inputs.query_start, inputs.context_lens, None,
        heads.window, most_rows, runs, programs, heads=heads.num_heads, head_dim=head_dim,
        block_d=block_d, block_s=64, pdl=pdl, early=early, num_warps=1, **extra,
    )  # fmt: skip
    return out
