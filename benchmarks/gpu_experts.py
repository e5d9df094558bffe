"""Times mixtures of experts and products of packed weights on a GPU, in a CUDA graph.

    PYTHONPATH=. python3 -m benchmarks.gpu_experts [--models gpt-oss-20b,...] [--rows 1,8,32]

A mixture is norm, router, choice, experts, shared expert and sum; routers are random, so that rows
choose independently. The limit of few rows is the time to read the chosen experts, the router and
the shared expert (4.35 TB/s on an H200); that of many rows is their arithmetic at 790 TFLOP/s
(share of the peak). Dense models give one line for each of a
layer's four products.
"""

import argparse
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.graph_timing import bytes_per_us, graph_us
from slipstream.kernels.experts import ClampedGate, Router, Routing, Scores
from slipstream.kernels.formats.dense import DenseMatrix
from slipstream.kernels.formats.mxfp4 import Mxfp4Matrix
from slipstream.kernels.formats.nvfp4 import Nvfp4Matrix
from slipstream.kernels.formats.weight import Weight
from slipstream.kernels.table import ExpertsParts, Norm, SharedExpert
from slipstream.kernels.triton import TRITON

FLOPS_PER_US = 790e6
DTYPE, DEVICE = torch.bfloat16, torch.device("cuda")
MEMORY = 12e9  # bytes of weights of a model: as many layers as that holds, four at most


@dataclass(frozen=True)
class Mixture:
    width: int
    inner: int
    routing: Routing
    form: str
    clamp: ClampedGate | None = None
    biased: bool = False
    shared: int = 0
    weighed: bool = False  # the shared expert has a gate


@dataclass(frozen=True)
class Dense:
    width: int
    inner: int
    heads: int
    form: str


_OSS = Mixture(
    2880, 2880, Routing(32, 4, Scores.CHOSEN_SOFTMAX), "mxfp4", ClampedGate(7, 1.702), True
)
MODELS: dict[str, Mixture | Dense] = {
    "gpt-oss-20b": _OSS,
    "gpt-oss-120b": replace(_OSS, routing=replace(_OSS.routing, num_experts=128)),
    "qwen3-30b-a3b": Mixture(2048, 768, Routing(128, 8, Scores.SOFTMAX, normalised=True), "bf16"),
    "glm-4.5-air": Mixture(
        4096, 1408, Routing(128, 8, Scores.SIGMOID, normalised=True), "bf16", shared=1408
    ),
    "glm-4.7-flash": Mixture(
        2048, 1536, Routing(64, 4, Scores.SIGMOID, normalised=True), "bf16", shared=1536
    ),
    "qwen3.5-35b-a3b": Mixture(
        2048,
        512,
        Routing(256, 8, Scores.SOFTMAX, normalised=True),
        "bf16",
        shared=512,
        weighed=True,
    ),
    "llama-70b": Dense(8192, 28672, 80, "nvfp4"),
}


def main() -> None:
    cli = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cli.add_argument("--models", default=",".join(MODELS))
    cli.add_argument("--rows", default="1,2,4,8,16,32,64,128,512,4096,8192")
    options = cli.parse_args()
    counts = [int(rows) for rows in options.rows.split(",")]
    print(f"{'':24}{'rows':>5}{'us':>10}{'limit':>9}{'share':>7}{'peak':>7}{'experts':>9}")
    for name in options.models.split(","):
        model = MODELS[name]
        if isinstance(model, Dense):
            _time_dense(name, model, counts)
        else:
            _time_mixture(name, model, counts)
        torch.cuda.empty_cache()


