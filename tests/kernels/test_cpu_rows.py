"""Norms and activations in C++, at every level of instructions that this machine has."""
# ruff: noqa: E402  (the module may be missing)

import pytest
import torch
from torch.testing import assert_close

cpp = pytest.importorskip("_slipstream_cpu", reason="the C++ kernels are not built")

from slipstream.kernels.cpu.rows import add_norm, gated_activation, norm
from slipstream.kernels.norm import Activation
from slipstream.kernels.reference import dense
from tests.kernels.batches import seeded

pytestmark = pytest.mark.usefixtures("level", "two_threads")

DTYPES = [torch.float32, torch.bfloat16]
SIZES = [(1, 1024), (3, 37), (40, 640), (0, 16)]


def assert_near(got: torch.Tensor, want: torch.Tensor) -> None:
    """Up to a unit in the last place."""
    assert got.dtype == want.dtype
    near = 2e-6 if got.dtype == torch.float32 else 2**-7
    assert_close(got, want, rtol=near, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_rows_are_normed(sizes: tuple[int, int], dtype: torch.dtype) -> None:
    generator = seeded(5)
    x, residual = (torch.randn(sizes, generator=generator).to(dtype) * 3 for _ in range(2))
    weight = torch.rand(sizes[1], generator=generator).to(dtype)
    assert_near(norm(x, weight, 1e-6), dense.norm(x, weight, 1e-6))
    got, added = add_norm(x, residual, weight, 1e-6)
    want, expected = dense.add_norm(x, residual, weight, 1e-6)
    assert torch.equal(added, expected)
    assert_near(got, want)
    for row in range(sizes[0]):
        alone, _ = add_norm(x[row : row + 1], residual[row : row + 1], weight, 1e-6)
        assert torch.equal(alone[0], got[row])


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_rows_are_gated(sizes: tuple[int, int], dtype: torch.dtype, activation: Activation) -> None:
    rows, columns = sizes
    wide = torch.randn(rows, 2 * columns + 3, generator=seeded(6)).to(dtype) * 4
    gate_up = wide[:, : 2 * columns]  # rows with gaps between them
    got = gated_activation(gate_up, activation)
    assert_near(got, dense.gated_activation(gate_up.double(), activation).to(dtype))
    for row in range(rows):
        assert torch.equal(gated_activation(gate_up[row : row + 1], activation)[0], got[row])


def test_large_gates_stay_numbers() -> None:
    gate_up = torch.tensor([[-200.0, 200.0, -90.0, 0.0, 1.0, 2.0, 3.0, 4.0]])
    assert_close(gated_activation(gate_up), dense.gated_activation(gate_up), rtol=1e-5, atol=1e-30)


def test_what_does_not_fit_is_refused() -> None:
    x = torch.zeros(2, 8)
    with pytest.raises(ValueError, match="weight"):
        norm(x, torch.zeros(7), 1e-6)
    with pytest.raises(TypeError, match="dtype"):
        norm(x, torch.zeros(8, dtype=torch.bfloat16), 1e-6)
    with pytest.raises(ValueError, match="float32"):
        gated_activation(x.double())


def test_arrays_without_a_table_of_functions_come_by_capsule() -> None:
    """Older versions of torch have tensors without such a table."""
    x = torch.randn(3, 20, generator=torch.Generator().manual_seed(1))
    weight, out = torch.rand(20), torch.empty(3, 20)
    cpp.norm(x, weight, 1e-6, out)
    arrays = x.numpy(), weight.numpy(), torch.zeros(3, 20).numpy()
    cpp.norm(arrays[0], arrays[1], 1e-6, arrays[2])
    assert torch.equal(torch.from_numpy(arrays[2]), out)
    with pytest.raises(TypeError):
        cpp.norm(x.tolist(), weight, 1e-6, out)
    with pytest.raises(TypeError):
        cpp.norm(x.to("meta"), weight, 1e-6, out)
