"""Caches of several kinds in one model: their sizes, their pools, and what an engine tells them."""

from dataclasses import replace

import pytest
import torch

from slipstream.cache.latent import LatentSpec
from slipstream.cache.paged import KVPool, KVSpec
from slipstream.cache.recurrent import RecurrentSpec
from slipstream.cache.spec import CacheLayout, CacheSizes, ModelCache
from slipstream.core.errors import UsageError
from slipstream.kernels.preparation import RequestTables

SIZES = CacheSizes(num_blocks=6, block_size=4, num_slots=3, device=torch.device("cpu"))
SMALL, LARGE = KVSpec(2, 8, torch.float32), KVSpec(1, 16, torch.bfloat16)


RECURRENT = RecurrentSpec((4, 3, 5), window=3, channels=20, gates=8, dtype=torch.bfloat16)


def test_bytes_are_those_of_all_layers() -> None:
    layout = CacheLayout((SMALL, RECURRENT, SMALL, LARGE), extra_bytes_per_token=7)
    assert layout.bytes_per_token == 2 * (2 * 2 * 8 * 4) + 2 * 16 * 2 + 7
    assert layout.bytes_per_request == 4 * 3 * 5 * 4 + 3 * 20 * 2
    assert layout.state_bytes(5) == layout.bytes_per_request + 5 * (20 + 8) * 2
    assert not layout.blocks_resume
    assert CacheLayout((SMALL, LARGE)).blocks_resume


def test_an_int8_head_has_a_scale_behind_its_numbers() -> None:
    spec = KVSpec(2, 8, torch.int8)
    assert spec.bytes_per_token == 2 * 2 * (8 + 4)
    keys, values = spec.allocate(1, SIZES).layers[0]
    assert keys.shape == values.shape == (6, 4, 2, 12)


def test_latent_layers_keep_one_row_a_token() -> None:
    spec = LatentSpec(18, torch.bfloat16)
    assert (spec.bytes_per_token, spec.bytes_per_request) == (36, 0)
    cache = ModelCache(CacheLayout((spec, SMALL, spec)), SIZES)
    assert [cache.layers[index].shape for index in (0, 2)] == [(6, 4, 18)] * 2
    with pytest.raises(UsageError, match="8 bits is not for latent attention"):
        LatentSpec(18, torch.int8)


def test_layers_keep_their_order_and_equal_ones_share_a_pool() -> None:
    cache = ModelCache(CacheLayout((SMALL, LARGE, SMALL)), SIZES)
    shapes = [tuple(keys.shape) for keys, _ in cache.layers]
    assert shapes == [(6, 4, 2, 8), (6, 4, 1, 16), (6, 4, 2, 8)]
    starts = {pages.data_ptr() for layer in cache.layers for pages in layer}
    assert len(starts) == 6
    storages = [keys.untyped_storage().data_ptr() for keys, _ in cache.layers]
    assert storages[0] == storages[2] != storages[1]
    assert not cache.has_states


def test_layers_with_a_window_have_pages_of_their_own() -> None:
    windowed = replace(SMALL, window=6)
    layout = CacheLayout((windowed, SMALL, windowed))
    assert (layout.windowed_bytes_per_token, layout.bytes_per_token) == (256, 384)
    assert (layout.window(7), layout.window(6)) == (6, None)
    shared = [keys.shape[0] for keys, _ in ModelCache(layout, SIZES).layers]
    assert shared == [6, 6, 6]
    cache = ModelCache(layout, replace(SIZES, num_window_blocks=4))
    assert [keys.shape[0] for keys, _ in cache.layers] == [5, 6, 5]
    assert all(pages[4].eq(0).all() for layer in cache.layers[::2] for pages in layer)
    assert cache.has_windows


def test_a_path_is_kept_by_the_table_of_each_layer() -> None:
    layout = CacheLayout((SMALL, replace(SMALL, window=6)))
    cache = ModelCache(layout, replace(SIZES, num_window_blocks=5))
    for keys, values in cache.layers:
        for pages in (keys, values):
            pages.copy_(torch.arange(24.0).view(6, 4, 1, 1).expand(pages.shape))
    tables = RequestTables(
        token_ids=torch.zeros(3, 17, dtype=torch.int32),
        num_tokens=torch.tensor([3, 0, 0]),
        num_computed=torch.tensor([2, 0, 0]),
        block_tables=torch.tensor([[4, 1, 3, 2], [0] * 4, [0] * 4], dtype=torch.int32),
        block_size=4,
        window_column=2,
    )
    path, one = torch.tensor([[0, 2, 4]]), torch.tensor([2])
    cache.keep_path(tables, torch.tensor([0]), one, path, one)
    for (keys, _), (first, second) in zip(cache.layers, ((4, 1), (3, 2)), strict=True):
        assert keys[first, 3, 0, 0] == 4 * second  # token 3 <- token 4
        assert keys[second, 0, 0, 0] == 4 * second + 2  # token 4 <- token 6


