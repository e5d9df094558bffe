"""Gated delta nets in C++, at every level of instructions that this machine has."""
# ruff: noqa: E402  (the module may be missing)

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

cpp = pytest.importorskip("_slipstream_cpu", reason="the C++ kernels are not built")

from slipstream.kernels.cpu.attention import delta_net, tensors_of
from slipstream.kernels.delta_net import DeltaCache, DeltaHeads
from slipstream.kernels.pass_inputs import PassInputs, StateInputs
from slipstream.kernels.reference.delta_net import delta_net as plainly
from tests.kernels.batches import Requests, attention_inputs, seeded

pytestmark = pytest.mark.usefixtures("level", "two_threads")

DTYPES = [torch.float32, torch.bfloat16]
SLOTS, PLACES = 7, 12
# (key heads, value heads, Dk, Dv, taps, K)
SHAPES = [
    (2, 2, 32, 32, 4, 3),
    (1, 3, 20, 72, 4, 4),
    (3, 3, 7, 5, 2, 1),
    (2, 4, 33, 130, 1, 0),
]


@dataclass(frozen=True)
class Case:
    """A layer, what it keeps, and rows of several requests."""

    heads: DeltaHeads
    cache: DeltaCache
    inputs: PassInputs
    rows: tuple[Tensor, Tensor, Tensor]

    def run(self, op: object = delta_net) -> tuple[Tensor, DeltaCache]:
        """The output of the rows, and the cache after the pass."""
        cache = DeltaCache(*(tensor.clone() for tensor in tensors_of(self.cache)))
        assert callable(op)
        return op(*self.rows, self.heads, self.inputs, cache), cache


def make_heads(sizes: tuple[int, ...]) -> DeltaHeads:
    key_heads, value_heads, key_dim, value_dim, taps, _ = sizes
    generator = seeded(2)
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    return DeltaHeads(
        key_heads,
        value_heads,
        key_dim,
        value_dim,
        taps=torch.randn(channels, taps, generator=generator),
        decay=-torch.randn(value_heads, generator=generator).exp(),
        step_bias=torch.randn(value_heads, generator=generator),
        norm_weight=torch.randn(value_dim, generator=generator),
        eps=1e-6,
    )


def make_case(
    sizes: tuple[int, ...],
    dtype: torch.dtype,
    requests: Requests,
    num_known: list[int],
    pending: list[int],
    save_at: list[int],
) -> Case:
    """Request r has slot r + 1 and checkpoint SLOTS + r. Rows are columns of wider ones."""
    heads, most_drafted, generator = make_heads(sizes), sizes[-1], seeded(3)
    key_dim, value_dim, num_rows = heads.key_dim, heads.value_dim, sum(requests.rows)
    value_heads, channels = heads.num_value_heads, heads.num_channels

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    cache = DeltaCache(
        torch.randn(PLACES, value_heads, key_dim, value_dim, generator=generator),
        drawn(PLACES, heads.taps.shape[1] - 1, channels),
        drawn(SLOTS, most_drafted, channels),
        drawn(SLOTS, most_drafted, 2 * value_heads),
    )
    places = torch.arange(len(num_known))
    known, accepted, edges = (torch.tensor(each) for each in (num_known, pending, save_at))
    states = StateInputs(places + 1, known, accepted, edges, places + SLOTS)
    widths = [channels, value_heads * value_dim, 2 * value_heads]
    mixed, z, gates = drawn(num_rows, sum(widths) + 3)[:, 1:-2].split(widths, 1)
    inputs = replace(attention_inputs(requests, 16), states=states)
    return Case(heads, cache, inputs, (mixed, gates, z))


def ragged(sizes: tuple[int, ...], dtype: torch.dtype) -> Case:
    """Long and short requests: with draft rows and without, some to be replayed, and checkpoints
    among those, after them, at a known row and where none is reached."""
    most = sizes[-1]
    few = min(most, 2)
    return make_case(
        sizes,
        dtype,
        Requests([0, 9, 50, 30, 8], [75 + most, 1, 0, 1 + most, 2 + few]),
        num_known=[75, 1, 0, 1, 2],
        pending=[0, most, 0, few, few],
        save_at=[64, 10 - most, 50, 31, 30],
    )


