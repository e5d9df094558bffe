"""The blocks of the target's cache: how many there are, and what hands them out."""

from dataclasses import replace
from functools import partial

from slipstream.cache.block_manager import BlockManager
from slipstream.cache.spec import CacheLayout, CacheSizes
from slipstream.cache.spread_blocks import SpreadBlocks
from slipstream.cache.state_places import StatePlaces
from slipstream.cache.window_blocks import WindowBlocks
from slipstream.core.config import EngineConfig
from slipstream.engine.resolve import Resolved


def shares_prefixes(config: EngineConfig, layout: CacheLayout, sizes: CacheSizes) -> bool:
    """Whether requests begin behind prefixes that others have computed."""
    resumes = layout.blocks_resume or sizes.num_checkpoints > 0
    return config.enable_prefix_caching and resumes


def target_sizes(resolved: Resolved, sizes: CacheSizes, rereads: bool) -> CacheSizes:
    """`sizes` with what the target's layers alone have."""
    return replace(
        sizes,
        num_window_blocks=resolved.num_window_blocks,
        num_drafts=resolved.limits.num_speculative_tokens,
        num_checkpoints=resolved.num_checkpoints,
        rereads=int(rereads),
    )


def block_manager(
    resolved: Resolved, sizes: CacheSizes, shares_prefixes: bool, num_ranks: int
) -> BlockManager:
    """What hands out the blocks of the target's cache.

    Args:
        sizes: those of `target_sizes`.
        num_ranks: number of ranks that have caches of their own for different requests.
    """
    make = partial(_manager_of_one, resolved, sizes, shares_prefixes)
    return make() if num_ranks == 1 else SpreadBlocks([make() for _ in range(num_ranks)])


def _manager_of_one(resolved: Resolved, sizes: CacheSizes, shares_prefixes: bool) -> BlockManager:
    window = states = None
    size = sizes.block_size
    if resolved.num_window_blocks:
        window = WindowBlocks(resolved.num_window_blocks, size, resolved.window)
    if shares_prefixes and sizes.num_checkpoints:
        interval = resolved.checkpoint_interval
        states = StatePlaces(sizes.num_checkpoints, size, interval, sizes.rereads)
    return BlockManager(resolved.num_blocks, size, shares_prefixes, window, states)
