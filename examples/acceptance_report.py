"""How well a drafter guesses, offline: the report of the field.

python examples/acceptance_report.py --model demo --drafter demo/draft -k 4 --num-prompts 16
"""

import argparse
import json
from pathlib import Path

from slipstream import LLM, SamplingParams
from slipstream.bench.datasets import DATASETS, read_dataset, take
from slipstream.bench.workload import Workload, run_offline


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--drafter", default="demo/draft", help="a checkpoint, ngram or suffix")
    parser.add_argument("-k", "--num-speculative-tokens", type=int, default=4)
    parser.add_argument("--speculative-config", type=json.loads, help="all of it as JSON instead")
    parser.add_argument("--dataset", default="demo", choices=[*DATASETS[:-1]])
    parser.add_argument("--dataset-path", type=Path, help="question.jsonl of MT-Bench, say")
    parser.add_argument("--num-prompts", type=int, default=80)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0)
    arguments = parser.parse_args()

    named = "method" if arguments.drafter in ("ngram", "suffix") else "model"
    drafter = arguments.speculative_config or {
        named: arguments.drafter,
        "num_speculative_tokens": arguments.num_speculative_tokens,
    }
    llm = LLM(arguments.model, speculative_config=drafter)
    prompts = take(read_dataset(arguments.dataset, arguments.dataset_path), arguments.num_prompts)
    params = SamplingParams(temperature=arguments.temperature, max_tokens=arguments.max_tokens)
    counts = run_offline(llm, Workload(prompts, params)).speculation

    print("-" * 50)
    print(f"num_drafts: {counts.num_drafts}")
    print(f"num_draft_tokens: {counts.num_draft_tokens}")
    print(f"num_accepted_tokens: {counts.num_accepted_tokens}")
    print(f"mean acceptance length: {counts.acceptance_length:.2f}")
    print("-" * 50)
    for position, share in enumerate(counts.acceptance_per_position):
        print(f"acceptance at token {position}: {share:.2f}")


if __name__ == "__main__":
    main()
