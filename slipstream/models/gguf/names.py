"""The tensors of a GGUF file under the names that layers ask for."""

import re
from collections.abc import Iterator
from dataclasses import replace

from slipstream.models.gguf.container import Container, GgufTensor
from slipstream.models.gguf.families import FAMILIES, OUTSIDE, Family
from slipstream.models.safetensors_file import TensorEntry

_IN_LAYER = re.compile(r"blk\.(\d+)\.((\w+)\.(weight|bias))")
_OF_EXPERT = re.compile(r"\.experts\.\d+\.")
_MOST_EXPERTS = 4096  # several times those of any model: each gets a name
# What the metadata's reader takes, and no layer.
_OF_CONFIG = ("rope_freqs.weight",)


def renamed_entries(container: Container) -> dict[str, TensorEntry]:
    """Every tensor as its bytes lie, those of experts one by one.

    A tensor that has no name but its own keeps that: whoever loads refuses it.
    """
    return {
        entry.name: entry
        for tensor, names in _renamed(container)
        for entry in _split(tensor, names)
    }


def stored_types(container: Container) -> dict[str, str]:
    """The type of each module that is stored in blocks, by the module's name."""
    return {
        name.removesuffix(".weight"): tensor.kind.name
        for tensor, names in _renamed(container)
        for name in names
        if tensor.kind.floats is None
    }


def _renamed(container: Container) -> Iterator[tuple[GgufTensor, list[str]]]:
    """Every tensor that layers may read, and its names: several for experts."""
    family = FAMILIES[str(container.metadata["general.architecture"])]
    for tensor in container.tensors.values():
        if tensor.name not in _OF_CONFIG:
            yield tensor, _names(tensor, family)


def _names(tensor: GgufTensor, family: Family) -> list[str]:
    module, _, ending = tensor.name.rpartition(".")
    if module in OUTSIDE:
        return [f"{OUTSIDE[module]}.{ending}"]
    match = _IN_LAYER.fullmatch(tensor.name)
    if match is None:
        return [tensor.name]
    layer = f"model.layers.{int(match[1])}"
    if match[2] in family.rename:
        return [f"{layer}.{family.rename[match[2]]}"]
    name = family.layer.get(match[3])
    if name is not None and "{}" not in name:
        return [f"{layer}.{name}.{match[4]}"]
    if name is None or len(tensor.shape) < 2 or tensor.shape[0] > _MOST_EXPERTS:
        return [tensor.name]
    return [f"{layer}.{name.format(index)}.{match[4]}" for index in range(tensor.shape[0])]


def _split(tensor: GgufTensor, names: list[str]) -> Iterator[TensorEntry]:
    """A tensor, or one for each name, of which the first dimension has one."""
    if _OF_EXPERT.search(names[0]) is None:
        yield tensor.entry(names[0])
        return
    whole = tensor.entry(tensor.name)
    for index, name in enumerate(names):
        entry = whole.row_range(index, index + 1)
        yield replace(entry, name=name, shape=entry.shape[1:])
