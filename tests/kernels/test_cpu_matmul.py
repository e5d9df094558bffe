"""Products with packed weights, at every level of instructions that runs here."""

import pytest
import torch
from torch import Tensor

from slipstream.kernels.formats.dense import DenseMatrix
from slipstream.kernels.formats.int4 import Int4Matrix
from slipstream.kernels.formats.int8 import Int8Matrix
from slipstream.kernels.formats.mxfp4 import Mxfp4Matrix
from slipstream.kernels.formats.nvfp4 import Nvfp4Matrix
from slipstream.kernels.formats.weight import Weight
from slipstream.kernels.reference import REFERENCE

cpp = pytest.importorskip("_slipstream_cpu", reason="the C++ kernels are not built")
from slipstream.kernels.cpu import matmul  # noqa: E402

SHAPES = [(64, 32), (100, 48), (256, 1024), (17, 33), (192, 640), (1, 1), (65, 128)]
ROWS = [1, 2, 5, 16, 17, 33, 70]
FORMS = ["float", "int8", "int8 twice", "int4 of 32", "int4 of 128", "int4 of 32 with zeros"]
FORMS += ["mxfp4", "nvfp4"]


def weight(form: str, rows: int, columns: int, dtype: torch.dtype) -> Weight | None:
    """A random weight; None if the format does not support the shape."""
    generator = torch.Generator().manual_seed(rows * columns)
    if form == "float":
        return DenseMatrix(torch.randn(rows, columns, generator=generator).to(dtype))
    scales = torch.rand(rows, generator=generator) * 0.02
    if form.startswith("int8"):
        values = torch.randint(-127, 128, (rows, columns), generator=generator)
        return Int8Matrix(values.to(torch.int8), scales, form.endswith("twice"))
    group = 128 if "128" in form else 16 if form == "nvfp4" else 32
    if columns % group:
        return None
    shape = rows, columns // group
    halves = torch.randint(0, 256, (rows, columns // 2), generator=generator).to(torch.uint8)
    if form == "mxfp4":
        powers = torch.randint(110, 130, shape, generator=generator).to(torch.uint8)
        return Mxfp4Matrix(halves, powers)
    if form == "nvfp4":
        eighths = (torch.rand(shape, generator=generator) * 400).to(torch.float8_e4m3fn)
        return Nvfp4Matrix(halves, eighths, scales)
    zeros = torch.randint(0, 16, shape, generator=generator).to(torch.uint8)
    by = torch.rand(shape, generator=generator).half().float() * 2.0**-6
    return Int4Matrix(halves, by, zeros if "zeros" in form else None, group)


def product(x: Tensor, packed: Weight) -> Tensor:
    return packed.logits(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("form", FORMS)
def test_products_are_the_references(level: str, form: str, dtype: torch.dtype) -> None:
    for rows, columns in SHAPES:
        whole = weight(form, rows, columns, dtype)
        if whole is None:
            continue
        packed = matmul.pack(whole)
        for count in ROWS:
            x = torch.randn(count, columns, generator=torch.Generator().manual_seed(count)).to(
                dtype
            )
            if form == "int8 twice":
                expected = REFERENCE.logits(x, whole).double()
            else:
                expected = x.double() @ whole.dequantised().double().T
            # Against what adds up: rows that meet integers keep 14 bits of their largest number,
            # 21 where they are float32.
            size = (x.double().abs().amax(-1, keepdim=True)) * whole.dequantised().abs().sum(1)
            exact = form == "float" or form == "int8 twice" or dtype == torch.float32
            bound = size * (2e-6 if exact else 2.0**-15)
            assert ((product(x, packed) - expected).abs() <= bound + 1e-7).all(), (rows, count)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("form", FORMS)
def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(
    level: str, form: str, dtype: torch.dtype
) -> None:
    threads = cpp.num_threads()
    for rows, columns in [(192, 640), (65, 128), (100, 48)]:
        whole = weight(form, rows, columns, dtype)
        if whole is None:
            continue
        packed = matmul.pack(whole)
        x = torch.randn(200, columns, generator=torch.Generator().manual_seed(1)).to(dtype)
        together = product(x, packed)
        for part in (1, 2, 7, 16, 17, 32, 33, 97):
            cpp.set_num_threads(1 + part % 3)
            assert torch.equal(product(x[3 : 3 + part], packed), together[3 : 3 + part]), part
        cpp.set_num_threads(threads)


def test_levels_but_the_lowest_agree_on_integers() -> None:
    # Sums are exact; only what is done with them may be rounded in one step or two.
    before = cpp.level()
    x = torch.randn(40, 640).bfloat16()
    for form in FORMS[1:]:
        whole = weight(form, 192, 640, torch.bfloat16)
        assert whole is not None
        packed = matmul.pack(whole)
        found = []
        for level in cpp.levels():
            cpp.set_level(level)
            found.append(product(x, packed))
        for other in found[2:]:
            assert torch.equal(other, found[1]), form
        assert torch.allclose(found[0], found[1], rtol=1e-5, atol=1e-5), form
    cpp.set_level(before)


@pytest.mark.parametrize("columns", [4096, 11008, 24576])
@pytest.mark.parametrize("has_zeros", [False, True])
def test_a_group_may_be_a_whole_row(level: str, columns: int, has_zeros: bool) -> None:
    # The largest sums that there are: all numbers at their bounds.
    halves = torch.full((65, columns // 2), 0xFF, dtype=torch.uint8)
    zeros = torch.zeros(65, 1, dtype=torch.uint8) if has_zeros else None
    whole = Int4Matrix(halves, torch.full((65, 1), 2.0**-6), zeros, columns)
    x = torch.full((3, columns), 1.75).bfloat16()
    x[1] = -x[1]
    expected = x.double() @ whole.dequantised().double().T
    for rows in (x[:1], x):
        found = product(rows, matmul.pack(whole))
        assert torch.allclose(found.double(), expected[: len(rows)], rtol=1e-4)


@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("byte", [0x00, 0xFF])
def test_the_largest_sums_of_small_groups_are_exact_for_many_rows(
    level: str, byte: int, has_zeros: bool
) -> None:
    halves = torch.full((65, 128), byte, dtype=torch.uint8)
    zeros = torch.full((65, 8), 15 - byte % 16, dtype=torch.uint8) if has_zeros else None
    packed = matmul.pack(Int4Matrix(halves, torch.full((65, 8), 0.01), zeros, 32))
    # Few numbers have more steps of a row's scale than 127 / 64; the small ones make sums odd.
    x = torch.full((40, 256), 127 / 64).bfloat16()
    x[1::2] = -x[1::2]
    x[2::5, ::3] = 2.0**-7
    together = product(x, packed)
    for row in range(40):
        assert torch.equal(product(x[row : row + 1], packed)[0], together[row]), row


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_sums_of_int8_fit(level: str, sign: int) -> None:
    """There are more columns than a 32-bit sum of the largest products holds."""
    columns = 1472
    packed = matmul.pack(
        Int8Matrix(torch.full((64, columns), 127, dtype=torch.int8), torch.ones(64))
    )
    for count in (1, 5, 33):
        x = torch.full((count, columns), float(sign), dtype=torch.bfloat16)
        expected = torch.full((count, 64), 127.0 * sign * columns)
        torch.testing.assert_close(product(x, packed), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_every_power_of_two_of_mxfp4_is_exact(level: str, dtype: torch.dtype) -> None:
    powers = torch.arange(255).to(torch.uint8).unsqueeze(1)
    whole = Mxfp4Matrix(torch.full((255, 16), 0xB3, dtype=torch.uint8), powers)  # 1.5, -1.5
    x = torch.zeros(3, 32, dtype=dtype)
    x[0, 4] = x[1, 31] = 1
    # The largest and the smallest numbers, beside ordinary ones.
    x[2, 0], x[2, 2] = 2.0**100, -(2.0**100)
    expected = torch.zeros(3, 255)
    expected[0] = torch.ldexp(torch.tensor(1.5, dtype=torch.float64), powers[:, 0] - 127.0).float()
    expected[1] = -expected[0]
    assert torch.equal(product(x, matmul.pack(whole)), expected)


@pytest.mark.parametrize("form", ["mxfp4", "nvfp4"])
def test_what_meets_e2m1_keeps_its_numbers_beside_large_ones(level: str, form: str) -> None:
    whole = weight(form, 100, 256, torch.bfloat16)
    assert isinstance(whole, Mxfp4Matrix | Nvfp4Matrix)
    whole.values[:, :16] = 0
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    x = x.sign() * x.abs().clamp(0.1, 3)  # of one group none is much larger than the others
    expected = x.double() @ whole.dequantised().double().T
    x[:, :32] = 30000.0
    size = x[:, 32:].double().abs() @ whole.dequantised()[:, 32:].double().abs().T
    assert ((product(x, matmul.pack(whole)) - expected).abs() <= size * 2.0**-22).all()


def test_results_are_rounded_and_biased_as_the_reference_does_it(level: str) -> None:
    whole = DenseMatrix(torch.randn(100, 72).bfloat16())
    bias = torch.randn(100).bfloat16()
    x = torch.randn(3, 144).bfloat16()[:, ::2].contiguous()
    found = matmul.pack(whole).linear(x, bias)
    expected = x.float() @ whole.dequantised().T + bias.float()
    assert found.dtype == torch.bfloat16
    assert torch.allclose(found.float(), expected, rtol=2.0**-8, atol=1e-2)
    empty = matmul.pack(whole).linear(x[:0], bias)
    assert empty.shape == (0, 100)


@pytest.mark.parametrize("form", FORMS)
def test_selected_rows_are_the_weights(level: str, form: str) -> None:
    whole = weight(form, 192, 640, torch.bfloat16)
    assert whole is not None
    packed, index = matmul.pack(whole), torch.tensor([191, 0, 64, 64, 7])
    assert isinstance(packed, matmul.CpuMatrix)
    x = torch.randn(6, 640).bfloat16()
    assert torch.equal(product(x, packed.select(index)), product(x, packed)[:, index])
    for start, stop in ((64, 192), (128, 150), (0, 1), (10, 20)):
        part = packed.rows(start, stop)
        assert part.shape == (stop - start, 640)
        assert torch.equal(product(x, part), product(x, packed)[:, start:stop])
        assert torch.equal(product(x, part.select(index[1:2])), product(x, part)[:, :1])
    with pytest.raises(ValueError, match="not a row"):
        packed.select(torch.tensor([192]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("columns", [1, 33, 72, 640])
def test_tables_give_back_their_rows(level: str, columns: int, dtype: torch.dtype) -> None:
    table = torch.randn(70, columns).to(dtype)
    packed = matmul.pack(DenseMatrix(table))
    assert isinstance(packed, matmul.CpuMatrix)
    index = torch.tensor([[0, 69], [5, 5]], dtype=torch.int32)
    assert torch.equal(packed.look_up(index), table[index])
    with pytest.raises(ValueError, match="not a row"):
        packed.look_up(torch.tensor([70]))


def test_what_the_kernels_do_not_serve_stays_as_it_is() -> None:
    half = DenseMatrix(torch.randn(4, 4).half())
    assert matmul.pack(half) is half


def test_wrong_tensors_are_refused() -> None:
    handle = cpp.pack(torch.randn(8, 4))
    out = torch.empty(2, 8)
    with pytest.raises(ValueError, match=r"x: \[M, K\]"):
        cpp.matmul(handle, torch.randn(2, 5), None, out)
    with pytest.raises(ValueError, match=r"out: \[M, N\]"):
        cpp.matmul(handle, torch.randn(2, 4), None, torch.empty(3, 8))
    with pytest.raises(ValueError, match="type of the weight"):
        cpp.matmul(handle, torch.randn(2, 4).bfloat16(), None, out)
    with pytest.raises(ValueError, match=r"bias: \[N\]"):
        cpp.matmul(handle, torch.randn(2, 4), torch.zeros(8, 2), out)
    with pytest.raises(ValueError, match="must be contiguous"):
        cpp.matmul(handle, torch.randn(4, 2).T, None, out)
    with pytest.raises(ValueError, match=r"out: \[ids, K\]"):
        cpp.look_up(handle, torch.tensor([0, 1, 2]), torch.empty(2, 4))
    with pytest.raises(ValueError, match="is no level"):
        cpp.set_level("sse9")


def test_integers_that_do_not_fit_are_refused() -> None:
    values, scales = torch.zeros(8, 128, dtype=torch.uint8), torch.zeros(8, 8)
    with pytest.raises(ValueError, match="multiples of 32"):
        cpp.pack_int4(values, torch.zeros(8, 16), None, 16)
    with pytest.raises(ValueError, match="scales and zeros"):
        cpp.pack_int4(values, scales, torch.zeros(8, 4, dtype=torch.uint8), 32)
    with pytest.raises(ValueError, match="two axes"):
        cpp.pack_int4(values[0], scales, None, 32)
    with pytest.raises(ValueError, match=r"scales \[N, K / group"):
        cpp.pack_mxfp4(values, torch.zeros(8, 16, dtype=torch.uint8))
    with pytest.raises(ValueError, match="factors"):
        cpp.pack_nvfp4(values, torch.zeros(8, 16), torch.zeros(4))
