"""How long a match has to be before its guess beats the demo draft's.

    python -m benchmarks.combination_match [--prompts 32] [--dtype float32]

Runs the held-out prompts greedily with the draft alone and after n-gram and suffix drafting for
several `min_match`, and prints tokens per step (the prompt's step included) and tokens per second.
"""

import argparse
import json
import time
from typing import Any

from benchmarks.demo_acceptance import HELD_OUT
from slipstream import LLM, SamplingParams

DRAFT: dict[str, Any] = {"model": "demo/draft", "num_speculative_tokens": 4}
MATCHES = (2, 4, 6, 8, 12)


def main() -> None:
    cli = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cli.add_argument("--prompts", type=int, default=32)
    cli.add_argument("--dtype", default="float32")
    options = cli.parse_args()
    entries = [json.loads(line) for line in HELD_OUT.read_text().splitlines()]
    prompts = [entry["prompt"] for entry in entries if "prompt" in entry][: options.prompts]
    show("demo/draft", DRAFT, prompts, options.dtype)
    for method in ("ngram", "suffix"):
        for count in (4, 8):
            for match in MATCHES:
                first = {"method": method, "min_match": match, "num_speculative_tokens": count}
                name = f"{method}, {match} tokens match, {count} guessed"
                show(name, [first, DRAFT], prompts, options.dtype)


def show(name: str, config: Any, prompts: list[str], dtype: str) -> None:
    llm = LLM("demo", speculative_config=config, dtype=dtype, max_num_seqs=8)
    began = time.perf_counter()
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=128))
    seconds = time.perf_counter() - began
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    steps = sum(output.metrics.num_steps for output in outputs)
    print(f"{name:40} {tokens / steps:.2f} tokens a step, {tokens / seconds:.0f} tokens/s")


if __name__ == "__main__":
    main()
