"""Products of packed weights on the CPU: the C++ kernels alone, by format and number of rows.

    python -m benchmarks.cpu_products [--formats Q4_1,bf16] [--rows 1,5,8,512] [--shape 4096x2048]
        [--megabytes 128] [--level avx2] [--json FILE]

Several copies of a weight, --megabytes together, are multiplied in turns, so that they come from
memory as in decoding; few megabytes show what the cores can do. One thread, the least processor
time of --repeats passes: what other programs do shows less in it than on a clock. Rows are bf16.
"""

import argparse
import importlib
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

cpp: Any = importlib.import_module("_slipstream_cpu")

_BLOCK_BYTES = {
    "Q4_0": 18,
    "Q4_1": 20,
    "Q8_0": 34,
    "Q4_K": 144,
    "Q6_K": 210,
}  # of 32 or 256 numbers


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each format, and write all figures where asked to."""
    given = _arguments(arguments)
    cpp.set_num_threads(1)
    if given.level is not None:
        cpp.set_level(given.level)
    print(f"{cpp.level()}; us a product, giga products of numbers a second")
    found = {}
    for name in given.formats:
        found[name] = _timed(partial(_packed, name, *given.shape), given)
        parts = [
            f"{rows:4} rows {us:9.1f} {gigas:5.1f}" for rows, (us, gigas) in found[name].items()
        ]
        print(f"{name:9} " + " | ".join(parts), flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps({"level": cpp.level(), "formats": found}, indent=1))


def _timed(pack: Callable[[], Any], given: argparse.Namespace) -> dict[int, tuple[float, float]]:
    copies = [pack()]
    copies += [pack() for _ in range(given.megabytes * 10**6 // copies[0].nbytes)]
    num_rows, columns = given.shape
    found = {}
    for rows in given.rows:
        x = torch.randn(rows, columns).bfloat16()
        out = torch.empty(rows, num_rows, dtype=torch.bfloat16)
        least = min(_pass(copies, x, out) for _ in range(given.repeats))
        found[rows] = (least * 1e6, rows * columns * num_rows / least / 1e9)
    return found


def _pass(copies: Sequence[Any], x: torch.Tensor, out: torch.Tensor) -> float:
    """Seconds of processor time for each copy."""
    began = time.process_time()
    for weight in copies:
        cpp.matmul(weight, x, None, out)
    return (time.process_time() - began) / len(copies)


def _packed(name: str, rows: int, columns: int) -> Any:
    if name == "bf16":
        return cpp.pack(torch.randn(rows, columns).bfloat16())
    if name == "int8":
        return cpp.round_to_int8(torch.randn(rows, columns), False)
    if name == "int4":
        return cpp.round_to_int4(torch.randn(rows, columns), 32, True)
    numbers = 256 if name.endswith("K") else 32
    blocks = torch.randint(256, (rows, columns // numbers, _BLOCK_BYTES[name]), dtype=torch.uint8)
    scale = torch.tensor([0.01, 0.01], dtype=torch.float16).view(torch.uint8)
    blocks[..., :4] = scale  # scale and minimum stand first, the scale of Q6_K last
    blocks[..., -2:] = scale[:2]
    return cpp.pack_blocks([blocks.flatten(1)], [name])


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    cli = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    formats = ["Q4_1", "Q4_0", "Q4_K", "Q6_K", "Q8_0", "int4", "int8", "bf16"]
    cli.add_argument("--formats", type=lambda text: text.split(","), default=formats)
    cli.add_argument("--rows", type=_numbers, default=[1, 5, 8, 512])
    cli.add_argument(
        "--shape", type=lambda text: [int(it) for it in text.split("x")], default=[4096, 2048]
    )
    cli.add_argument("--megabytes", type=int, default=128)
    cli.add_argument("--repeats", type=int, default=5)
    cli.add_argument("--level", help="of instructions; by default the best of the machine")
    cli.add_argument("--json", type=Path, help="a file for all figures")
    return cli.parse_args(arguments)


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


if __name__ == "__main__":
    main()
