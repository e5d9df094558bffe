"""Mixtures of experts in C++, at every level of instructions that runs here."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from slipstream.kernels.experts import ClampedGate, Router, Routing, Scores
from slipstream.kernels.formats.dense import DenseMatrix
from slipstream.kernels.formats.int4 import ToInt4
from slipstream.kernels.formats.int8 import ToInt8
from slipstream.kernels.formats.mxfp4 import ToMxfp4
from slipstream.kernels.formats.nvfp4 import ToNvfp4
from slipstream.kernels.formats.weight import Rounding, Weight
from slipstream.kernels.norm import Activation
from slipstream.kernels.reference import REFERENCE
from slipstream.kernels.table import ExpertsParts, Norm, SharedExpert

cpp = pytest.importorskip("_slipstream_cpu", reason="the C++ kernels are not built")
from slipstream.kernels.cpu import experts, matmul  # noqa: E402

FORMS = {
    "float": None,
    "int8": ToInt8(),
    "int4": ToInt4(32),
    "mxfp4": ToMxfp4(),
    "nvfp4": ToNvfp4(),
}


@dataclass(frozen=True)
class Mixture:
    """The sizes and settings of a mixture.

    Attributes:
        width, inner: H and I.
        shared: I of the shared expert; None without one.
        gained: experts have gains and gates of GELU.
    """

    routing: Routing
    width: int
    inner: int
    biased: bool = False
    corrected: bool = False
    clamp: ClampedGate | None = None
    shared: int | None = None
    shared_gate: bool = False
    gained: bool = False


MIXTURES = {
    # As gpt-oss: experts begin at blocks of 64 rows.
    "chosen": Mixture(
        Routing(8, 3, Scores.CHOSEN_SOFTMAX), 128, 96, biased=True, clamp=ClampedGate(0.5, 1.702)
    ),
    # They do not.
    "softmax": Mixture(
        Routing(5, 2, Scores.SOFTMAX, normalised=True), 96, 32, shared=64, shared_gate=True
    ),
    "groups": Mixture(
        Routing(12, 3, Scores.SIGMOID, True, 2.5, 4, 2), 64, 64, corrected=True, shared=32
    ),
    "all": Mixture(Routing(3, 3, Scores.SIGMOID), 32, 32, biased=True),
    # As Gemma 4's; a shared expert's activation stays SiLU.
    "gained": Mixture(
        Routing(6, 2, Scores.CHOSEN_SOFTMAX),
        64,
        32,
        gained=True,
        shared=32,
    ),
}


def made(mixture: Mixture, form: Rounding | None, dtype: torch.dtype) -> ExpertsParts:
    """The parts of a mixture with random parameters, in the reference's formats."""
    generator = torch.Generator().manual_seed(7)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def matrix(rows: int, columns: int) -> Weight:
        values = (draw(rows, columns) / columns**0.5).to(dtype)
        return DenseMatrix(values) if form is None else form.round(values)

    routing, width, inner = mixture.routing, mixture.width, mixture.inner
    count, shared = routing.num_experts, mixture.shared
    return ExpertsParts(
        norm=Norm(draw(width).to(dtype), 1e-5),
        router=Router(
            routing,
            (draw(count, width) / width**0.5).to(dtype),
            draw(count).to(dtype) if mixture.biased else None,
            draw(count) if mixture.corrected else None,
            draw(count) if mixture.gained else None,
        ),
        gate_up=matrix(count * 2 * inner, width),
        gate_up_bias=draw(count, 2 * inner).to(dtype) if mixture.biased else None,
        down=matrix(count * width, inner),
        down_bias=draw(count, width).to(dtype) if mixture.biased else None,
        clamp=mixture.clamp,
        activation=Activation.GELU_TANH if mixture.gained else Activation.SILU,
        shared=None
        if shared is None
        else SharedExpert(
            (matrix(2 * shared, width), draw(2 * shared).to(dtype)),
            (matrix(width, shared), None),
            draw(1, width).to(dtype) if mixture.shared_gate else None,
        ),
    )


def packed(parts: ExpertsParts) -> ExpertsParts:
    shared = parts.shared
    if shared is not None:
        (gate_up, gate_up_bias), (down, down_bias) = shared.gate_up, shared.down
        products = (matmul.pack(gate_up), gate_up_bias), (matmul.pack(down), down_bias)
        shared = SharedExpert(*products, shared.gate)
    return replace(
        parts, gate_up=matmul.pack(parts.gate_up), down=matmul.pack(parts.down), shared=shared
    )


