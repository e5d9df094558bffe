"""Finding what followed the end of a text when it last occurred: the op and who serves it."""

from typing import Protocol

import torch
from torch import Tensor

from slipstream.kernels.devices import runs_cpp, runs_triton


class SuffixLookupOp(Protocol):
    """For each text: the tokens behind the latest occurrence of its longest known suffix.

    A suffix of `shortest` to `longest` tokens counts, the longest first; its occurrence needs one
    token behind it. When the occurrence overlaps the end, the text is taken to repeat itself.

    Args:
        token_ids: [S, L] int32.
        slots: [R] int64, rows of `token_ids`.
        known: [R] int64, tokens of each text, at most L.
        width: K.

    Returns:
        tokens [R, K] int64, and found [R] bool: whether there was an occurrence.
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


def suffix_lookup_for(device: torch.device) -> SuffixLookupOp:
    """The op for this device."""
    if runs_triton(device):
        from slipstream.kernels.triton.suffix_lookup import suffix_lookup as triton

        return triton
    if runs_cpp(device):
        from slipstream.kernels.cpu.suffix_lookup import suffix_lookup as cpu

        return cpu
    from slipstream.kernels.reference.suffix_lookup import suffix_lookup as reference

    return reference
