"""What becomes of the tensors of a GGUF file once they are loaded, by type."""

from collections.abc import Collection
from dataclasses import dataclass

import torch

from slipstream.kernels.formats.weight import Weight
from slipstream.models.gguf.blocks import BlockType
from slipstream.models.gguf.container import Container
from slipstream.models.gguf.stored import form_of

_TABLE = "token_embd.weight"  # whose rows are looked up


@dataclass(frozen=True)
class TypeBytes:
    """All tensors of one type that become the same.

    Attributes:
        num_bytes: in the file.
        becomes: None: they stay what is stored; else the dtype that they get.
        rounded: whether that dtype has other numbers than the file.
    """

    type: str
    num_bytes: int
    becomes: str | None
    rounded: bool


def types_by_bytes(
    container: Container, dtype: torch.dtype, kept: Collection[type[Weight]]
) -> list[TypeBytes]:
    """The types of a file, those of most bytes first.

    Args:
        dtype: of the model's parameters.
        kept: classes of the matrices that stay what is stored on the device.
    """
    sizes: dict[tuple[BlockType, bool], int] = {}
    for tensor in container.tensors.values():
        form = form_of(tensor.kind, is_table=tensor.name == _TABLE)
        key = tensor.kind, form in kept
        sizes[key] = sizes.get(key, 0) + tensor.nbytes
    name = str(dtype).removeprefix("torch.")
    found = [
        TypeBytes(kind.name, size, None if stays else name, not stays and _loses(kind, dtype))
        for (kind, stays), size in sizes.items()
    ]
    return sorted(found, key=lambda each: -each.num_bytes)


def _loses(kind: BlockType, dtype: torch.dtype) -> bool:
    """Whether numbers of a type may change where they become a dtype."""
    if dtype == torch.float32 or kind.floats == dtype:
        return False
    # Powers of two times four bits; everything else has scales of eleven bits or more.
    return kind.name != "MXFP4"