def _time_mixture(name: str, model: Mixture, counts: list[int]) -> None:
    first = _parts(model, 0)
    layers = [first]
    while len(layers) < min(4, MEMORY // (first.gate_up.nbytes + first.down.nbytes)):
        layers.append(_parts(model, len(layers)))
    for rows in counts:
        x = torch.randn(rows, model.width, device=DEVICE).to(DTYPE)
        touched = sum(_touched(x, layer) for layer in layers) / len(layers)

        run = partial(_pass, x, layers)
        routing = model.routing
        each = (first.gate_up.nbytes + first.down.nbytes) / routing.num_experts
        other_bytes = 2 * model.width * (routing.num_experts + 3 * model.shared)
        active = routing.num_chosen * model.inner + model.shared
        work = 2 * rows * model.width * (3 * active + routing.num_experts)
        _report(
            name,
            rows,
            graph_us(run, repeats=7) / len(layers),
            touched * each + other_bytes,
            work,
            touched,
        )


def _time_dense(name: str, model: Dense, counts: list[int]) -> None:
    shapes = {
        "qkv": (model.heads * 128, model.width),
        "output": (model.width, model.width),
        "gate and up": (2 * model.inner, model.width),
        "down": (model.width, model.inner),
    }
    for part, (height, depth) in shapes.items():
        count = max(2, int(1e9 / (height * depth)))
        weights = [_weight(height, depth, model.form) for _ in range(count)]
        norm = Norm(torch.ones(depth, dtype=DTYPE, device=DEVICE), 1e-5)
        for rows in counts:
            x = torch.randn(rows, depth, device=DEVICE).to(DTYPE)

            run = partial(_multiply, x, weights, norm if part == "gate and up" else None)
            us = graph_us(run, repeats=7) / count
            _report(f"{name} {part}", rows, us, weights[0].nbytes, 2 * rows * height * depth, 0)


def _pass(x: Tensor, layers: list[ExpertsParts]) -> None:
    addend, stream = TRITON.experts(x, None, layers[0])
    for layer in layers[1:]:
        addend, stream = TRITON.experts(addend, stream, layer)


def _multiply(x: Tensor, weights: list[Weight], norm: Norm | None) -> None:
    """A product, with a norm before it and an activation after it if they are given."""
    for weight in weights:
        if norm is None:
            TRITON.linear(x, weight, None)
        else:
            TRITON.norm_gated_linear(x, None, norm, weight, None)


def _report(name: str, rows: int, us: float, nbytes: float, work: float, touched: float) -> None:
    limit, peak = nbytes / bytes_per_us(), work / FLOPS_PER_US
    print(f"{name:24}{rows:5}{us:10.1f}{limit:9.1f}{limit / us:7.0%}{peak / us:7.0%}", end="")
    print(f"{touched:9.1f}" if touched else "", flush=True)


def _parts(model: Mixture, layer: int) -> ExpertsParts:
    routing, width, inner = model.routing, model.width, model.inner
    experts = routing.num_experts
    torch.manual_seed(layer)

    def vector(*sizes: int) -> Tensor:
        return 0.1 * torch.randn(sizes, device=DEVICE).to(DTYPE)

    shared = None
    if model.shared:
        shared = SharedExpert(
            (_weight(2 * model.shared, width, model.form), None),
            (_weight(width, model.shared, model.form), None),
            vector(1, width) if model.weighed else None,
        )
    return ExpertsParts(
        norm=Norm(torch.ones(width, dtype=DTYPE, device=DEVICE), 1e-5),
        router=Router(
            routing,
            torch.randn(experts, width, device=DEVICE).to(DTYPE) / width**0.5,
            vector(experts) if model.biased else None,
            torch.zeros(experts, device=DEVICE) if routing.scores is Scores.SIGMOID else None,
        ),
        gate_up=_weight(experts * 2 * inner, width, model.form),
        gate_up_bias=vector(experts, 2 * inner) if model.biased else None,
        down=_weight(experts * width, inner, model.form),
        down_bias=vector(experts, width) if model.biased else None,
        clamp=model.clamp,
        shared=shared,
    )


def _weight(height: int, depth: int, form: str) -> Weight:
    """Random numbers, about depth ** -0.5 large, packed as the column reads them."""
    if form == "bf16":
        numbers = torch.empty(height, depth, dtype=DTYPE, device=DEVICE)
        return TRITON.pack(DenseMatrix(numbers.normal_(0, depth**-0.5)))
    values = torch.randint(0, 256, (height, depth // 2), dtype=torch.uint8, device=DEVICE)
    if form == "mxfp4":
        shape = height, depth // 32
        scales = torch.randint(117, 121, shape, dtype=torch.uint8, device=DEVICE)
        return TRITON.pack(Mxfp4Matrix(values, scales))
    small = torch.rand(height, depth // 16, device=DEVICE).add_(0.5).to(torch.float8_e4m3fn)
    whole = torch.full((height,), depth**-0.5 / 3, device=DEVICE)
    return TRITON.pack(Nvfp4Matrix(values, small, whole))


def _touched(x: Tensor, parts: ExpertsParts) -> int:
    """How many experts the rows choose in the first layer (others have other inputs)."""
    normed = F.rms_norm(x, (x.shape[1],))
    logits = F.linear(normed.float(), parts.router.weight.float())
    chosen = logits.topk(parts.router.routing.num_chosen).indices
    return len(set(chosen.flatten().tolist()))


if __name__ == "__main__":
    main()
