"""Query/key norm, rotary embedding and the cache write in one kernel."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.attention import FLOAT8_PAGES
from slipstream.kernels.pass_inputs import PassInputs
from slipstream.kernels.triton.attention_parts import (
    gains_of,
    halves,
    rotated,
    store_heads,
    turns,
)
from slipstream.kernels.triton.launch import (
    cdiv,
    launch_dependents,
    next_power_of_2,
    options,
    wait_for_inputs,
)

HEADS_PER_PROGRAM = 8


@triton.jit
def _rotate_and_store_kernel(
    query, key, value, query_weight, key_weight, eps, cos_sin, positions, slots, out, keys, values,
    key_scales, value_scales, query_stride, key_stride, value_stride, query_heads, kv_heads,
    head_dim: tl.constexpr, stored_dim: tl.constexpr, rotary_dim: tl.constexpr,
    block_heads: tl.constexpr, block_d: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """One program: `block_heads` heads of one row. Further programs process keys and values.

    query, key, value: [T, heads, head_dim] with a row stride of their own (they are views of one
    matmul's result); out is contiguous; keys and values are pages seen as [places, Hk, stored_dim].
    """
    launch_dependents(pdl)
    wait_for_inputs(pdl)
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    query_groups = tl.cdiv(query_heads, block_heads)
    half: tl.constexpr = head_dim // 2
    pair = tl.arange(0, block_d // 2)
    position = tl.load(positions + row) + tl.zeros((block_heads,), tl.int64)
    if group < query_groups:
        head = group * block_heads + tl.arange(0, block_heads)
        place = row * query_stride + head * head_dim
        first, second = halves(query, place, head < query_heads, head_dim, block_d)
        turn = turns(cos_sin, position, head < query_heads, rotary_dim, head_dim, block_d)
        has_norm: tl.constexpr = query_weight is not None
        query_gains = gains_of(query_weight, rotary_dim, head_dim, block_d) if has_norm else None
        first, second = rotated(
            query, place, head < query_heads, first, second, turn, query_gains, eps, rotary_dim,
            head_dim,
        )  # fmt: skip
        inside = (head < query_heads)[:, None] & (pair < half)[None, :]
        target = out + (row * query_heads + head[:, None]) * head_dim + pair[None, :]
        tl.store(target, first, mask=inside)
        tl.store(target + half, second, mask=inside)
    else:
        slot = tl.load(slots + row)
        head = (group - query_groups) * block_heads + tl.arange(0, block_heads)
        place = row * key_stride + head * head_dim
        first, second = halves(key, place, head < kv_heads, head_dim, block_d)
        turn = turns(cos_sin, position, head < kv_heads, rotary_dim, head_dim, block_d)
        has_key_norm: tl.constexpr = key_weight is not None
        key_gains = gains_of(key_weight, rotary_dim, head_dim, block_d) if has_key_norm else None
        first, second = rotated(
            key, place, head < kv_heads, first, second, turn, key_gains, eps, rotary_dim, head_dim
        )
        stored = head < tl.where(slot >= 0, kv_heads, 0)
        goes = slot * kv_heads * stored_dim + head * head_dim
        scale_at = (slot * kv_heads * stored_dim + kv_heads * head_dim) // 4 + head
        scaled: tl.constexpr = key_scales is not None
        key_scale_at = key_scales + scale_at if scaled else None
        value_scale_at = value_scales + scale_at if scaled else None
        store_heads(keys + goes, key_scale_at, stored, first, second, head_dim)
        first, second = halves(
            value, row * value_stride + head * head_dim, stored, head_dim, block_d
        )
        store_heads(values + goes, value_scale_at, stored, first, second, head_dim)


def pages_of(cache: tuple[Tensor, Tensor]) -> tuple[Tensor | None, ...]:
    """(keys, values, scales of keys, of values) as kernels read them: of pages of e4m3 both their
    bytes as such and, as float32, all that lies there; None without scales."""
    keys, values = cache
    if keys.dtype != FLOAT8_PAGES:
        return keys, values, None, None
    e4m3 = torch.float8_e4m3fn
    return keys.view(e4m3), values.view(e4m3), keys.view(torch.float32), values.view(torch.float32)


def rotate_and_store(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    norms: tuple[Tensor, Tensor, float] | None,
    cos_sin: Tensor,
    inputs: PassInputs,
    cache: tuple[Tensor, Tensor],
) -> Tensor:
    rows, query_heads, head_dim = query.shape
    kv_heads = key.shape[1]
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if not rows:
        return out
    assert all(heads[0].is_contiguous() for heads in (query, key, value))
    assert all(whole.is_contiguous() for whole in (cos_sin, *cache))
    query_weight, key_weight, eps = norms or (None, None, 0.0)
    per_program = HEADS_PER_PROGRAM
    grid = (rows, cdiv(query_heads, per_program) + cdiv(kv_heads, per_program))
    _rotate_and_store_kernel[grid](
        query, key, value, query_weight, key_weight, eps, cos_sin, inputs.rows.positions,
        inputs.paging.slots, out, *pages_of(cache), query.stride(0), key.stride(0),
        value.stride(0), query_heads, kv_heads, head_dim=head_dim, stored_dim=cache[0].shape[-1],
        rotary_dim=cos_sin.shape[1], block_heads=per_program,
        block_d=2 * next_power_of_2(head_dim // 2), num_warps=4, **options(query.device),
    )  # fmt: skip
    return out
