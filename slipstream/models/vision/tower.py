"""What the engine knows of the part of a model that reads images."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from slipstream.core.errors import CheckpointError
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.safetensors_file import read_into

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, eq=False)
class SpanEmbeddings:
    """What takes the place of the embeddings of a span's tokens, on the host.

    Attributes:
        rows: [n, hidden_size].
        added: [L, n, hidden_size], see `StreamAddends`; L may be 0.
    """

    rows: Tensor
    added: Tensor

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes + self.added.nbytes


@dataclass(frozen=True)
class Placeholder:
    """How an image stands in a prompt.

    Attributes:
        marker: the token that stands for an image in the text of a template.
        token: what an image's tokens have as their ids.
        end: where the marker is another, it stands before these tokens and this one behind them.
        begin: where the marker is the same, this one and `end` stand around these tokens, and are
            put there unless they are there already; None: nothing stands around them.
        around: the text in front of all that and behind it.
    """

    marker: int
    token: int
    end: int | None = None
    begin: int | None = None
    around: str = ""


class ImageFamily(Protocol):
    """What a checkpoint says of images, before its tower is loaded.

    Attributes:
        num_added_layers: see `DecoderConfig`.
        several_axes: whether positions of the language model have axes for an image.
        has_tower: whether the checkpoint holds one.
    """

    @property
    def placeholder(self) -> Placeholder: ...

    @property
    def num_added_layers(self) -> int: ...

    @property
    def several_axes(self) -> bool: ...

    @property
    def has_tower(self) -> bool: ...

    def most_whole(self, options: Mapping[str, Any]) -> int:
        """Tokens of the largest image, where an image's tokens see each other; 0 where not.

        Args:
            options: in place of settings of the image processor.

        Raises:
            ValueError: there is no such option.
        """

    def load(self, dtype: torch.dtype, device: torch.device) -> "ImageTower":
        """Load the tower; CheckpointError where tensors are missing or do not fit."""


class ImageTower(Protocol):
    """A loaded tower. One thread calls it at a time."""

    def grid(self, width: int, height: int, options: Mapping[str, Any]) -> tuple[int, int]:
        """Rows and columns of the tokens of an image of so many pixels.

        Raises:
            ValueError, TypeError: there is no such image, or no such option.
        """

    def encode(self, image: "Image", options: Mapping[str, Any]) -> SpanEmbeddings:
        """The embeddings of an image in RGB, row by row; `options` change the processor's."""


def has_tensors(checkpoint: Checkpoint, prefixes: Sequence[str]) -> bool:
    """Whether a checkpoint holds tensors with one of these prefixes."""
    return checkpoint.has_weights and any(
        name.startswith(tuple(prefixes)) for name in checkpoint.all_entries
    )


def load_tensors(module: torch.nn.Module, checkpoint: Checkpoint, prefixes: Sequence[str]) -> None:
    """Fill all parameters and kept buffers of a module.

    Args:
        prefixes: of their names in the checkpoint; the first under which there is something counts.
    """
    entries = checkpoint.all_entries
    held = (it for it in prefixes if any(name.startswith(it) for name in entries))
    prefix = next(held, prefixes[0])
    wanted = module.state_dict()
    missing = sorted(name for name in wanted if prefix + name not in entries)
    if missing:
        raise CheckpointError(
            f"{checkpoint.path} lacks tensors that read images, such as {prefix}{missing[0]}; "
            'download it again, or do without images (limit_mm_per_prompt={"image": 0})'
        )
    with torch.no_grad():
        for name, tensor in wanted.items():
            read_into(entries[prefix + name], tensor)
