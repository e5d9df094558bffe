"""Log probabilities that a request asked to see."""

from dataclasses import dataclass

import torch
from torch import Tensor


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
    logits: Tensor, token_ids: Tensor, num_top: int, normalised: bool = True
) -> TokenLogprobs:
    """Log probabilities under the raw logits: before processors, temperature and truncation.

    Args:
        logits: [N, V], any float dtype; the arithmetic is float32.
        token_ids: [N] int64, the chosen tokens, all legal.
        num_top: n, how many of the most probable tokens to report; 0 for none.
        normalised: false: the logits themselves stand for log probabilities.
    """
    logits = logits.float()
    chosen = token_ids.unsqueeze(-1)
    chosen_logits = logits.gather(-1, chosen)
    # The largest logit is subtracted first: a log probability near 0 keeps its digits and its sign.
    largest = logits.amax(-1, keepdim=True)
    log_sum = (logits - largest).exp_().sum(-1, keepdim=True).log_()
    if not normalised:
        largest, log_sum = torch.zeros_like(largest), torch.zeros_like(log_sum)
    top = torch.topk(logits, min(num_top, logits.shape[-1]))
    return TokenLogprobs(
        token_ids=token_ids,
        logprobs=(chosen_logits - largest - log_sum).squeeze(-1),
        ranks=(logits > chosen_logits).sum(-1) + 1,
        top_ids=top.indices,
        top_logprobs=top.values - largest - log_sum,
    )
