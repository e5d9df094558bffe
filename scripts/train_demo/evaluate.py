"""Measure target and draft on held-out text: loss, agreement, accepted length."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional
from torch import Tensor

from .network import Network
from .packing import Streams
from .prompts import Prompt
from .sampling import continue_rows
from .settings import END_OF_TEXT_ID, TURN_END_ID, Plan

_ROWS = 32
_SAMPLED_REPEATS = 8


def _held_out_windows(streams: Streams, size: int, device: torch.device) -> Iterator[Tensor]:
    """The held-out stream cut into windows; each token is predicted exactly once.

    The tokens after the last whole window are left out, at most one window of some hundreds.
    """
    stream = torch.from_numpy(streams.held_out.astype(np.int64))
    whole = (len(stream) - 1) // size
    starts = torch.arange(whole) * size
    windows = stream[starts[:, None] + torch.arange(size + 1)]
    for first in range(0, whole, _ROWS):
        yield windows[first : first + _ROWS].to(device)


@torch.no_grad()
def held_out_figures(
    target: Network, draft: Network, streams: Streams, plan: Plan, device: torch.device
) -> dict[str, Any]:
    """Loss by position of both models, argmax agreement and the overlap of distributions."""
    rows: dict[str, list[Tensor]] = defaultdict(list)
    for tokens in _held_out_windows(streams, plan.window, device):
        logs = [functional.log_softmax(net(tokens[:, :-1]), -1) for net in (target, draft)]
        for name, log in zip(("target", "draft"), logs, strict=True):
            rows[name].append(-log.gather(-1, tokens[:, 1:, None]).squeeze(-1).cpu())
        rows["agreement"].append((logs[0].argmax(-1) == logs[1].argmax(-1)).float().cpu())
        rows["overlap"].append(torch.minimum(logs[0].exp(), logs[1].exp()).sum(-1).cpu())
    joined = {name: torch.cat(parts).double() for name, parts in rows.items()}
    bytes_per_token = streams.held_out_bytes / (len(streams.held_out) - 1)
    half = plan.window // 2
    figures: dict[str, Any] = {
        "tokens": joined["target"].numel(),
        "bytes_per_token": bytes_per_token,
    }
    for name in ("target", "draft"):
        mean = float(joined[name].mean())
        figures[name] = {
            "nats_per_token": mean,
            "bits_per_byte": mean / math.log(2) / bytes_per_token,
            f"nats_at_positions_0_{half - 1}": float(joined[name][:, :half].mean()),
            f"nats_at_positions_{half}_{plan.window - 1}": float(joined[name][:, half:].mean()),
        }
    figures["argmax_agreement"] = float(joined["agreement"].mean())
    figures["distribution_overlap"] = float(joined["overlap"].mean())
    return figures


def _rounds(accepts: list[bool], chain: int) -> tuple[int, int]:
    """Rounds and accepted draft tokens when each position's fate is known.

    Whether the draft's token for a position is accepted depends only on the text before it, and
    that is the target's own text as long as all earlier draft tokens of the round were accepted.
    So one pass over the finished text settles every round (the method: Leviathan et al. 2023,
    arXiv:2211.17192; the last round counts only what still fits the text).
    """
    position, rounds, accepted = 0, 0, 0
    while position < len(accepts):
        rounds += 1
        run = 0
        while run < chain and position + run < len(accepts) and accepts[position + run]:
            run += 1
        accepted += run
        position += run + 1
    return rounds, accepted


def _text_end(row: Tensor, start: int, limit: int) -> int:
    """The end of the new text: after the first end token, or at the limit."""
    for position in range(start, start + limit):
        if int(row[position]) in (END_OF_TEXT_ID, TURN_END_ID):
            return position + 1
    return start + limit


@torch.no_grad()
def _acceptance(target: Network, draft: Network, rows: Tensor, greedy: bool) -> Tensor:
    """For each position, the probability that the draft's token is accepted after the text.

    Greedy: 1 if the draft's first choice is the text's token. Sampled: a token x that the target
    emits came from the draft with probability min(1, q(x) / p(x)).
    """
    parts = []
    for chunk in torch.split(rows, _ROWS):
        offered = functional.log_softmax(draft(chunk[:, :-1]), -1)
        following = chunk[:, 1:]
        if greedy:
            parts.append((offered.argmax(-1) == following).float())
        else:
            wanted = functional.log_softmax(target(chunk[:, :-1]), -1)
            ratio = (offered - wanted).gather(-1, following[..., None]).squeeze(-1)
            parts.append(ratio.exp().clamp(max=1.0))
    return functional.pad(torch.cat(parts), (1, 0)).cpu()


def accepted_length(
    target: Network, draft: Network, prompts: list[Prompt], plan: Plan, temperature: float
) -> dict[str, Any]:
    """AL = 1 + accepted / rounds over continuations by the target, per kind and over all."""
    device = target.cosine.device
    new = plan.evaluation_new_tokens
    width = max(len(prompt.ids) for prompt in prompts) + new
    rows = torch.full((len(prompts), width), END_OF_TEXT_ID, device=device)
    for row, prompt in zip(rows, prompts, strict=True):
        row[: len(prompt.ids)] = torch.tensor(prompt.ids, device=device)
    lengths = torch.tensor([len(prompt.ids) for prompt in prompts], device=device)
    temperatures = torch.full((len(prompts), 1), temperature, device=device)
    generator = torch.Generator(device).manual_seed(plan.seed)
    rows = continue_rows(target, rows, lengths, temperatures, generator)
    chances = _acceptance(target, draft, rows, greedy=temperature == 0)
    rows = rows.cpu()
    random = np.random.default_rng(plan.seed)
    tally: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for index, prompt in enumerate(prompts):
        start = len(prompt.ids)
        end = _text_end(rows[index], start, new)
        # The prompt's own pass yields the first token; rounds begin after it.
        chance = chances[index, start + 1 : end].numpy()
        for _ in range(1 if temperature == 0 else _SAMPLED_REPEATS):
            accepts = (random.random(len(chance)) < chance).tolist()
            rounds, accepted = _rounds(accepts, plan.draft_tokens)
            for kind in (prompt.kind, "all"):
                tally[kind][0] += 1
                tally[kind][1] += rounds
                tally[kind][2] += accepted
    return {
        kind: {
            "texts": texts,
            "rounds": rounds,
            "accepted": accepted,
            "accepted_length": 1 + accepted / max(1, rounds),
        }
        for kind, (texts, rounds, accepted) in sorted(tally.items())
    }


def evaluate(
    target: Network,
    draft: Network,
    streams: Streams,
    prompt_sets: dict[str, list[Prompt]],
    plan: Plan,
) -> dict[str, Any]:
    """The whole report."""
    report: dict[str, Any] = {
        "held_out": held_out_figures(target, draft, streams, plan, target.cosine.device)
    }
    for name, prompts in prompt_sets.items():
        report[name] = {
            "draft_tokens_per_round": plan.draft_tokens,
            "new_tokens": plan.evaluation_new_tokens,
            "greedy": accepted_length(target, draft, prompts, plan, 0.0),
            "temperature_1": accepted_length(target, draft, prompts, plan, 1.0),
        }
    return report
