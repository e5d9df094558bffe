"""Train heads for a real model from its own answers, within a limit of time, and measure them.

    scripts/real_model       # prints the paths of a model and of ShareGPT's conversations
    python -m scripts.real_heads.prompts SHAREGPT.json --out prompts.jsonl.gz
    python -m scripts.real_heads MODEL prompts.jsonl.gz --out OUT [--minutes 9]

Three stages share the minutes. The model answers prompts (`--answer-minutes`), in `--shards`
engines at a time, at temperatures 0 and 0.7 in turn. Every kind of `plan.HEADS` learns from the
answers that ended, all side by side on one device. What has been trained drafts for the held-out
prompts, beside n-gram and suffix lookups (`evaluate.py`); `--evaluation-minutes` are left for that.
Each stage ends in time with what there is. OUT gets

    heads/KIND             the drafters, as `slipstream train` writes them
    results/NAME.jsonl     what was measured, prompt by prompt
    report.json, CARD.md, curves.csv, curves.png
    logs/                  what the commands printed

With `--evaluation-minutes 0` nothing is measured: the same command with `--evaluate-only` does that
later, on whatever machine the model and OUT are on.

On a CPU give a limit of prompts (`--prompts`), fewer `--shards` and `--held-out`, and hours.
"""

import argparse
import gzip
import json
import shlex
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from scripts.real_heads.plan import BARS, HEADS, OTHERS, Clock, last_line, run
from scripts.real_heads.report import table, write_report
from slipstream.train.files import read_tensors

_STARTING, _ENDING = 45.0, 15.0  # seconds a command may need beside its minutes of training


def main() -> None:
    given = _arguments()
    clock = Clock.of_minutes(given.minutes)
    out: Path = given.out
    if given.evaluate_only:
        _measure(given, clock)
        return
    for folder in ("data", "heads", "results", "logs"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    shards = _write_prompts(given, out / "data")
    clock.say(f"{sum(shards.values())} prompts in {len(shards)} parts")
    data = _answer(given, clock, list(shards))
    if not data:
        sys.exit("no part was answered; see logs/")
    facts = _facts(given, data)
    clock.say(f"{facts['answers']:,} answers, {facts['tokens']:,} tokens in sequences")
    with ThreadPoolExecutor(len(OTHERS) + len(given.kinds)) as pool:
        others = OTHERS if given.evaluation_minutes else ()
        lookups = [pool.submit(_evaluate, given, clock, name) for name in others]
        heads = [pool.submit(_head, given, clock, kind, data) for kind in given.kinds]
        for job in (*heads, *lookups):
            job.result()
    facts["minutes"] = (time.monotonic() - clock.began) / 60
    document = write_report(out, facts)
    clock.say("report written")
    print(table([it for it in document["measured"] if it["drafter"] != "none"]))


def _measure(given: argparse.Namespace, clock: Clock) -> None:
    """Measure what an earlier run trained, one drafter after the other, and complete its report."""
    facts = json.loads((given.out / "report.json").read_text("utf-8"))
    facts.update(answer_tokens=given.evaluation_tokens)
    trained = [kind for kind in given.kinds if kind in facts["trained"]]
    for name in (*OTHERS, *trained):
        _evaluate(given, clock, name)
    document = write_report(given.out, facts)
    print(table([it for it in document["measured"] if it["drafter"] != "none"]))


def _write_prompts(given: argparse.Namespace, folder: Path) -> dict[Path, int]:
    """Files of prompts, one for each engine, and of held-out ones; how many the former have."""
    with gzip.open(given.prompts_file, "rt", encoding="utf-8") as file:
        entries = [json.loads(line) for line in file]
    held_out = [it for it in entries if "category" in it]
    # As many of every category, whose prompts follow each other in any order.
    step = max(1, len(held_out) // given.held_out)
    _write_lines(folder / "held_out.jsonl", held_out[::step][: given.held_out])
    training = [it for it in entries if "category" not in it][: given.prompts]
    shards = {}
    for number in range(given.shards):
        part = training[number :: given.shards]
        shards[folder / f"prompts-{number}.jsonl"] = len(part)
        _write_lines(folder / f"prompts-{number}.jsonl", part)
    return shards


def _write_lines(file: Path, entries: list[Any]) -> None:
    file.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries), "utf-8")


def _answer(given: argparse.Namespace, clock: Clock, shards: list[Path]) -> list[Path]:
    """The model's answers as sequences, one file for each part that was answered."""

    def one(number: int) -> Path | None:
        shard = shards[number]
        packed = shard.with_name(f"own-{number}.safetensors")
        arguments = [
            *("slipstream", "train", "data", given.model, "--data", str(shard), "--generate"),
            *("--generate-tokens", str(given.answer_tokens), "--temperatures", "0,0.7"),
            *("--generate-batch", str(given.batch), "--max-length", str(given.length)),
            *("--generate-minutes", str(given.answer_minutes), "--seed", str(1_000_000 * number)),
            *("--device", given.device, "--out", str(packed)),
        ]
        log = given.out / "logs" / f"answers-{number}.log"
        until = time.monotonic() + 60 * given.answer_minutes + _STARTING
        done = run(f"answers {number}", arguments, log, until, clock)
        return packed if done else None

    with ThreadPoolExecutor(len(shards)) as pool:
        jobs = [pool.submit(one, number) for number in range(len(shards))]
        while not all(job.done() for job in jobs):
            time.sleep(min(10.0, given.answer_minutes * 6))
            counts = [_num_lines(shard) for shard in shards]
            clock.say(f"answers so far: {counts}")
    return [packed for job in jobs if (packed := job.result()) is not None]


