"""What parallel drafters share: one pass over the tokens that wait and the masks behind them.

Of each request such a pass has, in this order, the committed tokens that the drafter has not
computed, the bonus (or recovered) token the last of them, and one mask token less than drafts are
wanted, at the positions that follow. Under the ordinary causal mask the bonus token's row gives
draft token 1 and mask j's row draft token j + 1 (An et al. 2025, PARD; P-EAGLE, arXiv 2602.01469).

Mask rows write the slots of the tokens that they stand for, which the blocks have room for, so that
later masks of the pass see them; they are never counted as computed, and the next pass writes these
slots anew before it reads them. A request has K more rows here than in the target's pass at most.
"""

import torch
from torch import Tensor

from slipstream.runner.device_batch import DeviceBatch
from slipstream.runner.device_state import DeviceState
from slipstream.runner.excerpts import Excerpt
from slipstream.runner.rows import PassRows
from slipstream.speculative.chains import Chains
from slipstream.speculative.draft_sampling import DraftSampling
from slipstream.speculative.drafter import Draft, DrafterResources


def most_waiting(num_speculative_tokens: int) -> int:
    """Tokens that wait at most behind a round that drafted: all its drafts and one more."""
    return num_speculative_tokens + 1


def most_rows(num_speculative_tokens: int) -> int:
    """Rows of a request in such a pass, at most."""
    return most_waiting(num_speculative_tokens) + num_speculative_tokens - 1


def parallel_rows(
    state: DeviceState,
    batch: DeviceBatch,
    starts: Tensor,
    wanted: Tensor,
    most: int,
    mask_token: int,
    excerpt: Excerpt,
) -> PassRows:
    """The rows of the pass.

    Args:
        starts: [R] int64, tokens that the drafter has computed.
        wanted: [R] int64, drafts; a request that wants none has no rows.
        most: rows of a request at most (`most_rows`).
        excerpt: what they see.
    """
    starts = excerpt.places(starts)
    waiting = excerpt.places(state.num_tokens[batch.slots]) - starts
    lengths = torch.where(wanted > 0, waiting + wanted - 1, 0)
    return batch.rows(starts, lengths, most, mask_token=mask_token, excerpt=excerpt)


def parallel_draft(
    state: DeviceState,
    batch: DeviceBatch,
    wanted: Tensor,
    logits: Tensor,
    drafting: DraftSampling,
    resources: DrafterResources,
) -> Draft:
    """The draft from the logits [R * K, V] of each request's last rows (`RowLayout.tails`); places
    that are not worth a verdict (`Chains`) are dropped again."""
    slots, width = batch.slots, batch.width
    place = torch.arange(width, device=slots.device)
    probs, chains = drafting.probabilities(batch), Chains(batch, resources, wanted, at_once=True)
    picked = drafting.sample(
        logits,
        slots.unsqueeze(1).expand(-1, width).contiguous().flatten(),
        (state.num_tokens[slots].unsqueeze(1) + place).flatten(),
        batch,
        resources,
        None if probs is None else probs.flatten(0, 1),
        chains.whole_out(),
    )
    tokens = drafting.token_ids(picked).view(-1, width)
    for index in range(width):
        if not chains.take(index):
            break
    one_hot = drafting.one_hot(batch, resources)
    return chains.finish(Draft(tokens, wanted, one_hot, probs, drafting.vocabulary))
