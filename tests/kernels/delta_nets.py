"""Ragged batches of gated delta nets, for tests of their op."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.delta_net import DeltaCache, DeltaHeads
from slipstream.kernels.pass_inputs import Paging, PassInputs, RowPlaces, StateInputs
from tests.kernels.batches import seeded


@dataclass(frozen=True)
class Shape:
    """Sizes of one layer."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int = 4
    dtype: torch.dtype = torch.float32

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True)
class Request:
    """One request: its rows in the pass, how many of them are known, rows that wait, tokens that
    the state covers, and the number of tokens at which a checkpoint is made."""

    rows: int
    known: int
    pending: int = 0
    covered: int = 100
    save_at: int = -1


@dataclass(frozen=True, eq=False)
class Case:
    """The arguments of an op."""

    mixed: Tensor
    gates: Tensor
    z: Tensor
    heads: DeltaHeads
    inputs: PassInputs
    cache: DeltaCache

    @property
    def arguments(
        self,
    ) -> tuple[Tensor, Tensor, Tensor, DeltaHeads, PassInputs, DeltaCache]:
        return self.mixed, self.gates, self.z, self.heads, self.inputs, self.cache

    def moved(self, device: torch.device) -> "Case":
        """A copy, of the cache as well."""
        assert self.inputs.states is not None
        rows = replace(self.inputs.rows, **_tensors(self.inputs.rows, device))
        states = replace(self.inputs.states, **_tensors(self.inputs.states, device))
        return Case(
            self.mixed.to(device),
            self.gates.to(device),
            self.z.to(device),
            replace(self.heads, **_tensors(self.heads, device)),
            replace(self.inputs, rows=rows, states=states),
            replace(self.cache, **_tensors(self.cache, device)),
        )


def _tensors(part: Any, device: torch.device) -> dict[str, Any]:
    return {
        name: value.to(device, copy=True)
        for name, value in vars(part).items()
        if isinstance(value, Tensor)
    }


def make_case(shape: Shape, requests: Sequence[Request], drafts: int, seed: int = 0) -> Case:
    """Random numbers; the places of the cache are in random order, and as many are unused."""
    generator = seeded(seed)

    def draw(*size: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(*size, generator=generator)).to(shape.dtype)

    count, total = len(requests), sum(request.rows for request in requests)
    value_heads, value_width = shape.value_heads, shape.value_heads * shape.value_dim
    heads = DeltaHeads(
        shape.key_heads,
        value_heads,
        shape.key_dim,
        shape.value_dim,
        draw(shape.channels, shape.taps, scale=0.7),
        -torch.rand(value_heads, generator=generator) - 0.1,
        torch.randn(value_heads, generator=generator) - 2,
        draw(shape.value_dim),
        1e-6,
    )
    slots = 2 * count
    order = torch.randperm(slots, generator=generator)
    sizes = (value_heads, shape.key_dim, shape.value_dim)
    cache = DeltaCache(
        torch.randn(slots + count, *sizes, generator=generator),
        draw(slots + count, shape.taps - 1, shape.channels),
        draw(slots, drafts, shape.channels),
        draw(slots, drafts, 2 * value_heads),
    )
    states = StateInputs(
        order[:count],
        torch.tensor([request.known for request in requests]),
        torch.tensor([request.pending for request in requests]),
        torch.tensor([request.save_at for request in requests]),
        torch.arange(slots, slots + count),
    )
    positions = [
        request.covered + request.pending + row
        for request in requests
        for row in range(request.rows)
    ]
    start = torch.tensor([0, *(request.rows for request in requests)]).cumsum(0)
    nothing = torch.zeros(0, dtype=torch.int64)
    inputs = PassInputs(
        RowPlaces(start, torch.tensor(positions)), Paging(nothing, nothing, nothing), states=states
    )
    wide = draw(total, shape.channels + 2 * value_heads + value_width)
    mixed, gates, z = wide.split((shape.channels, 2 * value_heads, value_width), 1)
    return Case(mixed, gates, z, heads, inputs, cache)
