"""Suffix lookup in C++. Meaning and shapes: `kernels/suffix_lookup.py`."""

import _slipstream_cpu as cpp
import torch
from torch import Tensor

from slipstream.kernels.cpu.addresses import dense


def suffix_lookup(
    token_ids: Tensor, slots: Tensor, known: Tensor, width: int, shortest: int, longest: int
) -> tuple[Tensor, Tensor]:
    requests = slots.shape[0]
    assert token_ids.dtype == torch.int32
    assert token_ids.is_cpu
    assert token_ids.is_contiguous()
    slots, known = dense(slots, torch.int64, requests), dense(known, torch.int64, requests)
    tokens = torch.empty((requests, width), dtype=torch.int64)
    found = torch.empty(requests, dtype=torch.bool)
    cpp.suffix_lookup(
        token_ids.data_ptr(), *token_ids.shape, requests, slots.data_ptr(), known.data_ptr(), width,
        shortest, longest, tokens.data_ptr(), found.data_ptr(),
    )  # fmt: skip
    return tokens, found
