"""Train the draft model to predict what the target predicts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as functional
from torch import Tensor

from .loop import Job, train
from .network import Network
from .packing import Streams, Windows
from .sampling import continue_rows
from .settings import Plan

_SHORTEST_PROMPT = 48


def distillation_loss(
    draft: Network, target: Network, tokens: Tensor, argmax_weight: float
) -> Tensor:
    """Divergence of the draft from the target (Hinton et al. 2015, arXiv:1503.02531).

    KL(target, draft) less the target's entropy, which the draft cannot change, mixed with the
    cross-entropy of the target's first choice: greedy decoding asks for nothing else.
    """
    with torch.autocast(tokens.device.type, torch.bfloat16):
        with torch.no_grad():
            wanted = target(tokens)
        offered = draft(tokens)
    logs = functional.log_softmax(offered.float(), dim=-1)
    likely = torch.softmax(wanted.float(), dim=-1)
    spread = -(likely * logs).sum(-1).mean()
    first = wanted.argmax(-1, keepdim=True)
    pointed = -logs.gather(-1, first).mean()
    return (1 - argmax_weight) * spread + argmax_weight * pointed


def _prompt_rows(
    streams: Streams, windows: Windows, plan: Plan, round_number: int
) -> tuple[Tensor, Tensor]:
    """Beginnings of files, of conversations, and places inside files; with prompt lengths."""
    generator = np.random.default_rng((plan.seed, 77, round_number))
    count, row = plan.distill_rows_per_round, plan.distill_row
    fits = streams.starts < len(streams.train) - row
    files = np.flatnonzero(fits & (streams.question_lengths == 0))
    chats = np.flatnonzero(
        fits & (streams.question_lengths > 0) & (streams.question_lengths < row // 2)
    )
    lengths = generator.integers(min(_SHORTEST_PROMPT, row // 4), 3 * row // 4, count)
    starts = generator.integers(0, len(streams.train) - row, count)
    kind = generator.random(count)
    from_files, from_chats = kind < 0.45, kind >= 0.75
    starts[from_files] = streams.starts[generator.choice(files, from_files.sum())]
    picked = generator.choice(chats, from_chats.sum())
    starts[from_chats] = streams.starts[picked]
    lengths[from_chats] = streams.question_lengths[picked]
    device = windows.stream.device
    return windows.at(starts), torch.from_numpy(lengths).to(device)


def target_rows(target: Network, streams: Streams, plan: Plan, device: torch.device) -> Tensor:
    """Texts the target wrote itself (Zhou et al. 2023, arXiv:2310.08461), greedy and sampled.

    A draft is asked about the target's own text, which is not quite the corpus.
    """
    windows = Windows(streams.train, plan.distill_row, plan.distill_rows_per_round, device)
    # Half the rows greedy, the rest warm or at the model's own temperature.
    choices = torch.tensor([0.0, 0.0, 0.7, 1.0], device=device)
    temperatures = choices.repeat(plan.distill_rows_per_round // 4)[:, None]
    writer = Network(plan.target).to(device)
    writer.load_state_dict(target.state_dict())
    if device.type == "cuda":
        writer.bfloat16()
        writer.cosine, writer.sine = target.cosine, target.sine
    rounds = []
    for number in range(plan.distill_rounds):
        rows, lengths = _prompt_rows(streams, windows, plan, number)
        generator = torch.Generator(device).manual_seed(plan.seed * 1000 + number)
        written = continue_rows(writer, rows, lengths, temperatures, generator)
        rounds.append(written.to(torch.int16))
    return torch.cat(rounds)


def train_draft(
    target: Network, streams: Streams, plan: Plan, folder: Path, device: torch.device
) -> int:
    """Train the draft; its last checkpoint is ``draft.pt``."""
    draft = Network(plan.draft)
    draft.initialise(plan.seed + 1)
    draft.to(device)
    own = target_rows(target, streams, plan, device)
    print("texts written by the target:", tuple(own.shape), flush=True)
    windows = Windows(streams.train, plan.window, plan.batch_tokens // plan.window, device)
    own_rows = plan.batch_tokens // plan.distill_row
    compute = (
        torch.compile(distillation_loss, dynamic=False) if plan.compile else (distillation_loss)
    )

    def loss(step: int) -> Tensor:
        generator = np.random.default_rng((plan.seed, 88, step))
        if generator.random() < plan.distill_own_share:
            picked = torch.from_numpy(generator.integers(0, len(own), own_rows)).to(device)
            tokens = own[picked].long()
        else:
            tokens = windows.batch(plan.seed + 1, step)
        return compute(draft, target, tokens, plan.distill_argmax_weight)

    job = Job("draft", draft, loss, plan.batch_tokens, plan.minutes_draft, plan.steps_draft)
    return train(job, plan, folder)
