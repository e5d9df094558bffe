"""Write the folder that ships: models, prompts, manifest, model card."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from .card import model_card
from .checkpoint import read_network, write_model
from .evaluate import evaluate
from .network import Network, parameter_count
from .packing import Streams, write_json
from .prompts import Prompt, all_prompts, balanced, shipped
from .settings import Plan
from .sources import Source


def _write_prompts(prompts: list[Prompt], path: Path) -> None:
    """One JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps(prompt.as_json(f"{prompt.kind}-{number:02d}"), ensure_ascii=False)
        for number, prompt in enumerate(sorted(prompts, key=lambda one: one.kind), 1)
    ]
    path.write_text("\n".join(lines) + "\n", "utf-8")


def _file_hashes(folder: Path) -> dict[str, str]:
    """sha256 of every file of the models and prompts, by name relative to the folder."""
    paths = sorted(
        path
        for part in ("target", "draft", "prompts")
        for path in (folder / part).rglob("*")
        if path.is_file()
    )
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in paths
    }


def _load_trained(plan: Plan, work: Path, name: str) -> tuple[Network, int]:
    """The last checkpoint of a model, and how many steps it took."""
    saved = torch.load(work / f"{name}.pt", map_location="cpu")
    if saved["step"] != saved["total"]:
        raise SystemExit(f"{name}: training stopped at step {saved['step']} of {saved['total']}")
    network = Network(plan.target if name == "target" else plan.draft)
    network.load_state_dict(saved["network"])
    return network, int(saved["step"])


def last_training_loss(log: Path, lines: int = 20) -> float:
    """The mean of the last losses of a training log: single batches differ too much."""
    entries = log.read_text("utf-8").splitlines()[-lines:]
    losses = [float(json.loads(entry)["loss"]) for entry in entries]
    return round(sum(losses) / len(losses), 4)


def export(
    plan: Plan,
    streams: Streams,
    held_out: list[Source],
    tokenizer: Tokenizer,
    corpus: dict[str, Any],
    work: Path,
    out: Path,
    device: torch.device,
) -> dict[str, Any]:
    """Write everything and return the manifest."""
    shapes = {"target": plan.target, "draft": plan.draft}
    steps, networks = {}, {}
    for name, shape in shapes.items():
        trained, steps[name] = _load_trained(plan, work, name)
        write_model(trained, tokenizer, out / name)
        networks[name] = read_network(out / name, shape, device)
    prompts = all_prompts(held_out, tokenizer)
    chosen = shipped(prompts)
    _write_prompts(chosen, out / "prompts" / "held_out.jsonl")
    sets = {"shipped_prompts": chosen, "more_prompts": balanced(prompts, plan.evaluation_prompts)}
    manifest = {
        "files": _file_hashes(out),
        "parameters": {name: parameter_count(network) for name, network in networks.items()},
        "figures": evaluate(networks["target"], networks["draft"], streams, sets, plan),
        "steps": steps,
        "last_training_loss": {name: last_training_loss(work / f"{name}.jsonl") for name in shapes},
        "plan": plan.as_dict(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "corpus": corpus,
    }
    write_json(out / "manifest.json", manifest)
    (out / "README.md").write_text(model_card(manifest), "utf-8")
    return manifest
