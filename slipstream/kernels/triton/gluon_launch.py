"""`launch.py` for kernels in Gluon, whose language has no words for it."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


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
