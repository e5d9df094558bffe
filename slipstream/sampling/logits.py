"""Log probabilities, and masks of grammars and bad words."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from slipstream.kernels.columns import ALL_COLUMNS, Columns
from slipstream.kernels.reference.processors import is_forbidden
from slipstream.kernels.sampling import SampleRows
from slipstream.sampling.state import SamplingState, Uses


def allow_next(
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    state: SamplingState,
    uses: frozenset[Uses],
    vocabulary: Tensor | None = None,
    columns: Columns = ALL_COLUMNS,
) -> Tensor:
    """Mask the tokens that grammars forbid directly after the known tokens in a drafter's logits.

    The device does not know what grammars forbid after draft tokens. If all tokens of the drafter's
    vocabulary are forbidden, its logits are not changed, and the target rejects the draft token.

    Args:
        logits: [n, v], not modified.
        slots, positions: [n] int64, slot and position of the token of each row of logits.
        uses: the features that the requests need.
        vocabulary: [V], the token id of each column; None: column i is token i.
        columns: columns of the logits: all of V, or this rank's share.
    """
    if Uses.GRAMMAR not in uses:
        return logits
    assert state.allowed_next is not None
    if vocabulary is None:
        vocabulary = columns.tokens(logits)[: state.vocab_size]
    else:
        vocabulary = columns.own(vocabulary, logits)
    known = state.num_prompt_tokens[slots] + state.num_output_tokens[slots]
    forbidden = is_forbidden(state.allowed_next[slots], vocabulary)
    all_are = columns.joined(forbidden.all(1, keepdim=True)).all(0)
    forbidden &= (positions == known).unsqueeze(1) & ~all_are
    forbidden = pad(forbidden, (0, logits.shape[-1] - len(vocabulary)))
    return logits.masked_fill(forbidden, -torch.inf)


def ban_words(logits: Tensor, rows: SampleRows, state: SamplingState) -> Tensor:
    """Mask tokens that would complete a bad word that began in the prompt, output or draft.

    Runs on the host: `Request.token_ids` must hold every committed token, and the host waits for
    the draft tokens.
    """
    first = state.columns.first(logits)
    banned_rows: list[int] = []
    banned_tokens: list[int] = []
    slots, drafts = rows.slots.tolist(), rows.draft_tokens.tolist()
    places = zip(rows.request.tolist(), rows.offset.tolist(), strict=True)
    for row, (index, offset) in enumerate(places):
        if Uses.BAD_WORDS not in state.uses([slots[index]]):
            continue
        request = state.request(slots[index])
        reach = max(len(word) for word in request.bad_words)
        context = (*request.token_ids[-reach:], *drafts[index][:offset])
        for token in _completions(context, request.bad_words):
            if first <= token < first + logits.shape[-1]:
                banned_rows.append(row)
                banned_tokens.append(token - first)
    cells = torch.tensor([banned_rows, banned_tokens], dtype=torch.int64, device=logits.device)
    return logits.index_put((cells[0], cells[1]), logits.new_tensor(-torch.inf))


def _completions(context: tuple[int, ...], words: Sequence[tuple[int, ...]]) -> Iterator[int]:
    """The tokens that would complete a word after `context`."""
    for word in words:
        start = len(word) - 1
        # The last token is compared first: there may be many long words.
        if not start or (
            start <= len(context)
            and context[-1] == word[start - 1]
            and context[-start:] == word[:start]
        ):
            yield word[start]


@dataclass(frozen=True, eq=False)
class TokenLogprobs:
    """Log probabilities of chosen tokens and of the most likely ones.

    Attributes:
        token_ids: [N] int64, the chosen tokens.
        logprobs: [N] float32, their log probabilities.
        ranks: [N] int64, 1 for the most probable; tokens of equal logits share the better rank.
        top_ids: [N, n] int64, the n most probable tokens, the most probable first.
        top_logprobs: [N, n] float32.
    """

    token_ids: Tensor
    logprobs: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_logprobs: Tensor


def token_logprobs(
    logits: Tensor,
    token_ids: Tensor,
    num_top: int,
    normalised: bool = True,
    columns: Columns = ALL_COLUMNS,
) -> TokenLogprobs:
    """Log probabilities under the raw logits: before processors, temperature and truncation.

    Args:
        logits: [N, v], any float dtype; the arithmetic is float32.
        token_ids: [N] int64, the chosen tokens, all legal.
        num_top: n, number of the most probable tokens to report; may be 0.
        normalised: False: report logits instead of log probabilities.
        columns: columns of the logits: all of V tokens, or this rank's share.
    """
    logits = logits.float()
    rows = torch.arange(len(token_ids), device=logits.device)
    chosen_logits = columns.at(logits, rows, token_ids).unsqueeze(-1)
    # The largest logit is subtracted first: a log probability near 0 keeps its digits and its sign.
    largest = columns.largest(logits)
    log_sum = columns.total((logits - largest).exp_()).log_()
    if not normalised:
        largest, log_sum = torch.zeros_like(largest), torch.zeros_like(log_sum)
    top_logits, top_ids = columns.top(logits, num_top)
    return TokenLogprobs(
        token_ids=token_ids,
        logprobs=(chosen_logits - largest - log_sum).squeeze(-1),
        ranks=columns.total(logits > chosen_logits).squeeze(-1) + 1,
        top_ids=top_ids,
        top_logprobs=top_logits - largest - log_sum,
    )
