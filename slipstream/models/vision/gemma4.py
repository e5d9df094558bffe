"""Images of Gemma 4: patches in a grid of the image's aspect ratio, within a budget; the tower
pools each square of patches into one token."""

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from slipstream.models.checkpoint import Checkpoint
from slipstream.models.vision.library import image_processor, require_class, tower_of
from slipstream.models.vision.tower import ImageFamily, Placeholder, SpanEmbeddings, load_tensors

if TYPE_CHECKING:
    from PIL.Image import Image

_TOWER = ("model.vision_tower.", "vision_tower.")
_EMBEDDER = ("model.embed_vision.", "embed_vision.")
_BUDGET = "max_soft_tokens"
_BUDGETS = (70, 140, 280, 560, 1120)


class Gemma4Family(ImageFamily):
    """In large models attention within an image is bidirectional, in layers with a window; in E2B
    and E4B it is causal. The library's processor puts two tokens around each image."""

    prefixes = _EMBEDDER

    def __init__(self, checkpoint: Checkpoint) -> None:
        config = checkpoint.whole_config
        token = config.get("image_token_id", 258880)
        begin, end = config.get("boi_token_id", 255999), config.get("eoi_token_id", 258882)
        super().__init__(checkpoint, Placeholder(token, token, end, begin))
        text = config.get("text_config") or {}
        self._is_whole = text.get("use_bidirectional_attention") == "vision"

    @cached_property
    def _processor(self) -> Any:
        vision = self._checkpoint.whole_config["vision_config"]
        names = "patch_size", "pooling_kernel_size"
        sizes = {name: vision[name] for name in names if name in vision}
        return image_processor(self._checkpoint, "Gemma4ImageProcessorPil", sizes)

    def most_whole(self, options: Mapping[str, Any]) -> int:
        return _budget(self._processor, options) if self._is_whole else 0

    def require_options(self, options: Mapping[str, Any], max_tokens: int) -> None:
        """See `ImageFamily`."""
        _budget(self._processor, options)

    def load(self, dtype: torch.dtype, device: torch.device) -> "_Tower":
        return _Tower(self._checkpoint, self._processor, dtype, device)


class _Tower:
    def __init__(
        self, checkpoint: Checkpoint, processor: Any, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._device, self._dtype, self._processor = device, dtype, processor
        names = "Gemma4VisionModel", "Gemma4VisionConfig"
        self._tower = tower_of(checkpoint, names, _TOWER, dtype, device)
        config = require_class("Gemma4Config")(**checkpoint.whole_config)
        embedder = require_class("Gemma4MultimodalEmbedder", ".models.gemma4.modeling_gemma4")
        embedder = embedder(config.vision_config, config.text_config)
        self._embedder = embedder.to(device, dtype).eval().requires_grad_(False)
        load_tensors(self._embedder, checkpoint, _EMBEDDER)

    def grid(self, width: int, height: int, options: Mapping[str, Any]) -> tuple[int, int]:
        """See `ImageTower`."""
        from transformers.models.gemma4.image_processing_pil_gemma4 import (
            get_aspect_ratio_preserving_size,
        )

        patch, kernel = self._processor.patch_size, self._processor.pooling_kernel_size
        most = _budget(self._processor, options) * kernel**2
        size = get_aspect_ratio_preserving_size(height, width, patch, most, kernel)
        return size[0] // (patch * kernel), size[1] // (patch * kernel)

    def encode(self, image: "Image", options: Mapping[str, Any]) -> SpanEmbeddings:
        """See `ImageTower`."""
        budget = {_BUDGET: _budget(self._processor, options)}
        read = self._processor(images=[image], return_tensors="pt", **budget)
        pixels = read["pixel_values"].to(self._device, self._dtype)
        places = read["image_position_ids"].to(self._device)
        found = self._tower(pixel_values=pixels, pixel_position_ids=places)
        rows = self._embedder(found.last_hidden_state)
        return SpanEmbeddings(rows, rows.new_empty((0, *rows.shape)))


def _budget(processor: Any, options: Mapping[str, Any]) -> int:
    """The maximum number of tokens of an image."""
    given = dict(options)
    budget = given.pop(_BUDGET, None) or processor.max_soft_tokens
    if given or budget not in _BUDGETS:
        raise ValueError(
            f"the option of the image processor is {_BUDGET}, one of {_BUDGETS}, not "
            f"{dict(options)}"
        )
    return int(budget)
