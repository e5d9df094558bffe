"""Gated delta nets of the triton column against the reference's.

On the GPU where there is one, else interpreted: see `test_triton_ops.py`.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

pytest.importorskip("triton", reason="it is there for Linux only")

from slipstream.kernels.pass_inputs import RowPlaces, StateInputs
from slipstream.kernels.reference.delta_net import delta_net as expected_of
from slipstream.kernels.triton.delta_net import delta_net
from tests.kernels.delta_nets import Case, Request, Shape, make_case
from tests.kernels.device import DEVICE, INTERPRETED, ON_GPU

pytestmark = INTERPRETED

SMALL = Shape(2, 4, 12, 20)
HOST = torch.device("cpu")
DECODING = [
    Request(1, 1),
    Request(4, 1, pending=3, save_at=102),
    Request(0, 0, pending=2),
    Request(4, 2, pending=0, covered=0, save_at=2),
    Request(3, 1, pending=1, save_at=103),
    Request(2, 0, pending=3, save_at=103),
]
MIXED = [
    Request(3, 1, pending=2, save_at=103),
    Request(75, 75, covered=0, save_at=70),
    Request(1, 1),
    Request(17, 15, pending=3, save_at=101),
]


def assert_agrees(case: Case, in_chunks: bool | None = None) -> None:
    """Assert equality with the reference up to a few roundings of the dtype."""
    ours, exact = case.moved(DEVICE), case.moved(HOST)
    out = delta_net(*ours.arguments, in_chunks=in_chunks)
    expected = expected_of(*exact.arguments)
    near = 2e-5 if out.dtype == torch.float32 else 16 * torch.finfo(out.dtype).eps
    assert_close(out.cpu(), expected, rtol=near, atol=near)
    assert_close(ours.cache.states.cpu(), exact.cache.states, rtol=near, atol=near)
    for name in ("windows", "drafted", "drafted_gates"):
        assert torch.equal(getattr(ours.cache, name).cpu(), getattr(exact.cache, name))


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(SMALL, marks=pytest.mark.full),
        Shape(1, 3, 16, 8, taps=2),
        Shape(2, 2, 16, 16, dtype=torch.float16),
    ],
    ids=str,
)
def test_few_rows(shape: Shape) -> None:
    assert_agrees(make_case(shape, DECODING, drafts=3))


def test_many_rows_beside_few() -> None:
    # On a GPU the products of float32 are not exact.
    dtype = torch.float16 if ON_GPU else torch.float32
    assert_agrees(make_case(replace(SMALL, dtype=dtype), MIXED, drafts=3), in_chunks=True)


def test_many_rows_one_by_one_and_no_draft_tokens() -> None:
    requests = [Request(1, 1), Request(20, 20, covered=0), Request(2, 2, save_at=101)]
    assert_agrees(make_case(Shape(1, 2, 12, 20), requests, drafts=0), in_chunks=False)


def alone(case: Case, first: int, end: int, known: int, pending: int) -> Tensor:
    """Rows [first, end) of the pass as a pass of their own, of its first request."""
    states, device = case.inputs.states, case.mixed.device
    assert states is not None
    counts = {"num_known": known, "pending": pending, "save_at": -1, "saved": 0}
    moves = {name: torch.tensor([value], device=device) for name, value in counts.items()}
    inputs = replace(
        case.inputs,
        rows=RowPlaces(
            torch.tensor([0, end - first], device=device),
            torch.arange(100 + first, 100 + end, device=device),
        ),
        states=StateInputs(slots=states.slots[:1], **moves),
    )
    mixed, gates, z = (part[first:end] for part in (case.mixed, case.gates, case.z))
    return delta_net(mixed, gates, z, case.heads, inputs, case.cache)


def test_bits_of_rows_and_states_are_those_of_rows_one_by_one() -> None:
    given = make_case(Shape(1, 1, 12, 20), [Request(6, 6), Request(17, 17)], drafts=3)
    together, single, rounds = (given.moved(DEVICE) for _ in range(3))
    expected = delta_net(*together.arguments)
    one_by_one = [alone(single, row, row + 1, known=1, pending=0) for row in range(6)]
    first = alone(rounds, 0, 4, known=1, pending=0)  # of three drafts two are accepted
    second = alone(rounds, 3, 6, known=3, pending=2)
    assert torch.equal(torch.cat(one_by_one), expected[:6])
    assert torch.equal(torch.cat((first[:3], second)), expected[:6])
    assert given.inputs.states is not None
    slot = int(given.inputs.states.slots[0])
    for other in (single, rounds):
        assert torch.equal(other.cache.states[slot], together.cache.states[slot])
        assert torch.equal(other.cache.windows[slot], together.cache.windows[slot])
