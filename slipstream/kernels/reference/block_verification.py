"""Block verification in plain torch (Sun et al. 2024, "Block Verification Accelerates Speculative
Decoding"): all tokens of a draft are verified jointly.

p_i is the target's distribution after the first i draft tokens, q_i the distribution from which the
next draft token x_(i+1) was sampled, and k the number of draft tokens:

    w_0 = 1, w_(i+1) = min(1, w_i p_i(x_(i+1)) / q_i(x_(i+1)))    the weight of a prefix
    S_i = sum of max(w_i p_i - q_i, 0)                            its residual mass
    h_i = S_i / (S_i + 1 - w_i) for i < k, and h_k = w_k

Each prefix has its own uniform number. The longest prefix whose number is below h_i is accepted
(the empty one always is). Then a token is sampled from max(w_i p_i - q_i, 0), scaled to 1, or from
p_k if the whole draft is accepted.

Proof that this is exact. The expectation of w_(i+1) over x_(i+1) is the sum of min(w_i p_i, q_i),
which is w_i - S_i. By induction from the longest prefix to the shortest, prefix i or a longer one
is accepted with probability 1 - (1 - h_i) (1 - (w_i - S_i)) = w_i, and prefix i itself with
probability S_i. The next token is x with probability q_i(x) min(1, w_i p_i(x) / q_i(x)) as a draft
token, plus max(w_i p_i(x) - q_i(x), 0) as a sampled token: together w_i p_i(x).

Drafts may have different lengths. The proof only assumes that x_(i+1) is a sample from q_i if
prefix i has a next token, and that k = i if it has none. A chain that stops early (`ChainStops`)
decides to stop by its first i tokens and q_i alone, so it is exact. If the decision depended on
x_(i+1), that would no longer be a sample from q_i. Uniform numbers of longer prefixes than the
accepted one have been used to reject them, so no later step may reuse them: the key of a number
includes the request's step.
"""

import torch
from torch import Tensor


def prefix_weights(p: Tensor, q: Tensor) -> Tensor:
    """[R, K + 1], the weight w of each prefix, given p and q [R, K] of the draft tokens."""
    weights = [torch.ones_like(p[:, 0])]
    for place in range(p.shape[1]):
        reached = weights[-1] * p[:, place]
        ratio = torch.where(reached < q[:, place], reached / q[:, place], 1.0)
        # A token of probability 0 is rejected, and so are all tokens after a NaN.
        weights.append(torch.where(reached > 0, ratio, 0.0))
    return torch.stack(weights, -1)


def accepted_prefix(weights: Tensor, masses: Tensor, chance: Tensor, lengths: Tensor) -> Tensor:
    """[R] int64, the number of accepted draft tokens.

    Args:
        weights: [R, K + 1], w.
        masses: [R, K + 1], S; arbitrary where w is 0 or 1.
        chance: [R, K], the uniform numbers of prefixes 1 to K.
        lengths: [R] int64, k.
    """
    # No token after a row of NaN is accepted: the draft ends there, as if S = w.
    masses = torch.where(masses.isnan(), weights, masses)
    inner = torch.where(weights < 1, masses / (masses + 1 - weights), 1.0)
    inner = torch.where(weights > 0, inner, 0.0)
    prefix = torch.arange(weights.shape[1], device=weights.device)
    bound = torch.where(prefix == lengths.unsqueeze(-1), weights, inner)[:, 1:]
    passed = (chance < bound) & (prefix[1:] <= lengths.unsqueeze(-1))
    return torch.where(passed, prefix[1:], 0).amax(-1)
