"""The sampling parameters of the running requests: tensors with a row for each slot."""

import struct
from collections.abc import Iterable, Mapping
from enum import Enum

import torch
from torch import Tensor
from torch.nn.functional import pad

from slipstream.core.request import Request
from slipstream.core.sampling_params import SamplingParams, Verification
from slipstream.kernels.columns import ALL_COLUMNS, Columns
from slipstream.kernels.devices import send, upload
from slipstream.kernels.registry import sampling_over
from slipstream.kernels.sampling import SamplingSlots

SIGN_BIT = 1 << 63
# Larger numbers have the same effect, and float32 arithmetic on them could overflow.
LARGE = 1e30
MOST_TOKENS = 1 << 62
# The memory layout of a slot's numbers: int64, then six float32 in the space of three.
NUM_INTS, NUM_FLOATS = 7, 6
NUMBERS = struct.Struct(f"={NUM_INTS}q{NUM_FLOATS}f")
FEWEST_STOP_IDS = 8


class Uses(Enum):
    """The sampling features that a request needs besides the argmax.

    A batch is sampled with the features of all its requests. A feature that one of them needs is
    computed for every row, and does not change the others' results. A feature that no request needs
    costs nothing.
    """

    SAMPLING = "temperature above 0"
    TOP_K = "top_k"
    TOP_P = "top_p"
    MIN_P = "min_p"
    PENALTIES = "penalties"
    BIAS = "logit_bias or allowed_token_ids"
    MIN_TOKENS = "min_tokens"
    BAD_WORDS = "bad_words"
    GRAMMAR = "structured output"
    BLOCK = "block verification"
    COUPLED = "coupled verification"
    ADAPTER = "an adapter"


_NOTHING: frozenset[Uses] = frozenset()