def assert_near(got: Tensor, want: Tensor) -> None:
    close = 2e-4 if got.dtype == torch.float32 else 2**-7
    assert_close(got, want, rtol=close, atol=close * float(want.abs().max()) / 8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_rows_and_states_are_those_of_the_plain_op(
    sizes: tuple[int, ...], dtype: torch.dtype
) -> None:
    case = ragged(sizes, dtype)
    (out, cache), (wanted, expected) = case.run(), case.run(plainly)
    assert_near(out, wanted)
    assert_near(cache.states, expected.states)
    for got, want in zip(tensors_of(cache)[1:], tensors_of(expected)[1:], strict=True):
        assert torch.equal(got, want)
    untouched = [0, 3, 6, 9, 11]
    assert torch.equal(cache.states[untouched], case.cache.states[untouched])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SHAPES[:2], ids=str)
def test_bits_depend_on_nothing_beside_a_request(
    sizes: tuple[int, ...], dtype: torch.dtype
) -> None:
    case = ragged(sizes, dtype)
    out, cache = case.run()
    cpp.set_num_threads(1)
    starts, states = case.inputs.rows.query_start.tolist(), case.inputs.states
    assert states is not None
    for request, (first, end) in enumerate(pairwise(starts)):
        if first == end:
            continue
        alone, position = slice(request, request + 1), int(case.inputs.rows.positions[first])
        inputs = replace(
            attention_inputs(Requests([position], [end - first]), 16),
            states=StateInputs(**{name: each[alone] for name, each in vars(states).items()}),
        )
        mixed, gates, z = (each[first:end] for each in case.rows)
        own, kept = replace(case, inputs=inputs, rows=(mixed, gates, z)).run()
        assert torch.equal(own, out[first:end])
        for place in (request + 1, request + SLOTS):
            assert torch.equal(kept.states[place], cache.states[place])
            assert torch.equal(kept.windows[place], cache.windows[place])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_do_not_tell_in_how_many_passes_rows_were_taken(dtype: torch.dtype) -> None:
    sizes, length = SHAPES[1], 90
    whole = make_case(sizes, dtype, Requests([0], [length]), [length], [0], [37])
    assert whole.inputs.states is not None
    expected, wanted = whole.run()
    cache, pending, start = whole.cache, 0, 0
    # Known rows, draft rows, and how many of those are then accepted.
    passes = [(1, 0, 0), (33, 4, 2), (1, 4, 0), (1, 4, 4), (2, 2, 2), (38, 3, 1), (5, 0, 0)]
    for known, drafts, accepted in passes:
        states = replace(
            whole.inputs.states,
            num_known=torch.tensor([known]),
            pending=torch.tensor([pending]),
        )
        inputs = replace(attention_inputs(Requests([start], [known + drafts]), 16), states=states)
        stays = known + accepted
        refused = torch.arange(known + drafts).unsqueeze(1) >= stays
        mixed, gates, z = (  # what is refused is not what comes in its place
            each[start : start + known + drafts] + refused for each in whole.rows
        )
        out, cache = replace(whole, inputs=inputs, rows=(mixed, gates, z), cache=cache).run()
        assert torch.equal(out[:stays], expected[start : start + stays])
        pending, start = accepted, start + stays
    assert start == length
    for kept, full in zip(tensors_of(cache)[:2], tensors_of(wanted)[:2], strict=True):
        assert torch.equal(kept[[1, SLOTS]], full[[1, SLOTS]])


@pytest.mark.parametrize(
    "change", [{"slots": SLOTS}, {"num_known": 4}, {"pending": 4}, {"saved": PLACES}], ids=str
)
def test_places_out_of_range_are_refused(change: dict[str, int]) -> None:
    case = make_case(SHAPES[0], torch.float32, Requests([5], [3]), [2], [1], [6])
    assert case.inputs.states is not None
    wrong = {name: torch.tensor([value]) for name, value in change.items()}
    states = replace(case.inputs.states, **wrong)
    with pytest.raises(ValueError, match=next(iter(change))):
        replace(case, inputs=replace(case.inputs, states=states)).run()
