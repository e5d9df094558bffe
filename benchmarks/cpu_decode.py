"""Plain decoding and start-up on the CPU, side by side with transformers.

    python -m benchmarks.cpu_decode [--geometry qwen3-0.6b] [--threads 2]

Writes a checkpoint of the geometry with random weights to a temporary folder, runs each engine in
a process of its own (weights in the file cache, nothing else running, please), and prints

    ready       from the start of the process until the first request could be sent
    ms a token  (time for 72 tokens - time for 8 tokens) / 64, median of --repeats, greedy
    peak        the process's largest resident set, and what it is above weights and KV budget

and the ratio of the two engines' times. The last line of the output is one JSON document.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.geometries import GEOMETRIES, write_checkpoint

PROMPT_TOKENS = 128
SHORT, LONG = 8, 72
KV_BYTES = 256 << 20


def main() -> None:
    options = _arguments()
    if options.engine:
        print(json.dumps(_measure(options)))
        return
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_checkpoint(Path(folder) / "model", options.geometry)
        rows = {
            name: _in_process(name, checkpoint, options) for name in ("slipstream", "transformers")
        }
    for name, row in rows.items():
        print(
            f"{name:13} ready {row['ready_s']:5.2f} s   {row['ms_per_token']:6.1f} ms a token   "
            f"peak {row['peak_mb']:.0f} MB, {row['above_mb']:.0f} above weights and KV budget"
        )
    ratio = rows["transformers"]["ms_per_token"] / rows["slipstream"]["ms_per_token"]
    print(f"plain decoding is {ratio:.2f} times as fast as transformers'")
    print(json.dumps({"geometry": options.geometry, "threads": options.threads, **rows}))


def _in_process(name: str, checkpoint: Path, options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.cpu_decode", "--engine", name]
    command += ["--checkpoint", str(checkpoint), "--started", str(time.time())]
    command += ["--threads", str(options.threads), "--repeats", str(options.repeats)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    row: dict[str, Any] = json.loads(output.splitlines()[-1])
    return row


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    torch.set_num_threads(options.threads)
    make = _slipstream if options.engine == "slipstream" else _transformers
    generate = make(options.checkpoint)
    ready = time.time() - options.started
    generate(SHORT)
    per_token = []
    for _ in range(options.repeats):
        short, long = _seconds(generate, SHORT), _seconds(generate, LONG)
        per_token.append((long - short) / (LONG - SHORT) * 1e3)
    weights = (Path(options.checkpoint) / "model.safetensors").stat().st_size
    peak = _peak_bytes()
    return {
        "ready_s": round(ready, 2),
        "ms_per_token": round(statistics.median(per_token), 2),
        "peak_mb": round(peak / 1e6),
        "above_mb": round((peak - weights - KV_BYTES) / 1e6),
    }


def _slipstream(checkpoint: str) -> Callable[[int], None]:
    from slipstream import LLM, SamplingParams
    from slipstream.engine.prompts import TokensPrompt

    llm = LLM(
        checkpoint,
        skip_tokenizer_init=True,
        kv_cache_memory=KV_BYTES,
        max_model_len=1024,
        enable_prefix_caching=False,
    )
    prompt = TokensPrompt(prompt_token_ids=list(range(100, 100 + PROMPT_TOKENS)))

    def generate(count: int) -> None:
        llm.generate(prompt, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))

    return generate


def _transformers(checkpoint: str) -> Callable[[int], None]:
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    ids = torch.arange(100, 100 + PROMPT_TOKENS).unsqueeze(0)

    def generate(count: int) -> None:
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=count,
                min_new_tokens=count,
                pad_token_id=0,
            )

    return generate


def _seconds(generate: Callable[[int], None], count: int) -> float:
    began = time.perf_counter()
    generate(count)
    return time.perf_counter() - began


def _peak_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmHWM in /proc/self/status")


def _arguments() -> argparse.Namespace:
    cli = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cli.add_argument("--geometry", choices=GEOMETRIES, default="qwen3-0.6b")
    cli.add_argument("--threads", type=int, default=2)
    cli.add_argument("--repeats", type=int, default=3)
    for internal in ("--engine", "--checkpoint"):
        cli.add_argument(internal, default="", help=argparse.SUPPRESS)
    cli.add_argument("--started", type=float, default=0.0, help=argparse.SUPPRESS)
    return cli.parse_args()


if __name__ == "__main__":
    main()
