"""Images of Gemma 3: all are resized to one size; attention within an image is bidirectional."""

from collections.abc import Mapping
from math import isqrt
from typing import TYPE_CHECKING, Any

import torch

from slipstream.core.errors import UsageError
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.vision.library import (
    PROJECTOR,
    TowerClasses,
    image_processor,
    projector_of,
    require_class,
    tower_of,
)
from slipstream.models.vision.tower import ImageFamily, ImageTower, Placeholder, SpanEmbeddings

if TYPE_CHECKING:
    from PIL.Image import Image

# Prefixes in older checkpoints, and as transformers 5 writes them.
_TOWER = (
    *("model.vision_tower.vision_model.", "vision_tower.vision_model."),
    *("model.vision_tower.", "vision_tower."),
)


class Gemma3Family(ImageFamily):
    """Gemma 3, with tokens for the beginning and the end of an image."""

    prefixes = PROJECTOR

    def __init__(self, checkpoint: Checkpoint) -> None:
        config = checkpoint.whole_config
        placeholder = Placeholder(
            config.get("boi_token_index", 255999),
            config.get("image_token_index", config.get("image_token_id", 262144)),
            config.get("eoi_token_index", 256000),
            around="\n\n",
        )
        super().__init__(checkpoint, placeholder)
        self._num_tokens: int = config.get("mm_tokens_per_image", 256)

    def most_whole(self, options: Mapping[str, Any]) -> int:
        """See `ImageFamily`: all images have equally many tokens."""
        _refuse(options)
        return self._num_tokens

    def require_options(self, options: Mapping[str, Any], max_tokens: int) -> None:
        _refuse(options)

    def load(self, dtype: torch.dtype, device: torch.device) -> ImageTower:
        return _Tower(self._checkpoint, self._num_tokens, dtype, device)


class _Tower:
    def __init__(
        self, checkpoint: Checkpoint, num_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._device, self._dtype, self._side = device, dtype, isqrt(num_tokens)
        classes = TowerClasses("SiglipVisionModel", "SiglipVisionConfig")
        self._tower = tower_of(checkpoint, classes, _TOWER, dtype, device)
        config = require_class("Gemma3Config")(**checkpoint.whole_config)
        name = "Gemma3MultiModalProjector"
        module = ".models.gemma3.modeling_gemma3"
        self._projector = projector_of(checkpoint, name, module, config, dtype, device)
        size = {name: config.vision_config.image_size for name in ("height", "width")}
        self._processor = image_processor(checkpoint, "Gemma3ImageProcessorPil", {"size": size})
        if getattr(self._processor, "do_pan_and_scan", False):
            raise UsageError(
                f"{checkpoint.path} cuts images into several (do_pan_and_scan), which is not "
                "supported; set it to false in its preprocessor_config.json"
            )

    def grid(self, width: int, height: int, options: Mapping[str, Any]) -> tuple[int, int]:
        _refuse(options)
        return self._side, self._side

    def encode(self, image: "Image", options: Mapping[str, Any]) -> SpanEmbeddings:
        read = self._processor(images=[image], return_tensors="pt")
        pixels = read["pixel_values"].to(self._device, self._dtype)
        rows = self._projector(self._tower(pixel_values=pixels).last_hidden_state)[0]
        return SpanEmbeddings(rows, rows.new_empty((0, *rows.shape)))


def _refuse(options: Mapping[str, Any]) -> None:
    if options:
        raise ValueError(f"its processor has no options, but {', '.join(options)} was given")
