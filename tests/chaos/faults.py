"""Faults that are put in on purpose, to see that a run of chaos finds them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from slipstream.cache.block_pool import BlockPool
from slipstream.cache.prefix_index import PrefixIndex
from slipstream.cache.spec import ModelCache
from slipstream.core.batch import Batch, Committed
from slipstream.core.outputs import RequestMetrics
from slipstream.core.request import Request
from slipstream.engine.adapters import Adapters
from slipstream.engine.launcher import Launcher
from slipstream.engine.metrics import EngineMetrics
from slipstream.engine.scheduler import Scheduler
from slipstream.engine.step_results import Launched
from slipstream.kernels.pass_inputs import StateInputs

Patch = pytest.MonkeyPatch


def leaked_block(patch: Patch) -> None:
    """A block that two requests share is lost when the first of them ends."""
    release = BlockPool.release

    def leaking(pool: BlockPool, block: int) -> None:
        shared = pool._references[block] > 1
        release(pool, block)
        if shared:
            pool._references[block] += 1

    patch.setattr(BlockPool, "release", leaking)


def lost_token(patch: Patch) -> None:
    """The last token of a step that accepted two drafts or more is lost on the host."""
    commit = Scheduler.commit

    def losing(scheduler: Scheduler, batch: Batch, committed: Sequence[Committed]) -> None:
        commit(scheduler, batch, committed)
        for item, gain in zip(batch.requests, committed, strict=True):
            if gain.num_accepted > 1 and item.request.finished:
                item.request.token_ids.pop()

    patch.setattr(Scheduler, "commit", losing)


def wrong_al(patch: Patch) -> None:
    """A draft that was accepted as a whole counts as one token longer."""
    count_draft = RequestMetrics.count_draft

    def counting(self: RequestMetrics, drafted: int, accepted: int, places: Any = None) -> None:
        count_draft(self, drafted, accepted, places)
        self.num_accepted_tokens += bool(drafted) and accepted == drafted

    patch.setattr(RequestMetrics, "count_draft", counting)


def late_checkpoint(patch: Patch) -> None:
    """A checkpoint of states is written one row after its edge."""
    state_inputs = ModelCache.state_inputs

    def late(cache: ModelCache, *arguments: Any) -> StateInputs | None:
        found = state_inputs(cache, *arguments)
        if found is None:
            return found
        return replace(found, save_at=found.save_at + (found.save_at > 0))

    patch.setattr(ModelCache, "state_inputs", late)


def stale_block(patch: Patch) -> None:
    """Blocks that differ in their last token alone are taken for equal."""
    child = PrefixIndex.child

    def blind(parent: bytes, token_ids: Sequence[int]) -> bytes:
        return child(parent, token_ids[:-1])

    patch.setattr(PrefixIndex, "child", staticmethod(blind))


def moved_seed(patch: Patch) -> None:
    """A request that is preempted goes on with other noise."""
    lose_place = Request.lose_place

    def losing(request: Request) -> None:
        lose_place(request)
        request.seed += 1

    patch.setattr(Request, "lose_place", losing)


def counted_twice(patch: Patch) -> None:
    """A step that is taken back stays counted."""
    for metrics in (RequestMetrics, EngineMetrics):
        patch.setattr(metrics, "restore", lambda *_: None)


def early_adapter(patch: Patch) -> None:
    """A request runs before its adapter is in its slot."""

    def is_loaded(self: Adapters, slot: Any) -> bool:
        slot.loading = None
        return True

    patch.setattr(Adapters, "_is_loaded", is_loaded)


def failed_step(patch: Patch) -> None:
    """Steps of several requests fail; run one by one they lose nothing."""
    launch = Launcher.launch

    def failing(launcher: Launcher, batch: Batch) -> Launched:
        if len(batch.requests) > 1:
            raise RuntimeError("several")
        return launch(launcher, batch)

    patch.setattr(Launcher, "launch", failing)


FAULTS: dict[str, Callable[[Patch], None]] = {
    "leaked-block": leaked_block,
    "lost-token": lost_token,
    "wrong-al": wrong_al,
    "late-checkpoint": late_checkpoint,
    "stale-block": stale_block,
    "moved-seed": moved_seed,
    "counted-twice": counted_twice,
    "early-adapter": early_adapter,
    "failed-step": failed_step,
}
