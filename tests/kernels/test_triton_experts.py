"""Mixtures of experts and weights of few bits on the triton column, against plain torch."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

pytest.importorskip("triton", reason="it is there for Linux only")

from slipstream.core.errors import UsageError
from slipstream.kernels.experts import ClampedGate, Router, Routing, Scores
from slipstream.kernels.formats.dense import DenseMatrix
from slipstream.kernels.formats.float8 import ToFloat8
from slipstream.kernels.formats.float8_blocks import Float8BlockMatrix, ToFloat8Blocks
from slipstream.kernels.formats.int4 import Int4Matrix, ToInt4
from slipstream.kernels.formats.int8 import Int8Matrix, ToInt8
from slipstream.kernels.formats.mxfp4 import Mxfp4Matrix, ToMxfp4
from slipstream.kernels.formats.nvfp4 import Nvfp4Matrix, ToNvfp4
from slipstream.kernels.formats.weight import Rounding, Weight
from slipstream.kernels.norm import Activation
from slipstream.kernels.reference import REFERENCE
from slipstream.kernels.reference.experts import choose as reference_choose
from slipstream.kernels.reference.experts import experts as reference_experts
from slipstream.kernels.table import ExpertsParts, Norm, SharedExpert
from slipstream.kernels.triton import TRITON, TRITON_INVARIANT, grouped
from slipstream.kernels.triton.chosen_experts import choose
from slipstream.kernels.triton.fragments import (
    E2M1_CHOSEN,
    E2M1_PAIR,
    E2M1_RESTS,
    E2M1_SHIFT,
    E2M1_TURNS,
    Fragments,
    from_float8_blocks,
    from_int4,
    from_int8,
    from_mxfp4,
    from_nvfp4,
)
from tests.kernels.batches import seeded
from tests.kernels.device import DEVICE, INTERPRETED, ON_GPU

pytestmark = INTERPRETED

# The interpreter's `tl.dot` is wrong for bfloat16.
HALF = torch.bfloat16 if ON_GPU else torch.float16
FORMATS: dict[str, Rounding | None] = {
    "plain": None,
    "float8": ToFloat8(),
    "blocks": ToFloat8Blocks(),
    "mxfp4": ToMxfp4(),
    "nvfp4": ToNvfp4(),
    "int8": ToInt8(),
    "int4": ToInt4(32),
    "int4 zeros": ToInt4(32, zeros=True),
    "int4 wide": ToInt4(128),
    "int4 wide zeros": ToInt4(128, zeros=True),
}
INTEGERS = ("int8", "int4", "int4 zeros", "int4 wide", "int4 wide zeros")
IN_GROUPS_OF_32 = [name for name in FORMATS if "wide" not in name]
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
    return torch.randn(sizes, generator=seeded(seed)).to(dtype)


def weight(rows: int, columns: int, form: Rounding | None, dtype: torch.dtype, seed: int) -> Weight:
    numbers = torch.randn(rows, columns, generator=seeded(seed)) / columns**0.5
    return DenseMatrix(numbers.to(dtype)) if form is None else form.round(numbers)


def packed(made: Weight) -> Weight:
    return TRITON.pack(made.to(DEVICE))


def in_fragments(made: Weight) -> Fragments:
    if isinstance(made, Int8Matrix):
        return from_int8(made)
    if isinstance(made, Int4Matrix):
        return from_int4(made)
    if isinstance(made, Float8BlockMatrix):
        blocks = from_float8_blocks(made)
        assert blocks is not None
        return blocks
    assert isinstance(made, Mxfp4Matrix | Nvfp4Matrix)
    return from_mxfp4(made) if isinstance(made, Mxfp4Matrix) else from_nvfp4(made)


def mixture(
    width: int, inner: int, dtype: torch.dtype, form: str = "plain", routing: str = "chosen",
    biased: bool = True, clamp: ClampedGate | None = None, shared: int = 0, gained: bool = False,
) -> ExpertsParts:  # fmt: skip
    chosen, rounding = ROUTINGS[routing], FORMATS[form]
    experts = chosen.num_experts
    corrected = chosen.scores is Scores.SIGMOID
    shared_expert = None
    if shared:
        shared_expert = SharedExpert(
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
            randn(experts, seed=19) if gained else None,
        ),
        gate_up=weight(2 * inner * experts, width, rounding, dtype, 14),
        gate_up_bias=randn(experts, 2 * inner, seed=15, dtype=dtype) if biased else None,
        down=weight(width * experts, inner, rounding, dtype, 16),
        down_bias=randn(experts, width, seed=17, dtype=dtype) if biased else None,
        clamp=clamp,
        shared=shared_expert,
        activation=Activation.GELU_TANH if gained else Activation.SILU,
    )


def joining(width: int, inner: int, routing: str, gate: bool = True) -> ExpertsParts:
    """Mixtures whose shared expert has the shape of the others."""
    parts = mixture(width, inner, HALF, routing=routing, biased=False, shared=inner)
    shared = parts.shared
    assert shared is not None
    down, own = (shared.down[0], None), shared.gate if gate else None
    return replace(parts, shared=replace(shared, down=down, gate=own))


def on_device(parts: ExpertsParts) -> ExpertsParts:
    def moved(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.to(DEVICE)

    def matrix(made: Weight) -> Weight:
        return packed(made) if parts.norm.weight.dtype == HALF else made.to(DEVICE)

    router, shared = parts.router, parts.shared
    return replace(
        parts,
        norm=Norm(parts.norm.weight.to(DEVICE), parts.norm.eps),
        router=Router(
            router.routing,
            router.weight.to(DEVICE),
            moved(router.bias),
            moved(router.correction),
            moved(router.gains),
        ),
        gate_up=matrix(parts.gate_up),
        gate_up_bias=moved(parts.gate_up_bias),
        down=matrix(parts.down),
        down_bias=moved(parts.down_bias),
        shared=shared
        and SharedExpert(
            (matrix(shared.gate_up[0]), None),
            (matrix(shared.down[0]), moved(shared.down[1])),
            moved(shared.gate),
        ),
    )


def whole(out: Tensor) -> Tensor:
    """The sum of the parts of an addend."""
    return out.double().cpu().sum(0) if out.ndim == 3 else out.double().cpu()


def assert_like_the_reference(
    parts: ExpertsParts, rows: int, dtype: torch.dtype, roundings: int = 8
) -> None:
    width = len(parts.norm.weight)
    addend, residual = randn(rows, width, dtype=dtype), randn(rows, width, seed=3, dtype=dtype)
    exact = 2e-5 if dtype == torch.float32 else roundings * torch.finfo(dtype).eps
    own = on_device(parts)
    out, kept = TRITON.experts(addend.to(DEVICE), residual.to(DEVICE), own)
    # From equal normed rows: other roundings may choose other experts.
    x, total = TRITON.norm(addend.to(DEVICE), residual.to(DEVICE), own.norm)
    truth = reference_experts(x.cpu(), parts)
    assert_close(kept, total, rtol=0, atol=0)
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
    moved = None if correction is None else correction.to(DEVICE)
    choice = choose(logits.to(DEVICE), Router(routing, logits[0], None, moved), 16)
    truth, weights = reference_choose(logits[0] + logits[1], routing, correction)
    assert_close(choice.weights.cpu(), weights)
    assert choice.experts.tolist() == truth.tolist()
    assert (choice.order is None) == (rows == 1)
    if choice.order is None:
        return
    expected = truth.flatten().argsort(stable=True)
    assert choice.order.pairs.tolist() == expected.tolist()
    counts = truth.flatten().bincount(minlength=experts)
    assert choice.order.starts.tolist() == [0, *counts.cumsum(0).tolist()]
    assert choice.order.ends.tolist() == ((counts + 15) // 16).cumsum(0).tolist()
    assert choice.slots >= choice.order.ends[-1]


def test_numbers_that_are_none_leave_no_memory() -> None:
    routing = ROUTINGS["normalised"]
    logits = randn(1, 9, routing.num_experts)
    logits[0, 0] = torch.nan
    logits[0, 1, 3] = -torch.inf
    choice = choose(logits.to(DEVICE), Router(routing, logits[0]), 16)
    for own in choice.experts.tolist():
        assert sorted(own) == list(range(routing.num_chosen))
    assert choice.order is not None
    assert sorted(choice.order.pairs.tolist()) == list(range(9 * routing.num_chosen))


# the half


@pytest.mark.parametrize("form", IN_GROUPS_OF_32)
@pytest.mark.parametrize("dtype", [torch.float32, HALF] if ON_GPU else [HALF], ids=str)
def test_formats(form: str, dtype: torch.dtype) -> None:
    parts = mixture(96, 160 if ON_GPU else 32, dtype, form, shared=32)
    for rows in (9, *([1, 40, 70, 300] if ON_GPU else [])):
        # If the last bit of a sum decides, an activation in e4m3 changes by a sixteenth.
        assert_like_the_reference(parts, rows, dtype, roundings=32 if form == "float8" else 8)


@pytest.mark.skipif(not ON_GPU, reason="fragments are for the tensor cores of a GPU")
@pytest.mark.parametrize("form", ["blocks", "mxfp4", "nvfp4", *INTEGERS])
@pytest.mark.parametrize("clamp", [None, ClampedGate(0.7, 1.702)])
def test_fragments(form: str, clamp: ClampedGate | None) -> None:
    all_sizes, shared = [(64, 32), (320, 192), (2880, 1440)], 64
    if "wide" in form or form == "blocks":
        all_sizes, shared = [(128, 128), (384, 256), (2944, 1408)], 128
    for sizes in all_sizes:
        parts = mixture(*sizes, HALF, form, clamp=clamp, shared=shared)
        for rows in (1, 3, 9, 17, 40, 64, 70, 300, 1000):
            assert_like_the_reference(parts, rows, HALF)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_kinds(routing: str) -> None:
    clamp = ClampedGate(0.7, 1.702) if routing in ("chosen", "groups") else None
    parts = mixture(40, 12, torch.float32, routing=routing, biased=clamp is not None, clamp=clamp)
    assert_like_the_reference(parts, 5, torch.float32)


@pytest.mark.parametrize("gate", [True, False])
def test_a_shared_expert_like_the_others(gate: bool) -> None:
    """It is one of their products where rows are few."""
    parts = joining(64, 32, "sigmoid", gate)
    for rows in (1, 3, 11, *([8, 9, 40, 64, 300] if ON_GPU else [])):
        assert_like_the_reference(parts, rows, HALF)
    own = on_device(parts)
    x = randn(1, 64, dtype=HALF).to(DEVICE)
    assert len(TRITON.experts(x, None, own)[0]) == 3 + 1


@pytest.mark.parametrize("form", ["plain", "mxfp4"])
def test_gains_and_gates_of_gelu(form: str) -> None:
    """Experts as in Gemma 4; the gate of a shared expert is SiLU."""
    dtype = HALF if form == "mxfp4" else torch.float32
    parts = mixture(64, 32, dtype, form, biased=False, shared=32, gained=True)
    for rows in (5, *([1, 40, 300] if ON_GPU else [])):
        assert_like_the_reference(parts, rows, dtype)


def test_a_second_sum_of_several_steps() -> None:
    for rows in (2, *([1, 8, 9, 40, 300] if ON_GPU else [])):
        assert_like_the_reference(mixture(40, 600, HALF), rows, HALF)


def test_more_rows_than_a_tile_holds() -> None:
    assert_like_the_reference(mixture(40, 12, HALF, routing="one"), 150, HALF)


def test_no_rows() -> None:
    parts = mixture(40, 12, HALF)
    out, total = TRITON.experts(randn(0, 40, dtype=HALF).to(DEVICE), None, on_device(parts))
    assert out.shape[-2:] == total.shape == (0, 40)


@pytest.mark.parametrize(
    "form", [*(IN_GROUPS_OF_32 if ON_GPU else ["plain", "blocks", "int4 zeros"]), "joining"]
)
def test_rows_do_not_depend_on_their_number(form: str) -> None:
    width, inner = (2880, 2880) if ON_GPU and form == "mxfp4" else (128, 768 if ON_GPU else 32)
    if form == "joining":
        parts = on_device(joining(width, inner, "groups"))
    else:
        parts = on_device(mixture(width, inner, HALF, form, shared=32))
    # More than 64 rows of e4m3 are added up by another kernel, which keeps more bits.
    rows = (64 if form == "float8" else 100) if ON_GPU else 8
    x = randn(rows, width, dtype=HALF).to(DEVICE)
    together, _ = TRITON_INVARIANT.experts(x, None, parts)
    for column in (TRITON, TRITON_INVARIANT):
        for count in (5, *([1, 17, 33, 64] if ON_GPU else [])):
            own = slice(2, min(2 + count, rows))
            out, _ = column.experts(x[own], None, parts)
            # The interpreter leaves sums to numpy, whose order follows the shapes.
            near = 0.0 if ON_GPU else 2 * torch.finfo(HALF).eps
            assert_close(whole(out), whole(together[..., own, :]), rtol=near, atol=near)


# the ops of dense layers


@pytest.mark.skipif(not ON_GPU, reason="fragments are for the tensor cores of a GPU")
@pytest.mark.parametrize("form", ["blocks", "mxfp4", "nvfp4", *INTEGERS])
def test_tiles_and_cards_change_no_bits(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = packed(weight(320, 640, FORMATS[form], HALF, 1))
    parts = on_device(mixture(128, 128, HALF, form))
    x, rows = randn(150, 640, dtype=HALF).to(DEVICE), randn(70, 128, dtype=HALF).to(DEVICE)
    norm = Norm(torch.ones(640, dtype=HALF, device=DEVICE), 1e-5)

    def outputs() -> list[Tensor]:
        gated, _ = TRITON.norm_gated_linear(x[:61], None, norm, made, None)
        mixed, _ = TRITON.experts(rows, None, parts)
        few, many = (9, 33, 64), (126, 150)
        return [*(whole(TRITON.linear(x[:n], made, None)) for n in few + many), gated, mixed]

    monkeypatch.setattr(grouped, "MANY_PROGRAMS", 1 << 30)
    expected = outputs()
    monkeypatch.setattr(grouped, "MANY_PROGRAMS", 0)
    with_two_tiles = outputs()
    other = grouped.Card(multiprocessors=82, memory=93 * 1024, is_hopper=False)
    monkeypatch.setattr(grouped, "card_of", lambda device: other)
    for one, two, three in zip(expected, with_two_tiles, outputs(), strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)


@pytest.mark.parametrize("form", ["blocks", "mxfp4", "nvfp4", *INTEGERS])
@pytest.mark.parametrize(
    "sizes",
    [(1, 70, 64), (19, 12, 96)]
    + [(70, 130, 160), (1, 128, 64), (9, 4096, 2048), (33, 256, 192), (200, 320, 640)] * ON_GPU,
    ids=str,
)
def test_dense_ops(sizes: tuple[int, int, int], form: str) -> None:
    rows, width, depth = sizes
    depth = -(-depth // 128) * 128 if "wide" in form else depth
    host_x, host_bias = randn(rows, depth, dtype=HALF), randn(width, seed=2, dtype=HALF)
    host = weight(width, depth, FORMATS[form], HALF, 1)
    host_norm = Norm(1 + 0.3 * randn(depth, seed=4, dtype=HALF), 1e-5)
    x, bias, made = host_x.to(DEVICE), host_bias.to(DEVICE), packed(host)
    norm = Norm(host_norm.weight.to(DEVICE), host_norm.eps)
    near = 8 * torch.finfo(HALF).eps

    def assert_near(out: Tensor, truth: Tensor) -> None:
        assert_close(whole(out), truth.double(), rtol=near, atol=near)

    assert_near(TRITON.linear(x, made, bias), REFERENCE.linear(host_x, host, host_bias))
    assert_near(TRITON.logits(x, made), REFERENCE.logits(host_x, host))
    joined = ([(host_x, host_norm)], host, host_bias)
    assert_near(TRITON.joined_linear([(x, norm)], made, bias), REFERENCE.joined_linear(*joined))
    for name in ("norm_linear", "norm_gated_linear"):
        out, _ = getattr(TRITON, name)(x, None, norm, made, bias)
        truth, _ = getattr(REFERENCE, name)(host_x, None, host_norm, host, host_bias)
        assert_near(out, truth)


def test_blocks_of_fewer_rows() -> None:
    whole_blocks = weight(150, 200, ToFloat8Blocks(), HALF, 1)
    part, x = whole_blocks.rows(30, 130), randn(3, 200, dtype=HALF)
    out, truth = TRITON.logits(x.to(DEVICE), packed(part)), part.logits(x)
    assert_close(out.cpu(), truth, rtol=1e-4, atol=1e-4)


def test_fragments_keep_every_float8() -> None:
    """Fragments are decoded as in `grouped_stream_kernels.py`, also those of chosen rows."""
    made = ToFloat8Blocks().round(randn(192, 256, seed=1) * torch.logspace(-3, 3, 256))
    kept = in_fragments(made)
    for chosen, rows in ((kept, range(192)), (kept.rows(32, 160), range(32, 160))):
        words = chosen.values.view(-1, 8, 2, 8, 4, 2, 2, 4)  # the last two: word of a row, byte
        assert chosen.scales is not None
        for place, row in list(enumerate(rows))[::13]:
            group, unit, lower, g = place // 32, place // 16 % 2, place // 8 % 2, place % 8
            of_row = words[group, :, unit, g, :, lower]  # chunk, thread, word, byte
            columns = of_row.view(8, 4, 2, 2, 2).permute(0, 2, 4, 1, 3).reshape(256)
            assert torch.equal(columns, made.values[row].view(torch.uint8))
            assert torch.equal(chosen.scales[group], made.scales[row // 128])
    with pytest.raises(UsageError, match="leave draft_vocab_size out"):
        kept.select(torch.arange(0, 192, 3))


def test_every_power_of_two() -> None:
    """From the smallest scale of MXFP4 to the largest for which no number overflows."""
    made = ToMxfp4().round(randn(253, 32, seed=1))
    made = Mxfp4Matrix(made.values, torch.arange(253, dtype=torch.uint8).unsqueeze(1))
    x = torch.zeros(32, 32, device=DEVICE).fill_diagonal_(1.0)
    assert_close(TRITON.logits(x, packed(made)).T.cpu(), made.dequantised(), rtol=0, atol=0)


@pytest.mark.parametrize("columns", [192, 160])
@pytest.mark.parametrize("form", [ToMxfp4(), ToNvfp4()], ids=["mxfp4", "nvfp4"])
def test_fragments_keep_every_number(form: ToMxfp4 | ToNvfp4, columns: int) -> None:
    """Fragments are decoded word by word as in the kernel; the last ones may end in zeros."""
    made = form.round(randn(64, columns, seed=1) * torch.logspace(-3, 3, columns))
    made.scales.view(torch.uint8)[5, :3] = torch.tensor([0, 1, 9])
    kept = from_mxfp4(made) if isinstance(made, Mxfp4Matrix) else from_nvfp4(made)
    words = kept.values.view(torch.int32).view(2, 3, 2, 8, 4, 2, 2)  # the last: of 32 columns
    assert kept.scales is not None
    scales = kept.scales.view(torch.uint8).view(2, 3, *kept.scales.shape[1:], 4).int()
    truth = F.pad(made.dequantised(), (0, 192 - columns))
    for row, column in ((0, 0), (5, 3), (5, 40), (13, 17), (31, 63), (40, 100), (63, 191), (5, 16)):
        group, unit, lower, g = row // 32, row // 16 % 2, row // 8 % 2, row % 8
        chunk, word, step, eight, t, one = (
            column // 64, column // 32 % 2, column // 16 % 2, column // 8 % 2, column // 2 % 4,
            column % 2,
        )  # fmt: skip
        first, second = (int(each) & 0xFFFFFFFF for each in words[group, chunk, unit, g, t, lower])
        pair = 2 * step + eight
        if pair < 3:
            held, turn = (first, second)[word], E2M1_TURNS[pair]
        else:
            held = first & E2M1_CHOSEN | second << E2M1_SHIFT & ~E2M1_CHOSEN & 0xFFFFFFFF
            turn = E2M1_RESTS[word]
        held = (held << turn | held >> 32 - turn) & E2M1_PAIR
        bits = held >> (16 * one) & 0xFFFF
        own = scales[group, chunk]
        code = own[0, unit * 8 + g, 2 * lower + word]
        if isinstance(form, ToNvfp4):
            code = own[lower, unit * 8 + g, 2 * word + step]
        factor = torch.tensor((int(code) << kept.shift) + kept.lift, dtype=torch.int16)
        number = torch.tensor(bits - (bits >> 15 << 16), dtype=torch.int16).view(torch.bfloat16)
        last = kept.lift_back if kept.row_scales is None else float(kept.row_scales[row])
        value = number.double() * factor.view(torch.bfloat16).double() * last
        assert_close(value, truth[row, column].double(), rtol=1e-7, atol=0)


@pytest.mark.parametrize("form", INTEGERS)
def test_fragments_keep_every_integer(form: str) -> None:
    """Fragments are decoded as in `grouped_stream_kernels.py`."""
    rounding = FORMATS[form]
    assert rounding is not None
    made = rounding.round(randn(64, 256, seed=1) * torch.logspace(-3, 3, 256))
    kept, wide = in_fragments(made), made.dequantised()
    words = kept.values.view(torch.int32).view(2, -1, 2, 8, 4, 2, 2)  # the last: word of a row
    for row, column in ((0, 0), (5, 3), (5, 40), (13, 17), (31, 63), (40, 130), (63, 255), (5, 26)):
        group, unit, lower, g = row // 32, row // 16 % 2, row // 8 % 2, row % 8
        chunk, word, step = column // 64, column // 32 % 2, column // 16 % 2
        t, eighth, one = column // 2 % 4, column // 8 % 2, column % 2
        if isinstance(made, Int8Matrix):
            chunk, word, step = column // 32, step, 0
        held = int(words[group, chunk, unit, g, t, lower, word]) & 0xFFFFFFFF
        if isinstance(made, Int8Matrix):
            assert (held >> 8 * (2 * one + eighth) & 255) - 128 == made.values[row, column]
            assert kept.row_scales is not None
            assert torch.equal(kept.row_scales, made.scales * 2**7)
            continue
        assert kept.scales is not None
        number = held >> (16 * one + 4 * (2 * step + eighth)) & 15
        entry = kept.scales.view(2, -1, *kept.scales.shape[1:])[
            group, column // max(64, kept.group)
        ]
        zeros = "zeros" in form
        at = (word if kept.group == 32 else 0) * (2 if zeros else 1) + (lower if zeros else 0)
        halves = entry[at, unit * 8 + g].view(1).view(torch.bfloat16).double()
        scale, zero = (halves[0], halves[1] - 128) if zeros else (halves[lower], 8)
        assert kept.lift_back == 1 if zeros else abs(scale) < 2
        scale *= 1 if zeros else kept.lift_back / 2**7
        assert_close((number - zero) * scale, wide[row, column].double(), rtol=2**-8, atol=0)


@pytest.mark.parametrize("columns", [384, 416])
@pytest.mark.parametrize("form", ["mxfp4", "nvfp4", *INTEGERS])
def test_rows_of_fragments(form: str, columns: int) -> None:
    rounding = FORMATS[form]
    assert rounding is not None
    columns = 384 if "wide" in form else columns
    made = rounding.round(randn(128, columns, seed=1))
    index = torch.randperm(128, generator=seeded(2))[:64]
    kept, truth = in_fragments(made), in_fragments(made.select(index))
    own = kept.select(index)
    assert own.shape == (64, columns)
    for name in ("values", "scales", "row_scales"):
        assert_close(getattr(own, name), getattr(truth, name), rtol=0, atol=0)
    part, of_group = kept.rows(32, 65), len(kept.values) // 4
    assert part.shape == (33, columns)
    assert_close(part.values[:of_group], kept.values[of_group : 2 * of_group], rtol=0, atol=0)
    assert len(part.values) == len(own.values)


@pytest.mark.parametrize("form", ["int8", "int4", "int4 wide zeros"])
def test_products_with_rows_of_fragments_cut_off(form: str) -> None:
    """Heads of a part of the vocabulary; on a card the last fragments are not whole."""
    made = weight(256, 256, FORMATS[form], HALF, 1)
    index = torch.randperm(256, generator=seeded(3))[:70]
    x = randn(5, 256, dtype=HALF)
    out = TRITON.logits(x.to(DEVICE), packed(made).select(index.to(DEVICE)))
    near = 8 * torch.finfo(HALF).eps
    assert_close(out.cpu(), made.select(index).logits(x), rtol=near, atol=near)


def test_activations_beside_integers_stay_as_they_are() -> None:
    made = ToInt8(rounds_input=True).round(randn(24, 64, seed=1))
    x = randn(3, 64, dtype=HALF)
    truth = x.float() @ made.dequantised().T
    near = 8 * torch.finfo(HALF).eps
    assert_close(TRITON.logits(x.to(DEVICE), packed(made)).cpu(), truth, rtol=near, atol=near)
