"""Train the target on the corpus."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as functional
from torch import Tensor

from .loop import Job, train
from .network import Network
from .packing import Streams, Windows
from .settings import Plan


def next_token_loss(network: Network, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of each token given those before it."""
    with torch.autocast(tokens.device.type, torch.bfloat16):
        logits = network(tokens[:, :-1])
    return functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def train_target(streams: Streams, plan: Plan, folder: Path, device: torch.device) -> int:
    """Train the target; its last checkpoint is ``target.pt``."""
    network = Network(plan.target)
    network.initialise(plan.seed)
    network.to(device)
    rows = plan.batch_tokens // plan.window
    windows = Windows(streams.train, plan.window + 1, rows, device)
    compute = torch.compile(next_token_loss) if plan.compile else next_token_loss

    def loss(step: int) -> Tensor:
        return compute(network, windows.batch(plan.seed, step))

    job = Job("target", network, loss, rows * plan.window, plan.minutes_target, plan.steps_target)
    return train(job, plan, folder)
