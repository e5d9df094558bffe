"""Images in prompts: their embeddings and placeholder tokens."""

import json
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch

from slipstream.core.errors import PromptTooLongError, UsageError
from slipstream.core.spans import Span
from slipstream.engine.media import as_rgb
from slipstream.models.tokenizer import Tokenizer
from slipstream.models.vision.tower import (
    ImageFamily,
    ImageTower,
    Placeholder,
    SpanEmbeddings,
)
from slipstream.runner.memory import uses_gpu_memory

if TYPE_CHECKING:
    from PIL.Image import Image

_PERSON = b"slipstream.image"
_LONGEST_REASON = 400  # characters of a message about options, which may repeat all of them


class ImageReader:
    """Puts images into prompts; this base class is that of an engine without images. Thread-safe.

    Args:
        why: the reason and the remedy.

    Attributes:
        most: maximum number of images of a prompt.
    """

    most = 0

    def __init__(
        self, why: str = "this model reads text only; leave images out, or use a multimodal model"
    ) -> None:
        self._why = why

    def require(self, count: int) -> None:
        """Raise UsageError if a prompt may not have this number of images."""
        if count:
            raise UsageError(self._why)

    def require_options(self, options: Mapping[str, Any], may_exceed: bool = True) -> None:
        """Raise UsageError for a wrong option of the image processor.

        Args:
            may_exceed: whether images may be larger than with the engine's own options.
        """
        if options:
            raise UsageError(f"leave mm_processor_kwargs out: {self._why}")

    def require_readable(self, image: "Image", options: Mapping[str, Any]) -> None:
        """Raise UsageError if the model does not read images of this size."""

    def written(self, text: str) -> str:
        """Add to a text the tokens that the model expects around images."""
        return text

    def spread(
        self, token_ids: list[int], images: Sequence["Image"], options: Mapping[str, Any]
    ) -> list[int]:
        """Repeat the placeholders for all tokens of the images; does not compute embeddings.

        Args:
            options: override settings of the model's image processor.

        Raises:
            UsageError: the size of an image is not supported, or the number of images differs from
                that of placeholders.
        """
        self.require(len(images))
        self.require_options(options)
        return token_ids

    def place(
        self, token_ids: list[int], images: Sequence["Image"], options: Mapping[str, Any]
    ) -> tuple[list[int], tuple[Span, ...]]:
        """The tokens as from `spread`, and the embeddings of the images; slow.

        Raises:
            PromptTooLongError: there is no room for output after the prompt.
            UsageError: as in `spread`, or an image cannot be read.
        """
        return self.spread(token_ids, images, options), ()


