"""Suffix lookup (prompt lookup) in plain torch, and the choice of a device's implementation."""

from typing import Protocol

import torch
from torch import Tensor

from slipstream.kernels.registry import runs_cpp, runs_triton


class SuffixLookup(Protocol):
    """Finds the longest suffix of each text that also occurs earlier in the text.

    Suffixes of `shortest` to `longest` tokens are tried, the longest first. An occurrence must be
    followed by at least one token; the latest one counts. If the K tokens after it reach the end
    of the text, the text is assumed to repeat itself.

    Args:
        token_ids: [S, L] int32.
        slots: [R] int64, rows of `token_ids`.
        known: [R] int64, number of tokens of each text, at most L.
        width: K.

    Returns:
        tokens: [R, K] int64, the tokens after the occurrence.
        found: [R] bool, whether there was an occurrence.
    """

    def __call__(
        self,
        token_ids: Tensor,
        slots: Tensor,
        known: Tensor,
        width: int,
        shortest: int,
        longest: int,
    ) -> tuple[Tensor, Tensor]: ...


def lookup_on(device: torch.device) -> SuffixLookup:
    """The fastest implementation for `device`."""
    if runs_cpp(device):
        return lookup_in_cpp
    if runs_triton(device):
        from slipstream.speculative.ngram.triton_lookup import lookup_in_triton

        return lookup_in_triton
    return lookup_in_torch


def lookup_in_cpp(
    token_ids: Tensor, slots: Tensor, known: Tensor, width: int, shortest: int, longest: int
) -> tuple[Tensor, Tensor]:
    import _slipstream_cpu as cpp

    requests = slots.shape[0]
    tokens = torch.empty((requests, width), dtype=torch.int64)
    found = torch.empty(requests, dtype=torch.bool)
    cpp.suffix_lookup(
        token_ids, slots.contiguous(), known.contiguous(), shortest, longest, tokens, found
    )
    return tokens, found


def lookup_in_torch(
    token_ids: Tensor, slots: Tensor, known: Tensor, width: int, shortest: int, longest: int
) -> tuple[Tensor, Tensor]:
    """The definition. The host waits for the device, to get the length of the longest text."""
    length = max(1, int(known.max()))
    text = token_ids[slots, :length].to(torch.int64)
    place = torch.arange(length, device=text.device)  # of the token after an occurrence
    end = known.unsqueeze(1)
    matches = (place > 0) & (place < end)
    latest = torch.zeros_like(known)
    for size in range(1, longest + 1):
        if size >= length:
            break
        # One more token matches: `size` before the place, and `size` before the end.
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
