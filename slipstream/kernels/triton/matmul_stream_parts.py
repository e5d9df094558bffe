"""Functions that `matmul_stream_kernels.py` and `adapters_stream.py` share."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Triton 3.6 has the second names, later versions the first.
_fetch = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


# As in `launch.py`. Gluon has no functions for dependent launch, so this is inline PTX.
@gluon.jit
def launch_dependents(pdl: gl.constexpr):
    if pdl:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; mov.u32 $0, 0;",
            "=r", [], dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@gluon.jit
def wait_for_inputs(pdl: gl.constexpr):
    if pdl:
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.u32 $0, 0;",
            "=r", [], dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@gluon.jit
def _fetch_rows(x, more_x, m0, k, barrier, ring_x, ring_y, slot, wanted):
    _fetch(x, [m0, k], barrier, ring_x.index(slot), wanted)
    if more_x is not None:
        _fetch(more_x, [m0 + x.block_shape[0], k], barrier, ring_y.index(slot), wanted)


@gluon.jit
def _zeros(
    count: gl.constexpr, high: gl.constexpr, width: gl.constexpr, warps: gl.constexpr,
    size: gl.constexpr = 2,
):  # fmt: skip
    """`count` sums [high, width] of products of numbers of `size` bytes."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, width, 32 // size]
    )
    sums = ()
    for _ in gl.static_range(count):
        sums += (gl.zeros([high, width], gl.float32, layout),)  # type: ignore[assignment]
    return sums


@gluon.jit
def _zeros_like(sums):
    layout: gl.constexpr = sums.type.layout
    return gl.zeros(sums.shape, gl.float32, layout)


@gluon.jit
def _step(ring, slot, ring_x, ring_y, sums, blocks: gl.constexpr):
    """Start the next step of every chain, and wait until the previous steps are done.

    The tensor cores keep only about 14 bits of a sum of e4m3, so each step of these has a sum of
    its own, which is added in float32.
    """
    chains: gl.constexpr = len(sums)
    float8: gl.constexpr = ring.dtype.primitive_bitwidth == 8
    begun = ()
    for chain in gl.static_range(chains):
        tile_x = ring_x.index(slot) if chain < blocks else ring_y.index(slot)
        weights = ring.index(slot * blocks + chain % blocks)
        start = _zeros_like(sums[chain]) if float8 else sums[chain]
        stepped = warpgroup_mma(weights, tile_x.permute((1, 0)), start, is_async=True)
        begun += (stepped,)  # type: ignore[assignment]
    if float8:
        total = ()
        done = _settled(begun, 0)
        for chain in gl.static_range(chains):
            total += (sums[chain] + done[chain],)  # type: ignore[assignment]
    else:
        total = _settled(begun, chains)
    return total


@gluon.jit
def _settled(sums, begun: gl.constexpr):
    """Wait until at most the last `begun` steps are still running; returns the sums."""
    done = warpgroup_mma_wait(num_outstanding=begun, deps=sums)
    return (done,) if len(sums) == 1 else done
