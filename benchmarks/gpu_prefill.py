"""Reading a long prompt, as a share of what the GPU can multiply; and how long a start takes.

    python -m benchmarks.gpu_prefill                      # 8,192 tokens, geometry of Qwen3-8B
    python -m benchmarks.gpu_prefill --startup            # Qwen3-8B with a Qwen3-0.6B draft, K = 4

Weights are random. Time to first token is the wall time of `LLM.generate` for one output token:
the whole prompt in one step, no prefix cache; median of --repeat runs after one that compiles.

    FLOPs  two for each multiplication: the matrices of all layers for every token, of experts those
           that it passes, scores and values of causal attention (half of the square, or what
           windows let a row see), and one row of the head
    peak   of a product of two square bf16 matrices in the same process, median (on a CPU of small
           ones)

A start is the time until `LLM(...)` returns, graphs captured, with the engine's default sizes. Each
is shown with the time of the first request after it, which may compile what only prompts need:
    cold     a fresh process, with an empty folder for compiled kernels
    second   the same again in that process, the first engine gone
    warm     another fresh process that finds the folder filled
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from benchmarks.decode_timing import release
from benchmarks.geometries import geometry_named, write_config
from slipstream import LLM, SamplingParams
from slipstream.models.catalogue import read_decoder_config

LOAD_FORMAT = "twin"  # whose rows choose different experts
FIRST_TOKEN = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
BLOCK_SIZE = 16
PEAK_SIZE, PEAK_REPEATS = 8192, 30
START_RESULT = "start: "


# ---------------------------------------------------------------------- prompts


def prefill_flops(geometry: str, length: int) -> float:
    """The operations of reading a prompt of `length` tokens, up to the logits of the last."""
    config = read_decoder_config(geometry_named(geometry))
    head = config.vocab_size * config.hidden_size
    layers = config.num_active_parameters - head  # those that a token passes
    seen = sum(_seen(length, window) for window in config.sliding_windows)
    attention = 4 * config.num_heads * config.head_dim * seen
    return 2.0 * layers * length + attention + 2.0 * head


def _seen(length: int, window: int | None) -> int:
    """Tokens that all rows of a text see together in a layer."""
    near = min(length, window or length)
    return near * (near + 1) // 2 + (length - near) * near


def time_to_first_token(geometry: str, length: int, repeat: int, options: dict[str, Any]) -> float:
    """Seconds, median."""
    with tempfile.TemporaryDirectory() as folder:
        blocks = -(-(length + 1) // BLOCK_SIZE)
        llm = LLM(
            write_config(Path(folder), geometry),
            load_format=LOAD_FORMAT,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_num_batched_tokens=length,
            max_model_len=length + 1,
            max_num_seqs=1,
            block_size=BLOCK_SIZE,
            num_kv_blocks=blocks,
            **options,
        )
    generator = torch.Generator().manual_seed(0)
    most = geometry_named(geometry)["vocab_size"]
    prompts = torch.randint(1, most, (repeat + 1, length), generator=generator).tolist()
    _, *seconds = [_seconds_to_read(llm, ids) for ids in prompts]  # the first one compiles
    return statistics.median(seconds)


def _seconds_to_read(llm: LLM, prompt: list[int]) -> float:
    before = llm.metrics.num_steps
    began = perf_counter()
    llm.generate({"prompt_token_ids": prompt}, FIRST_TOKEN)
    seconds = perf_counter() - began
    assert llm.metrics.num_steps == before + 1, "the prompt was read in several steps"
    return seconds


def peak_flops(device: str, dtype: torch.dtype) -> float:
    """FLOP/s of a product of two square matrices."""
    size = PEAK_SIZE if device == "cuda" else 512
    left, right = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    timed = _timed_by_events if device == "cuda" else _timed
    for _ in range(3):
        left @ right
    return 2 * size**3 / statistics.median(timed(lambda: left @ right, PEAK_REPEATS))


def _timed_by_events(call: Callable[[], Any], repeat: int) -> list[float]:
    marks: list[Any] = []
    for _ in range(repeat + 1):
        marks.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in pairwise(marks)]


def _timed(call: Callable[[], Any], repeat: int) -> list[float]:
    seconds = []
    for _ in range(repeat):
        began = perf_counter()
        call()
        seconds.append(perf_counter() - began)
    return seconds


def show_prefill(given: argparse.Namespace) -> float:
    """Print the table of one prompt; the share of the peak."""
    device = "cuda" if _on_gpu(given.device) else "cpu"
    options: dict[str, Any] = {"device": device, "dtype": given.dtype}
    if given.quantization:
        options["quantization"] = given.quantization
    peak = peak_flops(device, getattr(torch, given.dtype))
    seconds = time_to_first_token(given.target, given.prompt, given.repeat, options)
    flops = prefill_flops(given.target, given.prompt)
    share = flops / seconds / peak
    print(
        f"{given.target}, prompt of {given.prompt} tokens, {given.dtype}: first token after "
        f"{seconds * 1e3:.1f} ms (median of {given.repeat})\n"
        f"{flops / 1e12:.2f} TFLOP at {flops / seconds / 1e12:.1f} TFLOP/s, {share:.1%} of the "
        f"{peak / 1e12:.1f} TFLOP/s of a matmul in the same run",
        flush=True,
    )
    return share


# ---------------------------------------------------------------------- starts


def show_startup(given: argparse.Namespace) -> list[dict[str, float]]:
    """Print the times of three starts."""
    with tempfile.TemporaryDirectory() as folder:
        first = _starts_in_a_process(given, folder, 2)
        fresh = _starts_in_a_process(given, folder, 1)
    starts = [*first, *fresh]
    print(f"{given.target} + {given.draft}, K={given.num_speculative_tokens}, {given.dtype}")
    print("start     ready s   first request s")
    for name, start in zip(("cold", "second", "warm"), starts, strict=True):
        print(f"{name:8s} {start['ready']:8.1f} {start['first_request']:17.2f}", flush=True)
    return starts


def _starts_in_a_process(
    given: argparse.Namespace, kernels: str, count: int
) -> list[dict[str, float]]:
    """The times of so many starts, one after the other, of a process with that kernel cache."""
    command = [sys.executable, "-m", "benchmarks.gpu_prefill", "--start-here", str(count)]
    for name in ("target", "draft", "num_speculative_tokens", "dtype", "device"):
        command += [f"--{name.replace('_', '-')}", str(getattr(given, name))]
    done = subprocess.run(
        command,
        env={**os.environ, "TRITON_CACHE_DIR": kernels},
        cwd=Path(__file__).parent.parent,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    lines = done.stdout.splitlines()
    return [json.loads(line[len(START_RESULT) :]) for line in lines if START_RESULT in line]


def start_here(given: argparse.Namespace) -> None:
    """Start that many engines in this process; one line of JSON for each."""
    for _ in range(given.start_here):
        print(START_RESULT + json.dumps(_start(given)), flush=True)
        release()


def _start(given: argparse.Namespace) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        target = write_config(Path(folder) / "target", given.target)
        draft = write_config(Path(folder) / "draft", given.draft)
        began = perf_counter()
        llm = LLM(
            target,
            speculative_config={
                "model": str(draft),
                "num_speculative_tokens": given.num_speculative_tokens,
                "rejection_sample_method": "synthetic",
                "synthetic_acceptance_length": 1 + 0.45 * given.num_speculative_tokens,
            },
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype=given.dtype,
            device=given.device,
        )
        ready = perf_counter()
    llm.generate(
        {"prompt_token_ids": list(range(1, 101))},
        SamplingParams(temperature=0, max_tokens=16, ignore_eos=True),
    )
    return {"ready": ready - began, "first_request": perf_counter() - ready}


# ---------------------------------------------------------------------- command line


def main(arguments: Sequence[str] | None = None) -> int:
    """1 when a prompt is read below the least share of the peak that was asked for."""
    given = _parser().parse_args(arguments)
    if given.start_here:
        start_here(given)
        return 0
    if given.startup:
        show_startup(given)
        return 0
    return int(show_prefill(given) < given.least_share)


def _on_gpu(device: str) -> bool:
    return device == "cuda" or (device == "auto" and torch.cuda.is_available())


def _parser() -> argparse.ArgumentParser:
    cli = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cli.add_argument("--target", default="qwen3-8b")
    cli.add_argument("--prompt", type=int, default=8192, help="tokens")
    cli.add_argument("--repeat", type=int, default=5)
    cli.add_argument("--dtype", default="bfloat16")
    cli.add_argument("--quantization", choices=["fp8"])
    cli.add_argument("--least-share", type=float, default=0.0, help="of the peak; less is an error")
    cli.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    cli.add_argument("--startup", action="store_true", help="starts instead of prompts")
    cli.add_argument("--draft", default="qwen3-0.6b", help="of --startup")
    cli.add_argument("--num-speculative-tokens", "-k", type=int, default=4, help="of --startup")
    cli.add_argument("--start-here", type=int, default=0, help=argparse.SUPPRESS)
    return cli


if __name__ == "__main__":
    sys.exit(main())
