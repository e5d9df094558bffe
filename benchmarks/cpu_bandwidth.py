"""The rate at which this machine reads memory: the limit of decoding on a CPU.

    python -m benchmarks.cpu_bandwidth [--threads 2] [--gigabytes 1]

Reads a buffer far larger than the caches, by the C++ kernels where they are built and by sums of
torch elsewhere; prints the best of several passes in GB/s as JSON.
"""

import argparse
import importlib
import json
import subprocess
import sys
from time import perf_counter
from typing import Any

_PASSES = 7


def measured_apart(threads: int, gigabytes: float = 1.0) -> tuple[float, str]:
    """Bytes a second, and what read them: in a process of its own, so that its buffer is gone."""
    command = [sys.executable, "-m", "benchmarks.cpu_bandwidth", "--threads", str(threads)]
    command += ["--gigabytes", str(gigabytes)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    answer = json.loads(output)
    return answer["gb_per_s"] * 1e9, answer["by"]


def measure(num_bytes: int, threads: int) -> tuple[float, str]:
    """The best rate of several passes, in bytes a second, and what read."""
    kernels: Any
    try:
        kernels = importlib.import_module("_slipstream_cpu")
    except ImportError:
        kernels = None
    if kernels is None:
        return _by_sums(num_bytes, threads), "torch"
    kernels.set_num_threads(threads)
    return float(kernels.read_bandwidth(num_bytes, _PASSES)), "C++"


def _by_sums(num_bytes: int, threads: int) -> float:
    import torch

    torch.set_num_threads(threads)
    buffer = torch.ones(num_bytes // 4)
    times = []
    for _ in range(_PASSES):
        began = perf_counter()
        buffer.sum()
        times.append(perf_counter() - began)
    return buffer.nbytes / min(times)


def main() -> None:
    cli = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cli.add_argument("--threads", type=int, default=2)
    cli.add_argument("--gigabytes", type=float, default=1.0)
    given = cli.parse_args()
    rate, by = measure(int(given.gigabytes * 1e9), given.threads)
    print(json.dumps({"gb_per_s": round(rate / 1e9, 2), "by": by, "threads": given.threads}))


if __name__ == "__main__":
    main()
