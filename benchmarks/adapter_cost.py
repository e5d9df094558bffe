"""What adapters cost a decode step on this machine.

    python -m benchmarks.write_twins OUT --geometry qwen3-0.6b
    python -m benchmarks.adapter_cost OUT/target [--batches 1 8] [--rounds 5] [--steps 128]
    python -m benchmarks.adapter_cost qwen3-8b --batches 1 32 --adapters 8  # random weights

Random adapters of --rank for all projections of attention and feed-forward layers. In turns, in one
process: an engine without adapters, and one with them, asked for none, for one by all requests, and
for --adapters of them by turns. A step's time is the difference of a long and a short run, by its
number of steps; ratios are to the engine without adapters, medians over --rounds. The last line is
one JSON document.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.geometries import write_config
from slipstream import LLM, LoRARequest, SamplingParams
from slipstream.engine.prompts import TokensPrompt

SHORT, PROMPT = 4, 16  # tokens


def milliseconds(llm: LLM, adapters: list[LoRARequest | None], steps: int) -> float:
    """A decode step of one request for each adapter; None: of the model as it is."""
    seconds = []
    for count in (SHORT, SHORT + steps):
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        prompts = [
            TokensPrompt(prompt_token_ids=[*range(place, place + PROMPT)])
            for place in range(len(adapters))
        ]
        began = perf_counter()
        llm.generate(prompts, params, lora_request=adapters)
        seconds.append(perf_counter() - began)
    return 1e3 * (seconds[1] - seconds[0]) / steps


Case = tuple[LLM, list[LoRARequest | None]]


def cases(plain: LLM, adapted: LLM, adapters: list[LoRARequest], batch: int) -> dict[str, Case]:
    """Engines and what each request of a batch asks for."""
    return {
        "without adapters": (plain, [None] * batch),
        "none asked for": (adapted, [None] * batch),
        "one": (adapted, [adapters[0]] * batch),
        f"{min(batch, len(adapters))}": (
            adapted,
            [adapters[place % len(adapters)] for place in range(batch)],
        ),
    }


def in_turns(asked: dict[str, Case], rounds: int, steps: int) -> dict[str, tuple[float, float]]:
    """Milliseconds of a step and their ratio to the first case's, medians."""
    found: dict[str, list[float]] = {name: [] for name in asked}
    for turn in range(rounds + 1):
        for name, case in asked.items():
            took = milliseconds(*case, steps)
            if turn:  # the first loads adapters and warms up
                found[name].append(took)
    first = next(iter(found.values()))
    return {
        name: (
            statistics.median(times),
            statistics.median(a / b for a, b in zip(times, first, strict=True)),
        )
        for name, times in found.items()
    }


def write(folder: Path, target: Path, rank: int, count: int) -> list[LoRARequest]:
    """Random adapters of all projections of a dense model with Llama's names of tensors."""
    config = json.loads((target / "config.json").read_text())
    generator = torch.Generator().manual_seed(0)
    requests = []
    for number in range(1, count + 1):
        tensors = {}
        for name, (rows, columns) in projections(config).items():
            down = torch.randn(rank, columns, generator=generator) / columns**0.5
            up = torch.randn(rows, rank, generator=generator) * 0.1 / rank**0.5
            module = f"base_model.model.{name}"
            tensors[f"{module}.lora_A.weight"] = down.bfloat16()
            tensors[f"{module}.lora_B.weight"] = up.bfloat16()
        path = folder / str(number)
        path.mkdir()
        save_file(tensors, path / "adapter_model.safetensors")
        modules = sorted({name.rpartition(".")[2] for name in projections(config)})
        described = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules}
        (path / "adapter_config.json").write_text(json.dumps(described))
        requests.append(LoRARequest(f"adapter {number}", number, str(path)))
    return requests


def projections(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Rows and columns of each module."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or width // heads
    queries, keys = heads * head_dim, config["num_key_value_heads"] * head_dim
    attention = {"q": (queries, width), "k": (keys, width), "v": (keys, width)}
    attention["o"] = width, queries
    mlp = {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}
    found = {}
    for layer in range(config["num_hidden_layers"]):
        for part, shapes in (("self_attn", attention), ("mlp", mlp)):
            for name, shape in shapes.items():
                found[f"model.layers.{layer}.{part}.{name}_proj"] = shape
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("target", help="a directory, or the name of a geometry")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=128, help="that a long run has more")
    given = parser.parse_args(arguments)
    most = max(given.batches)
    options: dict[str, Any] = {
        "dtype": given.dtype,
        "max_num_seqs": most,
        "max_model_len": 64 + given.steps,
    }
    options |= {"skip_tokenizer_init": True, "enable_prefix_caching": False}
    slots = {"enable_lora": True, "max_loras": given.adapters, "max_lora_rank": given.rank}
    with tempfile.TemporaryDirectory() as folder:
        target = Path(given.target)
        if not target.exists():
            target = write_config(Path(folder, "target"), given.target)
            options |= {"load_format": "dummy", "num_kv_blocks": (6 + given.steps // 16) * most}
        adapters = write(Path(folder), target, given.rank, given.adapters)
        engines = LLM(str(target), **options), LLM(str(target), **options, **slots)
        report = {}
        for batch in given.batches:
            found = in_turns(cases(*engines, adapters, batch), given.rounds, given.steps)
            for name, (took, ratio) in found.items():
                report[f"batch {batch}, {name}"] = took, ratio
                print(f"batch {batch}, {name}: {took:.3f} ms, {ratio:.3f} times", flush=True)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
