"""Which requests of a step each rank runs, and how the results come together.

Tensor parallel ranks run all requests of a step, on shares of the network (`Division`). Ranks that
share experts alone run requests of their own, on whole layers (`DataParallelDivision`). All ranks
are sent whole steps, so each knows the shapes of the others' parts.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from slipstream.core.batch import Batch, ScheduledRequest
from slipstream.core.errors import RanksLostError
from slipstream.engine.ranks.ranks import MakeGuide, Ranks
from slipstream.engine.resolve import Resolved
from slipstream.engine.step_results import Collected, Launched, Outcome, RatedRows, num_columns
from slipstream.kernels.devices import upload
from slipstream.layers.expert_pool import ExpertPool
from slipstream.layers.parameters import WHOLE
from slipstream.runner.collectives import CollectiveError
from slipstream.runner.device_batch import PackedBatch
from slipstream.runner.graphs import GraphRunner
from slipstream.sampling.logits import TokenLogprobs
from slipstream.sampling.state import SamplingState, Uses

logger = logging.getLogger("slipstream")
T = TypeVar("T")
Launch = Callable[[Batch], Launched]


class Division:
    """How the requests of a step are divided among ranks: here, all ranks run all of them.

    Attributes:
        num_parts: number of parts, which different ranks run.
        layers: this rank's share of layers without experts.
    """

    num_parts = 1

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self.layers = ranks, ranks.share

    def guarding(self, launch: Launch) -> Launch:
        """`launch` of a step, which does not leave other ranks waiting where it fails."""
        return launch

    def begin(
        self, batch: Batch, graphs: GraphRunner | None, uses: frozenset[Uses]
    ) -> GraphRunner | None:
        """Begin the whole step `batch`, whose requests have these features. Returns what captures
        it; None: nothing."""
        return None if Uses.BAD_WORDS in uses else graphs  # they are matched on the host

    def own(self, batch: Batch) -> Batch:
        """The part of a step that this rank runs, which may have no requests."""
        return batch

    def agree(self, make: Callable[[], T]) -> T:
        """What `make` returns, equal on all ranks that run the same requests."""
        return self._ranks.agree(make)

    def walk(self, make: MakeGuide) -> None:
        """Where ranks run requests of their own, have each walk the grammars of its requests; else
        the leader walks all."""

    def in_shape(self, packed: PackedBatch, batch: Batch, sampling: SamplingState) -> PackedBatch:
        """A rank's own part, packed, in the shape that captured steps have on all ranks.

        Args:
            batch: the whole step.
        """
        return packed

    def collected(
        self, batch: Batch, outcome: Outcome | None, num_rows: int, padded: bool
    ) -> Collected:
        """The results of the whole step `batch`; valid on the leader.

        Args:
            outcome: of the own part; None: it has no requests.
            num_rows: see `Collected`.
            padded: it was captured, in the shape that all ranks have.
        """
        assert outcome is not None, "a step has requests"
        numbers = outcome.numbers[: len(batch.requests)] if padded else outcome.numbers
        return Collected(numbers, outcome.width, num_rows, outcome.path)

    def rated(
        self, rows: RatedRows, num_top: int, make: Callable[[], TokenLogprobs]
    ) -> TokenLogprobs:
        """What `make` returns on the rank that has the rows; valid on the leader."""
        return make()


class DataParallelDivision(Division):
    """Each rank runs the requests that were placed on it (`ScheduledRequest.rank`)."""

    def __init__(
        self, ranks: Ranks, pool: ExpertPool, device: torch.device, drafts_trees: bool
    ) -> None:
        super().__init__(ranks)
        self._pool, share = pool, ranks.share
        assert share.stack is not None, "there are other ranks"
        self._rank, self._size, self._stack = share.rank, share.size, share.stack
        self._device, self._drafts_trees = device, drafts_trees
        self.num_parts, self.layers = share.size, WHOLE

    def guarding(self, launch: Launch) -> Launch:
        def guarded(batch: Batch) -> Launched:
            # What a batch that just decodes uses is known at once; others are never captured.
            self._pool.begin_step(not batch.is_decode)
            try:
                return launch(batch)
            except (CollectiveError, RanksLostError):
                raise
            except Exception:
                self._pool.break_off()
                raise

        return guarded

    def begin(
        self, batch: Batch, graphs: GraphRunner | None, uses: frozenset[Uses]
    ) -> GraphRunner | None:
        # The host has a part in the middle of steps with grammars, which some ranks may not have.
        if not uses.isdisjoint((Uses.BAD_WORDS, Uses.GRAMMAR)):
            graphs = None
        self._pool.begin_step(graphs is None or not batch.is_decode)
        if graphs is not None:
            graphs.expect(uses)
        return graphs

    def own(self, batch: Batch) -> Batch:
        last = tuple(it for it in batch.checkpoints if it.rank == self._rank)
        own = tuple(self._parts(batch)[self._rank])
        return replace(batch, requests=own, checkpoints=last)

    def agree(self, make: Callable[[], T]) -> T:
        return make()

    def walk(self, make: MakeGuide) -> None:
        self._ranks.walk(make)

    def in_shape(self, packed: PackedBatch, batch: Batch, sampling: SamplingState) -> PackedBatch:
        parts = self._parts(batch)
        return replace(
            packed,
            width=_width(batch),
            shared=None,  # ranks capture graphs of one shape at once, and share different blocks
            uses=sampling.uses(item.request.slot for item in batch.requests),
            least_requests=max(map(len, parts)),
            least_rows=max(sum(1 + _verified(item) for item in part) for part in parts),
        )

    def collected(
        self, batch: Batch, outcome: Outcome | None, num_rows: int, padded: bool
    ) -> Collected:
        width = _width(batch) + 1
        if padded:
            assert outcome is not None, "padding is run on every rank"
            width = outcome.width
        most = max(map(len, self._parts(batch)))
        if outcome is None:
            own = torch.zeros((most, num_columns(width)), dtype=torch.int64, device=self._device)
        else:
            count = len(self.own(batch).requests)
            own = replace(outcome, numbers=outcome.numbers[:count]).laid_out(most, width)
        places, counts = [], Counter[int]()
        for item in batch.requests:
            places.append(item.rank * most + counts[item.rank])
            counts[item.rank] += 1
        order = upload(places, self._device)
        path: Tensor | None = None
        if self._drafts_trees:
            nodes = torch.zeros((most, width), dtype=torch.int64, device=self._device)
            if outcome is not None and outcome.path is not None:
                rows = outcome.path[:most]
                nodes[: len(rows), : rows.shape[1]] = rows
            path = self._stack(nodes).flatten(0, 1)[order]
        return Collected(self._stack(own).flatten(0, 1)[order], width, num_rows, path)

    def rated(
        self, rows: RatedRows, num_top: int, make: Callable[[], TokenLogprobs]
    ) -> TokenLogprobs:
        made, failure = None, None
        try:
            made = make() if rows.rank == self._rank else None
        except (CollectiveError, RanksLostError):
            raise
        except Exception as error:  # the other ranks wait for the numbers
            failure = error
            logger.error("log probabilities cannot be computed", exc_info=error)
        if made is None:  # token ids of -1 tell of a failure
            size = len(rows.places), num_top
            ids = torch.full(size, -1, dtype=torch.int64, device=self._device)
            one = torch.full(size[:1], -1, dtype=torch.int64, device=self._device)
            made = TokenLogprobs(one, one.float(), one, ids, ids.float())
        parts = made.token_ids, made.logprobs, made.ranks, made.top_ids, made.top_logprobs
        found = TokenLogprobs(*(self._stack(part)[rows.rank] for part in parts))
        if self._ranks.leads and bool((found.token_ids < 0).any()):
            raise RuntimeError(f"rank {rows.rank} cannot compute log probabilities") from failure
        return found

    def _parts(self, batch: Batch) -> Sequence[Sequence[ScheduledRequest]]:
        return [[it for it in batch.requests if it.rank == rank] for rank in range(self._size)]


def divide(ranks: Ranks, resolved: Resolved, pool: ExpertPool | None) -> Division:
    """How steps are divided; ranks that share experts in a pool run requests of their own."""
    if pool is None:
        return Division(ranks)
    return DataParallelDivision(ranks, pool, resolved.device, resolved.limits.drafts_trees)


def _width(batch: Batch) -> int:
    return max(item.num_draft_tokens for item in batch.requests)


def _verified(item: ScheduledRequest) -> int:
    most = item.num_draft_tokens
    return most if item.trim is None else min(most, item.trim.num_rows)
