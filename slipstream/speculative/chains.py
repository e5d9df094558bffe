"""The confidences of a step's draft tokens, and early ends of chains by confidence.

The confidence of a draft token is the largest probability of the drafter's distribution at its
position. Each confidence corresponds to an acceptance rate, and the product of the rates up to a
position is its survival. A chain ends where survival becomes too small (`ChainStops`).

Proof that this does not bias the output. Let a draft be x_1 x_2 ..., with x_i sampled from q_i,
which depends on the known tokens and x_1 ... x_(i-1). Verification is exact for every number of
draft tokens. It is also exact for a number that is chosen while drafting, if the decision whether
position i is verified depends only on x_1 ... x_(i-1) and q_i. Then, given x_1 ... x_(i-1), either
position i has no draft token and its token is sampled from p_i, or x_i is sampled from q_i and
verified as usual; both give p_i. The decision here depends only on the largest probabilities of
q_1 ... q_i.

The decision must not depend on x_i. If, for instance, x_i were dropped because q_i(x_i) is small,
an improbable token would be sampled again, mostly as another one, while probable ones stay, and the
text would have too few improbable tokens. For the same reason it must not depend on anything after
position i. So confidence is the largest probability, not that of the sampled token. (For a one-hot
draft any rule is exact.) Confidences of rejected tokens may influence the plans of later steps,
since these use new noise.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.core.batch import ChainStops
from slipstream.kernels.devices import upload
from slipstream.kernels.sampling import rates_by_request
from slipstream.runner.device_batch import DeviceBatch
from slipstream.speculative.drafter import Draft, DrafterResources


@dataclass
class _OpenChain:
    """A chain that may end by its confidences."""

    row: int
    stops: ChainStops
    survival: float = 1.0

    def takes(self, confidence: float) -> tuple[bool, bool]:
        """Whether a position with this confidence is verified, and whether the chain continues."""
        stops, count = self.stops, len(self.stops.rates)
        # Logits that are NaN may give any confidence.
        place = int(confidence * count) if 0 <= confidence < 1 else count - 1
        self.survival *= stops.rates[place]
        is_verified = self.survival >= stops.least_to_verify
        return is_verified, is_verified and self.survival >= stops.least_to_draft


class Chains:
    """The chains of one step, while their positions are drafted one after the other.

    If the batch has stops, the host waits for the confidences of each position; such a batch is
    exact (not padded). Otherwise the host does not wait, and chains have their planned length, as
    in captured steps.

    Args:
        wanted: [R] int64, number of tokens to draft for each request.
        at_once: all positions are drafted in one pass.

    Attributes:
        num_tokens: [R] int64, number of draft tokens of each request to be verified, so far.
        num_passes: [R] int64, number of drafted positions: one more than `num_tokens` if the last
            position is not verified.
    """

    def __init__(
        self, batch: DeviceBatch, resources: DrafterResources, wanted: Tensor, at_once: bool = False
    ) -> None:
        self.num_tokens = self.num_passes = wanted
        self._confidences: Tensor | None = None  # [R, K]
        self._forced: Tensor | None = None
        self._tokens: list[int] | None = None  # on the host, where there are stops
        self._passes: list[int] = []
        self._open: list[_OpenChain] = []
        requests, width = batch.num_requests, batch.width
        if not (batch.stops or resources.gives_confidences):
            return
        shape = (requests, width) if at_once else (width, requests)
        made = torch.empty(shape, dtype=torch.float32, device=wanted.device)
        self._confidences = made if at_once else made.T
        rates = resources.synthetic_rates
        if rates is not None:
            seeds = resources.sampling.seeds[batch.slots]
            self._forced = rates_by_request(rates, seeds)[:, :width]
        if batch.stops:
            assert batch.exact, "the host waits for confidences"
            self._tokens = wanted.tolist()
            self._passes = list(self._tokens)
            self._open = [
                _OpenChain(row, stops)
                for row, stops in enumerate(batch.stops)
                if stops is not None and self._tokens[row]
            ]

    def out(self, index: int) -> Tensor | None:
        """[R] float32, receives the confidences of position `index`."""
        return None if self._confidences is None else self._confidences[:, index]

    def confidences_out(self) -> Tensor | None:
        """[R * K] float32, receives all confidences of chains that are drafted in one pass."""
        return None if self._confidences is None else self._confidences.view(-1)

    def take(self, index: int) -> bool:
        """End the chains whose survival is too small at position `index`, which was drafted.

        Returns:
            Whether any chain continues.
        """
        if self._tokens is None:
            return True
        if self._open and self._end(index, self._known()[:, index].tolist()):
            self._upload()
        return max(self._passes) > index + 1

    def take_all(self) -> None:
        """End the chains that were drafted at once, each where its survival becomes too small."""
        if not self._open:
            return
        columns = zip(*self._known().tolist(), strict=True)
        if any([self._end(index, column) for index, column in enumerate(columns)]):
            self._upload()

    def _end(self, index: int, confidences: Sequence[float]) -> bool:
        """End chains by their confidences at position `index`; whether any ended."""
        assert self._tokens is not None
        before, self._open = self._open, []
        for chain in before:
            is_verified, goes_on = chain.takes(confidences[chain.row])
            if not goes_on:
                self._tokens[chain.row] = min(index + int(is_verified), self._tokens[chain.row])
                self._passes[chain.row] = index + 1
            elif self._passes[chain.row] > index + 1:
                self._open.append(chain)
        return len(self._open) < len(before)

    def _upload(self) -> None:
        assert self._tokens is not None
        numbers = upload([self._tokens, self._passes], self.num_tokens.device)
        self.num_tokens, self.num_passes = numbers.unbind(0)

    def finish(self, draft: Draft) -> Draft:
        """The draft of all positions, cut to the lengths of its chains, with its confidences."""
        if self._confidences is None:
            return draft
        confidences = self._known()
        if self._tokens is None:
            return replace(draft, confidences=confidences)
        most, probs = max(self._tokens), draft.probs
        return replace(
            draft,
            token_ids=draft.token_ids[:, :most],
            num_tokens=self.num_tokens,
            probs=None if probs is None else probs[:, :most],
            confidences=confidences[:, :most],
        )

    def _known(self) -> Tensor:
        """[R, K], the confidences; in a benchmark with forced acceptance, the rates that it
        forces."""
        known = self._confidences if self._forced is None else self._forced
        assert known is not None
        return known
