"""Random layers of latent attention and their batches, and what the op means, in float64."""

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.kernels.latent_attention import LatentHeads
from slipstream.kernels.pass_inputs import PassInputs
from tests.kernels import oracles
from tests.kernels.batches import Requests, attention_inputs, num_blocks, seeded

EPS = 1e-6
THETA = 500.0


@dataclass(frozen=True)
class LatentShape:
    """Sizes of one layer and its cache."""

    heads: int
    rank: int
    plain: int
    rotary: int
    value: int
    block_size: int
    dtype: torch.dtype = torch.float32
    scaled: bool = False


@dataclass(frozen=True, eq=False)
class Drawn:
    """One layer's arguments; the cache has NaN in empty slots."""

    heads: LatentHeads
    queries: Tensor
    latents: Tensor
    inputs: PassInputs
    cache: Tensor


def drawn(shape: LatentShape, requests: Requests, seed: int = 0) -> Drawn:
    inputs = attention_inputs(requests, shape.block_size, seed)
    generator = seeded(seed + 1)

    def numbers(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator)

    expanded = numbers(shape.heads, shape.plain + shape.value, shape.rank) / shape.rank**0.5
    expanded = expanded.to(shape.dtype)
    longest = int(inputs.paging.context_lens.max())
    turns = oracles.angles(shape.rotary, THETA, torch.arange(longest))
    heads = LatentHeads(
        num_heads=shape.heads,
        norm_weight=(1 + 0.3 * numbers(shape.rank)).to(shape.dtype),
        eps=EPS,
        keys=expanded[:, : shape.plain],
        values=expanded[:, shape.plain :],
        cos_sin=torch.cat((turns.cos(), turns.sin()), -1).float(),
        scale=1.5 * (shape.plain + shape.rotary) ** -0.5,
        query_scales=1 + 0.1 * torch.arange(longest).float() if shape.scaled else None,
    )
    rows = len(inputs.rows.positions)
    # Columns of one wider tensor, as a layer has them where queries are made of the stream.
    of_queries = shape.heads * (shape.plain + shape.rotary)
    both = numbers(rows, of_queries + shape.rank + shape.rotary).to(shape.dtype)
    sizes = num_blocks(requests, shape.block_size), shape.block_size, shape.rank + shape.rotary
    cache = torch.full(sizes, torch.nan, dtype=shape.dtype)
    for request, computed in enumerate(requests.computed):
        table = inputs.paging.block_tables[request]
        for token in range(computed):
            place = int(table[token // shape.block_size]), token % shape.block_size
            cache[place] = numbers(sizes[2]).to(shape.dtype)
    return Drawn(heads, both[:, :of_queries], both[:, of_queries:], inputs, cache)


def expected(layer: Drawn) -> tuple[Tensor, Tensor]:
    """The output [T, H V] and the cache after the pass, computed row by row in the direct form."""
    heads, inputs, cache = layer.heads, layer.inputs, layer.cache.double()
    turns = heads.cos_sin[inputs.rows.positions].double()
    half = heads.rotary_dim // 2
    angle = torch.complex(turns[:, :half], turns[:, half:])
    latents = layer.latents
    stored = torch.cat(
        (
            oracles.norm(latents[:, : heads.rank], heads.norm_weight, heads.eps),
            _turned(latents[:, heads.rank :], angle),
        ),
        -1,
    )
    block_size = cache.shape[1]
    for row, slot in enumerate(inputs.paging.slots.tolist()):
        if slot >= 0:
            cache[slot // block_size, slot % block_size] = stored[row]
    queries = layer.queries.view(len(latents), heads.num_heads, -1)
    outputs = []
    for request, table in enumerate(inputs.paging.block_tables.tolist()):
        first, last = inputs.rows.query_start[request : request + 2].tolist()
        for row in range(first, last):
            position = int(inputs.rows.positions[row])
            seen = torch.stack(
                [
                    cache[table[token // block_size], token % block_size]
                    for token in range(position + 1)
                ]
            )
            latent, shared = seen[:, : heads.rank], seen[:, heads.rank :]
            scale = heads.scale
            if heads.query_scales is not None:
                scale *= float(heads.query_scales[position])
            of_heads = []
            for head in range(heads.num_heads):
                plain = queries[row, head, : heads.plain_dim].double()
                turning = _turned(queries[row, head, None, heads.plain_dim :], angle[row])[0]
                keys = latent @ heads.keys[head].double().T
                weights = torch.softmax(scale * (keys @ plain + shared @ turning), 0)
                of_heads.append(weights @ (latent @ heads.values[head].double().T))
            outputs.append(torch.cat(of_heads))
    return torch.stack(outputs), cache


def _turned(x: Tensor, angle: Tensor) -> Tensor:
    """x [T, P], neighbours as complex numbers, turned."""
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * angle).flatten(-2)
