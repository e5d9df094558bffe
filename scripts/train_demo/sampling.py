"""Let a network continue many rows at once."""

from __future__ import annotations

import torch
from torch import Tensor

from .network import Network


@torch.no_grad()
def continue_rows(
    network: Network,
    rows: Tensor,
    prompt_lengths: Tensor,
    temperatures: Tensor,
    generator: torch.Generator,
) -> Tensor:
    """Replace what follows each row's prompt by what the network would write.

    ``temperatures`` is ``[rows, 1]``; zero means greedy. Rows of different prompt length go in
    step: a row that is still in its prompt takes the prompt's token instead of a sampled one.
    """
    rows = rows.clone()
    cache = network.new_cache(*rows.shape)
    first = int(prompt_lengths.min())
    logits = network.step(rows[:, :first], cache, 0)
    divisor = temperatures.clamp(min=1e-4)
    for position in range(first, rows.shape[1]):
        # The largest of scores plus Gumbel noise is a sample (Gumbel 1954); without, the argmax.
        uniform = torch.rand(logits.shape, device=rows.device, generator=generator)
        noise = -torch.log(-torch.log(uniform.clamp(1e-20, 1 - 1e-7)))
        scores = logits.float() / divisor + noise * (temperatures > 0)
        chosen = torch.where(prompt_lengths <= position, scores.argmax(dim=-1), rows[:, position])
        rows[:, position] = chosen
        if position + 1 < rows.shape[1]:
            logits = network.step(chosen[:, None], cache, position)
    return rows
