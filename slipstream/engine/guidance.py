"""The host's part of steps with grammars, between drafting and verification.

Before drafting, the mask of the next allowed tokens goes to the sampling state, which drafters
read. Then the draft is copied to the host. Each grammar walks along its request's draft, puts the
tokens in that it forces, and computes a mask of allowed tokens for every position. Draft and masks
are copied back to the device, for verification.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from slipstream.core.batch import Batch
from slipstream.core.request import Request
from slipstream.engine.draft_guide import DraftGuide, GuidedDraft
from slipstream.engine.grammar import Grammars
from slipstream.engine.ranks.division import Division
from slipstream.kernels.devices import Download, send, upload
from slipstream.runner.device_batch import DeviceBatch, PackedBatch
from slipstream.sampling.state import SamplingState
from slipstream.speculative.drafter import Draft


@dataclass
class _Proposed:
    """One request's draft on the host; `parents` of its nodes if it is a tree."""

    token_ids: list[int]
    one_hot: bool
    parents: list[int] | None


@dataclass
class _Steered:
    """A batch's draft after grammars have changed it, on the host.

    Attributes:
        paths: the draft of each request.
        rows: (request, place) of each row of `masks`.
        masks: [rows, words] int32, bits of the allowed tokens.
    """

    paths: list[GuidedDraft]
    rows: list[tuple[int, int]]
    masks: Tensor

    @property
    def counts(self) -> list[int]:
        return [len(path.token_ids) for path in self.paths]


@dataclass(frozen=True, eq=False)
class SteeredDraft:
    """A draft after grammars have changed it, as tensors on the device.

    Attributes:
        token_ids: [R, K] int64, replaces that of the `Draft`.
        num_tokens: [R] int64.
        certain: [R, K] bool, tokens that a grammar forced.
        kept: [R] int64, how many leading tokens are still those of the drafter.
        allowed: [N, ceil(V / 32)] int32, see `SampleRows`; the step copies a request's first row
            from the sampling state.
    """

    token_ids: Tensor
    num_tokens: Tensor
    certain: Tensor
    kept: Tensor
    allowed: Tensor

    def replace(self, batch: DeviceBatch, draft: Draft) -> tuple[DeviceBatch, Draft, Tensor]:
        """The batch and the draft with the changes of the grammars, and `allowed`."""
        probs = draft.probs
        missing = self.token_ids.shape[1] - draft.token_ids.shape[1]
        if probs is not None and missing:
            probs = pad(probs, (0, 0, 0, missing))
        # The rows of padding are not filled in.
        num_tokens = torch.where(batch.at_end, self.num_tokens, 0)
        confidences = draft.confidences
        if confidences is not None:  # a grammar's own tokens have none
            place = torch.arange(self.token_ids.shape[1], device=num_tokens.device)
            confidences = pad(confidences, (0, missing))
            confidences = confidences.masked_fill(place >= self.kept.unsqueeze(1), torch.nan)
        steered = replace(
            draft,
            token_ids=self.token_ids,
            num_tokens=num_tokens,
            probs=probs,
            certain=None if probs is None else self.certain,
            confidences=confidences,
        )
        return replace(batch, kept=self.kept), steered, self.allowed


@dataclass(frozen=True)
class DraftSteering:
    """The host's part of one step: called with the draft, it returns the steered one.

    In a captured step the draft has the rows of a whole bucket. The rest of the step then reads
    fixed tensors (`buffers`), which are filled in each time.
    """

    guidance: "Guidance"
    batch: Batch
    packed: PackedBatch

    def __call__(self, draft: Draft) -> SteeredDraft:
        return self.guidance.steer(self.batch, self.packed, draft)

    def buffers(self, draft: Draft) -> SteeredDraft:
        """The tensors that a captured step reads for a draft of this shape."""
        return self.guidance.buffers(*draft.token_ids.shape)

    def fill(self, draft: Draft) -> SteeredDraft:
        """Steer the draft of a bucket; returns the buffers, filled in."""
        return self.guidance.steer_padded(self.batch, self.packed, draft)


