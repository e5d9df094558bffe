"""The matmuls of the triton column: on the GPU where there is one, else interpreted.

The interpreter's `tl.dot` is wrong for bfloat16, so that dtype is tested on a GPU only.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

pytest.importorskip("triton", reason="it is there for Linux only")

from slipstream.kernels.formats.dense import DenseMatrix
from slipstream.kernels.formats.float8 import Float8Matrix, ToFloat8
from slipstream.kernels.formats.float8 import round_rows as reference_round_rows
from slipstream.kernels.formats.weight import Weight
from slipstream.kernels.norm import Activation
from slipstream.kernels.ops import Ops
from slipstream.kernels.table import Norm, PostNorm, PostNormAddend
from slipstream.kernels.triton import (
    TRITON,
    TRITON_INVARIANT,
    matmul,
    matmul_tiles,
)
from slipstream.kernels.triton.linear import FEW_ROWS
from slipstream.kernels.triton.matmul_tiles import MatmulTiles
from slipstream.kernels.triton.norm import normed_rows, round_rows
from tests.kernels import oracles
from tests.kernels.batches import seeded
from tests.kernels.device import DEVICE, INTERPRETED, ON_GPU

pytestmark = INTERPRETED

HALVES = [torch.float16, torch.bfloat16] if ON_GPU else [torch.float16]
DTYPES = [torch.float32, *HALVES]
COLUMNS = [TRITON, TRITON_INVARIANT]
BIASED = [False, True] if ON_GPU else [True]
# (T, N, K): tiles hold 16 to 64 rows, 64 of N and 128 of K.
FLOAT8_SIZES = [(1, 1, 1), (5, 70, 136)]
SIZES = [(1, 1, 1), (3, 7, 10), (5, 70, 136), (2, 64, 128), (17, 130, 300), (33, 10, 520)]
if ON_GPU:
    SIZES += [(1, 4096, 1024), (16, 1024, 2048), (40, 1000, 4100), (64, 1024, 3072)]
    SIZES += [(5, 17000, 256), (65, 320, 1000), (100, 1024, 2048), (160, 1000, 2048)]
    FLOAT8_SIZES += [(66, 12, 40), (70, 48, 96), (1, 1024, 2048), (7, 4096, 1024), (24, 200, 1152)]
    FLOAT8_SIZES += [(40, 1024, 3072), (64, 130, 640)]
    SIZES += [(9, 1000, 1152), (150, 5120, 1664), (2, 5120, 2880), (40, 200, 1088), (90, 320, 576)]


def randn(*sizes: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(sizes, generator=seeded(seed)).to(dtype).to(DEVICE)


def matrix(rows: int, columns: int, dtype: torch.dtype, seed: int = 1) -> DenseMatrix:
    """A random matrix whose product with normal numbers has unit variance."""
    return DenseMatrix((randn(rows, columns, seed=seed) / columns**0.5).to(dtype))


def float8(rows: int, columns: int, seed: int = 1) -> Float8Matrix:
    return ToFloat8().round(matrix(rows, columns, torch.float32, seed).values.cpu()).to(DEVICE)


def whole(out: Tensor) -> Tensor:
    """The sum of the parts that `linear` returns."""
    return out.double().cpu().sum(0) if out.ndim == 3 else out.double().cpu()


def assert_near(out: Tensor, truth: Tensor, roundings: float = 1, tiny: float = 2e-5) -> None:
    assert out.device.type == DEVICE.type
    relative = roundings * torch.finfo(out.dtype).eps if out.dtype != torch.float32 else 0.0
    assert_close(whole(out), truth.double().cpu(), rtol=relative + tiny, atol=relative + tiny)


def assert_same(out: Tensor, other: Tensor) -> None:
    """Assert that all bits are equal."""
    assert_close(out, other, rtol=0, atol=0)


def assert_same_sums(out: Tensor, other: Tensor) -> None:
    """Assert equal bits; the interpreter sums with numpy, whose order depends on shapes."""
    tiny = 0.0 if ON_GPU else 2 * torch.finfo(out.dtype).eps + 2e-6
    assert_close(out, other, rtol=tiny, atol=tiny)


# linear and logits


@pytest.mark.parametrize("biased", BIASED)
@pytest.mark.parametrize("column", COLUMNS, ids=lambda ops: ops.backend)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_linear(sizes: tuple[int, int, int], dtype: torch.dtype, column: Ops, biased: bool) -> None:
    rows, width, depth = sizes
    x, weight = randn(rows, depth, dtype=dtype), matrix(width, depth, dtype)
    bias = randn(width, seed=2, dtype=dtype) if biased else None
    out = column.linear(x, weight, bias)
    truth = oracles.product(x.cpu(), weight.values.cpu(), None if bias is None else bias.cpu())
    assert out.shape[-2:] == (rows, width)
    assert out.dtype == (torch.float32 if out.ndim == 3 else dtype)
    assert_near(out, truth)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(1, 1, 1), (5, 70, 136), (20, 150, 72), (70, 40, 30)], ids=str)
def test_logits_stay_in_float32(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows, width, depth = sizes
    x, weight = randn(rows, depth, dtype=dtype), matrix(width, depth, dtype)
    for column in COLUMNS:
        out = column.logits(x, weight)
        assert out.dtype == torch.float32
        assert_near(out, oracles.product(x.cpu(), weight.values.cpu()))


@pytest.mark.parametrize("column", COLUMNS, ids=lambda ops: ops.backend)
def test_no_rows(column: Ops) -> None:
    dtype = HALVES[-1]
    for weight in (matrix(6, 10, dtype), float8(6, 10)):
        x = randn(0, 10, dtype=dtype)
        norm = Norm(randn(10, dtype=dtype), 1e-6)
        assert column.linear(x, weight, None).shape[-2:] == (0, 6)
        assert column.logits(x, weight).shape == (0, 6)
        assert column.norm_linear(x, x, norm, weight, None)[0].shape == (0, 6)
        active, total = column.norm_gated_linear(x, None, norm, weight, None)
        assert active.shape == (0, 3)
        assert total.shape == (0, 10)
        assert column.add_norm(x, x, norm).shape == (0, 10)


def test_rows_with_a_stride_of_their_own() -> None:
    x, weight = randn(5, 300, dtype=HALVES[-1])[:, 100:228], matrix(70, 128, HALVES[-1])
    assert_same(TRITON.linear(x, weight, None), TRITON.linear(x.contiguous(), weight, None))
    turned = randn(128, 5, dtype=HALVES[-1]).T
    out = TRITON.logits(turned, weight)
    assert_near(out, oracles.product(turned.cpu(), weight.values.cpu()))


# norm_linear, norm_gated_linear, add_norm


NORMED = [(1, 1, 2, 1), (3, 7, 10, 2), (5, 70, 136, 3), (18, 12, 40, 1)]
if ON_GPU:
    NORMED += [
        (20, 66, 130, 1),
        (66, 12, 40, 1),
        (5, 4096, 1024, 8),
        (16, 3072, 1024, 8),
        (64, 12288, 4096, 2),
    ]
    NORMED += [(300, 512, 1024, 1), (100, 3000, 1024, 2), (400, 1000, 1024, 1), (390, 200, 512, 2)]


@pytest.mark.parametrize("biased", BIASED)
@pytest.mark.parametrize("column", COLUMNS, ids=lambda ops: ops.backend)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", NORMED, ids=str)
def test_norm_linears(
    case: tuple[int, int, int, int], dtype: torch.dtype, column: Ops, biased: bool
) -> None:
    """With and without a residual, for whole addends and for addends in parts."""
    rows, width, depth, parts = case
    norm = Norm(1 + 0.3 * randn(depth, seed=4, dtype=dtype), 1e-3)
    weight = matrix(2 * width, depth, dtype)
    bias = randn(2 * width, seed=2, dtype=dtype) if biased else None
    residual = 2 * randn(rows, depth, seed=3, dtype=dtype)
    addend = randn(rows, depth, dtype=dtype)
    split = randn(parts, rows, depth)
    for added, stream in ((addend, None), (addend, residual), (split, residual), (split, None)):
        before = added.clone()
        total = whole(added) if stream is None else whole(added) + stream.double().cpu()
        out, kept = column.norm_linear(added, stream, norm, weight, bias)
        active, again = column.norm_gated_linear(added, stream, norm, weight, bias)
        assert out.dtype == active.dtype == kept.dtype == dtype
        assert_near(kept, total, roundings=0.5)
        assert_same(kept, again)
        assert_same(added, before)
        normed = oracles.norm(kept.cpu(), norm.weight.cpu(), norm.eps).to(dtype)
        truth = oracles.product(normed, weight.values.cpu(), None if bias is None else bias.cpu())
        assert_near(out, truth, roundings=2)
        assert_near(active, oracles.gated(truth), roundings=6, tiny=5e-5)
        if stream is not None:
            assert_near(column.add_norm(added, stream, norm), normed, roundings=1)


@pytest.mark.parametrize("column", COLUMNS, ids=lambda ops: ops.backend)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_post_norms(dtype: torch.dtype, column: Ops) -> None:
    """The addend is normed, the sum multiplied, and normed again or not; gates may be of GELU."""
    rows, width, depth = 3, 10, 42
    weight = matrix(2 * width, depth, dtype)
    norm = Norm(1 + 0.3 * randn(depth, seed=4, dtype=dtype), 1e-3)
    own = Norm(1 + 0.3 * randn(depth, seed=5, dtype=dtype), 1e-2)
    residual = 2 * randn(rows, depth, seed=3, dtype=dtype)
    split = randn(2, rows, depth)
    factor = torch.tensor([0.7], dtype=dtype).to(DEVICE)
    added = oracles.norm(whole(split), own.weight.cpu(), own.eps)
    for post_norm, total in (
        (PostNorm(own, factor), (added + residual.double().cpu()) * factor.item()),
        (PostNorm(own), added + residual.double().cpu()),
        (PostNorm(None, factor), (whole(split) + residual.double().cpu()) * factor.item()),
    ):
        addend = PostNormAddend(split, post_norm)
        out, kept = column.norm_linear(addend, residual, norm, weight, None)
        assert_near(kept, total, roundings=3)
        normed = oracles.norm(kept.cpu(), norm.weight.cpu(), norm.eps).to(dtype)
        assert_near(out, oracles.product(normed, weight.values.cpu()), roundings=2)
        active, again = column.norm_gated_linear(
            addend, residual, None, weight, None, Activation.GELU_TANH
        )
        assert_same(again, kept)
        gate, up = oracles.product(kept.cpu(), weight.values.cpu()).chunk(2, -1)
        truth = torch.nn.functional.gelu(gate, approximate="tanh") * up
        assert_near(active, truth, roundings=6, tiny=5e-5)
        bare, same = column.norm(addend, residual, None)
        assert_same(bare, kept)
        assert_same(same, kept)


def test_a_linear_goes_on_in_the_next_norm() -> None:
    """A norm adds the parts that a linear op returns."""
    dtype = HALVES[-1]
    x, weight = randn(5, 2048, dtype=dtype), matrix(64, 2048, dtype)
    residual, norm = randn(5, 64, seed=3, dtype=dtype), Norm(randn(64, dtype=dtype), 1e-6)
    parts = TRITON.linear(x, weight, None)
    assert parts.ndim == 3
    assert len(parts) > 1
    kept = TRITON.norm_linear(parts, residual, norm, matrix(10, 64, dtype), None)[1]
    truth = oracles.product(x.cpu(), weight.values.cpu()) + residual.double().cpu()
    assert_near(kept, truth, roundings=0.6)


# e4m3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounding_of_rows(dtype: torch.dtype) -> None:
    x = randn(7, 130, dtype=dtype)
    x[3] = 0
    x[5, 4] = 1000
    values, scales = reference_round_rows(x.cpu())
    rows = round_rows(x)
    assert rows.scales is not None
    assert_same(rows.scales.cpu(), scales)
    assert_same(rows.values.float().cpu(), values.float())
    normed, _ = normed_rows(x, None, Norm(randn(130, dtype=dtype), 1e-5), float8=True)
    plain, _ = normed_rows(x, None, Norm(randn(130, dtype=dtype), 1e-5))
    again = round_rows(plain.values)
    assert normed.scales is not None
    assert again.scales is not None
    assert_same(normed.scales, again.scales)
    assert_same(normed.values.float(), again.values.float())


@pytest.mark.parametrize("column", COLUMNS, ids=lambda ops: ops.backend)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", FLOAT8_SIZES, ids=str)
def test_float8(sizes: tuple[int, int, int], dtype: torch.dtype, column: Ops) -> None:
    rows, width, depth = sizes
    x, bias = randn(rows, depth, dtype=dtype), randn(width, seed=2, dtype=dtype)
    weight = float8(width, depth)
    host = weight.to(torch.device("cpu"))
    truth = host.logits(x.cpu())
    # The tensor cores keep about 14 bits of a sum of e4m3.
    tiny = 5e-3 if rows <= FEW_ROWS and streams_float8(x, weight) else 2e-5
    assert_near(column.logits(x, weight), truth, tiny=tiny)
    assert_near(column.linear(x, weight, bias), truth + bias.cpu().float(), 2, tiny)
    norm = Norm(torch.ones(depth, dtype=dtype, device=DEVICE), 1e-3)
    normed = column.add_norm(x, torch.zeros_like(x), norm)
    out, kept = column.norm_linear(x, None, norm, weight, bias)
    assert_same(kept, x)
    truth = host.logits(normed.cpu()) + bias.cpu().float()
    assert_near(out, truth, 2, tiny)
    if width % 2 == 0:
        active, _ = column.norm_gated_linear(x, None, norm, weight, bias)
        assert_near(active, oracles.gated(truth), roundings=6, tiny=max(5e-5, 2 * tiny))


def streams_float8(x: Tensor, weight: Float8Matrix) -> bool:
    return matmul.streams(round_rows(x).values, weight.values)


def test_float8_that_the_library_does_not_take() -> None:
    """The library requires sizes in multiples of 16."""
    x, weight = randn(FEW_ROWS + 2, 40, dtype=HALVES[-1]), float8(12, 40)
    truth = weight.to(torch.device("cpu")).logits(x.cpu())
    assert_near(TRITON.linear(x, weight, None), truth)


# A row's numbers are its own


INVARIANT = [(30, 520)]
if ON_GPU:
    INVARIANT += [(70, 136), (4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (6144, 4096)]
    INVARIANT += [(4096, 12288), (17000, 512), (500, 999), (1280, 2880)]


@pytest.mark.parametrize("kind", ["whole", "float8"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("shape", INVARIANT, ids=str)
def test_rows_do_not_depend_on_their_number(
    shape: tuple[int, int], dtype: torch.dtype, kind: str
) -> None:
    """A row has one result among 1 to 64 rows, and with invariant kernels among any number."""
    width, depth = shape
    weight: Weight = float8(width, depth) if kind == "float8" else matrix(width, depth, dtype)
    rows = FEW_ROWS + 6 if ON_GPU else 20
    x, residual = randn(rows, depth, dtype=dtype), randn(rows, depth, seed=3, dtype=dtype)
    norm = Norm(randn(depth, seed=4, dtype=dtype), 1e-6)
    bias = randn(width, seed=5, dtype=dtype)

    def results(ops: Ops, part: slice) -> list[Tensor]:
        linear = ops.linear(x[part], weight, bias)
        if linear.ndim == 3:  # added up as the next norm does
            total = torch.zeros_like(linear[0])
            for each in linear:
                total += each
            linear = total
        logits = ops.logits(x[part], weight)
        qkv, kept = ops.norm_linear(x[part], residual[part], norm, weight, bias)
        active, _ = ops.norm_gated_linear(x[part], residual[part], norm, weight, bias)
        return [linear, logits, qkv, active, kept]

    together = results(TRITON_INVARIANT, slice(rows))
    counts = (1, 5, 16, 17, 33, FEW_ROWS) if ON_GPU else (1, 17)
    for ops in COLUMNS:
        few = results(ops, slice(FEW_ROWS))
        for count in counts:
            part = slice(3, min(3 + count, rows))
            for out, all_rows, some_rows in zip(results(ops, part), together, few, strict=True):
                if not isinstance(weight, Float8Matrix):
                    assert_same_sums(out, all_rows[part].to(out.dtype))
                    continue
                # Sums of e4m3 are rounded by the steps of a tile.
                assert_close(out, all_rows[part].to(out.dtype), rtol=1.6e-2, atol=5e-3)
                if part.stop <= FEW_ROWS and streams_float8(x, weight):
                    assert_same(out, some_rows[part])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tiles_change_no_bits(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    width, depth = (200, 1024) if ON_GPU else (70, 512)
    x, weight = randn(7, depth, dtype=dtype), matrix(width, depth, dtype)
    residual, norm = randn(7, depth, seed=3, dtype=dtype), Norm(randn(depth, dtype=dtype), 1e-6)

    def results() -> list[Any]:
        return [
            TRITON_INVARIANT.linear(x, weight, None),
            TRITON_INVARIANT.logits(x, weight),
            TRITON_INVARIANT.norm_gated_linear(x, residual, norm, weight, None)[0],
        ]

    expected = results()
    several = [
        MatmulTiles(16, 64, 128, 4, 2),
        MatmulTiles(16, 64, 128, 4, 2, 128),
        MatmulTiles(32, 64, 64),
    ]
    if ON_GPU and dtype != torch.float32:
        several += [
            MatmulTiles(64, 64, 128, 8),
            MatmulTiles(64, 128, 128, 8),
            MatmulTiles(16, 64, 256, 4, 3, 256),
        ]
    for tiles in several:
        monkeypatch.setattr(matmul_tiles, "_tiles", lambda *_, tiles=tiles: tiles)
        monkeypatch.setattr(matmul, "streams", lambda *_: False)
        for out, other in zip(results(), expected, strict=True):
            assert_same_sums(out, other)
