"""Compiles many kernels at once, in threads: one after the other takes minutes."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from triton.runtime import driver
from triton.runtime.jit import JITFunction


@contextmanager
def compiling_together() -> Iterator[None]:
    """Within it kernels that are not compiled yet are not launched; they are compiled at its end.

    Most of a compiler's time is spent in LLVM and ptxas, which run without Python's lock.
    """
    compile_now = JITFunction._do_compile
    found = {}

    def compile_one(kernel, *arguments):
        compiled = compile_now(kernel, *arguments)
        # Some versions of Triton have a C compiler build what launches it, and keep that on disk.
        driver.active.launcher_cls(compiled.src, compiled.metadata)

    def compile_later(kernel, key, *arguments):
        found[id(kernel), key] = kernel, arguments
        # Triton launches nothing if this returns None.

    JITFunction._do_compile = compile_later
    try:
        yield
    finally:
        JITFunction._do_compile = compile_now
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        compiled = [
            threads.submit(compile_one, kernel, key, *arguments)
            for (_, key), (kernel, arguments) in found.items()
        ]
        for each in compiled:
            each.result()