def _num_lines(shard: Path) -> int:
    file = shard.with_name(shard.name.replace("prompts", "own")).with_suffix(".answers.jsonl")
    return max(0, file.read_bytes().count(b"\n") - 1) if file.is_file() else 0


def _facts(given: argparse.Namespace, data: list[Path]) -> dict[str, Any]:
    answers = sum(file.with_suffix(".answers.jsonl").read_bytes().count(b"\n") - 1 for file in data)
    shapes = [read_tensors(file, ("token_ids",))["token_ids"].numel() for file in data]
    return {
        "model": Path(given.model).name,
        "device": given.device_name or given.device,
        "command": shlex.join(["python", "-m", "scripts.real_heads", *sys.argv[1:]]),
        "answers": answers,
        "tokens": sum(shapes),
        "step_tokens": given.train_batch * given.length,
        "answer_tokens": given.evaluation_tokens,
    }


def _head(given: argparse.Namespace, clock: Clock, kind: str, data: list[Path]) -> None:
    """Train a head, and measure it. Every checkpoint is a drafter, should time run out."""
    seconds = clock.left() - 60 * given.evaluation_minutes
    minutes = max(0.05, (seconds - _STARTING) / 60 * (1.0 if kind in BARS else 0.5))
    minutes = min(minutes, given.train_minutes)
    sources = [word for file in data for word in ("--data", str(file))]
    arguments = [
        *("slipstream", "train", kind, given.model, *sources, *HEADS[kind]),
        *("--out", str(given.out / "heads" / kind), "--minutes", f"{minutes:.3f}"),
        *("--batch-size", str(given.train_batch), "--validation", str(given.validation)),
        *("--validate-every", "400", "--checkpoint-every", "1000"),
        *("--device", given.device),
    ]
    log = given.out / "logs" / f"train-{kind}.log"
    until = time.monotonic() + seconds + _ENDING
    done = run(f"train {kind}", arguments, log, until, clock)
    if done and given.evaluation_minutes:
        _evaluate(given, clock, kind)


def _evaluate(given: argparse.Namespace, clock: Clock, name: str) -> None:
    drafter = str(given.out / "heads" / name) if name in HEADS else name
    arguments = [
        *("scripts.real_heads.evaluate", given.model, str(given.out / "data" / "held_out.jsonl")),
        *("--drafter", drafter, "--out", str(given.out / "results" / f"{name}.jsonl"), "-k", "4"),
        *("--tokens", str(given.evaluation_tokens), "--device", given.device),
        *("--dtype", given.evaluation_dtype),
    ]
    log = given.out / "logs" / f"evaluate-{name}.log"
    run(f"evaluate {name}", arguments, log, clock.end - _ENDING, clock)
    results = given.out / "results" / f"{name}.jsonl"
    if not results.is_file():
        clock.say(f"evaluate {name}: no result; {last_line(log)}")


def _arguments() -> argparse.Namespace:
    cli = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cli.add_argument("model", help="a checkpoint, such as a GGUF file")
    cli.add_argument("prompts_file", type=Path, metavar="prompts", help="of `prompts.py`")
    cli.add_argument("--out", type=Path, required=True)
    cli.add_argument("--minutes", type=float, default=9.0, help="for everything")
    cli.add_argument("--answer-minutes", type=float, default=2.2)
    cli.add_argument("--answer-tokens", type=int, default=400, help="of an answer, at most")
    cli.add_argument("--prompts", type=int, default=1_000_000, help="to answer, at most")
    cli.add_argument("--shards", type=int, default=4, help="engines that answer at a time")
    cli.add_argument("--batch", type=int, default=256, help="prompts that each answers at once")
    cli.add_argument("--length", type=int, default=1024, help="tokens of a sequence")
    cli.add_argument("--train-batch", type=int, default=8, help="sequences of a step")
    cli.add_argument("--validation", type=float, default=0.004, help="share of the sequences")
    cli.add_argument("--kinds", nargs="+", default=list(HEADS), choices=list(HEADS))
    cli.add_argument("--train-minutes", type=float, default=1e6, help="of a head, at most")
    cli.add_argument("--evaluation-minutes", type=float, default=1.5, help="0: do not measure")
    cli.add_argument(
        "--evaluate-only", action="store_true", help="measure what --out has, from a run without"
    )
    cli.add_argument("--held-out", type=int, default=200, help="prompts to measure with")
    cli.add_argument("--evaluation-tokens", type=int, default=256, help="of an answer, at most")
    cli.add_argument("--evaluation-dtype", default="auto")
    cli.add_argument("--device", default="auto")
    cli.add_argument("--device-name", help="what the card calls it")
    return cli.parse_args()


if __name__ == "__main__":
    main()
