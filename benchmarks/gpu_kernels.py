"""The triton column on a GPU: each op against the reference, and its time inside a CUDA graph.

    PYTHONPATH=. python3 -m benchmarks.gpu_kernels [--sweep | --shared]

Shapes are those of Qwen3-8B in bf16. An op is called on many sets of inputs in turn, together far
larger than the L2 cache, in one graph; a row is the median time of the graph over its calls.

    error   ||out - reference|| / ||reference||, the reference in float32 on the same numbers
    limit   the bytes that must move (keys and values; all inputs and outputs) at 4.35 TB/s, or the
            multiplications at 800 TFLOP/s for a prompt chunk
    share   limit / measured

`--sweep` times attention with other tiles instead, `--shared` attention of requests that share
the first tokens of their contexts, read for each of them and once. The last line is one JSON
document.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.gpu_dense import (
    BLOCK_SIZE,
    DEVICE,
    DTYPE,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    MAX_LEN,
    MOST_CALLS,
    Row,
    dense_rows,
    randn,
    relative_error,
)
from benchmarks.graph_timing import bytes_per_us, graph_us
from slipstream.kernels.attention import query_key_norms, split_heads
from slipstream.kernels.pass_inputs import Paging, PassInputs, RowPlaces, SharedBlocks
from slipstream.kernels.reference import REFERENCE
from slipstream.kernels.table import Heads, Norm
from slipstream.kernels.triton import TRITON, attention_stream
from slipstream.kernels.triton import attention as tuned
from slipstream.kernels.triton.attention import AttentionTiles
from slipstream.kernels.triton.rope import rotate_and_store
from slipstream.layers.rope import RopeConfig, rope_table

FLOPS_PER_US = 800e6
POOL_TOKENS = 32 * 32768
KV_BYTES = 2 * KV_HEADS * HEAD_DIM * 2  # of one token


@dataclass(frozen=True)
class Case:
    """Attention of `requests`, each with `rows` new rows that end a context of `context`, whose
    first `shared` tokens are in the same blocks; `once`: these are read once for all of them."""

    name: str
    requests: int
    rows: int
    context: int
    table_tokens: int | None = None  # the block table's width, if it is wider than the context
    shared: int = 0
    once: bool = False

    @property
    def own_blocks(self) -> int:
        """Blocks that only one request has, for each."""
        return -(-(self.context - self.shared) // BLOCK_SIZE)

    @property
    def blocks(self) -> int:
        """Distinct blocks of all contexts."""
        return self.shared // BLOCK_SIZE + self.requests * self.own_blocks

    def tables(self, blocks: Tensor) -> Tensor:
        """[requests, blocks of a context], from all distinct blocks."""
        shared, own = blocks.tensor_split([self.shared // BLOCK_SIZE])
        shared = shared.expand(self.requests, -1)
        return torch.cat((shared, own.view(self.requests, self.own_blocks)), 1)


@dataclass(frozen=True)
class Layer:
    """A layer of 8 KV heads; one without norms has sinks."""

    num_heads: int
    head_dim: int = HEAD_DIM
    normed: bool = True
    window: int | None = None

    def __str__(self) -> str:
        window = f", window {self.window}" if self.window else ""
        return f"{self.num_heads} heads of {self.head_dim}{window}"


# The whole op: norms, rotation and store as well, in the shapes of Qwen3-0.6B and 8B, and of both
# kinds of layers of gpt-oss.
WHOLE = [
    (layer, Case(f"attend {layer} R={requests} rows={rows} context={context}", *sizes))
    for layer in (Layer(16), Layer(32), Layer(64, 64, False), Layer(64, 64, False, 128))
    for sizes in (
        (1, 1, 600),
        (1, 5, 600),
        (1, 1, 2000),
        (8, 1, 600),
        (8, 5, 600),
        (32, 1, 600),
        (32, 5, 600),
        (100, 1, 600),
    )
    for requests, rows, context in (sizes,)
]
SHARED = [
    (
        Layer(heads),
        Case(f"{heads} heads R={r} rows={n} shared={s} {how}", r, n, s + 256, None, s, o),
    )
    for heads, r, n, s in (
        *((32, r, n, s) for r, n in ((8, 1), (32, 1), (32, 5), (100, 1)) for s in (1024, 4096)),
        *((16, 32, 1, 4096), (64, 32, 4, 4096), (32, 8, 1, 32768), (32, 2, 1, 16384)),
    )
    for how, o in (("apart", False), ("once", True))
]
CASES = [
    *(
        Case(f"decode R={requests} context={context // 1024}k", requests, 1, context)
        for context in (1024, 8192, 32768)
        for requests in (1, 8, 32)
    ),
    Case("decode R=32 context=1k, wide table", 32, 1, 1024, MAX_LEN),
    Case("verify 5 rows R=1 context=1k", 1, 5, 1024),
    Case("verify 5 rows R=32 context=1k", 32, 5, 1024),
    Case("verify 5 rows R=1 context=8k", 1, 5, 8192),
    Case("verify 5 rows R=8 context=8k", 8, 5, 8192),
    Case("verify 9 rows R=8 context=8k", 8, 9, 8192),
    Case("prompt of 2048", 1, 2048, 2048),
    Case("chunk of 2048 at 8k", 1, 2048, 8192),
]


def main() -> None:
    cli = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cli.add_argument("--sweep", action="store_true")
    cli.add_argument("--shared", action="store_true")
    options = cli.parse_args()
    torch.manual_seed(0)
    # Normal numbers, drawn once: zeros would be faster than real data.
    shape = (POOL_TOKENS // BLOCK_SIZE, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    pool = (
        torch.empty(shape, dtype=DTYPE, device=DEVICE).normal_(),
        torch.empty(shape, dtype=DTYPE, device=DEVICE).normal_(),
    )
    if options.shared:
        rows = [_attend(pool, layer, case) for layer, case in SHARED]
    elif options.sweep:
        rows = _sweep(pool)
    else:
        rows = [*dense_rows(), *_attention_rows(pool, CASES)]
        rows += [_attend(pool, layer, case) for layer, case in WHOLE]
    print(f"{'op':48}{'us':>9}{'torch':>9}{'limit':>9}{'share':>7}  error")
    for row in rows:
        baseline = f"{row['torch_us']:9.2f}" if row.get("torch_us") else " " * 9
        print(
            f"{row['op']:48}{row['us']:9.2f}{baseline}{row['limit_us']:9.2f}"
            f"{row['limit_us'] / row['us']:7.0%}  {row['error']:.1e}"
        )
    short = [{k: v if k == "op" else float(f"{v:.4g}") for k, v in row.items()} for row in rows]
    print(json.dumps({"device": torch.cuda.get_device_name(), "rows": short}))


# Attention


def _attention_rows(pool: tuple[Tensor, Tensor], cases: Sequence[Case]) -> list[Row]:
    return [_attention(pool, case) for case in cases]


def _attention(pool: tuple[Tensor, Tensor], case: Case) -> Row:
    blocks = case.blocks
    calls = max(1, min(MOST_CALLS, pool[0].shape[0] // blocks))
    if case.rows > 64:
        calls = 4  # bound by arithmetic
    order = torch.randperm(pool[0].shape[0], device=DEVICE).int()
    inputs = [_inputs(case, order[i * blocks : (i + 1) * blocks]) for i in range(calls)]
    query = torch.randn(case.requests * case.rows, HEADS, HEAD_DIM, dtype=DTYPE, device=DEVICE)
    scale = HEAD_DIM**-0.5

    def run() -> None:
        for each in inputs:
            TRITON.paged_attention(query, pool, each, scale, None)

    limit = case.requests * case.context * KV_BYTES / bytes_per_us()
    if case.rows > 64:
        seen = case.rows * (case.context - case.rows) + case.rows * (case.rows + 1) / 2
        limit = 4 * case.requests * seen * HEADS * HEAD_DIM / FLOPS_PER_US
    out = TRITON.paged_attention(query, pool, inputs[0], scale, None)
    error = relative_error(out, _attention_truth(query, pool, inputs[0], case, scale))
    return {
        "op": case.name,
        "us": graph_us(run, calls, repeats=15, warm_up=3),
        "limit_us": limit,
        "error": error,
    }


def _attend(whole: tuple[Tensor, Tensor], layer: Layer, case: Case) -> Row:
    """The new tokens are written into the pool; the tables are as wide as a graph's."""
    size = layer.head_dim
    keys, values = (pages.view(-1, BLOCK_SIZE, KV_HEADS, size) for pages in whole)
    pool = keys, values
    case = replace(case, table_tokens=MAX_LEN)
    blocks = case.blocks
    calls = min(MOST_CALLS, pool[0].shape[0] // blocks)
    order = torch.randperm(pool[0].shape[0], device=DEVICE).int()
    inputs = [_inputs(case, order[i * blocks : (i + 1) * blocks], True) for i in range(calls)]
    weights = randn(2, size)
    heads = Heads(
        num_heads=layer.num_heads,
        num_kv_heads=KV_HEADS,
        head_dim=size,
        norms=(Norm(weights[0], 1e-6), Norm(weights[1], 1e-6)) if layer.normed else None,
        cos_sin=rope_table(size, RopeConfig(1e6), MAX_LEN, DEVICE),
        scale=size**-0.5,
        window=layer.window,
        sinks=None if layer.normed else randn(layer.num_heads),
    )
    qkv = randn(case.requests * case.rows, (layer.num_heads + 2 * KV_HEADS) * size)

    def run() -> None:
        for each in inputs:
            tuned.attend(qkv, heads, each, pool)

    out = tuned.attend(qkv, heads, inputs[0], pool)
    query = rotate_and_store(
        *split_heads(qkv, heads), query_key_norms(heads), heads.cos_sin, inputs[0], pool
    )
    truth = _attention_truth(
        query, pool, inputs[0], case, heads.scale, heads.window, heads.sinks
    ).flatten(-2)
    seen = min(case.context, (layer.window or MAX_LEN) + case.rows - 1)
    distinct = case.requests * seen - (case.requests - 1) * case.shared  # none have windows
    limit = distinct * KV_BYTES * size / HEAD_DIM / bytes_per_us()
    us = graph_us(run, calls, repeats=15, warm_up=3)
    return {"op": case.name, "us": us, "limit_us": limit, "error": relative_error(out, truth)}


def _inputs(case: Case, blocks: Tensor, stored: bool = False) -> PassInputs:
    tables = case.tables(blocks)
    if case.table_tokens:
        unused = case.table_tokens // BLOCK_SIZE - tables.shape[1]
        tables = torch.nn.functional.pad(tables, (0, unused), value=1 << 30)
    positions = torch.arange(case.context - case.rows, case.context, device=DEVICE)
    slots = torch.full((case.requests * case.rows,), -1, device=DEVICE)
    if stored:
        own = tables[:, positions // BLOCK_SIZE].long() * BLOCK_SIZE
        slots = (own + positions % BLOCK_SIZE).flatten()
    query_start = torch.arange(case.requests + 1, device=DEVICE) * case.rows
    context_lens = torch.full((case.requests,), case.context, device=DEVICE)
    shared = None
    if case.once:
        members = torch.arange(case.requests, device=DEVICE) + 1
        shared = SharedBlocks(torch.full_like(members, case.shared), members)
    return PassInputs(
        RowPlaces(query_start, positions.repeat(case.requests), max_rows=case.rows),
        Paging(tables.contiguous(), context_lens, slots, shared),
    )


def _attention_truth(
    query: Tensor,
    pool: tuple[Tensor, Tensor],
    inputs: PassInputs,
    case: Case,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Request by request in float32, each on a cache that holds it alone."""
    outs = []
    blocks = -(-case.context // BLOCK_SIZE)
    for request in range(case.requests):
        table = inputs.paging.block_tables[request, :blocks].long()
        rows = slice(request * case.rows, (request + 1) * case.rows)
        own = torch.arange(blocks, device=DEVICE)[None]
        alone = PassInputs(
            RowPlaces(torch.tensor([0, case.rows]), inputs.rows.positions[rows], case.rows),
            Paging(own, torch.tensor([case.context]), inputs.paging.slots),
        )
        cache = pool[0][table].float(), pool[1][table].float()
        outs.append(
            REFERENCE.paged_attention(query[rows].float(), cache, alone, scale, window, sinks)
        )
    return torch.cat(outs)


def _sweep(pool: tuple[Tensor, Tensor]) -> list[Row]:
    """Some of the cases with other tiles; a configuration that does not fit is left out."""
    rows: list[Row] = []
    names = ("decode R=1 context=1k", "decode R=1 context=32k", "decode R=32 context=8k")
    short = [case for case in CASES if case.name in (*names, "verify 5 rows R=8 context=8k")]
    chunks = [case for case in CASES if case.rows > 64]
    for tokens, warps, stages, registers, programs in (
        (64, 4, 5, None, 132), (64, 8, 5, None, 132), (64, 4, 4, 168, 264), (64, 4, 4, None, 264),
        (64, 8, 4, 128, 264), (64, 8, 3, 128, 264), (64, 4, 3, 168, 396), (64, 4, 4, 168, 1),
        (32, 4, 6, 168, 264), (128, 8, 2, None, 264),
    ):  # fmt: skip
        tuned.short_tiles = _divided(AttentionTiles(32, tokens, warps, stages, registers), programs)
        rows += _tried(pool, short, f"{tokens} w{warps} s{stages} r{registers} p{programs}")
    for lines, tokens, warps, stages, registers in (
        (128, 64, 8, 2, 128), (128, 64, 8, 2, None), (128, 64, 8, 3, None), (128, 32, 8, 3, 128),
        (128, 128, 8, 2, None), (256, 64, 16, 2, None), (64, 64, 4, 2, 168),
    ):  # fmt: skip
        attention_stream.streams = lambda *_: False  # the kernel that has such tiles
        tuned.chunk_tiles = _always(AttentionTiles(lines, tokens, warps, stages, registers))
        rows += _tried(pool, chunks, f"{lines}x{tokens} w{warps} s{stages} r{registers}")
    return sorted(rows, key=lambda row: (row["op"].split(" | ")[0], row["us"]))


def _always(tiles: AttentionTiles) -> Callable[..., AttentionTiles]:
    return lambda *_: tiles


def _divided(tiles: AttentionTiles, programs: int) -> Callable[..., tuple[AttentionTiles, int]]:
    return lambda lines, *_: (replace(tiles, lines=lines), programs)


def _tried(pool: tuple[Tensor, Tensor], cases: Sequence[Case], label: str) -> list[Row]:
    from triton.runtime.errors import OutOfResources

    try:
        return [{**row, "op": f"{row['op']} | {label}"} for row in _attention_rows(pool, cases)]
    except OutOfResources as error:
        print(f"{label}: {error}")
        return []


if __name__ == "__main__":
    main()
