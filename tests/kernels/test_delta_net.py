"""The recurrence of gated delta nets: its numbers, and that refused rows leave no trace."""

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from slipstream.kernels.delta_net import DeltaCache, DeltaHeads
from slipstream.kernels.pass_inputs import Paging, PassInputs, RowPlaces, StateInputs
from slipstream.kernels.reference.delta_net import delta_net

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, TAPS, K = 2, 6, 8, 5, 4, 3
CHANNELS = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
SLOTS, PLACES = 4, 6


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def heads() -> DeltaHeads:
    return DeltaHeads(
        num_key_heads=KEY_HEADS,
        num_value_heads=VALUE_HEADS,
        key_dim=KEY_DIM,
        value_dim=VALUE_DIM,
        taps=drawn(CHANNELS, TAPS, seed=1),
        decay=-drawn(VALUE_HEADS, seed=2).exp(),
        step_bias=drawn(VALUE_HEADS, seed=3),
        norm_weight=drawn(VALUE_DIM, seed=4),
        eps=1e-6,
    )


def empty_cache() -> DeltaCache:
    return DeltaCache(
        torch.zeros(PLACES, VALUE_HEADS, KEY_DIM, VALUE_DIM),
        torch.zeros(PLACES, TAPS - 1, CHANNELS),
        torch.zeros(SLOTS, K, CHANNELS),
        torch.zeros(SLOTS, K, 2 * VALUE_HEADS),
    )


class Texts:
    """Inputs of two requests' rows, and passes over some of them."""

    def __init__(self, length: int) -> None:
        self.mixed = drawn(2, length, CHANNELS, seed=5)
        self.gates = drawn(2, length, 2 * VALUE_HEADS, seed=6)
        self.z = drawn(2, length, VALUE_HEADS * VALUE_DIM, seed=7)
        self.cache = empty_cache()

    def run(
        self,
        spans: list[tuple[int, int]],
        known: list[int],
        pending: list[int],
        save_at: list[int] | None = None,
    ) -> Tensor:
        """A pass over rows `spans` of the requests, whose states are in slots 2 and 0."""
        counts = [stop - start for start, stop in spans]
        starts = torch.tensor([0, *counts]).cumsum(0)
        positions = torch.cat([torch.arange(*span) for span in spans])
        states = StateInputs(
            torch.tensor([2, 0]),
            torch.tensor(known),
            torch.tensor(pending),
            torch.tensor(save_at or [-1, -1]),
            torch.tensor([4, 5]),
        )
        nowhere = torch.zeros(2, 1)
        inputs = PassInputs(
            RowPlaces(starts, positions), Paging(nowhere, nowhere, nowhere), states=states
        )
        mixed, gates, z = (
            torch.cat([rows[start:stop] for rows, (start, stop) in zip(each, spans, strict=True)])
            for each in (self.mixed, self.gates, self.z)
        )
        return delta_net(mixed, gates, z, heads(), inputs, self.cache)


def test_numbers_are_those_of_transformers() -> None:
    texts, own = Texts(11), heads()
    out = texts.run([(0, 11), (0, 11)], [11, 11], [0, 0]).view(2, 11, VALUE_HEADS, VALUE_DIM)
    mixed = torch.nn.functional.conv1d(
        torch.nn.functional.pad(texts.mixed.transpose(1, 2), (TAPS - 1, 0)),
        own.taps.unsqueeze(1),
        groups=CHANNELS,
    )
    mixed = torch.nn.functional.silu(mixed).transpose(1, 2)
    keys = KEY_HEADS * KEY_DIM
    query, key, value = mixed.split([keys, keys, VALUE_HEADS * VALUE_DIM], -1)
    query, key = (
        each.view(2, 11, KEY_HEADS, KEY_DIM).repeat_interleave(VALUE_HEADS // KEY_HEADS, 2)
        for each in (query, key)
    )
    strength, step = texts.gates.chunk(2, -1)
    read, state = torch_recurrent_gated_delta_rule(
        query,
        key,
        value.view(2, 11, VALUE_HEADS, VALUE_DIM),
        own.decay * torch.nn.functional.softplus(step + own.step_bias),
        strength.sigmoid(),
        None,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    normed = torch.nn.functional.rms_norm(read, (VALUE_DIM,), own.norm_weight, own.eps)
    gated = normed * torch.nn.functional.silu(texts.z.view_as(normed))
    torch.testing.assert_close(out, gated, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(texts.cache.states[[2, 0]], state, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(texts.cache.windows[[2, 0]], texts.mixed[:, -3:])


@pytest.mark.parametrize("accepted", [(0, 3), (1, 2), (2, 1), (3, 0)])
def test_a_state_is_that_of_the_tokens_that_stay(accepted: tuple[int, int]) -> None:
    """Draft rows read what they would read as known rows; those refused leave no trace."""
    whole = Texts(9)
    expected = whole.run([(0, 9), (0, 9)], [9, 9], [0, 0]).view(2, 9, -1)

    rounds = Texts(9)
    rounds.run([(0, 2), (0, 4)], [2, 4], [0, 0])
    ends = [3, 5]  # after the known row of the next pass
    for request, count in enumerate(accepted):  # what is refused is not what comes in its place
        rounds.mixed[request, ends[request] + count :] += 1
        rounds.gates[request, ends[request] + count :] += 1
    rounds.run([(2, 6), (4, 8)], [1, 1], [0, 0])
    starts = [end + count for end, count in zip(ends, accepted, strict=True)]
    rounds.mixed, rounds.gates = whole.mixed, whole.gates
    out = rounds.run([(start, start + 1) for start in starts], [1, 1], list(accepted))

    fresh = Texts(9)
    fresh.run([(0, start + 1) for start in starts], [start + 1 for start in starts], [0, 0])
    for request, (slot, start) in enumerate(zip((2, 0), starts, strict=True)):
        # Torch may round what a row reads by the rows beside it, but never the state.
        torch.testing.assert_close(out[request], expected[request, start], rtol=1e-6, atol=1e-6)
        for kept in ("states", "windows"):
            found, wanted = getattr(rounds.cache, kept)[slot], getattr(fresh.cache, kept)[slot]
            assert torch.equal(found, wanted)
    assert not rounds.cache.states[[1, 3, 4, 5]].any()


@pytest.mark.parametrize("save_at", [2, 3, 4, 5, 6])
def test_a_checkpoint_is_taken_where_tokens_are_taken_in(save_at: int) -> None:
    """Among pending rows, after them or at a known row; draft rows are not included."""
    texts = Texts(9)
    texts.run([(0, 3), (0, 1)], [3, 1], [0, 0], [save_at, -1])
    texts.run([(3, 6), (1, 1)], [1, 0], [0, 0], [save_at, -1])
    taken = save_at in (2, 3, 4)
    assert bool(texts.cache.states[4].any()) == taken
    texts.run([(6, 8), (1, 1)], [1, 0], [2, 0], [save_at, -1])
    fresh = Texts(9)
    fresh.run([(0, save_at), (0, 1)], [save_at, 1], [0, 0])
    assert torch.equal(texts.cache.states[4], fresh.cache.states[2])
    assert torch.equal(texts.cache.windows[4], fresh.cache.windows[2])
    assert not texts.cache.states[5].any()
