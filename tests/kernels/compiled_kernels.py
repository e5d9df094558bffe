"""Compiles the kernels that no interpreter has; prints what each takes, as JSON.

Run with `ways`, `more`, `tiles` or `attention`, without TRITON_INTERPRET; needs no GPU. All are
compiled for an H200, those that other cards have as well also for one of these.
"""

import json
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from slipstream.kernels.triton.adapters import (
    _expand_kernel,
    _shrink_kernel,
    _shrink_rows_kernel,
)
from slipstream.kernels.triton.attention_segments import (
    CHAINED,
    SPLIT,
    WHOLE,
)
from slipstream.kernels.triton.attention_stream_kernel import (
    SWIZZLED as SWIZZLED_PAGES,
)
from slipstream.kernels.triton.attention_stream_kernel import attention_stream_kernel
from slipstream.kernels.triton.fragments import E2M1, FLOAT8, INT4, INT4_ZEROS, INT8
from slipstream.kernels.triton.grouped_stream_kernels import HALVES, grouped_stream_kernel
from slipstream.kernels.triton.matmul_stream_kernels import (
    SWIZZLED,
    SWIZZLED_BYTES,
    stream_kernel,
)
from slipstream.kernels.triton.matmul_tiles import StreamTiles
from slipstream.kernels.triton.norm import _norm_kernel

HOPPER = 90  # compute capabilities, times 10
AMPERE, ADA = 80, 89
ALIGNED = [["tt.divisibility", 16]]
DIVISIBLE = ("width", "row_stride", "depth", "part", "size", "pitch")
NOT, SILU, GELU = 0, 1, 2  # as `activation.py` numbers them
E4M3 = torch.float8_e4m3fn
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", E4M3: "fp8e4nv"}


