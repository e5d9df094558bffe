"""Log probabilities that a request asked to see."""

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.kernels.columns import ALL_COLUMNS, Columns


@dataclass(frozen=True, eq=False)
class TokenLogprobs:
    """What the target thought of the chosen tokens and of their strongest rivals.

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
        num_top: n, how many of the most probable tokens to report; 0 for none.
        normalised: false: the logits themselves stand for log probabilities.
        columns: of logits, which are all of V tokens or some of them.
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
