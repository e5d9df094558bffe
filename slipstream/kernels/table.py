"""The table of ops: which column serves a device.

A row is an op with one signature and one meaning; a column is an implementation for a kind of
device. `reference` (plain torch) serves every device and defines what is right. Layers get their
column once, when the network is built, and never ask which device they are on.
"""

import functools
import logging
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

logger = logging.getLogger("slipstream")


@dataclass(frozen=True)
class AttentionInputs:
    """Where the rows of one pass stand, shared by all layers.

    Attributes:
        query_start: [R + 1] int64, first row of each request; the last entry is the row count.
        context_lens: [R] int64, tokens of each request in the cache once this pass has written.
        block_tables: [R, max_blocks] int32.
        positions: [T] int64, of each row.
        slots: [T] int64, where each row's key and value go; -1 writes nothing.
        max_rows: no request has more rows, as far as the host knows; None if it does not. A hint
            for how many programs to start: results do not depend on it.
    """

    query_start: Tensor
    context_lens: Tensor
    block_tables: Tensor
    positions: Tensor
    slots: Tensor
    max_rows: int | None = None


class LinearOp(Protocol):
    """x [T, K], weight [N, K], bias [N] or None -> [T, N] in the dtype of x."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor: ...


class LogitsOp(Protocol):
    """x [T, K], weight [V, K] -> [T, V] float32, never rounded below the accumulator."""

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor: ...


class NormOp(Protocol):
    """RMS norm over the last axis, computed in float32: x [..., H], weight [H] -> like x."""

    def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...


class AddNormOp(Protocol):
    """x, residual [T, H] -> (norm(x + residual), x + residual)."""

    def __call__(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]: ...


class GatedActivationOp(Protocol):
    """gate_up [T, 2I], gate first -> silu(gate) * up, [T, I]."""

    def __call__(self, gate_up: Tensor) -> Tensor: ...


class RotateAndStoreOp(Protocol):
    """Norm queries and keys per head (where weights are given), rotate them, store keys and values.

    query [T, Hq, D], key and value [T, Hk, D]; cos_sin [max_positions, D] float32 (D/2 cosines,
    then D/2 sines, the half-split layout); caches [num_blocks, block_size, Hk, D].
    Returns the rotated queries [T, Hq, D].
    """

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        norms: tuple[Tensor, Tensor, float] | None,
        cos_sin: Tensor,
        inputs: AttentionInputs,
        cache: tuple[Tensor, Tensor],
    ) -> Tensor: ...


class PagedAttentionOp(Protocol):
    """Causal attention of ragged query rows over paged keys and values -> [T, Hq, D].

    A row at position p sees the cached tokens 0..p of its request, or the last `window` of them.
    """

    def __call__(
        self,
        query: Tensor,
        cache: tuple[Tensor, Tensor],
        inputs: AttentionInputs,
        scale: float,
        window: int | None,
    ) -> Tensor: ...


@dataclass(frozen=True)
class Ops:
    """One column of the table."""

    column: str
    linear: LinearOp
    logits: LogitsOp
    norm: NormOp
    add_norm: AddNormOp
    gated_activation: GatedActivationOp
    rotate_and_store: RotateAndStoreOp
    paged_attention: PagedAttentionOp


@functools.cache
def ops_for(device: torch.device) -> Ops:
    """The fastest column that serves `device`."""
    from slipstream.kernels.reference import REFERENCE

    if device.type != "cuda":
        return REFERENCE
    try:
        from slipstream.kernels.triton import TRITON
    except ImportError as error:
        logger.warning("Triton cannot be imported (%s): plain torch kernels serve the GPU.", error)
        return REFERENCE
    return TRITON