class TowerReader(ImageReader):
    """Computes embeddings with a vision tower, one image at a time, and caches recent ones.

    On a GPU the tower runs in a stream of its own.

    Args:
        tokenizer: None if the engine runs without one.
        most: maximum number of images of a prompt.
        max_tokens: maximum number of tokens of a prompt.
        options: settings of the image processor; a prompt's own take precedence.
        cache_bytes: size of the cache of embeddings on the host; the latest image is always kept.
        most_whole: maximum tokens of an image that must fit into one pass (`Span.whole`); None:
            images may be split.
    """

    def __init__(
        self,
        tower: ImageTower,
        family: ImageFamily,
        tokenizer: Tokenizer | None,
        most: int,
        max_tokens: int,
        options: Mapping[str, Any],
        cache_bytes: int,
        device: torch.device,
        most_whole: int | None = None,
    ) -> None:
        super().__init__()
        self._tower, self._family, self.most = tower, family, most
        self._placeholder = placeholder = family.placeholder
        self._max_tokens, self._options = max_tokens, dict(options)
        self._cache_bytes, self._kept_bytes = cache_bytes, 0
        self._kept: OrderedDict[bytes, SpanEmbeddings] = OrderedDict()
        self._lock = Lock()
        self._stream: torch.cuda.Stream | None = None
        if uses_gpu_memory(device):
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._most_whole = most_whole
        self._surrounded: Sequence[int] = ()
        self._marker = self._written = ""
        if tokenizer is not None:
            marks = placeholder.marker, placeholder.token, placeholder.end
            marker, token, end = (tokenizer.id_to_token(it) or "" if it else "" for it in marks)
            around, self._marker = placeholder.around, marker
            if end and marker != token:
                self._written = f"{around}{marker}{token}{end}{around}"
                self._surrounded = tokenizer.encode(self._written, add_special_tokens=False)
        self.num_encoded = 0

    def require(self, count: int) -> None:
        if count > self.most:
            raise UsageError(
                f"the prompt has {count} images, but at most {self.most} are read; leave some "
                f'out, or raise limit_mm_per_prompt to {{"image": {count}}}'
            )

    def require_options(self, options: Mapping[str, Any], may_exceed: bool = True) -> None:
        if not options:
            return
        family, whole = self._family, self._merged(options)
        try:
            family.require_options(whole, self._max_tokens)
            allowed, asked = map(family.most_pixels, (self._options, whole))
        except ValueError as error:
            raise UsageError(f"mm_processor_kwargs: {str(error)[:_LONGEST_REASON]}") from error
        if asked > allowed and not may_exceed:
            raise UsageError(
                f"mm_processor_kwargs: images of up to {asked} pixels are more than the {allowed} "
                "that this server reads; ask for fewer, or let its --mm-processor-kwargs allow more"
            )

    def require_readable(self, image: "Image", options: Mapping[str, Any]) -> None:
        self._grid(image, options)

    def written(self, text: str) -> str:
        return text.replace(self._marker, self._written) if self._written else text

    def spread(
        self, token_ids: list[int], images: Sequence["Image"], options: Mapping[str, Any]
    ) -> list[int]:
        self.require(len(images))
        self.require_options(options)
        marker, token = self._placeholder.marker, self._placeholder.token
        if images and self._surrounded and token not in token_ids:
            whole = self._surrounded
            token_ids = [
                it for known in token_ids for it in (whole if known == marker else [known])
            ]
        if images and self._placeholder.begin is not None:
            token_ids = _enclosed(token_ids, self._placeholder)
        places = token_ids.count(token) if images or token in token_ids else 0
        if places != len(images):
            raise UsageError(
                f"the prompt has {places} placeholders of images, but {len(images)} images were "
                f"given; write one {self._marker or token} for each image and none elsewhere, and "
                "for chat messages use a chat template that supports images"
            )
        if not images:
            return token_ids
        found = iter([self._placeholder.tokens(self._grid(image, options)) for image in images])
        return [it for known in token_ids for it in (next(found) if known == token else [known])]

    def place(
        self, token_ids: list[int], images: Sequence["Image"], options: Mapping[str, Any]
    ) -> tuple[list[int], tuple[Span, ...]]:
        ids, token = self.spread(token_ids, images, options), self._placeholder.token
        if images and ids[-1] == token:
            raise UsageError("the prompt ends with an image; add text after it")
        grids = [self._grid(image, options) for image in images]
        self._require_room(grids)
        if images and len(ids) >= self._max_tokens:
            raise PromptTooLongError(
                f"the prompt has {len(ids)} tokens with those of its images, but max_model_len is "
                f"{self._max_tokens}, prompt and output; give fewer or smaller images"
            )
        spans: list[Span] = []
        start, is_whole = 0, self._most_whole is not None
        for image, grid in zip(images, grids, strict=True):
            digest, embedded = self._embedded(image, grid, self._merged(options))
            start, count = ids.index(token, start), len(self._placeholder.tokens(grid))
            row_ends = self._placeholder.row_end is not None
            spans.append(Span(start, count, digest, grid, embedded, is_whole, row_ends))
            start += count
        return ids, tuple(spans)

    def _require_room(self, grids: Sequence[tuple[int, int]]) -> None:
        most = max((math.prod(grid) for grid in grids), default=0)
        if self._most_whole is not None and most > self._most_whole:
            raise UsageError(
                f"an image has {most} tokens, which are read in one pass, but a pass has room for "
                f"{self._most_whole}; give a smaller one, or raise max_num_batched_tokens"
            )

    def _merged(self, options: Mapping[str, Any]) -> dict[str, Any]:
        return self._family.merged(self._options, options)

    def _grid(self, image: "Image", options: Mapping[str, Any]) -> tuple[int, int]:
        width, height = image.size
        if not width * height:
            raise UsageError(f"an image of {width} x {height} pixels is empty; leave it out")
        try:
            return self._tower.grid(width, height, self._merged(options))
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise UsageError(
                f"an image of {width} x {height} pixels cannot be read: {error}"
            ) from error

    def _embedded(
        self, image: "Image", grid: tuple[int, int], options: Mapping[str, Any]
    ) -> tuple[bytes, SpanEmbeddings]:
        try:
            image = as_rgb(image)
        except (ValueError, OSError) as error:  # it is closed, or its file is broken
            raise UsageError(f"an image cannot be read: {error}") from error
        read_as = json.dumps([image.size, grid, options], sort_keys=True, default=str)
        digest = blake2b(read_as.encode(), digest_size=16, person=_PERSON)
        digest.update(image.tobytes())
        key = digest.digest()
        with self._lock:
            found = self._kept.get(key)
            if found is None:
                found = self._encode(image, options)
                assert len(found.rows) == grid[0] * grid[1], "the grid tells how many tokens"
                self._keep(key, found)
            self._kept.move_to_end(key)
        return key, found

    def _encode(self, image: "Image", options: Mapping[str, Any]) -> SpanEmbeddings:
        self.num_encoded += 1
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            try:
                # Otherwise float32 convolutions would use TF32, which rounds inputs to 10 bits.
                with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
                    found = self._tower.encode(image, options)
            except (ValueError, TypeError) as error:
                raise UsageError(f"an image cannot be read: {error}") from error
            # Not pinned: pinning memory that is kept would take longer than the copy.
            return SpanEmbeddings(found.rows.cpu(), found.added.cpu())

    def _keep(self, key: bytes, embedded: SpanEmbeddings) -> None:
        self._kept[key] = embedded
        self._kept_bytes += embedded.nbytes
        while self._kept_bytes > self._cache_bytes and len(self._kept) > 1:
            _, dropped = self._kept.popitem(last=False)
            self._kept_bytes -= dropped.nbytes


def _enclosed(token_ids: Sequence[int], placeholder: Placeholder) -> list[int]:
    """Add the tokens around each placeholder where they are missing."""
    assert placeholder.begin is not None
    assert placeholder.end is not None
    ends = [placeholder.begin, placeholder.end]
    found: list[int] = []
    for index, known in enumerate(token_ids):
        neighbours = [*token_ids[max(0, index - 1) : index], *token_ids[index + 1 : index + 2]]
        is_bare = known == placeholder.token and neighbours != ends
        found += [ends[0], known, ends[1]] if is_bare else [known]
    return found
