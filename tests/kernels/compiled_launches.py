"""Compiles what layers launch, for a card with little shared memory; prints the bytes, as JSON.

    python -m tests.kernels.compiled_launches 86 99 few

`86`: the card's compute capability, times 10; `99`: KiB of shared memory that a program may have.
Run without TRITON_INTERPRET; needs no GPU: a launch is compiled and does not run.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from slipstream.kernels.formats.dense import DenseMatrix
from slipstream.kernels.norm import Activation, Norm
from slipstream.kernels.triton import TRITON, launch
from tests.kernels.batches import Requests, Shape
from tests.kernels.latents import LatentShape, drawn
from tests.kernels.test_shared_attention import with_shared
from tests.kernels.test_triton_attention import case
from tests.kernels.test_triton_attention import run as attend
from tests.kernels.test_triton_latent import run as attend_to_latents

HALF = torch.bfloat16
NAMES = {HALF: "bf16", torch.float32: "fp32", torch.int64: "i64", torch.int32: "i32"}
OPTIONS = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion")
MIXED = Requests([0, 300, 127], [40, 5, 1])  # a prompt, a verified draft, a decoded token


def linear(rows: int, width: int, depth: int, gated: bool = False) -> None:
    x, weight = torch.zeros(rows, depth, dtype=HALF), torch.zeros(width, depth, dtype=HALF)
    if gated:
        norm = Norm(torch.ones(depth, dtype=HALF), 1e-5)
        TRITON.norm_gated_linear(x, None, norm, DenseMatrix(weight), None, Activation.SILU)
    else:
        TRITON.linear(x, DenseMatrix(weight), None)


def layers(many: bool) -> None:
    """Launch the kernels of layers of real sizes, fewer or all."""
    linear(1, 4096, 4096)
    linear(64, 4096, 12288)
    attend(with_shared(case(Shape(32, 8, 128, 16), MIXED, HALF), (1, 2), 112))
    if not many:
        return
    for rows in (5, 40):
        for width, depth in ((6144, 4096), (5120, 25600), (1024, 2048)):
            linear(rows, width, depth)
            linear(rows, width, depth, gated=True)
    for groups, head_dim in ((1, 64), (16, 128), (4, 256), (8, 512)):
        attend(with_shared(case(Shape(2 * groups, 2, head_dim, 16), MIXED, HALF), (1, 2), 112))
    attend_to_latents(drawn(LatentShape(20, 512, 192, 64, 256, 16, HALF), MIXED))


def compiled(kernel: JITFunction[Any], capability: int) -> Callable[..., tuple[str, int]]:
    """What compiles a launch instead -> (the kernel's name, bytes of shared memory)."""

    def compile_launch(*args: Any, **options: Any) -> tuple[str, int]:
        given = dict(zip(kernel.arg_names, args, strict=False)) | options
        signature, constants, attributes = {}, {}, {}
        for index, parameter in enumerate(kernel.params):
            value = given.get(parameter.name)
            signature[parameter.name] = kind = _kind(value, parameter.is_constexpr)
            if kind == "constexpr":
                constants[(index,)] = value
            elif isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0):
                attributes[(index,)] = [["tt.divisibility", 16]]
        source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
        chosen = {name: options[name] for name in OPTIONS if name in options}
        target = GPUTarget("cuda", capability, 32)
        result = triton.compile(source, target=target, options=chosen)
        return kernel.fn.__name__, result.metadata.shared

    return compile_launch


def _kind(value: Any, is_constant: bool) -> str:
    if is_constant or value is None or value is True or value is False:
        return "constexpr"
    if isinstance(value, Tensor):
        return f"*{NAMES[value.dtype]}"
    return "fp32" if isinstance(value, float) else "i32"


def main(capability: int, kibibytes: int, which: str) -> None:
    found: set[tuple[str, int]] = set()

    def launched(kernel: JITFunction[Any], grid: Any) -> Callable[..., None]:
        del grid
        return lambda *args, **options: found.add(compiled(kernel, capability)(*args, **options))

    launch.MOST_SHARED_MEMORY = kibibytes * 1024
    JITFunction.__getitem__ = launched
    layers(which == "many")
    print(json.dumps(sorted(found)))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
