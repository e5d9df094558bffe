"""Whole decoder layers of the triton column on a GPU, inside one CUDA graph, against the library.

    PYTHONPATH=. python3 -m benchmarks.gpu_matmul [--models 0.6b,8b] [--rows 1,5,16,32,64,100]
        [--quantization int4]

A pass is every layer's norm_linear, attend (each row a request of 600 tokens), linear,
norm_gated_linear and linear, each layer with weights of its own, then the last norm and the head;
`dense` is the same without attention. The limit is the weights' bytes at 4.35 TB/s.
"""

import argparse
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.graph_timing import bytes_per_us, graph_us
from slipstream.kernels.formats.dense import DenseMatrix
from slipstream.kernels.formats.weight import Weight
from slipstream.kernels.ops import Ops
from slipstream.kernels.pass_inputs import Paging, PassInputs, RowPlaces
from slipstream.kernels.reference import ReferenceOps
from slipstream.kernels.table import Heads, Norm
from slipstream.kernels.triton import TRITON, TritonOps
from slipstream.models.precision import PRECISIONS

CONTEXT, BLOCK_SIZE = 600, 16
DTYPE, DEVICE = torch.bfloat16, torch.device("cuda")


class Library(TritonOps):
    """The Triton backend with torch's matmuls, and no op that does more than one thing."""

    backend = "library"
    linear, norm, add_norm = Ops.linear, Ops.norm, Ops.add_norm
    norm_linear, norm_gated_linear = Ops.norm_linear, Ops.norm_gated_linear
    attend, logits = Ops.attend, staticmethod(ReferenceOps.logits)


LIBRARY = Library()


@dataclass(frozen=True)
class Geometry:
    """The sizes of a decoder; `timed` of its `layers` are run, and the pass is scaled up."""

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    layers: int
    vocab: int = 151936
    timed: int | None = None
    query_norms: bool = True


GEOMETRIES = {
    "0.6b": Geometry(1024, 16, 8, 128, 3072, 28),
    "1.7b": Geometry(2048, 16, 8, 128, 6144, 28),
    "llama-1b": Geometry(2048, 32, 8, 64, 8192, 16, vocab=128256, query_norms=False),
    "8b": Geometry(4096, 32, 8, 128, 12288, 36),
    "llama-8b": Geometry(4096, 32, 8, 128, 14336, 32, vocab=128256, query_norms=False),
    "32b": Geometry(5120, 64, 8, 128, 25600, 64, timed=8),
}


@dataclass(frozen=True)
class Layer:
    qkv: Weight
    output: Weight
    gate_up: Weight
    down: Weight
    norm: Norm


@dataclass(frozen=True)
class Decoder:
    layers: list[Layer]
    head: Weight
    heads: Heads
    cache: tuple[Tensor, Tensor]


def main() -> None:
    cli = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cli.add_argument("--models", default=",".join(GEOMETRIES))
    cli.add_argument("--rows", default="1,5,16,32,64,100")
    cli.add_argument("--quantization", choices=PRECISIONS, help="of layers and head")
    cli.add_argument("--no-library", action="store_true")
    options = cli.parse_args()
    print(f"{'model':9}{'rows':>5}{'pass us':>9}{'layer':>8}{'dense':>8}{'head':>8}", end="")
    print(f"{'limit':>9}{'share':>7}{'library':>9}{'layer':>8}")
    for name in options.models.split(","):
        geometry = GEOMETRIES[name]
        counts = [int(rows) for rows in options.rows.split(",")]
        decoder = _decoder(geometry, options.quantization, max(counts))
        for rows in counts:
            library = None if options.no_library or options.quantization else LIBRARY
            _report(name, geometry, decoder, rows, library)
        del decoder
        torch.cuda.empty_cache()


def _report(
    name: str, geometry: Geometry, decoder: Decoder, rows: int, library: Ops | None
) -> None:
    layers, head = _pass_us(TRITON, decoder, rows, True)
    dense, _ = _pass_us(TRITON, decoder, rows, False)
    whole = layers * geometry.layers + head
    limit = _bytes(decoder, geometry) / bytes_per_us()
    print(f"{name:9}{rows:5}{whole:9.0f}{layers:8.2f}{dense:8.2f}{head:8.2f}", end="")
    print(f"{limit:9.0f}{limit / whole:7.0%}", end="")
    if library is not None:
        layers, head = _pass_us(library, decoder, rows, True)
        print(f"{layers * geometry.layers + head:9.0f}{layers:8.2f}", end="")
    print(flush=True)


