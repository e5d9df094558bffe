"""Products with the blocks of GGUF files, at every level of instructions that runs here."""

import pytest
import torch
from torch import Tensor

from slipstream.core.errors import UsageError
from slipstream.kernels.formats.blocks import BlockMatrix, Blocks
from slipstream.models.gguf.blocks import BY_NAME, Q4_K, Q6_K, Q8_0
from tests.gguf_files import random_blocks

cpp = pytest.importorskip("_slipstream_cpu", reason="the C++ kernels are not built")
from slipstream.kernels.cpu import matmul  # noqa: E402

TYPES = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]
MIXED = ["Q4_K Q6_K", "Q6_K Q4_K Q5_K", "Q4_1 Q8_0", "Q5_0 Q4_0", "Q8_0 Q5_1 Q4_0"]
ROWS = [1, 2, 5, 17, 40]


def matrix(types: str, rows: int, columns: int) -> BlockMatrix:
    """Parts of so many rows, one below the other."""
    generator = torch.Generator().manual_seed(rows * columns)
    return BlockMatrix.stack(
        [
            BlockMatrix(
                (Blocks(random_blocks(kind, (rows, columns), generator).raw, kind),), torch.float32
            )
            for kind in map(BY_NAME.__getitem__, types.split())
        ]
    )


