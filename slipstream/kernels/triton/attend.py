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
GROUPED_FROM = 128  # programs
EARLY = False


@dataclass(frozen=True)
class Tiles:
    lines: int
    tokens: int
    warps: int
    stages: int
    registers: int | None = None


def short_tiles(groups: int, block_d: int, dtype: torch.dtype) -> Tiles:
    if dtype == torch.float32:
        return Tiles(16, 32, 4, 1)
    lines = min(64, max(16, 8 * triton.next_power_of_2(groups)))
    return Tiles(lines, 64, 4, 5)


def attend_short(
    qkv: Tensor, heads: Heads, inputs: AttentionInputs, cache: tuple[Tensor, Tensor]
) -> Tensor:
    head_dim, kv_heads, groups = heads.head_dim, heads.num_kv_heads, heads.num_heads // heads.num_kv_heads
    total_rows = len(qkv)
    out = torch.empty((total_rows, heads.num_heads * head_dim), dtype=qkv.dtype, device=qkv.device)
    if not total_rows:
        return out
    query_end = heads.num_heads * head_dim
    key, value = qkv[:, query_end:], qkv[:, query_end + kv_heads * head_dim :]
    keys, values = cache
    block_size = keys.shape[1]
    block_d = int(max(16, triton.next_power_of_2(head_dim)))
    tiles = short_tiles(groups, block_d, qkv.dtype)
    most_rows = min(inputs.max_rows or total_rows, SHORT_ROWS)
    requests = len(inputs.context_lens)
    tokens = int(inputs.block_tables.shape[1]) * block_size
    if inputs.max_context is not None:
        tokens = min(tokens, inputs.max_context)
    pairs = kv_heads * triton.cdiv(most_rows * groups, tiles.lines)
    grouped = requests * pairs >= GROUPED_FROM
    runs = most_groups(tokens) if grouped else most_splits(tokens)
    sizes = (total_rows, heads.num_heads, runs)
    part = torch.empty((*sizes, head_dim), dtype=torch.float32, device=qkv.device)
    part_exponent, part_total = torch.empty((2, *sizes), dtype=torch.float32, device=qkv.device)
    lanes = min(runs, triton.cdiv(PROGRAMS, requests * pairs))
    pdl = overlaps(qkv.device)
    extra = {"launch_pdl": True} if pdl else {}
    more = {} if tiles.registers is None else {"maxnreg": tiles.registers}
    query_weight, key_weight, eps = None, None, 0.0
    if heads.norms is not None:
        query_weight, key_weight, eps = heads.norms[0].weight, heads.norms[1].weight, heads.norms[0].eps
    early = EARLY and pdl
    short_kernel[(pairs, requests, lanes)](
        qkv, key, value, keys, values, out, part, part_exponent, part_total, inputs.query_start,
        inputs.context_lens, inputs.block_tables, inputs.positions, inputs.slots, None, 0, None,
        query_weight, key_weight, eps, heads.cos_sin, qkv.stride(0), kv_heads * head_dim,
        inputs.block_tables.stride(0), heads.scale, None, heads.window, most_rows, runs, kv_heads,
        groups=groups, head_dim=head_dim, block_size=block_size, block_m=tiles.lines,
        block_n=tiles.tokens, block_d=block_d, grouped=grouped, pdl=pdl, early=early,
        num_warps=tiles.warps, num_stages=tiles.stages, **extra, **more,
    )  # fmt: skip
    if grouped and runs == 1:
        return out
    combine_kernel[(heads.num_heads, most_rows, requests)](
        part, part_exponent, part_total, out, inputs.query_start, inputs.context_lens,
        inputs.positions, None, heads.window, most_rows, runs, heads.num_heads, causal=True,
        head_dim=head_dim, block_d=block_d, block_s=64, grouped=grouped, pdl=pdl, early=early,
        num_warps=2, **extra,
    )  # fmt: skip
    return out