def stream(
    tiles: StreamTiles,
    dtype: torch.dtype,
    out: torch.dtype,
    gated: int,
    biased: bool,
    rank: int = 0,
) -> Any:
    """`matmul.py`'s launch, with adapters of a rank."""

    def described(rows: int) -> str:
        order = SWIZZLED_BYTES if dtype == E4M3 else SWIZZLED
        return f"tensordesc<{NAMES[dtype]}[{rows}, {tiles.depth}],{order.value}>"

    types: dict[str, str | None] = {
        "x": described(tiles.rows),
        "more_x": described(tiles.more) if tiles.more else None,
        "weight": described(tiles.high // 2 if gated else tiles.high),
        "bias": "*bf16" if biased else None,
        "out": f"*{NAMES[out]}",
    }
    types |= dict.fromkeys(("rows", "width", "depth", "part"), "i32")
    if dtype == E4M3:
        types |= dict.fromkeys(("x_scales", "scales"), "*fp32")
    constants = {
        "gated": gated,
        "blocks": tiles.blocks,
        "high": tiles.high,
        "stages": tiles.stages,
        "pdl": True,
        "warps": tiles.warps,
        "rank": rank,
        "padded": 16,
        "chunk": 128,
        "chunks": 1,
        "makers": 8 if rank else 0,
        "shares": 4 if rank else 0,
        "parts": 2 if gated else 1,
    }
    if rank:
        types |= {"inner": "*fp32", "up": f"*{NAMES[dtype]}", "ends": "*i32", "adapters": "*i64"}
        types |= {"down": described(16), "counts": "*i64", "share": "i32"}
    return compiled(stream_kernel, types, constants, tiles.warps)


def grouped(
    tile: tuple[int, int, int],
    words: int,
    gated: int,
    sorted_pairs: bool,
    out: torch.dtype,
    coding: int = E2M1,
    span: int = 1,
    few: bool = False,
    high: int = 1,
    card: int = HOPPER,
) -> Any:
    """`grouped.py`'s launch; tile: rows of x, chunks and stages. A few pairs are not sorted."""
    count, chunks, stages = tile
    columns = 32 if coding in (INT8, FLOAT8) else 64
    types: dict[str, str | None] = {"x": "*bf16", "weight": "*u8"}
    types["scales"] = "*fp32" if coding == FLOAT8 else "*i32" if words else None
    types |= {"bias": "*bf16", "out": f"*{NAMES[out]}", "lift_back": "fp32"}
    if words == 2 or coding == INT8:
        types["row_scales"] = "*fp32"
    if sorted_pairs:
        types |= dict.fromkeys(("choices",) if few else ("pairs", "starts", "ends"), "*i32")
        types["factors"] = None if gated else "*fp32"
    elif count > 8 and card == HOPPER:
        types["x_tiles"] = f"tensordesc<bf16[{count}, {columns * chunks}],{HALVES.value}>"
    ints = ("row_stride", "rows", "width", "depth", "part", "size", "pitch", "lift")
    types |= dict.fromkeys(ints, "i32")
    constants = {
        "experts": 32 if sorted_pairs else 1,
        "block": 32,
        "chosen": 4,
        "gathers": sorted_pairs and gated,
        "late": not sorted_pairs or (few and not gated),
        "coding": coding,
        "columns": columns,
        "words": words,
        "span": span,
        "shift": 7 if words == 1 else 4,
        "gated": gated,
        "limit": 7.0 if words == 1 else None,
        "alpha": 1.702,
        "count": count,
        "chunks": chunks,
        "stages": stages,
        "high": high,
        "wgmma": card == HOPPER,
        "pdl": card >= HOPPER,
    }
    return compiled(grouped_stream_kernel, types, constants, 4, card)


def attention(mode: int) -> Any:
    """`attention_stream.py`'s launch for prompts with trees and sinks, in pages of 16 tokens."""
    pages = f"tensordesc<bf16[16, 64],{SWIZZLED_PAGES.value}>"
    types: dict[str, str | None] = {"keys": pages, "values": pages, "tables": "*i32"}
    types |= dict.fromkeys(("query", "out", "sinks"), "*bf16")
    lists = ("query_start", "context_lens", "positions", "tokens", "ancestors", "tree_starts")
    types |= dict.fromkeys(lists, "*i64")
    types |= dict.fromkeys(("part", "part_largest", "part_total"), "*fp32" if mode else None)
    ints = ("row_stride", "table_stride", "count", "requests", "short_rows")
    types |= dict.fromkeys(ints, "i32") | {"scale": "fp32"}
    constants = {"kv_heads": 8, "groups": 8, "block_size": 16, "block_r": 16, "pdl": True}
    constants |= {"mode": mode}
    return compiled(attention_stream_kernel, types, constants, 4)


def norm(weighted: bool, ranks: int = 1, shares: bool = False) -> int:
    """`norm.py`'s kernel, which may have nothing to norm with, or fetch the parts of other ranks,
    whole or in shares -> bytes of machine code."""
    types: dict[str, Any] = dict.fromkeys(("addend", "residual", "out", "total"), "*bf16")
    types |= dict.fromkeys(("part_stride", "row_stride", "width"), "i32")
    types |= dict.fromkeys(("eps", "post_eps"), "fp32")
    types |= {"weight": "*bf16"} if weighted else {}
    types |= {"channel": ("i64",) * (ranks + 3)} if ranks > 1 else {}
    types |= {"share": "i32"} if shares else {}
    constants = {"parts": 1, "rank": 0, "ranks": ranks, "block": 256, "pdl": True}
    constants["share_block"] = 64
    return plain(_norm_kernel, types, constants)


def adapters() -> tuple[int, ...]:
    """The kernels of `adapters.py` -> bytes of machine code."""
    types = {"x": "*bf16", "y": "*fp32", "down": "*bf16", "up": "*bf16", "inner": "*fp32"}
    types |= {"slots": "*i64", "ends": "*i32"}
    ints = ("row_stride", "y_stride", "depth", "width", "rank", "total", "splits")
    types |= dict.fromkeys(ints, "i32")
    first = {"block_r": 8, "block_k": 1024, "pdl": True}
    second = {"parts": 3, "block_n": 256, "block_r": 16, "block_s": 4, "pdl": True}
    third = {"block_m": 32, "block_r": 16, "block_k": 512, "step": 128, "pdl": True}
    types |= {"rows": "i32", "part": "i32"}
    kernels = (_shrink_kernel, first), (_expand_kernel, second), (_shrink_rows_kernel, third)
    return tuple(plain(kernel, types, constants) for kernel, constants in kernels)


def plain(kernel: Any, types: dict[str, Any], constants: dict[str, Any]) -> int:
    """A kernel of Triton's that has no matrix instructions -> bytes of machine code."""
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    given = {(index,): constants.get(name) for index, name in enumerate(names)}
    constexprs = {at: it for at, it in given.items() if signature[names[at[0]]] == "constexpr"}
    source = ASTSource(kernel, signature, constexprs=constexprs)
    target = GPUTarget("cuda", HOPPER, 32)
    result = triton.compile(source, target=target, options={"num_warps": 4})
    return len(result.asm["cubin"])


def compiled(
    kernel: Any,
    types: dict[str, str | None],
    constants: dict[str, Any],
    warps: int,
    card: int = HOPPER,
) -> dict[str, Any]:
    """Shared memory in bytes, and how often each matrix instruction stands in the program."""
    names = kernel.arg_names
    signature = {name: types.get(name) or "constexpr" for name in names}
    given = {(index,): constants.get(name) for index, name in enumerate(names)}
    constexprs = {
        at: value for at, value in given.items() if signature[names[at[0]]] == "constexpr"
    }
    attributes = {
        (index,): ALIGNED
        for index, name in enumerate(names)
        if signature[name].startswith("*") or name in DIVISIBLE
        if signature[name] != "constexpr"
    }
    source = GluonASTSource(kernel, signature, constexprs=constexprs, attrs=attributes)
    options = {"num_warps": warps, "launch_pdl": card >= HOPPER, "enable_fp_fusion": False}
    result = triton.compile(source, target=GPUTarget("cuda", card, 32), options=options)
    program = result.asm["ptx"]
    return {
        "shared": result.metadata.shared,
        "products": program.count("wgmma.mma_async") + program.count("mma.sync"),
        "machine_code": len(result.asm["cubin"]),
    }


def each_way(half: torch.dtype, whole: torch.dtype) -> list[dict[str, Any]]:
    """Most branches of each kernel, with those of `other_ways` all: a program takes 2 s."""
    return [
        stream(StreamTiles(32, 8, stages=7), half, half, gated=SILU, biased=True, rank=16),
        stream(StreamTiles(8, 8, depth=256, stages=6), E4M3, half, gated=SILU, biased=True),
        grouped((8, 4, 4), words=2, gated=GELU, sorted_pairs=True, out=half),
        grouped((64, 2, 4), 0, NOT, sorted_pairs=True, out=whole, coding=INT8, high=2),
        grouped((16, 4, 3), words=2, gated=SILU, sorted_pairs=False, out=half, card=AMPERE),
        grouped((8, 4, 4), 0, SILU, sorted_pairs=False, out=half, coding=FLOAT8),
    ]


def other_ways(half: torch.dtype, whole: torch.dtype) -> list[dict[str, Any]]:
    return [
        stream(StreamTiles(8, depth=256, stages=4), torch.float16, whole, gated=NOT, biased=True),
        grouped((32, 2, 4), 1, NOT, sorted_pairs=False, out=whole, coding=INT4, span=2),
        stream(StreamTiles(64, stages=6), half, half, gated=GELU, biased=False),
        grouped((16, 4, 6), words=2, gated=SILU, sorted_pairs=False, out=half),
        grouped((16, 4, 4), 4, NOT, sorted_pairs=True, out=whole, coding=INT4_ZEROS),
        grouped((64, 2, 3), 2, NOT, sorted_pairs=True, out=half, coding=INT4, card=AMPERE),
        grouped((8, 4, 3), 0, NOT, sorted_pairs=False, out=half, coding=FLOAT8, card=AMPERE),
        grouped((8, 4, 4), 1, SILU, sorted_pairs=True, out=half, few=True),
    ]


def other_tiles(half: torch.dtype, whole: torch.dtype) -> list[dict[str, Any]]:
    return [
        stream(StreamTiles(128, 16, 2, 64, 64, 3), half, half, gated=SILU, biased=False),
        stream(StreamTiles(128, 0, 1, 128, 64, 6), half, half, gated=NOT, biased=False),
        stream(StreamTiles(8, depth=256, stages=4), half, whole, gated=NOT, biased=False, rank=12),
        grouped((8, 4, 4), words=1, gated=SILU, sorted_pairs=True, out=half),
        grouped((128, 2, 3), words=2, gated=NOT, sorted_pairs=True, out=whole),
        grouped((128, 2, 2), words=1, gated=SILU, sorted_pairs=True, out=half, card=ADA),
        grouped((128, 2, 2), 4, NOT, False, out=half, coding=INT4_ZEROS, card=ADA),
        grouped((8, 4, 4), 2, NOT, sorted_pairs=True, out=whole, few=True),
    ]


def main(which: str) -> None:
    if which == "attention":  # alone, as it takes as long as all the others
        print(json.dumps([attention(mode.value) for mode in (WHOLE, CHAINED, SPLIT)]))
        return
    listed = {"ways": each_way, "more": other_ways, "tiles": other_tiles}
    results = listed[which](torch.bfloat16, torch.float32)
    assert norm(weighted=True, ranks=4, shares=True) > norm(weighted=True)
    assert norm(weighted=True, ranks=4) > norm(weighted=True) > norm(weighted=False) > 0
    assert all(adapters())
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])