def _bytes(decoder: Decoder, geometry: Geometry) -> float:
    one = decoder.layers[0]
    matrices = (one.qkv, one.output, one.gate_up, one.down)
    layer = sum(each.nbytes for each in matrices)
    return float(layer * geometry.layers + decoder.head.nbytes)


def _pass_us(ops: Ops, decoder: Decoder, rows: int, attending: bool) -> tuple[float, float]:
    """(microseconds of one layer, of the last norm and the head)."""
    stream = torch.randn(rows, decoder.layers[0].qkv.shape[1], device=DEVICE).to(DTYPE)
    inputs = _inputs(rows)
    heads = decoder.heads
    mixed = torch.randn(rows, heads.num_heads * heads.head_dim, device=DEVICE).to(DTYPE)

    def layers() -> tuple[Tensor, Tensor]:
        addend, residual = stream, None
        for layer in decoder.layers:
            qkv, residual = ops.norm_linear(addend, residual, layer.norm, layer.qkv, None)
            attended = ops.attend(qkv, heads, inputs, decoder.cache) if attending else mixed
            addend = ops.linear(attended, layer.output, None)
            active, residual = ops.norm_gated_linear(
                addend, residual, layer.norm, layer.gate_up, None
            )
            addend = ops.linear(active, layer.down, None)
        assert residual is not None
        return addend, residual

    def whole() -> None:
        addend, residual = layers()
        ops.logits(ops.add_norm(addend, residual, decoder.layers[0].norm), decoder.head)

    without = graph_us(layers)
    return without / len(decoder.layers), graph_us(whole) - without


def _decoder(geometry: Geometry, quantization: str | None, requests: int) -> Decoder:
    one, width = geometry, geometry.width
    heads_width = one.heads * one.head_dim
    precision = PRECISIONS[quantization] if quantization else None

    def matrix(rows: int, columns: int, is_head: bool = False) -> Weight:
        weight = torch.empty(rows, columns, dtype=DTYPE, device=DEVICE).normal_()
        weight *= columns**-0.5
        form = precision and (precision.head if is_head else precision.matrix)
        return TRITON.pack(form.round(weight) if form else DenseMatrix(weight))

    layers = [
        Layer(
            matrix((one.heads + 2 * one.kv_heads) * one.head_dim, width),
            matrix(width, heads_width),
            matrix(2 * one.inner, width),
            matrix(width, one.inner),
            Norm(torch.ones(width, dtype=DTYPE, device=DEVICE), 1e-6),
        )
        for _ in range(one.timed or one.layers)
    ]
    head = matrix(one.vocab, width, is_head=True)
    norm = Norm(torch.ones(one.head_dim, dtype=DTYPE, device=DEVICE), 1e-6)
    turns = torch.randn(4096, one.head_dim, device=DEVICE)
    blocks = requests * -(-CONTEXT // BLOCK_SIZE)
    pages = torch.randn(2, blocks, BLOCK_SIZE, one.kv_heads, one.head_dim, device=DEVICE).to(DTYPE)
    heads = Heads(
        num_heads=one.heads,
        num_kv_heads=one.kv_heads,
        head_dim=one.head_dim,
        norms=(norm, norm) if one.query_norms else None,
        cos_sin=turns,
        scale=one.head_dim**-0.5,
        window=None,
    )
    return Decoder(layers, head, heads, (pages[0], pages[1]))


def _inputs(rows: int) -> PassInputs:
    blocks = -(-CONTEXT // BLOCK_SIZE)
    tables = torch.arange(rows * blocks, device=DEVICE, dtype=torch.int32).view(rows, blocks)
    positions = torch.full((rows,), CONTEXT - 1, device=DEVICE)
    slots = tables[:, -1].long() * BLOCK_SIZE + (CONTEXT - 1) % BLOCK_SIZE
    return PassInputs(
        RowPlaces(torch.arange(rows + 1, device=DEVICE), positions, max_rows=1),
        Paging(tables, positions + 1, slots),
    )


if __name__ == "__main__":
    main()
