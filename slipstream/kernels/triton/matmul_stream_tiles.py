"""How the matmul by tiles that the copy engine brings is cut.

For up to 64 rows the splits of the sum, which bits depend on, come from `matmul_tiles.py`; with
more rows they are free.
"""

import triton

from slipstream.kernels.triton.matmul_tiles import MULTIPROCESSORS, Plan, Stream

STEP = 128  # columns: every part is a multiple of it, and no tile is deeper
MEMORY = 221 * 1024  # bytes of a multiprocessor, for tiles on their way


def few_rows(width: int, rows: int, splits: int) -> Stream:
    """Of `width` rows of weights for up to 64 rows of x."""
    height = max(8, triton.next_power_of_2(rows))
    programs = triton.cdiv(width, 64) * splits
    together = 1 if programs <= 1.3 * MULTIPROCESSORS else 2
    return Stream(height, stages=_stages(64 + height, STEP, together))


def many_rows(width: int, depth: int, rows: int, splitting: bool) -> Plan | None:
    """For more rows of x; None where the library is faster."""
    return None


def _stages(lines: int, depth: int, together: int) -> int:
    """As many tiles as a multiprocessor holds for so many programs at once."""
    return min(768 // depth, MEMORY // together // (lines * depth * 2))
