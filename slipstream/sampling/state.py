"""How the running requests are to be sampled: one row of every tensor per request slot."""

from collections.abc import Sequence
from enum import Enum

import torch
from torch import Tensor
from torch.nn.functional import pad

from slipstream.core.request import Request
from slipstream.core.sampling_params import SamplingParams

SIGN_BIT = 1 << 63
# Numbers beyond this mean the same, and float32 arithmetic on them could overflow.
LARGE = 1e30
MOST_TOKENS = 1 << 62


class Uses(Enum):
    """What a request needs beyond the argmax. A batch without a use pays nothing for it."""

    SAMPLING = "temperature above 0"
    TOP_K = "top_k"
    TOP_P = "top_p"
    MIN_P = "min_p"
    PENALTIES = "penalties"
    BIAS = "logit_bias or allowed_token_ids"
    MIN_TOKENS = "min_tokens"
    BAD_WORDS = "bad_words"


class SamplingState:
    """Sampling parameters and what was generated so far, on the device, indexed by slot.

    Tensors over the vocabulary are allocated when the first request needs them. Rows of slots that
    do not use a tensor hold leftovers.

    Attributes:
        temperature, top_p, min_p, presence_penalty, frequency_penalty, repetition_penalty:
            [S] float32.
        top_k: [S] int64, `vocab_size` where every token is kept.
        seeds: [S] int64, the 64 bits of the seed.
        steps: [S] int64, verification steps so far; equals `Request.num_steps`.
        min_tokens, num_output_tokens, num_prompt_tokens: [S] int64.
        stop_ids: [S, M] int64, padded with -1; M grows with the longest list.
        output_counts: [S, V] int32 or None, how often each token was generated.
        prompt_mask: [S, V] bool or None, which tokens the prompt holds.
        bias: [S, V] float32 or None, logit_bias, and -inf outside allowed_token_ids.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device | str) -> None:
        self.max_num_seqs = max_num_seqs
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        # Packed, so that an admission is one copy for each kind of number.
        self._floats = torch.zeros(6, max_num_seqs, dtype=torch.float32, device=device)
        self._ints = torch.zeros(6, max_num_seqs, dtype=torch.int64, device=device)
        (
            self.temperature,
            self.top_p,
            self.min_p,
            self.presence_penalty,
            self.frequency_penalty,
            self.repetition_penalty,
        ) = self._floats.unbind(0)
        (
            self.top_k,
            self.seeds,
            self.steps,
            self.min_tokens,
            self.num_output_tokens,
            self.num_prompt_tokens,
        ) = self._ints.unbind(0)
        self.stop_ids = torch.full((max_num_seqs, 1), -1, dtype=torch.int64, device=device)
        self.output_counts: Tensor | None = None
        self.prompt_mask: Tensor | None = None
        self.bias: Tensor | None = None
        self._requests: list[Request | None] = [None] * max_num_seqs
        self._top_k = [0] * max_num_seqs
        self._slots: dict[Uses, set[int]] = {use: set() for use in Uses}

    def admit(self, slot: int, request: Request) -> None:
        """Give the slot to a request, with everything it has generated so far."""
        self.release(slot)
        self._requests[slot] = request
        uses = _uses(request)
        for use in uses:
            self._slots[use].add(slot)
        params = request.params
        self._top_k[slot] = self._kept_tokens(params)
        self._floats[:, slot] = torch.tensor(_float_parameters(params), dtype=torch.float32).to(
            self.device
        )
        self._ints[:, slot] = torch.tensor(self._int_parameters(slot, request)).to(self.device)
        self._fill_stop_ids(slot, sorted(request.stop_token_ids))
        if Uses.PENALTIES in uses:
            self._fill_history(slot, request)
        if Uses.BIAS in uses:
            self._fill_bias(slot, params)

    def release(self, slot: int) -> None:
        """The slot's request has left; nothing is computed for the slot any more."""
        self._requests[slot] = None
        for slots in self._slots.values():
            slots.discard(slot)

    def commit(self, slots: Tensor, token_ids: Tensor, num_tokens: Tensor) -> None:
        """Take over what a verification step gave.

        Args:
            slots: [R] int64.
            token_ids: [R, K+1] int64; what stands behind `num_tokens` is ignored.
            num_tokens: [R] int64; 0 leaves the slot as it was.
        """
        self.steps.index_add_(0, slots, (num_tokens > 0).to(torch.int64))
        self.num_output_tokens.index_add_(0, slots, num_tokens)
        if self.output_counts is None or not self._slots[Uses.PENALTIES]:
            return
        column = torch.arange(token_ids.shape[1], device=token_ids.device)
        given = column < num_tokens.unsqueeze(-1)
        # A flat scatter_add counts a token that occurs twice in a row of `token_ids` twice.
        cells = slots.unsqueeze(-1) * self.vocab_size + torch.where(given, token_ids, 0)
        self.output_counts.view(-1).scatter_add_(0, cells.view(-1), given.to(torch.int32).view(-1))

    def users(self, host_slots: Sequence[int], use: Uses) -> list[int]:
        """Batch indices of the requests (given by their slots) that have this use."""
        slots = self._slots[use]
        if not slots:
            return []
        return [index for index, slot in enumerate(host_slots) if slot in slots]

    def request(self, slot: int) -> Request:
        """The request that holds the slot."""
        request = self._requests[slot]
        assert request is not None, f"slot {slot} is free"
        return request

    def largest_top_k(self, host_slots: Sequence[int]) -> int:
        """The largest top_k of those that restrict anything; 0 when none does."""
        return max(
            (self._top_k[host_slots[i]] for i in self.users(host_slots, Uses.TOP_K)), default=0
        )

    def _kept_tokens(self, params: SamplingParams) -> int:
        return min(params.top_k, self.vocab_size) if params.top_k > 0 else self.vocab_size

    def _int_parameters(self, slot: int, request: Request) -> list[int]:
        seed = request.seed & (2 * SIGN_BIT - 1)
        return [
            self._top_k[slot],
            seed - 2 * SIGN_BIT if seed & SIGN_BIT else seed,
            request.num_steps,
            min(request.params.min_tokens, MOST_TOKENS),
            request.num_output_tokens,
            request.num_prompt_tokens,
        ]

    def _fill_stop_ids(self, slot: int, stop_ids: list[int]) -> None:
        stop_ids = [token for token in stop_ids if token < self.vocab_size]
        missing = len(stop_ids) - self.stop_ids.shape[1]
        if missing > 0:
            self.stop_ids = pad(self.stop_ids, (0, missing), value=-1)
        padding = [-1] * (self.stop_ids.shape[1] - len(stop_ids))
        self.stop_ids[slot] = torch.tensor(stop_ids + padding).to(self.device)

    def _fill_history(self, slot: int, request: Request) -> None:
        if self.output_counts is None or self.prompt_mask is None:
            shape = (self.max_num_seqs, self.vocab_size)
            self.output_counts = torch.zeros(shape, dtype=torch.int32, device=self.device)
            self.prompt_mask = torch.zeros(shape, dtype=torch.bool, device=self.device)
        ids = torch.tensor(request.token_ids, dtype=torch.int64)
        output = ids[request.num_prompt_tokens :]
        counts = torch.bincount(output, minlength=self.vocab_size)
        self.output_counts[slot] = counts.to(self.device, torch.int32)
        self.prompt_mask[slot] = False
        self.prompt_mask[slot, ids[: request.num_prompt_tokens].to(self.device)] = True

    def _fill_bias(self, slot: int, params: SamplingParams) -> None:
        if self.bias is None:
            shape = (self.max_num_seqs, self.vocab_size)
            self.bias = torch.zeros(shape, dtype=torch.float32, device=self.device)
        bias = torch.zeros(self.vocab_size)
        if params.allowed_token_ids is not None:
            bias.fill_(-torch.inf)
            bias[list(params.allowed_token_ids)] = 0.0
        for token, value in (params.logit_bias or {}).items():
            bias[token] += value
        self.bias[slot] = bias.to(self.device)


def _uses(request: Request) -> set[Uses]:
    params = request.params
    penalised = params.presence_penalty or params.frequency_penalty
    answers = {
        Uses.SAMPLING: not params.greedy,
        Uses.TOP_K: params.top_k > 0 and not params.greedy,
        Uses.TOP_P: params.top_p < 1 and not params.greedy,
        Uses.MIN_P: params.min_p > 0 and not params.greedy,
        Uses.PENALTIES: bool(penalised) or params.repetition_penalty != 1,
        Uses.BIAS: bool(params.logit_bias) or params.allowed_token_ids is not None,
        Uses.MIN_TOKENS: params.min_tokens > 0 and bool(request.stop_token_ids),
        Uses.BAD_WORDS: bool(request.bad_words),
    }
    return {use for use, answer in answers.items() if answer}


def _float_parameters(params: SamplingParams) -> list[float]:
    return [
        min(params.temperature, LARGE),
        params.top_p,
        params.min_p,
        params.presence_penalty,
        params.frequency_penalty,
        min(max(params.repetition_penalty, 1 / LARGE), LARGE),
    ]