def test_states_have_places_for_slots_and_checkpoints() -> None:
    sizes = replace(SIZES, num_drafts=2, num_checkpoints=4)
    cache = ModelCache(CacheLayout((SMALL, RECURRENT, RECURRENT)), sizes)
    for layer in cache.layers[1:]:
        assert layer.states.shape == (3 + 4, 4, 3, 5)
        assert layer.windows.shape == (3 + 4, 3, 20)
        assert layer.drafted.shape == (3, 2, 20)
        assert layer.drafted_gates.shape == (3, 2, 8)
        assert (layer.states.dtype, layer.windows.dtype) == (torch.float32, torch.bfloat16)
        layer.states.fill_(1.0)
        layer.windows.fill_(1.0)
        layer.states[5], layer.windows[5] = 2.0, 3.0
    cache.begin([0, 2], [-1, 2])
    for layer in cache.layers[1:]:
        for kept, there in ((layer.states, 2.0), (layer.windows, 3.0)):
            found = [place.unique().tolist() for place in kept]
            assert found == [[0.0], [1.0], [there], [1.0], [1.0], [there], [1.0]]


def test_accepted_rows_are_pending_until_their_request_goes_on() -> None:
    cache = ModelCache(CacheLayout((SMALL, RECURRENT)), replace(SIZES, num_drafts=5))
    assert cache.has_states
    known = torch.tensor([4, 1])

    def pending() -> list[int]:
        found = cache.state_inputs(torch.tensor([2, 0]), known, known, None)
        assert found is not None
        assert found.num_known is known
        assert found.save_at.tolist() == [-1, -1]
        return found.pending.tolist()

    cache.commit(torch.tensor([2, 0]), torch.tensor([5, 1]))
    assert pending() == [5, 1]
    cache.commit(torch.tensor([0]), torch.tensor([3]))
    assert pending() == [5, 3]
    cache.begin([2], [-1])
    assert pending() == [0, 3]
    paged = ModelCache(CacheLayout((SMALL,)), SIZES)
    assert paged.state_inputs(torch.tensor([2, 0]), known, known, None) is None


@pytest.mark.parametrize(("rereads", "save_at"), [(0, [4, -1, 8]), (1, [7, -1, 7])])
def test_the_last_edge_of_a_pass_is_saved(rereads: int, save_at: list[int]) -> None:
    """Behind 7, 9 and 8 tokens, with a place for the first and the last request."""
    sizes = replace(SIZES, num_checkpoints=5, rereads=rereads)
    cache = ModelCache(CacheLayout((RECURRENT,)), sizes)
    starts, known = torch.tensor([2, 8, 0]), torch.tensor([5, 1, 8])
    found = cache.state_inputs(torch.arange(3), starts, known, torch.tensor([4, -1, 0]))
    assert found is not None
    assert found.save_at.tolist() == save_at
    assert found.saved[[0, 2]].tolist() == [3 + 4, 3 + 0]


def test_drafts_take_little_beside_the_state_of_a_request() -> None:
    """Geometry of Qwen3.5-9B: 24 such layers, 32 heads of values, 16 of keys, all of 128."""
    channels = (2 * 16 + 32) * 128
    spec = RecurrentSpec(
        (32, 128, 128), window=3, channels=channels, gates=64, dtype=torch.bfloat16
    )
    layout = CacheLayout((spec,) * 24)
    assert layout.state_bytes(7) < 1.06 * layout.state_bytes(0)


def test_a_path_is_kept_in_every_pool() -> None:
    cache = ModelCache(CacheLayout((SMALL, LARGE)), SIZES)
    for number, (keys, values) in enumerate(cache.layers):
        slots = torch.arange(24, dtype=torch.float32).view(6, 4, 1, 1)
        keys.copy_((slots + 100 * number).expand(keys.shape))
        values.copy_((slots + 100 * number + 0.5).expand(values.shape))
    tables = RequestTables(
        token_ids=torch.zeros(3, 17, dtype=torch.int32),
        num_tokens=torch.tensor([3, 0, 0]),
        num_computed=torch.tensor([2, 0, 0]),
        block_tables=torch.tensor([[4, 1, 0, 0], [0] * 4, [0] * 4], dtype=torch.int32),
        block_size=4,
    )
    # Token 2 is the root; nodes 2 and 4 of the tree were accepted: tokens 4 and 6 hold them.
    path, one = torch.tensor([[0, 2, 4]]), torch.tensor([2])
    cache.keep_path(tables, torch.tensor([0]), one, path, one)
    for number, (keys, values) in enumerate(cache.layers):
        assert keys[4, 3, 0, 0] == 100 * number + 4  # token 3 <- token 4: block 1, its first slot
        assert keys[1, 0, 0, 0] == 100 * number + 6
        assert values[1, 0, 0, 0] == 100 * number + 6.5
    assert isinstance(SMALL.allocate(1, SIZES), KVPool)
