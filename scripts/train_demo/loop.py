"""The training loop that target and draft share: schedule, log, checkpoints."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .muon import Optimisers
from .network import Network
from .settings import Plan

_LOG_EVERY = 25
_SAVE_SECONDS = 60.0
# The first steps pay for compilation; the rate is read off the ones after them.
_CALIBRATION = (20, 60)


@dataclass
class Job:
    """The settings of one training run; `loss` maps a step to the loss to minimise."""

    name: str
    network: Network
    loss: Callable[[int], Tensor]
    tokens_per_step: int
    minutes: float
    steps: int


def schedule(step: int, total: int, plan: Plan) -> float:
    """Warm-up, plateau, linear fall to zero (trapezoid; Hägele et al. 2024, arXiv:2405.18392)."""
    warm = min(1.0, (step + 1) / plan.warmup)
    left = (total - step) / max(1.0, total * plan.cooldown)
    return min(warm, left, 1.0)


def _planned_steps(started: float, step: int, minutes: float) -> int:
    """How many steps fit, from the speed between the two calibration steps."""
    speed = (_CALIBRATION[1] - _CALIBRATION[0]) / (time.monotonic() - started)
    return max(step + 1, int(minutes * 60 * speed))


class Recorder:
    """Writes the loss log and prints it."""

    def __init__(self, job: Job, folder: Path) -> None:
        self.path = folder / f"{job.name}.jsonl"
        self.job = job
        self.last = (time.monotonic(), 0)

    def record(self, step: int, total: int, loss: float, factor: float) -> None:
        """One line."""
        now = time.monotonic()
        before, at = self.last
        speed = (step - at) * self.job.tokens_per_step / max(1e-9, now - before)
        self.last = (now, step)
        entry = {
            "step": step,
            "of": total,
            "loss": round(loss, 4),
            "rate": round(factor, 4),
            "tokens_per_second": round(speed),
        }
        with self.path.open("a", encoding="utf-8") as log:
            log.write(json.dumps(entry) + "\n")
        if step % (8 * _LOG_EVERY) == 0:
            print(self.job.name, entry, flush=True)


def _save(path: Path, job: Job, optimisers: Optimisers, step: int, total: int) -> None:
    """Write a checkpoint so that a broken write never replaces a whole one."""
    whole = {
        "network": job.network.state_dict(),
        "optimisers": optimisers.state(),
        "step": step,
        "total": total,
    }
    part = path.with_suffix(".part")
    torch.save(whole, part)
    part.replace(path)


def train(job: Job, plan: Plan, folder: Path) -> int:
    """Train to the end, from the last checkpoint if there is one; return the step count."""
    optimisers = Optimisers(job.network, plan)
    path = folder / f"{job.name}.pt"
    recorder = Recorder(job, folder)
    step, total = 0, job.steps or 10**9
    if path.exists():
        saved = torch.load(path, map_location=job.network.cosine.device)
        job.network.load_state_dict(saved["network"])
        optimisers.restore(saved["optimisers"])
        step, total = saved["step"], saved["total"]
    calibrating = saved_at = time.monotonic()
    while step < total:
        loss = job.loss(step)
        torch.autograd.backward(loss)
        factor = schedule(step, total, plan)
        optimisers.step(factor)
        step += 1
        if step == _CALIBRATION[0]:
            loss.item()
            calibrating = time.monotonic()
        if step == _CALIBRATION[1] and not job.steps and total == 10**9:
            loss.item()
            total = _planned_steps(calibrating, step, job.minutes)
        if step % _LOG_EVERY == 0 or step == total:
            recorder.record(step, total, loss.item(), factor)
            if time.monotonic() - saved_at > _SAVE_SECONDS and total < 10**9:
                _save(path, job, optimisers, step, total)
                saved_at = time.monotonic()
    _save(path, job, optimisers, step, total)
    return step
