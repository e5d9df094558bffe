"""What adapters cost a decode step on this machine.

    python -m benchmarks.write_twins OUT --geometry qwen3-0.6b
    python -m benchmarks.adapter_cost OUT/target [--dtype bfloat16] [--batches 1 8] [--rounds 5]

Random adapters of --rank for all projections of attention and feed-forward layers. In turns, in one
process: an engine without adapters, and one with them, asked for none, for one by all requests, and
for another one by each. A step's time is the difference of a long and a short run, by its number of
steps; ratios are to the engine without adapters, medians over --rounds. The last line is one JSON
document.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from slipstream import LLM, LoRARequest, SamplingParams
from slipstream.engine.prompts import TokensPrompt
from tests.adapters import write_adapter

SHORT, LONG, PROMPT = 4, 36, 16  # tokens


def milliseconds(llm: LLM, adapters: list[LoRARequest | None]) -> float:
    """A decode step of one request for each adapter; None: of the model as it is."""
    seconds = []
    for count in (SHORT, LONG):
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        prompts = [
            TokensPrompt(prompt_token_ids=[*range(place, place + PROMPT)])
            for place in range(len(adapters))
        ]
        began = perf_counter()
        llm.generate(prompts, params, lora_request=adapters)
        seconds.append(perf_counter() - began)
    return 1e3 * (seconds[1] - seconds[0]) / (LONG - SHORT)


Case = tuple[LLM, list[LoRARequest | None]]


def cases(plain: LLM, adapted: LLM, adapters: list[LoRARequest], batch: int) -> dict[str, Case]:
    """Engines and what each request of a batch asks for."""
    return {
        "without adapters": (plain, [None] * batch),
        "none asked for": (adapted, [None] * batch),
        "one": (adapted, [adapters[0]] * batch),
        "one each": (adapted, [*adapters[:batch]]),
    }


def in_turns(asked: dict[str, Case], rounds: int) -> dict[str, tuple[float, float]]:
    """Milliseconds of a step and their ratio to the first case's, medians."""
    found: dict[str, list[float]] = {name: [] for name in asked}
    for turn in range(rounds + 1):
        for name, case in asked.items():
            took = milliseconds(*case)
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
    """So many random adapters."""
    return [
        LoRARequest(
            f"adapter {number}",
            number,
            write_adapter(folder / str(number), target, seed=number, rank=rank, size=0.1),
        )
        for number in range(1, count + 1)
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args(arguments)
    most = max(given.batches)
    options: dict[str, Any] = {"dtype": given.dtype, "max_num_seqs": most, "max_model_len": 64}
    options |= {"skip_tokenizer_init": True, "enable_prefix_caching": False}
    slots = {"enable_lora": True, "max_loras": most, "max_lora_rank": given.rank}
    with tempfile.TemporaryDirectory() as folder:
        adapters = write(Path(folder), given.target, given.rank, most)
        engines = LLM(str(given.target), **options), LLM(str(given.target), **options, **slots)
        report = {}
        for batch in given.batches:
            found = in_turns(cases(*engines, adapters, batch), given.rounds)
            for name, (took, ratio) in found.items():
                report[f"batch {batch}, {name}"] = took, ratio
                print(f"batch {batch}, {name}: {took:.2f} ms, {ratio:.3f} times", flush=True)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
