"""What the ops of `kernels/table.py` mean, in float64 and by another way than the reference's."""

import torch
from torch import Tensor

from slipstream.kernels.pass_inputs import PassInputs


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    rows = x.double().reshape(-1, x.shape[-1])
    out = torch.stack([row / (row.dot(row) / len(row) + eps).sqrt() for row in rows])
    return out.view(x.shape) * weight.double()


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out = x.double() @ weight.double().T
    return out if bias is None else out + bias.double()


def gated(gate_up: Tensor) -> Tensor:
    half = gate_up.shape[-1] // 2
    gate, up = gate_up[..., :half].double(), gate_up[..., half:].double()
    return gate / (1 + (-gate).exp()) * up


def angles(head_dim: int, theta: float, positions: Tensor) -> Tensor:
    """[T, head_dim / 2]: by how much each pair of a head turns at each position."""
    speeds = [theta ** (-2 * pair / head_dim) for pair in range(head_dim // 2)]
    return positions.double().unsqueeze(1) * torch.tensor(speeds, dtype=torch.float64)


def rotated(x: Tensor, turns: Tensor) -> Tensor:
    """x [T, H, D] as complex numbers (first half real, second half imaginary), turned."""
    half = x.shape[-1] // 2
    numbers = torch.complex(x[..., :half].double(), x[..., half:].double())
    numbers = numbers * torch.exp(1j * turns).unsqueeze(1)
    return torch.cat((numbers.real, numbers.imag), dim=-1)


def attention(
    query: Tensor,
    cache: tuple[Tensor, Tensor],
    inputs: PassInputs,
    scale: float,
    window: int | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Row by row and head by head."""
    keys, values = cache
    block_size, kv_heads = keys.shape[1], keys.shape[2]
    groups = query.shape[1] // kv_heads
    out = torch.empty(query.shape, dtype=torch.float64)
    for request, table in enumerate(inputs.paging.block_tables.tolist()):
        first, last = inputs.rows.query_start[request : request + 2].tolist()
        for row in range(first, last):
            position = int(inputs.rows.positions[row])
            oldest = max(inputs.sees.first_seen, 0 if window is None else position - window + 1)
            end = position + 1 if inputs.sees.causal else int(inputs.paging.context_lens[request])
            seen = range(oldest, end)
            places = [(table[token // block_size], token % block_size) for token in seen]
            for head in range(query.shape[1]):
                own_keys = torch.stack([keys[block, at, head // groups] for block, at in places])
                own_values = torch.stack(
                    [values[block, at, head // groups] for block, at in places]
                )
                scores = own_keys.double() @ query[row, head].double() * scale
                weights = (scores - scores.max()).exp()
                total = weights.sum()
                if sinks is not None:
                    total += (sinks[head].double() - scores.max()).exp()
                out[row, head] = weights @ own_values.double() / total
    return out