class Guidance:
    """Makes drafts follow the grammars of their requests.

    Args:
        most_drafts: K of the engine.
        division: where ranks run the same requests, the leader walks their grammars.
    """

    def __init__(
        self,
        grammars: Grammars,
        sampling: SamplingState,
        most_drafts: int,
        division: Division,
    ) -> None:
        division.walk(grammars.guide)
        self._agree = division.agree
        self._grammars, self._sampling, self._most_drafts = grammars, sampling, most_drafts
        self._words = -(-sampling.vocab_size // 32)
        self._largest: SteeredDraft | None = None  # buffers of the largest captured step

    def begin(self, batch: Batch, packed: PackedBatch) -> DraftSteering:
        """Copy the masks of the next tokens to the device; returns what steers the draft."""
        asked = [
            item.request
            for item in batch.requests
            if item.reaches_end and item.request.guide is not None
        ]
        if asked:
            masks = self._agree(lambda: self._first_masks(asked))
            assert self._sampling.allowed_next is not None
            slots = upload([request.slot for request in asked], self._sampling.device)
            self._sampling.allowed_next.index_copy_(0, slots, self._sent(masks))
        return DraftSteering(self, batch, packed)

    def _first_masks(self, asked: Sequence[Request]) -> Tensor:
        """[requests, words], bits of the tokens that may come next."""
        masks = self._grammars.masks(len(asked))
        guides = [guide for request in asked if (guide := _guide(request)) is not None]
        self._grammars.fill(masks, [(guide, row, []) for row, guide in enumerate(guides)])
        return masks

    def steer(self, batch: Batch, packed: PackedBatch, draft: Draft) -> SteeredDraft:
        """Steer the draft of a batch without padding."""
        steered = self._agree(lambda: self._steered(batch, packed, draft))
        device = self._sampling.device
        counts = steered.counts
        width = max(draft.token_ids.shape[1], *counts)
        firsts = [0]
        for count in counts:
            firsts.append(firsts[-1] + count + 1)
        allowed = torch.full((firsts[-1], self._words), -1, dtype=torch.int32, device=device)
        self._spread(allowed, steered, firsts)
        numbers = upload(_columns(steered.paths, width), device)
        tokens, certain, kept = numbers[:, :width], numbers[:, width : 2 * width], numbers[:, -1]
        return SteeredDraft(tokens.contiguous(), numbers[:, -2], certain != 0, kept, allowed)

    def steer_padded(self, batch: Batch, packed: PackedBatch, draft: Draft) -> SteeredDraft:
        """Steer the draft of a captured batch; returns the buffers, filled in."""
        bucket, width = draft.token_ids.shape
        buffers = self.buffers(bucket, width)
        steered = self._agree(lambda: self._steered(batch, packed, draft))
        count = len(steered.paths)
        buffers.allowed.fill_(-1)
        self._spread(buffers.allowed, steered, [index * (width + 1) for index in range(count)])
        numbers = upload(_columns(steered.paths, width), self._sampling.device)
        buffers.token_ids[:count] = numbers[:, :width]
        buffers.certain[:count] = numbers[:, width : 2 * width] != 0
        buffers.num_tokens[:count], buffers.kept[:count] = numbers[:, -2], numbers[:, -1]
        return buffers

    def buffers(self, bucket: int, width: int) -> SteeredDraft:
        """Fixed tensors for `bucket` requests of `width` draft tokens, as views of the largest."""
        most = self._largest
        if most is None:
            requests, device = self._sampling.max_num_seqs, self._sampling.device
            shape = (requests, self._most_drafts)
            rows = requests * (self._most_drafts + 1)
            most = self._largest = SteeredDraft(
                token_ids=torch.zeros(shape, dtype=torch.int64, device=device),
                num_tokens=torch.zeros(requests, dtype=torch.int64, device=device),
                certain=torch.zeros(shape, dtype=torch.bool, device=device),
                kept=torch.zeros(requests, dtype=torch.int64, device=device),
                allowed=torch.full((rows, self._words), -1, dtype=torch.int32, device=device),
            )
        return SteeredDraft(
            token_ids=most.token_ids[:bucket, :width],
            num_tokens=most.num_tokens[:bucket],
            certain=most.certain[:bucket, :width],
            kept=most.kept[:bucket],
            allowed=most.allowed[: bucket * (width + 1)],
        )

    def _steered(self, batch: Batch, packed: PackedBatch, draft: Draft) -> _Steered:
        """Walk every request's draft by its grammar, and compute the masks of all positions."""
        proposed = _fetch(draft, len(batch.requests))
        paths: list[GuidedDraft] = []
        walks: list[_Walk] = []
        for index, (item, own) in enumerate(zip(batch.requests, proposed, strict=True)):
            guide = _guide(item.request) if item.reaches_end else None
            if guide is None:
                paths.append(_as_proposed(own))
                continue
            path = _as_proposed(own)
            if own.parents is None:
                # A request whose last cached token is computed again gets no further drafts.
                rereads = bool(packed.rereads and packed.rereads[index])
                room = len(own.token_ids) if rereads else item.num_draft_tokens
                path = guide.follow(own.token_ids, room, own.one_hot)
            paths.append(path)
            if path.token_ids:
                walks.append(_Walk(index, guide, path.token_ids, own.parents))
        rows = [(walk.index, place) for walk in walks for place in range(1, walk.size + 1)]
        masks = self._grammars.masks(len(rows))
        self._fill(masks, walks)
        return _Steered(paths, rows, masks)

    def _fill(self, masks: Tensor, walks: Sequence["_Walk"]) -> None:
        """Fill the mask after every draft token that its grammar allows."""
        chains: list[tuple[DraftGuide, int, list[int]]] = []
        row = 0
        for walk in walks:
            if walk.parents is not None:
                self._fill_tree(masks, row, walk, 0)
            elif walk.guide.enter(walk.token_ids[0]):
                chains.append((walk.guide, row, walk.token_ids[1:]))
            row += walk.size
        if chains:
            self._grammars.fill(masks, chains)
        for guide, _, _ in chains:
            guide.leave()

    def _fill_tree(self, masks: Tensor, row: int, walk: "_Walk", parent: int) -> None:
        """Fill the masks of the nodes below `parent`."""
        assert walk.parents is not None
        for node in range(parent + 1, walk.size + 1):
            if walk.parents[node] == parent and walk.guide.enter(walk.token_ids[node - 1]):
                self._grammars.fill(masks, [(walk.guide, row + node - 1, [])])
                self._fill_tree(masks, row, walk, node)
                walk.guide.leave()

    def _spread(self, allowed: Tensor, steered: _Steered, firsts: Sequence[int]) -> None:
        """Write the masks to the rows of `allowed` that they belong to."""
        if steered.rows:
            places = [firsts[request] + place for request, place in steered.rows]
            rows = upload(places, self._sampling.device)
            allowed.index_copy_(0, rows, self._sent(steered.masks))

    def _sent(self, masks: Tensor) -> Tensor:
        """Masks on the device, cut to the model's vocabulary."""
        return send(masks[:, : self._words].contiguous(), self._sampling.device)


@dataclass
class _Walk:
    """A request's draft, and the grammar that walks along it."""

    index: int
    guide: DraftGuide
    token_ids: list[int]
    parents: list[int] | None

    @property
    def size(self) -> int:
        return len(self.token_ids)


def _guide(request: Request) -> DraftGuide | None:
    guide = request.guide
    assert guide is None or isinstance(guide, DraftGuide)
    return guide


def _fetch(draft: Draft, requests: int) -> list[_Proposed]:
    """The drafts of the first `requests` on the host, by one copy."""
    width = draft.token_ids.shape[1]
    parts = [draft.num_tokens.unsqueeze(1), draft.one_hot.unsqueeze(1), draft.token_ids]
    if draft.tree is not None:
        parts.append(draft.tree.parents)
    rows = Download(torch.cat([part[:requests].to(torch.int64) for part in parts], 1)).wait()
    return [
        _Proposed(
            token_ids=row[2 : 2 + row[0]],
            one_hot=bool(row[1]),
            parents=None if draft.tree is None else row[2 + width :],
        )
        for row in rows
    ]


def _as_proposed(proposed: _Proposed) -> GuidedDraft:
    tokens = proposed.token_ids
    return GuidedDraft(tokens, [False] * len(tokens), len(tokens))


def _columns(paths: Sequence[GuidedDraft], width: int) -> list[list[int]]:
    """A row per path: its tokens, which of them were forced, their number, how many were kept."""
    rows = []
    for path in paths:
        padding = [0] * (width - len(path.token_ids))
        forced = [int(it) for it in path.forced]
        rows.append([*path.token_ids, *padding, *forced, *padding, len(path.token_ids), path.kept])
    return rows
