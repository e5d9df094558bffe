"""Launches the kernels that choose each row's experts and sort rows by expert
(`routing_kernels.py`)."""

import torch
from torch import Tensor

from slipstream.kernels.experts import Router, Scores
from slipstream.kernels.triton import launch
from slipstream.kernels.triton.launch import cdiv, next_power_of_2
from slipstream.kernels.triton.operands import ChosenExperts, SortedPairs
from slipstream.kernels.triton.routing_kernels import (
    CHOSEN_SOFTMAX,
    NOT_SHARED,
    SHARED,
    SIGMOID,
    SOFTMAX,
    WEIGHED,
    choose_kernel,
    place_kernel,
    rank_kernel,
    sort_kernel,
)

SPAN = 64  # rows of a program that sorts
UNSORTED_ROWS = 8  # up to here pairs are not sorted; at most the rows of the smallest tile
_KINDS = {
    Scores.SOFTMAX: SOFTMAX.value,
    Scores.CHOSEN_SOFTMAX: CHOSEN_SOFTMAX.value,
    Scores.SIGMOID: SIGMOID.value,
}


def choose(logits: Tensor, router: Router, tile: int, shared: bool = False) -> ChosenExperts:
    """Choose the experts of each row, and sort the pairs by expert if there are many rows.

    Args:
        logits: [parts, T, E] float32, partial sums; [parts, T, E + 1] if a shared expert has a
            gate, whose logit is the last.
        tile: rows of a tile of the grouped product.
        shared: whether each row also has the shared expert, as expert E.
    """
    parts, rows, width = logits.shape
    routing, device = router.routing, logits.device
    experts, places = routing.num_experts, routing.num_chosen + shared
    block = next_power_of_2(experts)
    choices = torch.empty(rows, places, dtype=torch.int32, device=device)
    weights = torch.empty(rows, places, dtype=torch.float32, device=device)
    sharing = NOT_SHARED if not shared else WEIGHED if width > experts else SHARED
    choose_kernel[(rows,)](
        logits, router.correction, router.gains, choices, weights, logits.stride(0), parts=parts,
        experts=experts, chosen=routing.num_chosen, kind=_KINDS[routing.scores],
        normalised=routing.normalised, scale=routing.scale, groups=routing.num_groups,
        kept=routing.kept_groups, shared=sharing.value, block=block,
        num_warps=1, **launch.options(device),
    )  # fmt: skip
    if rows <= UNSORTED_ROWS:
        return ChosenExperts(weights, choices, None, tile, rows * places)
    experts += shared
    slots = min(rows * places, experts + rows * places // tile)
    return ChosenExperts(weights, choices, _order(choices, experts, tile), tile, slots)


def _order(choices: Tensor, experts: int, tile: int) -> SortedPairs:
    (rows, chosen), device = choices.shape, choices.device
    ranks, pairs = torch.empty(2, rows, chosen, dtype=torch.int32, device=device)
    starts = torch.empty(experts + 1, dtype=torch.int32, device=device)
    ends = torch.empty(experts, dtype=torch.int32, device=device)
    programs = cdiv(rows, SPAN)
    counts = None
    if programs > 1:
        counts = torch.empty(programs, experts, dtype=torch.int32, device=device)
    options, block = launch.options(device), next_power_of_2(experts)
    shape = {"experts": experts, "chosen": chosen, "span": SPAN}
    rank_kernel[(programs,)](
        choices, ranks, counts, starts, ends, pairs, rows, block=block, tile=tile, num_warps=16,
        **shape, **options,
    )  # fmt: skip
    if counts is not None:
        sort_kernel[(1,)](
            counts, starts, ends, programs, experts=experts, block=block, span=SPAN,
            tile=tile, num_warps=8, **options,
        )  # fmt: skip
        place_kernel[(programs,)](
            choices, ranks, starts, counts, pairs, rows, num_warps=4, **shape, **options
        )
    return SortedPairs(pairs.view(-1), starts, ends)
