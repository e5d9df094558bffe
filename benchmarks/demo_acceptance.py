"""How far the demo draft's guesses get on text that no demo model saw, and that nothing changes.

    python -m benchmarks.demo_acceptance [--dtype bfloat16] [--prompts 80] [-k 4]
    python -m benchmarks.demo_acceptance --windows 64 128 256 0 --prompt-tokens 1024

For every drafter it runs the shipped held-out prompts greedily and at temperature 1, and prints
AL, acceptance per position, tokens/s and the ratio to plain decoding in the same run. Greedy
outputs are compared with plain ones; where one differs, the gap between the two largest logits at
the first difference is printed (in bf16 two tokens can tie). The last line is one JSON document.
With `--windows` it runs the demo's drafters that keep keys and values instead, with each
`draft_window` (0: all tokens); `--prompt-tokens` joins prompts to long ones.

    python -m benchmarks.demo_acceptance --verification rejection,block [--rounds 3]

compares ways of verification instead, at temperature 1 and with every bundled drafter: AL, and the
standard error of AL and of the differences, prompt by prompt.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from slipstream import LLM, RequestOutput, SamplingParams

HELD_OUT = Path(__file__).parent.parent / "slipstream" / "demo" / "prompts" / "held_out.jsonl"
BUNDLED = ("demo/draft", "demo/eagle3", "demo/p-eagle", "demo/mtp", "demo/pard")
WHOLE_DRAFTS = 25  # after the first token, so that AL is not lowered by a last draft cut short


def main() -> None:
    cli = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cli.add_argument("--dtype", default="bfloat16")
    cli.add_argument("--prompts", type=int, default=80)
    cli.add_argument("-k", type=int, default=4)
    cli.add_argument("--batch", type=int, default=8)
    cli.add_argument("--windows", type=int, nargs="+", default=[])
    cli.add_argument("--prompt-tokens", type=int, default=0, help="of joined prompts, at least")
    cli.add_argument("--rounds", type=int, default=1, help="with other seeds")
    cli.add_argument("--verification", help="ways to compare, the first with the others")
    options = cli.parse_args()
    if options.verification is not None:
        _compare(options)
        return
    drafters: dict[str, dict[str, Any]] = {
        "demo/draft": {"model": "demo/draft"},
        "ngram": {"method": "ngram"},
        "suffix": {"method": "suffix"},
        "demo (itself)": {"model": "demo"},
    }
    if options.windows:
        drafters = {
            f"{name} window {window or 'all'}": {"model": name, "draft_window": window or None}
            for name in BUNDLED
            for window in options.windows
        }
    rows = []
    for temperature in (0.0, 1.0):
        plain, plain_rate = _run(None, temperature, options)
        print(f"temperature {temperature:g}: plain {plain_rate:.0f} tokens/s")
        for name, config in drafters.items():
            config = {**config, "num_speculative_tokens": options.k}
            outputs, rate = _run(config, temperature, options)
            row = _row(name, temperature, outputs, rate / plain_rate)
            if temperature == 0:
                row["differing"] = _differences(plain, outputs)
            rows.append(row)
            print(f"  {json.dumps(row)}")
    print(json.dumps({"dtype": options.dtype, "k": options.k, "rows": rows}))


def _compare(options: argparse.Namespace) -> None:
    """AL of each bundled drafter by the way of verification."""
    rows = []
    for name in BUNDLED:
        lengths = {}
        for way in options.verification.split(","):
            config = {"model": name, "num_speculative_tokens": options.k}
            config["rejection_sample_method"] = way
            outputs: list[RequestOutput] = []
            for seed in range(options.rounds):
                outputs += _run(config, 1.0, options, seed)[0]
            lengths[way] = [_acceptance_length([output]) for output in outputs]
        first, *others = lengths
        row: dict[str, Any] = {"drafter": name, "prompts": len(lengths[first])}
        row[first] = _mean_and_error(lengths[first])
        for way in others:
            gains = [a - b for a, b in zip(lengths[way], lengths[first], strict=True)]
            row |= {way: _mean_and_error(lengths[way]), f"{way} gains": _mean_and_error(gains)}
        rows.append(row)
        print(f"  {json.dumps(row)}", flush=True)
    print(json.dumps({"dtype": options.dtype, "k": options.k, "rows": rows}))


def _mean_and_error(values: list[float]) -> tuple[float, float]:
    error = statistics.stdev(values) / len(values) ** 0.5
    return round(statistics.fmean(values), 3), round(error, 3)


def _acceptance_length(outputs: list[RequestOutput]) -> float:
    drafts = sum(output.metrics.num_drafts for output in outputs)
    # An output of one token has no draft.
    return 1 + sum(output.metrics.num_accepted_tokens for output in outputs) / max(drafts, 1)


def _run(
    config: dict[str, Any] | None,
    temperature: float,
    options: argparse.Namespace,
    seed: int = 0,
) -> tuple[list[RequestOutput], float]:
    """The outputs, and output tokens per second."""
    llm = LLM(
        "demo",
        speculative_config=config,
        dtype=options.dtype,
        seed=seed,
        max_num_seqs=options.batch,
        enable_prefix_caching=False,
    )
    entries = [json.loads(line) for line in HELD_OUT.read_text().splitlines()][: options.prompts]
    max_tokens = 1 + WHOLE_DRAFTS * (options.k + 1)
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, logprobs=1)
    texts = [entry["prompt"] for entry in entries if "prompt" in entry]
    chats = [entry["messages"] for entry in entries if "messages" in entry]
    if options.prompt_tokens:
        texts, chats = _joined(llm, texts, options.prompt_tokens), []
    began = time.perf_counter()
    outputs = llm.generate(texts, params)
    outputs += llm.chat(chats, params) if chats else []
    seconds = time.perf_counter() - began
    return outputs, sum(len(output.outputs[0].token_ids) for output in outputs) / seconds


def _joined(llm: LLM, parts: list[str], least: int) -> list[str]:
    """A prompt that ends with each part, after as many before it as make `least` tokens."""
    texts = []
    for last in range(len(parts)):
        text, first = parts[last], last
        while len(llm.tokenizer.encode(text)) < least:
            first -= 1
            text = parts[first % len(parts)] + "\n\n\n" + text
        texts.append(text)
    return texts


def _standard_error(metrics: list[Any]) -> float:
    """The standard error of AL, a ratio of sums over requests that are taken to be independent."""
    accepted = [m.num_accepted_tokens for m in metrics]
    drafts = [m.num_drafts for m in metrics]
    ratio, count = sum(accepted) / sum(drafts), len(metrics)
    spread = sum((a - ratio * d) ** 2 for a, d in zip(accepted, drafts, strict=True))
    return float((spread / (count - 1) * count) ** 0.5 / sum(drafts)) if count > 1 else 0.0


def _row(
    name: str, temperature: float, outputs: list[RequestOutput], ratio: float
) -> dict[str, Any]:
    metrics = [output.metrics for output in outputs]
    drafts = sum(m.num_drafts for m in metrics)
    width = max(len(m.num_accepted_tokens_per_pos) for m in metrics)
    per_position = [
        sum((*m.num_accepted_tokens_per_pos, *[0] * width)[place] for m in metrics) / drafts
        for place in range(width)
    ]
    return {
        "drafter": name,
        "temperature": temperature,
        "AL": round(_acceptance_length(outputs), 3),
        "standard_error": round(_standard_error(metrics), 3),
        "per_position": [round(share, 3) for share in per_position],
        "times_plain": round(ratio, 2),
    }


def _differences(plain: list[RequestOutput], drafted: list[RequestOutput]) -> list[dict[str, Any]]:
    """Outputs that differ from plain decoding, and the gap of the two best tokens there."""
    found = []
    for expected, output in zip(plain, drafted, strict=True):
        ours, theirs = output.outputs[0].token_ids, expected.outputs[0].token_ids
        if list(ours) == list(theirs):
            continue
        place = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
        logprobs = expected.outputs[0].logprobs
        assert logprobs is not None
        other = output.outputs[0].logprobs
        assert other is not None
        gap = logprobs[place][theirs[place]].logprob - max(
            c.logprob for token, c in other[place].items() if token == ours[place]
        )
        found.append({"request": output.request_id, "place": place, "gap": round(gap, 5)})
    return found


if __name__ == "__main__":
    main()