class SamplingState:
    """Sampling parameters and counts of generated tokens, on the device, indexed by slot.

    Tensors over the vocabulary are allocated when the first request needs them. A request that does
    not need a feature has neutral parameters, so that the feature may be applied to its rows. Its
    rows of `output_counts` and `prompt_mask` then hold old data, on which neutral penalties have no
    effect.

    Args:
        use_fp64_gumbel: sample with 63-bit noise and float64 logarithms.
        columns: the columns of the target's logits on this rank, if ranks share the vocabulary.

    Attributes:
        temperature, top_p, min_p, presence_penalty, frequency_penalty, repetition_penalty:
            [S] float32.
        top_k: [S] int64, `vocab_size` if every token is kept.
        seeds: [S] int64, the 64 bits of the seed.
        steps: [S] int64, verification steps so far; equals `Request.num_steps`.
        min_tokens, num_output_tokens, num_prompt_tokens: [S] int64.
        verification: [S] int64, see `Verification`.
        stop_ids: [S, M] int64, padded with -1; M grows with the longest list.
        output_counts: [S, V] int32 or None, how often each token was generated.
        prompt_mask: [S, V] bool or None, which tokens are in the prompt.
        bias: [S, V] float32 or None, logit_bias, and -inf outside allowed_token_ids.
        allowed_next: [S, ceil(V / 32)] int32 or None, bits of the tokens that a grammar allows
            next; all bits are set for requests without a grammar.
        ints, floats: [S, 7] and [S, 6], the numbers above, packed.
        ops: the sampling kernels.
        generation: rises whenever one of these tensors is replaced; CUDA graphs that were captured
            with the old ones are then invalid.
    """

    def __init__(
        self,
        max_num_seqs: int,
        vocab_size: int,
        device: torch.device | str,
        use_fp64_gumbel: bool = False,
        columns: Columns = ALL_COLUMNS,
    ) -> None:
        self.max_num_seqs = max_num_seqs
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.columns = columns
        self.ops = sampling_over(columns, self.device, use_fp64_gumbel)
        self.generation = 0
        # Packed, so that an admission is one copy.
        self._numbers = torch.zeros(
            max_num_seqs, NUMBERS.size // 8, dtype=torch.int64, device=device
        )
        # These have the order of `FLOATS` and `INTS`.
        self.ints = self._numbers[:, :NUM_INTS]
        self.floats = self._numbers.view(torch.float32)[:, 2 * NUM_INTS :]
        (
            self.temperature,
            self.top_p,
            self.min_p,
            self.presence_penalty,
            self.frequency_penalty,
            self.repetition_penalty,
        ) = self.floats.unbind(1)
        (
            self.top_k,
            self.seeds,
            self.steps,
            self.min_tokens,
            self.num_output_tokens,
            self.num_prompt_tokens,
            self.verification,
        ) = self.ints.unbind(1)
        # Slots that were never used (and padding) are greedy and need no features.
        self.top_p.fill_(1.0)
        self.repetition_penalty.fill_(1.0)
        self.top_k.fill_(vocab_size)
        shape = (max_num_seqs, FEWEST_STOP_IDS)
        self.stop_ids = torch.full(shape, -1, dtype=torch.int64, device=device)
        self.output_counts: Tensor | None = None
        self.prompt_mask: Tensor | None = None
        self.bias: Tensor | None = None
        self.allowed_next: Tensor | None = None
        self._requests: list[Request | None] = [None] * max_num_seqs
        self._uses = [_NOTHING] * max_num_seqs  # of the request in each slot
        # The contents of tensors on the device, so that only changes are copied.
        self._stop_ids: list[list[int]] = [[] for _ in range(max_num_seqs)]
        self._biased: set[int] = set()
        self._guided: set[int] = set()
        # The last results of `tensors`, with their generation.
        self._tensors: dict[bool, tuple[int, SamplingSlots]] = {}

    def reset(self) -> None:
        """Forget the contents of the device's tensors after a failed admission, so that they are
        written again."""
        slots = range(self.max_num_seqs)
        self._stop_ids = [[-1] for _ in slots]  # no request has these
        self._biased = set() if self.bias is None else set(slots)
        self._guided = set() if self.allowed_next is None else set(slots)

    def admit(self, requests: Mapping[int, Request]) -> None:
        """Write the parameters and the history of requests to their slots.

        The slots' old contents are replaced. Does not wait for the device.

        Args:
            requests: by slot.
        """
        if not requests:
            return
        numbers = [
            NUMBERS.pack(*self._int_parameters(request), *_float_parameters(request.params))
            for request in requests.values()
        ]
        packed = torch.frombuffer(bytearray(b"".join(numbers)), dtype=torch.int64)
        rows = send(packed.view(len(requests), -1), self.device)
        self._numbers.index_copy_(0, upload([*requests], self.device), rows)
        for slot, request in requests.items():
            self._admit(slot, request)

    def _admit(self, slot: int, request: Request) -> None:
        """Write the parameters that only few requests have."""
        self._requests[slot] = request
        uses = self._uses[slot] = _uses(request)
        self._fill_stop_ids(slot, sorted(request.stop_token_ids))
        if Uses.PENALTIES in uses:
            self._fill_history(slot, request)
        if Uses.BIAS in uses:
            self._fill_bias(slot, request.params)
        elif slot in self._biased:
            assert self.bias is not None
            self.bias[slot].zero_()
            self._biased.discard(slot)
        self._open_grammar(slot, Uses.GRAMMAR in uses)

    def commit(
        self, slots: Tensor, token_ids: Tensor, num_tokens: Tensor, uses: frozenset[Uses]
    ) -> None:
        """Apply the verdict of a step.

        Args:
            slots: [R] int64.
            token_ids: [R, K+1] int64; those from `num_tokens` on are ignored.
            num_tokens: [R] int64; 0 leaves the slot unchanged.
            uses: the features of the batch.
        """
        self.ops.commit(slots, token_ids, num_tokens, self.tensors(Uses.PENALTIES in uses))

    def tensors(self, history: bool = True) -> SamplingSlots:
        """The arguments of ops; `history`: with the tensors that penalties read."""
        generation, slots = self._tensors.get(history, (-1, None))
        if slots is None or generation != self.generation:
            slots = self._slots_now(history)
            self._tensors[history] = self.generation, slots
        return slots

    def _slots_now(self, history: bool) -> SamplingSlots:
        return SamplingSlots(
            ints=self.ints,
            floats=self.floats,
            stop_ids=self.stop_ids,
            output_counts=self.output_counts if history else None,
            prompt_mask=self.prompt_mask if history else None,
            bias=self.bias,
        )

    def uses(self, host_slots: Iterable[int]) -> frozenset[Uses]:
        """The features that any request in these slots needs."""
        return _NOTHING.union(*[self._uses[slot] for slot in host_slots])

    def request(self, slot: int) -> Request:
        request = self._requests[slot]
        assert request is not None, f"slot {slot} is free"
        return request

    def _int_parameters(self, request: Request) -> list[int]:
        seed = request.seed & (2 * SIGN_BIT - 1)
        top_k = request.params.top_k
        return [
            min(top_k, self.vocab_size) if top_k > 0 else self.vocab_size,
            seed - 2 * SIGN_BIT if seed & SIGN_BIT else seed,
            request.num_steps,
            min(request.params.min_tokens, MOST_TOKENS),
            request.num_output_tokens,
            request.num_prompt_tokens,
            request.verification,
        ]

    def _fill_stop_ids(self, slot: int, stop_ids: list[int]) -> None:
        stop_ids = [token for token in stop_ids if token < self.vocab_size]
        if stop_ids == self._stop_ids[slot]:
            return
        width = self.stop_ids.shape[1]
        while width < len(stop_ids):
            width *= 2
        if width > self.stop_ids.shape[1]:
            self.stop_ids = pad(self.stop_ids, (0, width - self.stop_ids.shape[1]), value=-1)
            self.generation += 1
        padded = torch.tensor(stop_ids + [-1] * (width - len(stop_ids)))
        self.stop_ids[slot] = send(padded, self.device)
        self._stop_ids[slot] = stop_ids

    def allocate_all(self) -> None:
        """Allocate all tensors over the vocabulary, before a graph that reads them is captured."""
        self._history()
        self._biases()

    def _history(self) -> tuple[Tensor, Tensor]:
        """(output_counts, prompt_mask)."""
        if self.output_counts is None or self.prompt_mask is None:
            shape = (self.max_num_seqs, self.vocab_size)
            self.output_counts = torch.zeros(shape, dtype=torch.int32, device=self.device)
            self.prompt_mask = torch.zeros(shape, dtype=torch.bool, device=self.device)
            self.generation += 1
        return self.output_counts, self.prompt_mask

    def _biases(self) -> Tensor:
        if self.bias is None:
            shape = (self.max_num_seqs, self.vocab_size)
            self.bias = torch.zeros(shape, dtype=torch.float32, device=self.device)
            self.generation += 1
        return self.bias

    def _open_grammar(self, slot: int, guided: bool) -> None:
        """Allow all tokens next, until a grammar's mask is written."""
        if guided and self.allowed_next is None:
            shape = (self.max_num_seqs, -(-self.vocab_size // 32))
            self.allowed_next = torch.full(shape, -1, dtype=torch.int32, device=self.device)
        if slot in self._guided and not guided:
            assert self.allowed_next is not None
            self.allowed_next[slot].fill_(-1)
            self._guided.discard(slot)
        elif guided:
            self._guided.add(slot)

    def _fill_history(self, slot: int, request: Request) -> None:
        output_counts, prompt_mask = self._history()
        ids = send(torch.tensor(request.token_ids, dtype=torch.int64), self.device)
        prompt, output = ids[: request.num_prompt_tokens], ids[request.num_prompt_tokens :]
        prompt_mask[slot].zero_().index_fill_(0, prompt, True)
        ones = torch.ones_like(output, dtype=torch.int32)
        output_counts[slot].zero_().index_add_(0, output, ones)

    def _fill_bias(self, slot: int, params: SamplingParams) -> None:
        biases = self._biases()
        bias = torch.zeros(self.vocab_size)
        if params.allowed_token_ids is not None:
            bias.fill_(-torch.inf)
            bias[list(params.allowed_token_ids)] = 0.0
        for token, value in (params.logit_bias or {}).items():
            bias[token] += value
        biases[slot] = send(bias, self.device)
        self._biased.add(slot)


def _uses(request: Request) -> frozenset[Uses]:
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
        Uses.GRAMMAR: request.guide is not None,
        Uses.BLOCK: request.verification is Verification.BLOCK and not params.greedy,
        Uses.COUPLED: request.verification is Verification.COUPLED and not params.greedy,
        Uses.ADAPTER: request.adapter is not None,
    }
    return frozenset(use for use, answer in answers.items() if answer)


def _float_parameters(params: SamplingParams) -> list[float]:
    return [
        min(params.temperature, LARGE),
        params.top_p,
        params.min_p,
        params.presence_penalty,
        params.frequency_penalty,
        min(max(params.repetition_penalty, 1 / LARGE), LARGE),
    ]
