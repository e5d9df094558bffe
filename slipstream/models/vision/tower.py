"""The interface of vision towers."""

from abc import ABC, abstractmethod
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
    """Embeddings, in host memory, that replace those of a span of placeholder tokens.

    Attributes:
        rows: [n, hidden_size], the embeddings.
        added: [L, n, hidden_size], see `StreamAddends`; L may be 0.
    """

    rows: Tensor
    added: Tensor

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes + self.added.nbytes


@dataclass(frozen=True)
class Placeholder:
    """How an image is represented in a prompt.

    Attributes:
        marker: token for an image in the output of a chat template.
        token: id of the placeholder tokens that the marker is expanded to.
        end: token after the placeholders. A marker that is not a placeholder token stays in front
            of them.
        begin: token before the placeholders if the marker is a placeholder token; `begin` and `end`
            are added unless the prompt has them. None: no tokens around the placeholders.
        around: text before and after all of these.
        row_end: token after each row of an image's tokens but the last, after which is `end`.
    """

    marker: int
    token: int
    end: int | None = None
    begin: int | None = None
    around: str = ""
    row_end: int | None = None

    def tokens(self, grid: tuple[int, int]) -> list[int]:
        """What a placeholder becomes for an image with these rows and columns of tokens."""
        rows, columns = grid
        if self.row_end is None:
            return [self.token] * (rows * columns)
        assert self.end is not None
        return [*([*[self.token] * columns, self.row_end] * rows)[:-1], self.end]


class ImageFamily(ABC):
    """Description of a model's image input, known before its vision tower is loaded.

    Attributes:
        prefixes: possible prefixes of tensors that every checkpoint with a tower has.
        num_added_layers: see `DecoderConfig`.
        several_axes: whether the language model uses M-RoPE positions.
    """

    prefixes: tuple[str, ...]
    num_added_layers = 0
    several_axes = False

    def __init__(self, checkpoint: Checkpoint, placeholder: Placeholder) -> None:
        self._checkpoint, self.placeholder = checkpoint, placeholder

    @property
    def has_tower(self) -> bool:
        checkpoint = self._checkpoint
        return checkpoint.has_weights and any(
            name.startswith(self.prefixes) for name in checkpoint.all_entries
        )

    def most_whole(self, options: Mapping[str, Any]) -> int:
        """Number of tokens of the largest image if attention within it is bidirectional, else 0.

        Args:
            options: overrides of the image processor's settings.

        Raises:
            ValueError: an option is unknown.
        """
        return 0

    @abstractmethod
    def require_options(self, options: Mapping[str, Any], max_tokens: int) -> None:
        """Raise ValueError for an unknown option of the image processor, a wrong value, or one with
        which no image fits into a prompt of `max_tokens`."""

    def merged(self, own: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """Options of an engine, and those of a prompt, which precede them."""
        return {**own, **given}

    def most_pixels(self, options: Mapping[str, Any]) -> int:
        """Number of pixels of the largest image before it is resized to fewer; 0 if options do not
        affect it, or hardly."""
        return 0

    @abstractmethod
    def load(self, dtype: torch.dtype, device: torch.device) -> "ImageTower":
        """Load the tower; CheckpointError if tensors are missing or do not fit."""


class ImageTower(Protocol):
    """A loaded tower. One thread calls it at a time."""

    def grid(self, width: int, height: int, options: Mapping[str, Any]) -> tuple[int, int]:
        """(rows, columns) of the token grid of an image; `width` and `height` are in pixels.
        ValueError or TypeError for an invalid size or option."""

    def encode(self, image: "Image", options: Mapping[str, Any]) -> SpanEmbeddings:
        """Compute the embeddings of an RGB image, row by row; `options` as in `most_whole`."""


def load_tensors(module: torch.nn.Module, checkpoint: Checkpoint, prefixes: Sequence[str]) -> None:
    """Load all parameters and persistent buffers of a module.

    Args:
        prefixes: possible prefixes of their names in the checkpoint; the first that occurs is used.
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
