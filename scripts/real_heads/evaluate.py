"""How far a drafter's guesses get on held-out prompts, by category.

    python -m scripts.real_heads.evaluate MODEL HELD_OUT.jsonl --drafter DRAFTER --out FILE

DRAFTER is a directory, ngram, suffix or none. Every prompt is answered to its end, or to
`--tokens`, at each of `--temperatures`. FILE gets one JSON object for each temperature as soon as
it is measured, with one row for each prompt: its category, tokens, whether the answer ended by
itself, drafts, accepted tokens, and a digest of the tokens, by which greedy texts of two drafters
are compared.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from slipstream import LLM, RequestOutput, SamplingParams

NONE = "none"
_LOOKUPS = ("ngram", "suffix")  # methods without a checkpoint
_LONGEST_PROMPT = 1024  # tokens

Row = Mapping[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    given = _arguments(arguments)
    entries = [json.loads(line) for line in given.held_out.read_text("utf-8").splitlines()]
    llm = LLM(
        given.model,
        speculative_config=_speculation(given.drafter, given.k),
        device=given.device,
        dtype=given.dtype,
        max_model_len=_LONGEST_PROMPT + given.tokens,
        max_num_seqs=given.batch,
        enable_prefix_caching=False,
        seed=1,
    )
    chats = [entry["messages"] for entry in entries]
    lines = []
    for temperature in given.temperatures:
        params = SamplingParams(temperature=temperature, max_tokens=given.tokens)
        outputs = llm.chat(chats, params)
        rows = [_row(entry, out) for entry, out in zip(entries, outputs, strict=True)]
        lines.append(json.dumps({"temperature": temperature, "k": given.k, "rows": rows}))
        given.out.write_text("".join(f"{line}\n" for line in lines))
        print(f"{given.drafter} at {temperature:g}: {summary(rows)}", flush=True)


def read_results(file: Path) -> list[dict[str, Any]]:
    """The results by temperature; empty if there is no file."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """The figures of some prompts.

    `AL` is over the steps with a draft, whatever their share, and `tokens_per_pass` over all steps
    after the first token: lookups do not draft in every step. `standard_error` is that of AL as a
    ratio of sums over prompts.
    """
    drafts, accepted = (sum(row[key] for row in rows) for key in ("drafts", "accepted"))
    later = sum(row["tokens"] - 1 for row in rows)
    width = max((len(row["per_position"]) for row in rows), default=0)
    places = [sum((*row["per_position"], *[0] * width)[at] for row in rows) for at in range(width)]
    return {
        "prompts": len(rows),
        "tokens": sum(row["tokens"] for row in rows),
        "ended": round(sum(row["ended"] for row in rows) / max(1, len(rows)), 3),
        "AL": round(1 + accepted / max(1, drafts), 3),
        "standard_error": round(_standard_error(rows), 3),
        "tokens_per_pass": round(later / max(1, later - accepted), 3),
        "per_position": [round(count / max(1, drafts), 3) for count in places],
    }


def _standard_error(rows: Sequence[Row]) -> float:
    drafts, count = sum(row["drafts"] for row in rows), len(rows)
    if not drafts or count < 2:
        return 0.0
    ratio = sum(row["accepted"] for row in rows) / drafts
    spread = sum((row["accepted"] - ratio * row["drafts"]) ** 2 for row in rows)
    return float((spread / (count - 1) * count) ** 0.5 / drafts)


def _row(entry: Mapping[str, Any], output: RequestOutput) -> Row:
    sample, metrics = output.outputs[0], output.metrics
    return {
        "category": entry["category"],
        "tokens": len(sample.token_ids),
        "ended": sample.finish_reason == "stop",
        "drafts": metrics.num_drafts,
        "accepted": metrics.num_accepted_tokens,
        "per_position": list(metrics.num_accepted_tokens_per_pos),
        "digest": blake2b(repr(list(sample.token_ids)).encode(), digest_size=8).hexdigest(),
    }


def _speculation(drafter: str, count: int) -> dict[str, Any] | None:
    if drafter == NONE:
        return None
    named = {"method": drafter} if drafter in _LOOKUPS else {"model": drafter}
    return {**named, "num_speculative_tokens": count}


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    cli = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cli.add_argument("model")
    cli.add_argument("held_out", type=Path)
    cli.add_argument("--drafter", required=True)
    cli.add_argument("--out", type=Path, required=True)
    cli.add_argument("-k", type=int, default=4)
    cli.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7])
    cli.add_argument("--tokens", type=int, default=256)
    cli.add_argument("--batch", type=int, default=64)
    cli.add_argument("--device", default="auto")
    cli.add_argument("--dtype", default="auto")
    return cli.parse_args(arguments)


if __name__ == "__main__":
    main()
