"""What a pass reads of a network's weights, which for few rows is what it costs."""

from functools import partial

import torch

from slipstream.kernels.experts import Routing
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.precision import head_bytes, layer_matrices
from slipstream.models.quantized.module import StoredQuantization
from slipstream.models.quantized.source import stored_rounding


def expected_experts(routing: Routing, rows: int) -> float:
    """How many distinct experts of a layer so many rows touch if each chooses independently."""
    share = routing.num_chosen / routing.num_experts
    return routing.num_experts * (1.0 - (1.0 - share) ** rows)


def pass_bytes(
    config: DecoderConfig,
    rows: int,
    dtype: torch.dtype,
    quantization: str | None = None,
    stored: StoredQuantization | None = None,
    experts: float | None = None,
) -> float:
    """Bytes of the matrices that a pass of so many rows reads, the head included.

    Args:
        quantization: what they are rounded to; None: nothing.
        stored: how a quantised checkpoint stores them.
        experts: distinct ones that the rows touch in a layer; None: as many as independent choices
            would.
    """
    form = None if stored is None else partial(stored_rounding, stored)
    routing = config.routing
    total = head_bytes(config, dtype, quantization)
    for matrix in layer_matrices(config, dtype, quantization, form):
        touched = 1.0
        if routing is not None and matrix.experts > 1:
            touched = expected_experts(routing, rows) if experts is None else experts
        total += matrix.nbytes * touched / matrix.experts
    return total
