"""Inputs of passes by the names of their tensors, for tests."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.pass_inputs import Paging, PassInputs, RowPlaces, Visibility

TENSORS = ("query_start", "context_lens", "block_tables", "positions", "slots")


def pass_inputs(
    query_start: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    positions: Tensor,
    slots: Tensor,
    max_rows: int | None = None,
    **sees: Any,
) -> PassInputs:
    return PassInputs(
        RowPlaces(query_start, positions, max_rows),
        Paging(block_tables, context_lens, slots),
        Visibility(**sees),
    )


def changed(inputs: PassInputs, **values: Any) -> PassInputs:
    """The inputs with other values for some attributes of their parts."""
    parts = {}
    for name in ("rows", "paging", "sees"):
        part = getattr(inputs, name)
        parts[name] = replace(part, **{key: values.pop(key) for key in vars(part) if key in values})
    assert not values, f"no part has {sorted(values)}"
    return replace(inputs, **parts)


def moved(inputs: PassInputs, device: str | torch.device) -> PassInputs:
    """The inputs with their tensors on a device."""
    parts = {**vars(inputs.rows), **vars(inputs.paging)}
    names = TENSORS if inputs.rows.places is None else (*TENSORS, "places")
    tensors = {name: parts[name].to(device) for name in names}
    tree = inputs.sees.tree
    if tree is not None:
        tree = replace(tree, **{name: value.to(device) for name, value in vars(tree).items()})
    last_seen = None if inputs.sees.last_seen is None else inputs.sees.last_seen.to(device)
    return changed(inputs, **tensors, tree=tree, last_seen=last_seen)