def inputs(count: int, columns: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(count, columns, generator=torch.Generator().manual_seed(count)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("types", TYPES + MIXED)
def test_products_are_those_of_the_numbers_in_the_file(
    level: str, types: str, dtype: torch.dtype
) -> None:
    for rows, columns in [(17, 256), (100, 768)]:
        whole = matrix(types, rows, columns)
        packed = matmul.pack(whole)
        assert isinstance(packed, matmul.CpuMatrix)
        numbers = whole.dequantised().double()
        # What adds up: an integer's part and a minimum may nearly cancel, so each group has more
        # than its numbers.
        spread = numbers.view(*numbers.shape[:1], -1, 16).abs().amax(-1).sum(-1) * 16
        for count in ROWS:
            x = inputs(count, columns, dtype)
            size = x.double().abs().amax(-1, keepdim=True) * spread
            bound = size * (4e-6 if dtype == torch.float32 else 2.0**-15)
            found = packed.logits(x)
            assert ((found - x.double() @ numbers.T).abs() <= bound).all(), (rows, count)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("types", [*TYPES, *MIXED[:1]])
def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(
    level: str, types: str, dtype: torch.dtype
) -> None:
    threads = cpp.num_threads()
    packed = matmul.pack(matrix(types, 65, 512))
    x = inputs(100, 512, dtype)
    together = packed.logits(x)
    for part in (1, 2, 7, 16, 33, 97):
        cpp.set_num_threads(1 + part % 3)
        assert torch.equal(packed.logits(x[3 : 3 + part]), together[3 : 3 + part]), part
    cpp.set_num_threads(threads)


@pytest.mark.parametrize("types", TYPES + MIXED)
def test_levels_but_the_lowest_agree(types: str) -> None:
    before, found = cpp.level(), []
    packed = matmul.pack(matrix(types, 70, 512))
    for level in cpp.levels():
        cpp.set_level(level)
        found.append(packed.logits(inputs(5, 512, torch.bfloat16)))
    cpp.set_level(before)
    for other in found[2:]:
        assert torch.equal(other, found[1])
    assert torch.allclose(found[0], found[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("types", TYPES)
def test_rows_are_looked_up_as_the_file_has_them(types: str) -> None:
    whole = matrix(types, 70, 512)
    index = torch.tensor([[69, 0], [64, 63]])
    expected = whole.dequantised()[index]
    packed = matmul.pack(whole)
    assert torch.equal(packed.look_up(index), expected)
    assert torch.equal(whole.look_up(index), expected)
    halves = matmul.pack(BlockMatrix(whole.parts, torch.bfloat16))
    assert torch.equal(halves.look_up(index), expected.bfloat16())


@pytest.mark.parametrize("types", ["Q4_1", "Q6_K", "Q4_K Q6_K"])
def test_rows_are_chosen_and_cut(types: str) -> None:
    whole = matrix(types, 80, 512)
    last = len(whole.dequantised()) - 1
    index = torch.tensor([3, 79, last, 0, last])
    x = inputs(3, 512, torch.bfloat16)
    packed = matmul.pack(whole)
    for part in (packed.select(index), matmul.pack(whole.select(index))):
        assert torch.equal(part.logits(x), packed.logits(x)[:, index])
    assert torch.equal(whole.rows(70, last).dequantised(), whole.dequantised()[70:last])
    assert torch.equal(packed.rows(64, 79).logits(x), packed.logits(x)[:, 64:79])
    assert torch.equal(whole.columns(256, 512).dequantised(), whole.dequantised()[:, 256:])
    with pytest.raises(UsageError, match="whole blocks"):
        whole.columns(0, 8)


def test_packed_weights_take_the_bytes_of_the_file() -> None:
    for types in TYPES:
        whole = matrix(types, 128, 1024)
        # Factors of rows, a spare bit beside five, and two beside the six bits of scales.
        extra = 128 * 4 + 128 * 1024 // 8 * (types[1] == "5") + 128 * 32 * (types[1:] == "4_K")
        extra += 128 * 32 * (types[1:] == "5_K")
        assert whole.nbytes <= matmul.pack(whole).nbytes <= whole.nbytes + extra, types


def test_types_without_a_common_form_are_packed_apart() -> None:
    whole = BlockMatrix.stack([matrix("Q4_K", 4, 256), matrix("Q8_0", 4, 256)])
    assert [part.type for part in whole.parts] == [Q4_K, Q8_0]
    require_apart(whole)


@pytest.mark.parametrize(("types", "scale"), [("Q4_1 Q8_0", 512), ("Q4_K Q6_K", 2048)])
def test_numbers_that_a_common_form_has_no_room_for_are_packed_apart(
    level: str, types: str, scale: float
) -> None:
    """A scale times minus the integer that stands for zero is more than a float16 can be."""
    whole = matrix(types, 4, 256)
    assert isinstance(matmul.pack(whole), matmul.CpuMatrix)
    large = whole.parts[1]
    place = large.type.scales[0]  # type: ignore[attr-defined]
    halves = large.raw[:, place : place + 2]
    halves[:] = torch.tensor([scale], dtype=torch.float16).view(torch.uint8)
    exact = torch.tensor([scale / 2], dtype=torch.float16).view(torch.uint8)
    halves[1:] = exact
    require_apart(whole)
    halves[:] = exact
    assert isinstance(matmul.pack(whole), matmul.CpuMatrix)


def require_apart(whole: BlockMatrix) -> None:
    """The parts are packed one by one, and multiplied as if they were one matrix."""
    packed = matmul.pack(whole)
    assert isinstance(packed, matmul.CpuMatrices)
    assert packed.shape == whole.shape
    assert packed.nbytes >= whole.nbytes
    x, bias = inputs(2, 256, torch.float32), torch.arange(float(whole.shape[0]))
    expected = (x.double() @ whole.dequantised().double().T).float()
    size = float(expected.abs().max())
    assert torch.allclose(packed.logits(x), expected, rtol=0, atol=2e-6 * size)
    assert torch.equal(packed.linear(x, None), packed.logits(x))
    assert torch.equal(packed.linear(x, bias), packed.logits(x) + bias)
    index = torch.tensor([7, 0, 1, 6, 6])
    assert torch.equal(packed.select(index).logits(x), packed.logits(x)[:, index])
    assert torch.equal(packed.rows(3, 6).logits(x), packed.logits(x)[:, 3:6])
    assert packed.select(index[:0]).shape == (0, 256)


def test_no_rows_can_be_chosen() -> None:
    whole = matrix("Q4_K Q6_K", 4, 256)
    none = torch.empty(0, dtype=torch.int64)
    for part in (whole.select(none), whole.rows(3, 3)):
        assert part.shape == (0, 256)
        assert part.dequantised().shape == (0, 256)
    assert whole.look_up(none.view(2, 0)).shape == (2, 0, 256)


def test_largest_numbers_do_not_overflow(level: str) -> None:
    raw = torch.full((3, 8 * Q6_K.nbytes), 0xFF, dtype=torch.uint8)
    halves = raw.view(3, 8, Q6_K.nbytes)
    halves[..., 192:208], halves[..., 208], halves[..., 209] = 0x80, 0, 0x04
    whole = BlockMatrix((Blocks(raw, Q6_K),))
    x = torch.full((2, 2048), 1.75).bfloat16()
    x[1] = -x[1]
    expected = x.double() @ whole.dequantised().double().T
    assert torch.allclose(matmul.pack(whole).logits(x).double(), expected, rtol=1e-4)
