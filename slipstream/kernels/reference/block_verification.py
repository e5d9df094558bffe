"""Block verification in plain torch (Sun et al. 2024, "Block Verification Accelerates Speculative
Decoding"): all tokens of a draft are judged together.

With p_i the target's distribution behind the first i draft tokens, q_i the one that the next draft
token x_(i+1) was sampled from, and k their number:

    w_0 = 1, w_(i+1) = min(1, w_i p_i(x_(i+1)) / q_i(x_(i+1)))    the weight of a prefix
    S_i = sum of max(w_i p_i - q_i, 0)                            its residual mass
    h_i = S_i / (S_i + 1 - w_i) for i < k, and h_k = w_k

The longest prefix whose own uniform number is below h_i is accepted (the empty one always is), and
behind it max(w_i p_i - q_i, 0), scaled to 1, is sampled, or p_k behind all of the draft.

Why that is exact. The expectation of w_(i+1) over x_(i+1) is sum of min(w_i p_i, q_i), which is
w_i - S_i. So, from the longest prefix to the shortest, prefix i or a longer one is accepted with
probability w_i:  1 - (1 - h_i) (1 - (w_i - S_i)) = w_i,  and prefix i itself with probability S_i.
A token x then stands behind it with probability q_i(x) min(1, w_i p_i(x) / q_i(x)), as a draft
token, plus max(w_i p_i(x) - q_i(x), 0), as a sampled one: together w_i p_i(x).

Nothing in this needs all drafts to be of one length: it takes for granted that x_(i+1) is a sample
of q_i where prefix i has a next token, and that k = i where it has none. A chain that stops early
(`ChainStops`) decides between the two by its first i tokens and by q_i alone, so it is exact; a
decision by x_(i+1) would make of it a sample of something else. Numbers behind the accepted prefix
were looked at to refuse longer ones, so a later step may not see them again: their key has the
request's step.
"""

import torch
from torch import Tensor


def prefix_weights(p: Tensor, q: Tensor) -> Tensor:
    """[R, K + 1], w of each prefix, given p and q [R, K] of the draft tokens."""
    weights = [torch.ones_like(p[:, 0])]
    for place in range(p.shape[1]):
        reached = weights[-1] * p[:, place]
        ratio = torch.where(reached < q[:, place], reached / q[:, place], 1.0)
        # What has no probability is refused, and so is everything behind broken numbers.
        weights.append(torch.where(reached > 0, ratio, 0.0))
    return torch.stack(weights, -1)


def accepted_prefix(weights: Tensor, masses: Tensor, chance: Tensor, lengths: Tensor) -> Tensor:
    """[R] int64, how many draft tokens are accepted.

    Args:
        weights: [R, K + 1], w.
        masses: [R, K + 1], S; what it is for w of 0 or 1 makes no difference.
        chance: [R, K], the uniform numbers of prefixes 1 to K.
        lengths: [R] int64, k.
    """
    # Behind a row of broken numbers nothing is accepted: the draft ends there, like one of S = w.
    masses = torch.where(masses.isnan(), weights, masses)
    inner = torch.where(weights < 1, masses / (masses + 1 - weights), 1.0)
    inner = torch.where(weights > 0, inner, 0.0)
    prefix = torch.arange(weights.shape[1], device=weights.device)
    bound = torch.where(prefix == lengths.unsqueeze(-1), weights, inner)[:, 1:]
    passed = (chance < bound) & (prefix[1:] <= lengths.unsqueeze(-1))
    return torch.where(passed, prefix[1:], 0).amax(-1)
