"""Images of Gemma 4: patches in a grid of the image's aspect ratio, within a budget; the tower
pools each square of patches into one token."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from slipstream.models.checkpoint import Checkpoint
from slipstream.models.vision.library import (
    TowerClasses,
    image_processor,
    require_class,
    tower_of,
)
from slipstream.models.vision.tower import (
    ImageFamily,
    ImageTower,
    Placeholder,
    SpanEmbeddings,
    load_tensors,
)

if TYPE_CHECKING:
    from PIL.Image import Image

_TOWER = ("model.vision_tower.", "vision_tower.")
_EMBEDDER = ("model.embed_vision.", "embed_vision.")
_BUDGET = "max_soft_tokens"
_BUDGETS = (70, 140, 280, 560, 1120)


class Gemma4Family(ImageFamily):
    """In large models attention within an image is bidirectional, in layers with a window; in E2B
    and E4B it is causal. The library's processor puts two tokens around each image."""

    prefixes: tuple[str, ...] = _EMBEDDER
    # Value of a missing `use_bidirectional_attention`.
    sees_within_images: str | None = None

    def __init__(self, checkpoint: Checkpoint) -> None:
        config = checkpoint.whole_config
        token = config.get("image_token_id", 258880)
        begin, end = config.get("boi_token_id", 255999), config.get("eoi_token_id", 258882)
        super().__init__(checkpoint, Placeholder(token, token, end, begin))
        text = config.get("text_config") or {}
        sees = text.get("use_bidirectional_attention", self.sees_within_images)
        self._is_whole = sees == "vision"

    @cached_property
    def _processor(self) -> Any:
        vision = self._checkpoint.whole_config["vision_config"]
        names = "patch_size", "pooling_kernel_size"
        sizes = {name: vision[name] for name in names if name in vision}
        return image_processor(self._checkpoint, "Gemma4ImageProcessorPil", sizes)

    def most_whole(self, options: Mapping[str, Any]) -> int:
        return _budget(self._processor, options) if self._is_whole else 0

    def require_options(self, options: Mapping[str, Any], max_tokens: int) -> None:
        _budget(self._processor, options)

    def load(self, dtype: torch.dtype, device: torch.device) -> ImageTower:
        return _Tower(self._checkpoint, self._processor, dtype, device)


class Gemma4UnifiedFamily(Gemma4Family):
    """The 12B, which has no tower: each patch is projected, as large as those that other sizes pool
    into one token."""

    # As published, and as transformers 5 writes them.
    prefixes = ("model.vision_embedder.", "vision_embedder.", *_EMBEDDER)
    sees_within_images = "vision"

    @cached_property
    def _processor(self) -> Any:
        processor = super()._processor
        processor.patch_size *= processor.pooling_kernel_size
        processor.pooling_kernel_size = 1
        return processor

    def require_options(self, options: Mapping[str, Any], max_tokens: int) -> None:
        """See `ImageFamily`. Within an image attention is not limited by windows, which is so here
        only if the image is no longer than one."""
        text = self._checkpoint.whole_config.get("text_config") or {}
        window = text.get("sliding_window", 1024)
        if (budget := _budget(self._processor, options)) > window:
            raise ValueError(
                f"{_BUDGET} ({budget}) must not be above this model's sliding_window ({window})"
            )

    def load(self, dtype: torch.dtype, device: torch.device) -> ImageTower:
        return _UnifiedTower(self._checkpoint, self._processor, self.prefixes, dtype, device)


class _Sizes:
    """The grids of images."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor

    def grid(self, width: int, height: int, options: Mapping[str, Any]) -> tuple[int, int]:
        from transformers.models.gemma4.image_processing_pil_gemma4 import (
            get_aspect_ratio_preserving_size,
        )

        patch, kernel = self._processor.patch_size, self._processor.pooling_kernel_size
        most = _budget(self._processor, options) * kernel**2
        size = get_aspect_ratio_preserving_size(height, width, patch, most, kernel)
        return size[0] // (patch * kernel), size[1] // (patch * kernel)

    def _read(self, image: "Image", options: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        """The patches [1, n, numbers] and their places [1, n, 2], both padded."""
        budget = {_BUDGET: _budget(self._processor, options)}
        read = self._processor(images=[image], return_tensors="pt", **budget)
        return read["pixel_values"], read["image_position_ids"]


class _UnifiedTower(_Sizes):
    def __init__(
        self,
        checkpoint: Checkpoint,
        processor: Any,
        prefixes: Sequence[str],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(processor)
        self._device, self._dtype = device, dtype
        config = require_class("Gemma4UnifiedConfig")(**checkpoint.whole_config)
        module = ".models.gemma4_unified.modeling_gemma4_unified"
        embedder = require_class("Gemma4UnifiedVisionEmbedder", module)
        embedder = embedder(config.vision_config, config.text_config)
        embedder = embedder.to(device, dtype).eval().requires_grad_(False)
        last = embedder.multimodal_embedder
        inner = [f"{prefix}multimodal_embedder." for prefix in _EMBEDDER]
        load_tensors(last, checkpoint, [*inner, *_EMBEDDER])
        del embedder.multimodal_embedder
        load_tensors(embedder, checkpoint, prefixes)
        embedder.multimodal_embedder = last
        self._embedder = embedder

    def encode(self, image: "Image", options: Mapping[str, Any]) -> SpanEmbeddings:
        pixels, places = self._read(image, options)
        places = places.to(self._device)
        found = self._embedder(pixels.to(self._device, self._dtype), places, return_dict=True)
        rows = found.pooler_output[(places >= 0).all(-1)]
        return SpanEmbeddings(rows, rows.new_empty((0, *rows.shape)))


class _Tower(_Sizes):
    def __init__(
        self, checkpoint: Checkpoint, processor: Any, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(processor)
        self._device, self._dtype = device, dtype
        classes = TowerClasses("Gemma4VisionModel", "Gemma4VisionConfig")
        self._tower = tower_of(checkpoint, classes, _TOWER, dtype, device)
        config = require_class("Gemma4Config")(**checkpoint.whole_config)
        embedder = require_class("Gemma4MultimodalEmbedder", ".models.gemma4.modeling_gemma4")
        embedder = embedder(config.vision_config, config.text_config)
        self._embedder = embedder.to(device, dtype).eval().requires_grad_(False)
        load_tensors(self._embedder, checkpoint, _EMBEDDER)

    def encode(self, image: "Image", options: Mapping[str, Any]) -> SpanEmbeddings:
        pixels, places = self._read(image, options)
        pixels, places = pixels.to(self._device, self._dtype), places.to(self._device)
        found = self._tower(pixel_values=pixels, pixel_position_ids=places)
        rows = self._embedder(found.last_hidden_state)
        return SpanEmbeddings(rows, rows.new_empty((0, *rows.shape)))


def _budget(processor: Any, options: Mapping[str, Any]) -> int:
    """The maximum number of tokens of an image."""
    given = dict(options)
    budget = given.pop(_BUDGET, None)
    budget = processor.max_soft_tokens if budget is None else budget
    if given or budget not in _BUDGETS:
        raise ValueError(
            f"the option of the image processor is {_BUDGET}, one of {_BUDGETS}, not "
            f"{dict(options)}"
        )
    return int(budget)
