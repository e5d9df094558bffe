"""What has to hold of an engine between two operations, as far as it can be told from outside."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from slipstream.core.outputs import CompletionOutput, RequestMetrics
from slipstream.engine.engine import Engine
from slipstream.engine.samples import Submission


def check_engine(engine: Engine) -> None:
    """Check queues, slots, blocks and checkpoints, and that host and device agree."""
    scheduler = engine.scheduler
    scheduler.check_invariants()
    _check_owners(engine)
    _check_device(engine)
    if not engine.has_unfinished:
        check_all_free(engine)


def check_all_free(engine: Engine) -> None:
    """Nobody is left, so nothing is held."""
    blocks = engine.scheduler.block_manager
    assert blocks.num_available == blocks.num_blocks, "blocks are held by nobody"
    for kept in (blocks._window, blocks._states):
        if kept is not None:
            pool: Any = kept._pool
            assert pool.num_available == pool.num_blocks, "places are held by nobody"
    assert len(engine.scheduler._free_slots) == engine.resolved.limits.max_num_seqs
    assert not engine._owners, "a request that ended is still known"
    assert not engine._submissions, "a submission that ended is still known"


def _check_owners(engine: Engine) -> None:
    """Every unfinished sample waits, runs or is set aside, once."""
    owned = {it.request for _, it in engine._owners.values() if not it.request.finished}
    queued = {*engine.scheduler.waiting, *engine.scheduler.running}
    aside = set(engine._isolation._set_aside)
    assert not queued & aside, "a request is queued and set aside"
    assert queued | aside == owned, "a request is in no queue or in nobody's hands"
    assert engine.has_unfinished == bool(owned)
    assert engine._mark is None, "the mark of a step is left over"


def _check_device(engine: Engine) -> None:
    """Check that the device has the tokens and the blocks of every running request."""
    state: Any = engine._step._state
    ahead = engine._launched is not None
    blocks = engine.scheduler.block_manager
    for request in engine.scheduler.running:
        slot, name = request.slot, request.request_id
        known, computed = int(state.num_tokens[slot]), int(state.num_computed[slot])
        adapter = engine.adapters.slot_of(request)
        assert int(state.adapters[slot]) == adapter, f"{name}: the device has another adapter"
        host = request.num_tokens, request.num_computed
        if ahead:
            assert (known, computed) >= host, f"{name}: the device is behind the host"
        else:
            assert (known, computed) == host, f"{name}: device {known, computed}, host {host}"
        tokens = state.token_ids[slot, : request.num_tokens].tolist()
        assert tokens == request.token_ids, f"{name}: the device has other tokens"
        table = list(blocks.table(name))
        written = state.block_tables[slot, : len(table)].tolist()
        covering = blocks.blocks_for(request.num_computed)
        assert written[:covering] == table[:covering], f"{name}: the device has other blocks"
        if not request.steps_in_flight:
            needed = blocks.blocks_for(request.num_tokens)
            assert len(table) <= needed, f"{name}: holds {len(table)} blocks, and needs {needed}"


def check_counts(submission: Submission, num_lost: int) -> None:
    """Metrics add up, and with the tokens.

    Args:
        num_lost: tokens that stop conditions have cut off, at most.
    """
    counted = submission.metrics
    check_metrics(counted)
    origins = [origin for sample in submission.samples for origin in sample.origins]
    gained = sum(sample.request.num_output_tokens for sample in submission.samples)
    name = submission.request_id
    if submission.error is not None:
        return
    assert len(origins) == gained, f"{name}: {len(origins)} origins of {gained} tokens"
    surplus = counted.num_steps + counted.num_accepted_tokens - gained
    accepted = sum(origin.kind == "accepted" for origin in origins)
    assert 0 <= surplus <= num_lost, (
        f"{name}: {gained} tokens of {counted.num_steps} steps and "
        f"{counted.num_accepted_tokens} accepted drafts"
    )
    assert 0 <= counted.num_accepted_tokens - accepted <= num_lost, f"{name}: origins"


def check_metrics(counted: RequestMetrics) -> None:
    """Accepted and refused drafts are the drafts; so are they place by place, and the AL."""
    steps = counted.num_steps_by_draft_tokens
    per_place = counted.num_accepted_tokens_per_pos
    assert sum(steps[1:]) == counted.num_drafts, "drafts by their number"
    drafted = sum(number * count for number, count in enumerate(steps))
    assert drafted == counted.num_draft_tokens, "draft tokens by the number of each step"
    assert 0 <= counted.num_accepted_tokens <= counted.num_draft_tokens, (
        "more accepted than drafted"
    )
    assert sum(per_place) == counted.num_accepted_tokens, "accepted tokens by their places"
    assert all(a >= b for a, b in pairwise((counted.num_drafts, *per_place))), "a place was skipped"
    accepted, drafts = counted.num_accepted_tokens, counted.num_drafts
    assert counted.acceptance_length == 1 + accepted / max(1, drafts), "AL"


def check_answer(
    said: Sequence[CompletionOutput],
    plain: Sequence[CompletionOutput],
    max_tokens: int,
    whole: bool,
) -> None:
    """Samples are those of plain decoding, or where a request did not come to its end their
    beginnings."""
    for sample, wanted in zip(said, plain, strict=True):
        tokens, all_tokens = list(sample.token_ids), list(wanted.token_ids)
        if not whole and sample.finish_reason in (None, "abort"):
            assert tokens == all_tokens[: len(tokens)], f"{tokens} is no beginning of {all_tokens}"
            continue
        expected = all_tokens[:max_tokens]
        assert tokens == expected, f"said {tokens}, plain {expected}"
        cut = len(all_tokens) > max_tokens
        reason = "length" if cut else wanted.finish_reason
        assert sample.finish_reason == reason, f"ended by {sample.finish_reason}, plain {reason}"
        if not cut:
            assert sample.stop_reason == wanted.stop_reason
            assert sample.text == wanted.text or not sample.text, "other text"
        assert (sample.logprobs is None) == (wanted.logprobs is None)
        for own, other in zip(sample.logprobs or (), wanted.logprobs or (), strict=False):
            assert own.keys() == other.keys(), "other candidates"
            for token, candidate in own.items():
                assert abs(candidate.logprob - other[token].logprob) < 1e-3, "other logprobs"
