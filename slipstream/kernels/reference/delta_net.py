"""Gated delta nets in plain torch, token by token; see `kernels/delta_net.py`."""

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.delta_net import DeltaCache, DeltaHeads
from slipstream.kernels.pass_inputs import PassInputs, StateInputs

_L2_EPS = 1e-6


def delta_net(
    mixed: Tensor,
    gates: Tensor,
    z: Tensor,
    heads: DeltaHeads,
    inputs: PassInputs,
    cache: DeltaCache,
) -> Tensor:
    """See `Ops.delta_net`."""
    states = inputs.states
    assert states is not None, "passes through recurrent layers have state inputs"
    read = torch.zeros(mixed.shape[0], heads.num_value_heads, heads.value_dim)
    starts = inputs.rows.query_start.tolist()
    for request, (first, end) in enumerate(pairwise(starts)):
        if first < end:
            rows = slice(first, end)
            start = int(inputs.rows.in_context[first])
            read[rows] = _run_request(
                mixed[rows], gates[rows], heads, states, cache, request, start
            ).to(read)
    read = read.to(mixed.device)
    normed = F.rms_norm(read, (heads.value_dim,), heads.norm_weight.float(), heads.eps)
    return (normed.flatten(1) * F.silu(z.float())).to(z.dtype)


def _run_request(
    mixed: Tensor,
    gates: Tensor,
    heads: DeltaHeads,
    states: StateInputs,
    cache: DeltaCache,
    request: int,
    start: int,
) -> Tensor:
    """The outputs of one request's rows, [rows, Hv, Dv] float32; updates its state."""
    slot, pending = int(states.slots[request]), int(states.pending[request])
    num_taken = pending + int(states.num_known[request])  # rows that are committed to the state
    save_after = int(states.save_at[request]) - (start - pending)
    mixed = torch.cat((cache.drafted[slot, :pending], mixed))
    gates = torch.cat((cache.drafted_gates[slot, :pending], gates))
    before = torch.cat((cache.windows[slot], mixed))  # row i comes after its W - 1 predecessors
    width = heads.taps.shape[1]
    state = cache.states[slot]
    outputs = []
    for row in range(mixed.shape[0]):
        active = F.silu((before[row : row + width].float() * heads.taps.T.float()).sum(0))
        state, output = _recur(state, active.to(mixed.dtype).float(), gates[row].float(), heads)
        outputs.append(output)
        window = before[row + 1 : row + width]
        if row + 1 == save_after and save_after <= num_taken:
            place = int(states.saved[request])
            cache.states[place], cache.windows[place] = state, window
        if row + 1 == num_taken:
            cache.states[slot], cache.windows[slot] = state, window
    drafted = mixed[num_taken:][: cache.drafted.shape[1]]
    cache.drafted[slot, : len(drafted)] = drafted
    cache.drafted_gates[slot, : len(drafted)] = gates[num_taken:][: len(drafted)]
    return torch.stack(outputs[pending:])


def _recur(
    state: Tensor, active: Tensor, gates: Tensor, heads: DeltaHeads
) -> tuple[Tensor, Tensor]:
    """One row of the recurrence: active [C], gates [2 Hv], float32 -> the state after the row, and
    its output [Hv, Dv]."""
    keys = heads.num_key_heads * heads.key_dim
    query, key, value = active[:keys], active[keys : 2 * keys], active[2 * keys :]
    repeats = heads.num_value_heads // heads.num_key_heads
    query, key = (
        _unit(each.view(-1, heads.key_dim)).repeat_interleave(repeats, 0) for each in (query, key)
    )
    query = query * heads.key_dim**-0.5
    strength, step = gates.chunk(2)
    kept = (heads.decay * F.softplus(step + heads.step_bias)).exp()
    state = state * kept[:, None, None]
    value = value.view(-1, heads.value_dim)
    delta = strength.sigmoid()[:, None] * (value - (state * key[:, :, None]).sum(1))
    state = state + key[:, :, None] * delta[:, None, :]
    return state, (state * query[:, :, None]).sum(1)


def _unit(rows: Tensor) -> Tensor:
    return rows * (rows.square().sum(-1, keepdim=True) + _L2_EPS).rsqrt()
