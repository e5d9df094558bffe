"""Caches of several kinds in one model: their sizes, their pools, and what an engine tells them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.cache.paged import KVPool, KVSpec
from slipstream.cache.spec import CacheLayout, CacheSizes, ModelCache
from slipstream.kernels.preparation import RequestTables

SIZES = CacheSizes(num_blocks=6, block_size=4, num_slots=3, device=torch.device("cpu"))
SMALL, LARGE = KVSpec(2, 8, torch.float32), KVSpec(1, 16, torch.bfloat16)


@dataclass(frozen=True)
class SumSpec:
    """A made-up recurrent kind: each layer keeps one number a request."""

    bytes_per_token = 0
    bytes_per_request = 4
    window = None

    def allocate(self, num_layers: int, sizes: CacheSizes) -> "SumPool":
        return SumPool(num_layers, sizes)


class SumPool:
    def __init__(self, num_layers: int, sizes: CacheSizes) -> None:
        self.states = torch.full((num_layers, sizes.num_slots), -1.0)
        self.layers = list(self.states)

    def keep_path(
        self, tables: RequestTables, slots: Tensor, roots: Tensor, path: Tensor, counts: Tensor
    ) -> None:
        raise AssertionError("this kind takes no trees")

    def begin(self, slots: Sequence[int]) -> None:
        self.states[:, list(slots)] = 0

    def commit(self, slots: Tensor, num_rows: Tensor) -> None:
        self.states[:, slots] += num_rows


def test_bytes_are_those_of_all_layers() -> None:
    layout = CacheLayout((SMALL, SumSpec(), SMALL, LARGE), torch.float32, extra_bytes_per_token=7)
    assert layout.bytes_per_token == 2 * (2 * 2 * 8 * 4) + 2 * 16 * 2 + 7
    assert layout.bytes_per_request == 4
    assert not layout.blocks_resume
    assert CacheLayout((SMALL, LARGE), torch.float32).blocks_resume


def test_an_int8_head_has_a_scale_behind_its_numbers() -> None:
    spec = KVSpec(2, 8, torch.int8)
    assert spec.bytes_per_token == 2 * 2 * (8 + 4)
    keys, values = spec.allocate(1, SIZES).layers[0]
    assert keys.shape == values.shape == (6, 4, 2, 12)


def test_layers_keep_their_order_and_equal_ones_share_a_pool() -> None:
    cache = ModelCache(CacheLayout((SMALL, LARGE, SMALL), torch.float32), SIZES)
    shapes = [tuple(keys.shape) for keys, _ in cache.layers]
    assert shapes == [(6, 4, 2, 8), (6, 4, 1, 16), (6, 4, 2, 8)]
    starts = {pages.data_ptr() for layer in cache.layers for pages in layer}
    assert len(starts) == 6
    storages = [keys.untyped_storage().data_ptr() for keys, _ in cache.layers]
    assert storages[0] == storages[2] != storages[1]
    assert not cache.has_states


def test_layers_with_a_window_have_pages_of_their_own() -> None:
    windowed = replace(SMALL, window=6)
    layout = CacheLayout((windowed, SMALL, windowed), torch.float32)
    assert (layout.windowed_bytes_per_token, layout.bytes_per_token) == (256, 384)
    assert (layout.window(7), layout.window(6)) == (6, None)
    shared = [keys.shape[0] for keys, _ in ModelCache(layout, SIZES).layers]
    assert shared == [6, 6, 6]
    cache = ModelCache(layout, replace(SIZES, num_window_blocks=4))
    assert [keys.shape[0] for keys, _ in cache.layers] == [5, 6, 5]
    assert all(pages[4].eq(0).all() for layer in cache.layers[::2] for pages in layer)
    assert cache.has_windows


def test_a_path_is_kept_by_the_table_of_each_layer() -> None:
    layout = CacheLayout((SMALL, replace(SMALL, window=6)), torch.float32)
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


def test_states_are_begun_and_rolled_forward_by_what_was_kept() -> None:
    cache = ModelCache(CacheLayout((SMALL, SumSpec(), SumSpec()), torch.float32), SIZES)
    assert cache.has_states
    cache.begin([0, 2])
    cache.commit(torch.tensor([2, 0]), torch.tensor([5, 1]))
    cache.commit(torch.tensor([2]), torch.tensor([3]))
    for state in cache.layers[1:]:
        assert state.tolist() == [1, -1, 8]
    cache.begin([2])
    assert cache.layers[1].tolist() == [1, -1, 0]


def test_a_path_is_kept_in_every_pool() -> None:
    cache = ModelCache(CacheLayout((SMALL, LARGE), torch.float32), SIZES)
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
