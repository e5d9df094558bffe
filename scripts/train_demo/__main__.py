"""The command line: corpus, target, draft, export, each skipped if not asked for."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pickle
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from .distill import train_draft
from .export import export
from .network import Network
from .packing import Streams, build_streams, write_json
from .pretrain import train_target
from .settings import Plan, full_plan, tiny_plan
from .sources import Source, collect, digest
from .vocabulary import train_tokenizer

_STAGES = ("corpus", "target", "draft", "export")


def _arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m scripts.train_demo", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for what ships")
    parser.add_argument("--work", type=Path, help="folder for corpus, checkpoints and logs")
    parser.add_argument("--minutes-target", type=float)
    parser.add_argument("--minutes-draft", type=float)
    parser.add_argument("--steps-target", type=int)
    parser.add_argument("--steps-draft", type=int)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--stages", default=",".join(_STAGES), help="comma-separated")
    parser.add_argument("--tiny", action="store_true", help="smoke test on a CPU")
    return parser.parse_args()


def _plan(arguments: argparse.Namespace) -> Plan:
    """The chosen plan with what the command line overrides."""
    names = ("minutes_target", "minutes_draft", "steps_target", "steps_draft", "seed")
    given = {name: getattr(arguments, name) for name in names}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return dataclasses.replace(tiny_plan() if arguments.tiny else full_plan(), **changes)


def _tokenizer_texts(train: list[Source], limit: int) -> list[str]:
    """An even sample of the training files."""
    every = max(1, sum(len(source.text) for source in train) // limit)
    return [source.text for source in train[::every]]


def make_corpus(plan: Plan, work: Path) -> None:
    """Collect sources, train the tokenizer, write the token streams."""
    train, held_out = collect(plan.held_out_per_mille, plan.max_files)
    print("files:", len(train), "held out:", len(held_out), flush=True)
    texts = _tokenizer_texts(train, plan.tokenizer_bytes)
    tokenizer = train_tokenizer(texts, plan.target.vocabulary)
    tokenizer.save(str(work / "tokenizer.json"))
    streams, counts = build_streams(tokenizer, train, held_out, plan)
    streams.save(work / "streams.npz")
    (work / "held_out.pickle").write_bytes(pickle.dumps(held_out))
    corpus = {"counts": counts, "train": digest(train), "held_out": digest(held_out)}
    write_json(work / "corpus.json", corpus)
    print(json.dumps(counts), flush=True)


def _trained_target(plan: Plan, work: Path, device: torch.device) -> Network:
    """The target as it will ship, rounded to bf16: what the draft has to match."""
    target = Network(plan.target)
    target.load_state_dict(torch.load(work / "target.pt", map_location="cpu")["network"])
    target.bfloat16().float()
    fresh = Network(plan.target)
    fresh.load_state_dict(target.state_dict())
    return fresh.to(device).requires_grad_(False)


def _timed(name: str, started: float) -> None:
    """Say how long a stage took."""
    print(f"stage {name}: {time.monotonic() - started:.1f} s", flush=True)


def main() -> None:
    """Run the stages."""
    arguments = _arguments()
    plan = _plan(arguments)
    stages = arguments.stages.split(",")
    work = arguments.work or arguments.out.parent / f"{arguments.out.name}-work"
    for folder in (work, arguments.out):
        folder.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    started = time.monotonic()
    if "corpus" in stages and not (work / "corpus.json").exists():
        make_corpus(plan, work)
        _timed("corpus", started)
    streams = Streams.load(work / "streams.npz")
    if "target" in stages:
        started = time.monotonic()
        train_target(streams, plan, work, device)
        _timed("target", started)
    if "draft" in stages:
        started = time.monotonic()
        train_draft(_trained_target(plan, work, device), streams, plan, work, device)
        _timed("draft", started)
    if "export" in stages:
        started = time.monotonic()
        held_out = pickle.loads((work / "held_out.pickle").read_bytes())
        tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
        corpus = json.loads((work / "corpus.json").read_text("utf-8"))
        manifest = export(plan, streams, held_out, tokenizer, corpus, work, arguments.out, device)
        print(json.dumps(manifest["figures"], indent=1), flush=True)
        _timed("export", started)


if __name__ == "__main__":
    main()