def rows(count: int, width: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(3)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_is_the_references_and_a_row_its_own(
    level: str, name: str, form: str, dtype: torch.dtype
) -> None:
    mixture, threads = MIXTURES[name], cpp.num_threads()
    whole = made(mixture, FORMS[form], dtype)
    parts, x = packed(whole), rows(70, mixture.width, dtype)
    assert experts.serves(parts)
    together = experts.experts(x, parts)
    expected = REFERENCE.mixture(x, whole)
    # Gated products are rounded to bf16, sometimes to the other neighbour.
    bound = expected.abs().max() * (1e-5 if dtype == torch.float32 else 2.0**-6)
    assert ((together - expected).abs() <= bound).all()
    for part in (1, 2, 5, 16, 17, 33):
        cpp.set_num_threads(1 + part % 3)
        assert torch.equal(experts.experts(x[3 : 3 + part], parts), together[3 : 3 + part]), part
    cpp.set_num_threads(threads)


@pytest.mark.parametrize("form", ["float", "mxfp4"])
def test_rows_may_all_choose_one_expert(level: str, form: str) -> None:
    """The others have none, and equal logits go to the lower index."""
    mixture = replace(MIXTURES["chosen"], routing=Routing(8, 2, Scores.CHOSEN_SOFTMAX))
    whole = made(mixture, FORMS[form], torch.bfloat16)
    bias = torch.tensor([0, 0, 1, 0, 0, 9, 1, 1]).bfloat16()
    flat = replace(whole.router, weight=torch.zeros_like(whole.router.weight), bias=bias)
    whole = replace(whole, router=flat)
    x = rows(40, mixture.width, torch.bfloat16)
    found, expected = experts.experts(x, packed(whole)), REFERENCE.mixture(x, whole)
    assert ((found - expected).abs() <= expected.abs().max() * 2.0**-6).all()
    # Only chosen experts count: 5, and 2 before 6 and 7.
    assert whole.gate_up_bias is not None
    spoilt = whole.gate_up_bias.clone()
    spoilt[[0, 1, 3, 4, 6, 7]] = torch.nan
    spared = packed(replace(whole, gate_up_bias=spoilt))
    assert torch.equal(experts.experts(x, spared), found)


def test_so_many_rows_go_in_several_passes() -> None:
    mixture = Mixture(Routing(4, 1, Scores.SOFTMAX), 32, 32)
    parts = packed(made(mixture, None, torch.bfloat16))
    x = rows(150_000, mixture.width, torch.bfloat16)
    together = experts.experts(x, parts)
    for start in range(0, 150_000, 9_973):
        part = slice(start, start + 3)
        assert torch.equal(experts.experts(x[part], parts), together[part])
    for row in (0, 149_999):
        assert torch.equal(experts.experts(x[row:], parts)[:1], together[row : row + 1])


def test_rows_that_are_not_finite_stay_alone(level: str) -> None:
    mixture = MIXTURES["chosen"]
    for form in ("float", "mxfp4"):
        parts = packed(made(mixture, FORMS[form], torch.bfloat16))
        x = rows(6, mixture.width, torch.bfloat16)
        clean = experts.experts(x, parts)
        x[2] = torch.nan
        x[4, 5] = torch.inf
        found = experts.experts(x, parts)
        assert torch.equal(found[[0, 1, 3, 5]], clean[[0, 1, 3, 5]])
        assert not found[2].isfinite().any()


def test_what_is_not_packed_is_left_to_plain_torch() -> None:
    mixture = MIXTURES["softmax"]
    for whole in (made(mixture, ToMxfp4(), torch.bfloat16), made(mixture, None, torch.half)):
        assert not experts.serves(whole)
        x = rows(4, mixture.width, whole.router.weight.dtype)
        assert torch.equal(experts.experts(x, whole), REFERENCE.mixture(x, whole))


def test_parts_that_do_not_fit_are_refused() -> None:
    parts = packed(made(MIXTURES["chosen"], None, torch.float32))
    x = rows(2, 128, torch.float32)
    assert parts.gate_up_bias is not None
    wrong = [
        (replace(parts, down=parts.gate_up, down_bias=None), "do not fit"),
        (replace(parts, gate_up_bias=parts.gate_up_bias[1:]), "bias"),
        (replace(parts, router=replace(parts.router, correction=torch.zeros(7))), "correction"),
    ]
    for one, reason in wrong:
        with pytest.raises(ValueError, match=reason):
            experts.experts(x, one)
    with pytest.raises(ValueError, match="x and out"):
        experts.experts(x[:, 1:], parts)
    with pytest.raises(TypeError, match="dtype"):
        experts.experts(x.bfloat16(), parts)
