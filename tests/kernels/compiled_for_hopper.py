"""Compiles the kernels that no interpreter has for an H200; prints what each takes, as JSON.

Run as a program, without TRITON_INTERPRET; needs no GPU.
"""

import json
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from slipstream.kernels.triton.fragments import E2M1, INT4, INT4_ZEROS, INT8
from slipstream.kernels.triton.grouped_kernels import grouped_kernel
from slipstream.kernels.triton.grouped_stream_kernels import BYTES, HALVES, grouped_stream_kernel
from slipstream.kernels.triton.matmul_stream_kernels import SWIZZLED, stream_kernel
from slipstream.kernels.triton.matmul_tiles import Stream
from slipstream.kernels.triton.norm import _norm_kernel
from slipstream.kernels.triton.routing_kernels import place_kernel, route_kernel, sort_kernel

H200 = GPUTarget("cuda", 90, 32)
ALIGNED = [["tt.divisibility", 16]]
DIVISIBLE = ("width", "row_stride", "depth", "part", "size", "pitch")
NOT, SILU, GELU = 0, 1, 2  # as `activation.py` numbers them
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def stream(tiles: Stream, dtype: torch.dtype, out: torch.dtype, gated: int, biased: bool) -> Any:
    """`matmul_stream.py`'s launch."""

    def described(rows: int) -> str:
        return f"tensordesc<{NAMES[dtype]}[{rows}, {tiles.depth}],{SWIZZLED.value}>"

    types: dict[str, str | None] = {
        "x": described(tiles.rows),
        "more_x": described(tiles.more) if tiles.more else None,
        "weight": described(tiles.high // 2 if gated else tiles.high),
        "bias": f"*{NAMES[dtype]}" if biased else None,
        "out": f"*{NAMES[out]}",
    }
    types |= dict.fromkeys(("rows", "width", "depth", "part"), "i32")
    constants = {
        "gated": gated,
        "blocks": tiles.blocks,
        "high": tiles.high,
        "stages": tiles.stages,
        "pdl": True,
        "warps": tiles.warps,
    }
    return compiled(stream_kernel, types, constants, tiles.warps)


def grouped(
    tile: tuple[int, int, int],
    words: int,
    gated: int,
    sorted_pairs: bool,
    out: torch.dtype,
    coding: int = E2M1,
    span: int = 1,
) -> Any:
    """`grouped_stream.py`'s launch; tile: rows of x, chunks and stages."""
    count, chunks, stages = tile
    columns = 32 if coding == INT8 else 64
    described = f"tensordesc<u8[{8 * chunks}, 128],{BYTES.value}>"
    types: dict[str, str | None] = {"x": "*bf16", "weight": described}
    types["scales"] = "*i32" if words else None
    types |= {"bias": "*bf16", "out": f"*{NAMES[out]}", "lift_back": "fp32"}
    if words == 2 or coding == INT8:
        types["row_scales"] = "*fp32"
    if sorted_pairs:
        types |= dict.fromkeys(("pairs", "starts", "ends"), "*i32")
        types["factors"] = None if gated else "*fp32"
    else:
        types["x_tiles"] = f"tensordesc<bf16[{count}, {columns * chunks}],{HALVES.value}>"
    ints = ("row_stride", "rows", "width", "depth", "part", "size", "pitch", "lift")
    types |= dict.fromkeys(ints, "i32")
    constants = {
        "experts": 32 if sorted_pairs else 1,
        "block": 32,
        "chosen": 4,
        "gathers": sorted_pairs and gated,
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
        "pdl": True,
    }
    return compiled(grouped_stream_kernel, types, constants, 4)


def norm(weighted: bool) -> int:
    """`norm.py`'s kernel, which may have nothing to norm with -> bytes of machine code."""
    types = dict.fromkeys(("addend", "residual", "out", "total"), "*bf16")
    types |= dict.fromkeys(("part_stride", "row_stride", "width"), "i32")
    types |= dict.fromkeys(("eps", "behind_eps"), "fp32")
    types |= {"weight": "*bf16"} if weighted else {}
    constants = {"parts": 1, "block": 256, "pdl": True}
    result = in_triton(_norm_kernel, types, constants, 4)
    return len(result.asm["cubin"])


def routing(experts: int, chosen: int, shared: int) -> dict[str, Any]:
    """Sigmoids, of which the largest are chosen."""
    return {
        "parts": 8, "experts": experts, "block": triton.next_power_of_2(experts), "kind": 2,
        "normalised": True, "scale": 2.5, "groups": 1, "kept": 1, "shared": shared, "pdl": True,
        "chosen": chosen, "places": chosen + (shared > 0),
    }  # fmt: skip


def grouped_plain(choice: str, rows: int, gated: int, shared: int, dtype: str) -> dict[str, int]:
    """`grouped.py`'s launch. choice: whether the row's experts are still to be chosen, or are
    chosen, or pairs are sorted."""
    types = {"x": f"*{dtype}", "values": f"*{dtype}", "out": "*bf16" if gated else "*fp32"}
    types |= dict.fromkeys(("rows", "width", "row_stride", "part_stride"), "i32")
    floats = ["factors"] if not gated else []
    ints = ["pairs", "starts", "ends"] if choice == "sorted" else ["experts_of"]
    if choice == "open":
        floats += ["logits", "weights", "correction"]
    if shared:
        types["shared_values"] = types["values"]
    if dtype == "fp8e4nv":
        floats += ["x_scales", "row_scales", *(["shared_scales"] if shared else [])]
    types |= dict.fromkeys(floats, "*fp32") | dict.fromkeys(ints, "*i32")
    constants = routing(256, 8, shared) | {
        "depth": 2048, "gathers": bool(gated), "form": 0, "block_rows": 128, "block_columns": 128,
        "gated": gated, "block_m": rows, "block_n": 64, "block_k": 128, "stages": 4,
    }  # fmt: skip
    result = in_triton(grouped_kernel, types, constants, 4)
    return {"shared": result.metadata.shared, "wgmma": result.asm["ptx"].count("wgmma.mma_async")}


def route(lines: int, span: int, programs: int, shared: int) -> int:
    """`grouped.py`'s launches of what sorts -> bytes of machine code of all of it."""
    ints = dict.fromkeys(("choices", "ranks", "starts", "ends", "pairs"), "*i32")
    ints |= dict.fromkeys(("part_stride", "rows", "programs"), "i32")
    ints |= {"counts": "*i32"} if programs > 1 else {}
    types = ints | dict.fromkeys(("logits", "weights", "correction"), "*fp32")
    own = routing(256, 8, shared) | {"lines": lines, "span": span, "tile": 16}
    kernels = [route_kernel, *([sort_kernel, place_kernel] if programs > 1 else [])]
    return sum(len(in_triton(each, types, own, lines).asm["cubin"]) for each in kernels)


def in_triton(kernel: Any, types: dict[str, str], constants: dict[str, Any], warps: int) -> Any:
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    given = {(index,): constants.get(name) for index, name in enumerate(names)}
    constexprs = {at: it for at, it in given.items() if signature[names[at[0]]] == "constexpr"}
    aligned = {
        (index,): ALIGNED
        for index, name in enumerate(names)
        if signature[name].startswith("*") or (name in DIVISIBLE and signature[name] == "i32")
    }
    source = ASTSource(kernel, signature, constexprs=constexprs, attrs=aligned)
    options = {"num_warps": warps, "num_stages": 4, "enable_fp_fusion": False}
    return triton.compile(source, target=H200, options=options)


def compiled(
    kernel: Any, types: dict[str, str | None], constants: dict[str, Any], warps: int
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
    options = {"num_warps": warps, "launch_pdl": True, "enable_fp_fusion": False}
    result = triton.compile(source, target=H200, options=options)
    program = result.asm["ptx"]
    return {
        "shared": result.metadata.shared,
        "wgmma": program.count("wgmma.mma_async"),
        "machine_code": len(result.asm["cubin"]),
    }


def main() -> None:
    half, whole = torch.bfloat16, torch.float32
    results = [
        stream(Stream(8, depth=256, stages=4), torch.float16, whole, gated=NOT, biased=True),
        stream(Stream(64, stages=6), half, half, gated=SILU, biased=True),
        stream(Stream(128, 16, 2, 64, 64, 3), half, half, gated=SILU, biased=False),
        stream(Stream(64, stages=6), half, half, gated=GELU, biased=False),
        stream(Stream(128, 0, 1, 128, 64, 6), half, half, gated=NOT, biased=False),
        stream(Stream(32, 8, stages=8), half, whole, gated=NOT, biased=False),
        grouped((8, 4, 4), words=1, gated=SILU, sorted_pairs=True, out=half),
        grouped((128, 2, 3), words=2, gated=NOT, sorted_pairs=True, out=whole),
        grouped((16, 4, 6), words=2, gated=SILU, sorted_pairs=False, out=half),
        grouped((64, 2, 4), words=2, gated=SILU, sorted_pairs=False, out=half),
        grouped((8, 4, 4), words=2, gated=GELU, sorted_pairs=True, out=half),
        grouped((8, 4, 4), 2, SILU, sorted_pairs=False, out=half, coding=INT4),
        grouped((32, 2, 4), 1, NOT, sorted_pairs=False, out=whole, coding=INT4, span=2),
        grouped((16, 4, 4), 4, NOT, sorted_pairs=True, out=whole, coding=INT4_ZEROS),
        grouped((8, 4, 4), 2, SILU, sorted_pairs=True, out=half, coding=INT4_ZEROS, span=2),
        grouped((8, 4, 4), 0, SILU, sorted_pairs=False, out=half, coding=INT8),
        grouped((64, 2, 4), 0, NOT, sorted_pairs=True, out=whole, coding=INT8),
    ]
    assert norm(weighted=True) > norm(weighted=False) > 0
    for choice, gated in (("open", SILU), ("chosen", NOT), ("sorted", SILU)):
        for shared in (0, 2):
            made = grouped_plain(choice, 16, gated, shared, "bf16")
            assert made["wgmma"] > 0
            assert made["shared"] <= 113 * 1024  # two programs at once
    assert grouped_plain("sorted", 16, NOT, 1, "fp8e4nv")["wgmma"] > 0
    assert route(4, 4, 1, shared=2) > 0
    assert route(16, 64, 1, shared=1) > 0
    assert route(16, 64, 2, shared=2) > 0
    print(json.dumps(results))


if __name__ == "__main__":
    main()
