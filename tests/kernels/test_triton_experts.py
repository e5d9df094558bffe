"""Mixtures of experts and weights of few bits on the triton column, against plain torch."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

pytest.importorskip("triton", reason="it is there for Linux only")

from slipstream.kernels.experts import ClampedGate, Router, Routing, Scores
from slipstream.kernels.formats.dense import DenseMatrix
from slipstream.kernels.formats.float8 import ToFloat8
from slipstream.kernels.formats.float8_blocks import Float8BlockMatrix, ToFloat8Blocks
from slipstream.kernels.formats.mxfp4 import Mxfp4Matrix, ToMxfp4
from slipstream.kernels.formats.nvfp4 import ToNvfp4
from slipstream.kernels.formats.weight import Rounding, Weight
from slipstream.kernels.reference import REFERENCE
from slipstream.kernels.reference.experts import choose as reference_choose
from slipstream.kernels.table import ExpertsParts, Norm, SharedExpert
from slipstream.kernels.triton import TRITON, TRITON_INVARIANT, grouped
from tests.kernels.batches import seeded
from tests.kernels.device import DEVICE, INTERPRETED, ON_GPU

pytestmark = INTERPRETED

# The interpreter's `tl.dot` is wrong for bfloat16.
HALF = torch.bfloat16 if ON_GPU else torch.float16
CPU = torch.device("cpu")
FORMATS: dict[str, Rounding | None] = {
    "plain": None,
    "float8": ToFloat8(),
    "blocks": ToFloat8Blocks(),
    "mxfp4": ToMxfp4(),
    "nvfp4": ToNvfp4(),
}
ROUTINGS = {
    "softmax": Routing(6, 3, Scores.SOFTMAX, scale=1.5),
    "normalised": Routing(8, 8, Scores.SOFTMAX, normalised=True),
    "chosen": Routing(5, 2, Scores.CHOSEN_SOFTMAX),
    "one": Routing(1, 1, Scores.CHOSEN_SOFTMAX),
    "sigmoid": Routing(7, 3, Scores.SIGMOID, normalised=True, scale=2.5),
    "groups": Routing(12, 3, Scores.SIGMOID, normalised=True, num_groups=4, kept_groups=2),
    "softmax in groups": Routing(10, 2, Scores.SOFTMAX, num_groups=2, kept_groups=1),
}


def randn(*sizes: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(sizes, generator=seeded(seed)).to(dtype).to(DEVICE)


def weight(rows: int, columns: int, form: Rounding | None, dtype: torch.dtype, seed: int) -> Weight:
    numbers = torch.randn(rows, columns, generator=seeded(seed)) / columns**0.5
    made = DenseMatrix(numbers.to(dtype)) if form is None else form.round(numbers)
    return made.to(DEVICE)


def mixture(
    width: int, inner: int, dtype: torch.dtype, form: str = "plain", routing: str = "chosen",
    biased: bool = True, clamp: ClampedGate | None = None, shared: int = 0,
) -> ExpertsParts:  # fmt: skip
    chosen, rounding = ROUTINGS[routing], FORMATS[form]
    experts = chosen.num_experts
    corrected = chosen.scores is Scores.SIGMOID
    beside = None
    if shared:
        beside = SharedExpert(
            (weight(2 * shared, width, rounding, dtype, 7), None),
            (weight(width, shared, rounding, dtype, 8), randn(width, seed=18, dtype=dtype)),
            randn(1, width, seed=9, dtype=dtype) / width**0.5,
        )
    return ExpertsParts(
        norm=Norm(1 + 0.3 * randn(width, seed=10, dtype=dtype), 1e-5),
        router=Router(
            chosen,
            randn(experts, width, seed=11, dtype=dtype) / width**0.5,
            randn(experts, seed=12, dtype=dtype) if biased else None,
            0.1 * randn(experts, seed=13) if corrected else None,
        ),
        gate_up=weight(2 * inner * experts, width, rounding, dtype, 14),
        gate_up_bias=randn(experts, 2 * inner, seed=15, dtype=dtype) if biased else None,
        down=weight(width * experts, inner, rounding, dtype, 16),
        down_bias=randn(experts, width, seed=17, dtype=dtype) if biased else None,
        clamp=clamp,
        shared=beside,
    )


def on_host(parts: ExpertsParts) -> ExpertsParts:
    def host(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.cpu()

    router, shared = parts.router, parts.shared
    return replace(
        parts,
        norm=Norm(parts.norm.weight.cpu(), parts.norm.eps),
        router=Router(
            router.routing, router.weight.cpu(), host(router.bias), host(router.correction)
        ),
        gate_up=parts.gate_up.to(CPU),
        gate_up_bias=host(parts.gate_up_bias),
        down=parts.down.to(CPU),
        down_bias=host(parts.down_bias),
        shared=shared
        and SharedExpert(
            (shared.gate_up[0].to(CPU), None),
            (shared.down[0].to(CPU), host(shared.down[1])),
            host(shared.gate),
        ),
    )


def whole(out: Tensor) -> Tensor:
    """What is left to be added up, added up."""
    return out.double().cpu().sum(0) if out.ndim == 3 else out.double().cpu()


def assert_like_the_reference(parts: ExpertsParts, rows: int, dtype: torch.dtype) -> None:
    width = len(parts.norm.weight)
    addend, residual = randn(rows, width, dtype=dtype), randn(rows, width, seed=3, dtype=dtype)
    host = on_host(parts)
    exact = 2e-5 if dtype == torch.float32 else 8 * torch.finfo(dtype).eps
    truth, total = REFERENCE.experts(addend.cpu(), residual.cpu(), host)
    out, kept = TRITON.experts(addend, residual, parts)
    assert_close(kept.cpu(), total)
    assert_close(whole(out), truth.double(), rtol=exact, atol=exact)


# routing


@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize("rows", [1, 17, 70])
def test_routing(rows: int, kind: str) -> None:
    """Choices, weights, and the pairs sorted by expert; among equal scores the lower index."""
    routing = ROUTINGS[kind]
    experts = routing.num_experts
    logits = randn(2, rows, experts)
    logits[:, 0] = 1.0  # all equal
    correction = 0.1 * randn(experts, seed=2) if routing.scores is Scores.SIGMOID else None
    if correction is not None:
        correction[0] = correction[1]
    router = Router(routing, logits[0], None, correction)
    choice = grouped.choose(logits, router, 16)
    host = None if correction is None else correction.cpu()
    truth, weights = reference_choose((logits[0] + logits[1]).cpu(), routing, host)
    assert_close(choice.weights.cpu(), weights)
    expected = truth.flatten().argsort(stable=True)
    assert choice.pairs.tolist() == expected.tolist()
    counts = truth.flatten().bincount(minlength=experts)
    assert choice.starts.tolist() == [0, *counts.cumsum(0).tolist()]
    assert choice.ends.tolist() == ((counts + 15) // 16).cumsum(0).tolist()
    assert choice.slots >= choice.ends[-1]


def test_numbers_that_are_none_leave_no_memory() -> None:
    routing = ROUTINGS["normalised"]
    logits = randn(1, 3, routing.num_experts)
    logits[0, 0] = torch.nan
    logits[0, 1, 3] = -torch.inf
    choice = grouped.choose(logits, Router(routing, logits[0]), 16)
    assert sorted(choice.pairs.tolist()) == list(range(3 * routing.num_chosen))


# the half


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, HALF] if ON_GPU else [HALF], ids=str)
def test_formats(form: str, dtype: torch.dtype) -> None:
    parts = mixture(96, 160 if ON_GPU else 32, dtype, form, shared=32)
    for rows in (9, *([1, 40, 70, 300] if ON_GPU else [])):
        assert_like_the_reference(parts, rows, dtype)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_kinds(routing: str) -> None:
    clamp = ClampedGate(0.7, 1.702) if routing in ("chosen", "groups") else None
    parts = mixture(40, 12, torch.float32, routing=routing, biased=clamp is not None, clamp=clamp)
    assert_like_the_reference(parts, 5, torch.float32)


def test_more_rows_than_a_tile_holds() -> None:
    assert_like_the_reference(mixture(40, 12, HALF, routing="one"), 150, HALF)


def test_no_rows() -> None:
    parts = mixture(40, 12, HALF)
    out, total = TRITON.experts(randn(0, 40, dtype=HALF), None, parts)
    assert out.shape[-2:] == total.shape == (0, 40)


@pytest.mark.parametrize("form", FORMATS)
def test_rows_do_not_depend_on_their_number(form: str) -> None:
    width, inner = (2880, 2880) if ON_GPU and form == "mxfp4" else (128, 32)
    parts = mixture(width, inner, HALF, form, shared=32)
    x = randn(100 if ON_GPU else 8, width, dtype=HALF)
    together, _ = TRITON_INVARIANT.experts(x, None, parts)
    for column in (TRITON, TRITON_INVARIANT):
        for count in (5, *([1, 17, 33, 64] if ON_GPU else [])):
            own = slice(2, 2 + count)
            out, _ = column.experts(x[own], None, parts)
            # The interpreter leaves sums to numpy, whose order follows the shapes.
            near = 0.0 if ON_GPU else 2 * torch.finfo(HALF).eps
            assert_close(whole(out), whole(together[..., own, :]), rtol=near, atol=near)


# the ops of dense layers


@pytest.mark.parametrize("form", ["blocks", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("sizes", [(1, 70, 64), (19, 12, 96)] + [(70, 130, 160)] * ON_GPU, ids=str)
def test_dense_ops(sizes: tuple[int, int, int], form: str) -> None:
    rows, width, depth = sizes
    x, bias = randn(rows, depth, dtype=HALF), randn(width, seed=2, dtype=HALF)
    made = weight(width, depth, FORMATS[form], HALF, 1)
    norm = Norm(1 + 0.3 * randn(depth, seed=4, dtype=HALF), 1e-5)
    host_norm, host = Norm(norm.weight.cpu(), norm.eps), made.to(CPU)
    near = 8 * torch.finfo(HALF).eps

    def assert_near(out: Tensor, truth: Tensor) -> None:
        assert_close(whole(out), truth.double(), rtol=near, atol=near)

    of = (x.cpu(), host, bias.cpu())
    assert_near(TRITON.linear(x, made, bias), REFERENCE.linear(*of))
    assert_near(TRITON.logits(x, made), REFERENCE.logits(x.cpu(), host))
    joined = ([(x.cpu(), host_norm)], host, bias.cpu())
    assert_near(TRITON.joined_linear([(x, norm)], made, bias), REFERENCE.joined_linear(*joined))
    for name in ("norm_linear", "norm_gated_linear"):
        out, _ = getattr(TRITON, name)(x, None, norm, made, bias)
        truth, _ = getattr(REFERENCE, name)(x.cpu(), None, host_norm, host, bias.cpu())
        assert_near(out, truth)


def test_blocks_of_fewer_rows() -> None:
    whole_blocks = weight(150, 200, ToFloat8Blocks(), HALF, 1)
    assert isinstance(whole_blocks, Float8BlockMatrix)
    part, x = whole_blocks.rows(30, 130), randn(3, 200, dtype=HALF)
    out, truth = TRITON.logits(x, part), part.to(CPU).logits(x.cpu())
    assert_close(out.cpu(), truth, rtol=1e-4, atol=1e-4)


def test_every_power_of_two() -> None:
    """From the least scale of MXFP4 to the largest whose numbers all are floats."""
    made = ToMxfp4().round(randn(253, 32, seed=1))
    scales = torch.arange(253, dtype=torch.uint8, device=DEVICE).unsqueeze(1)
    made = Mxfp4Matrix(made.values, scales)
    x = torch.zeros(32, 32, device=DEVICE).fill_diagonal_(1.0)
    assert_close(TRITON.logits(x, made).T.cpu(), made.to(CPU).dequantised(), rtol=0, atol=0)
