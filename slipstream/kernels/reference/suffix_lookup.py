"""Suffix lookup in plain torch. Meaning and shapes: `kernels/suffix_lookup.py`."""

import torch
from torch import Tensor


def suffix_lookup(
    token_ids: Tensor, slots: Tensor, known: Tensor, width: int, shortest: int, longest: int
) -> tuple[Tensor, Tensor]:
    """Waits for the device to learn the longest text."""
    length = max(1, int(known.max()))
    text = token_ids[slots, :length].to(torch.int64)
    place = torch.arange(length, device=text.device)  # of the token behind an occurrence
    end = known.unsqueeze(1)
    matches = (place > 0) & (place < end)
    latest = torch.zeros_like(known)
    for size in range(1, longest + 1):
        if size >= length:
            break
        # One token more agrees: `size` before the place, and `size` before the end.
        matches[:, size:] &= text[:, :-size] == text.gather(1, (end - size).clamp_min(0))
        matches[:, :size] = False
        if size >= shortest:
            found = torch.where(matches, place, 0).amax(1)
            latest = torch.where(found > 0, found, latest)
    found = latest > 0
    column = torch.arange(width, device=text.device)
    period = (known - latest).clamp_min(1).unsqueeze(1)
    source = (latest.unsqueeze(1) + column % period).clamp_max(length - 1)
    return text.gather(1, source), found
