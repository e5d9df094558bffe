"""Compiles the kernels that no interpreter has for an H200; prints what each takes, as JSON.

Run as a program, without TRITON_INTERPRET; needs no GPU.
"""

import itertools
import json
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from slipstream.kernels.triton.matmul_resident_kernels import resident_kernel
from slipstream.kernels.triton.matmul_stream_kernels import SWIZZLED, stream_kernel
from slipstream.kernels.triton.matmul_tiles import LANES, RESIDENT, RESIDENT_PART, Stream

H200 = GPUTarget("cuda", 90, 32)
ALIGNED = [["tt.divisibility", 16]]
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def stream(tiles: Stream, dtype: torch.dtype, out: torch.dtype, gated: bool, biased: bool) -> Any:
    """`matmul_stream.py`'s launch."""

    def described(rows: int) -> str:
        return f"tensordesc<{NAMES[dtype]}[{rows}, {tiles.depth}],{SWIZZLED.value}>"

    types = {
        "x": described(tiles.rows),
        "more_x": described(tiles.more) if tiles.more else None,
        "weight": described(tiles.high // 2 if gated else tiles.high),
        "weight_at": f"*{NAMES[dtype]}",
        "bias": f"*{NAMES[dtype]}" if biased else None,
        "out": f"*{NAMES[out]}",
    } | dict.fromkeys(("rows", "width", "depth", "part"), "i32")
    constants = {
        "gated": gated,
        "blocks": tiles.blocks,
        "high": tiles.high,
        "stages": tiles.stages,
        "ahead": tiles.ahead,
        "pdl": True,
        "warps": tiles.warps,
    }
    return compiled(stream_kernel, types, constants, tiles.warps)


def resident(shape: tuple[int, int], rows: int, gated: bool) -> Any:
    """`matmul.py`'s launch."""
    tiles = next(tier for tier in RESIDENT[shape] if rows <= tier.rows)
    types = dict.fromkeys(("x", "weight", "out"), "*bf16")
    types |= dict.fromkeys(("row_stride", "rows", "width"), "i32")
    types |= dict.fromkeys(("x_scales", "weight_scales", "bias"))
    constants = {
        "depth": shape[1],
        "part": RESIDENT_PART,
        "gated": gated,
        "block_m": tiles.rows,
        "block_n": tiles.width,
        "lanes": LANES,
        "row_warps": tiles.row_warps,
        "pdl": True,
    }
    return compiled(resident_kernel, types, constants, LANES * tiles.row_warps)


def compiled(
    kernel: Any, types: dict[str, str | None], constants: dict[str, Any], warps: int
) -> dict[str, Any]:
    """Shared memory in bytes, and how often each matrix instruction stands in the program."""
    names = kernel.arg_names
    signature = {name: types.get(name) or "constexpr" for name in names}
    given = {(index,): constants.get(name) for index, name in enumerate(names)}
    constexprs = {at: value for at, value in given.items() if signature[names[at[0]]] == "constexpr"}
    attributes = {
        (index,): ALIGNED
        for index, name in enumerate(names)
        if signature[name].startswith("*") or name in ("width", "row_stride", "depth", "part")
        if signature[name] != "constexpr"
    }
    source = GluonASTSource(kernel, signature, constexprs=constexprs, attrs=attributes)
    options = {"num_warps": warps, "launch_pdl": True, "enable_fp_fusion": False}
    result = triton.compile(source, target=H200, options=options)
    program = result.asm["ptx"]
    return {
        "shared": result.metadata.shared,
        "wgmma": program.count("wgmma.mma_async"),
        "mma": program.count("mma.sync.aligned"),
        "machine_code": len(result.asm["cubin"]),
    }


def main() -> None:
    half, whole = torch.bfloat16, torch.float32
    results = [
        stream(Stream(8, stages=6), torch.float16, whole, gated=False, biased=True),
        stream(Stream(32, stages=4, ahead=512), half, half, gated=True, biased=True),
        stream(Stream(64, stages=6), half, whole, gated=False, biased=False),
        stream(Stream(128, 16, 2, 64, 64, 3), half, half, gated=True, biased=False),
        stream(Stream(128, 0, 1, 128, 128, 3), half, half, gated=False, biased=True),
    ]
    for gated, rows in itertools.product((False, True), (8, 16)):
        results.append(resident((6144, 1024) if gated else (4096, 1024), rows, gated))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
