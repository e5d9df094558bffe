"""Images of InternVL: cut into tiles of one size, and the whole image as one more tile."""

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from slipstream.models.checkpoint import Checkpoint
from slipstream.models.tokenizer import declared_token_ids
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

_TOWER = ("model.vision_tower.", "vision_tower.")
_MOST = "max_patches"
_MOST_TILES = 64


class InternVLFamily(ImageFamily):
    """InternVL 3 and 3.5, as converted for transformers, with tokens around each image."""

    prefixes = PROJECTOR

    def __init__(self, checkpoint: Checkpoint) -> None:
        config = checkpoint.whole_config
        ids = declared_token_ids(checkpoint.path)
        token = config.get("image_token_id", 151667)
        begin, end = ids.get("<img>", 151665), ids.get("</img>", 151666)
        super().__init__(checkpoint, Placeholder(token, token, end, begin))

    @cached_property
    def _processor(self) -> Any:
        size = self._checkpoint.whole_config["vision_config"].get("image_size", 448)
        high, wide = size if isinstance(size, list) else (size, size)
        sizes = {"size": {"height": high, "width": wide}}
        return image_processor(self._checkpoint, "GotOcr2ImageProcessorPil", sizes)

    def require_options(self, options: Mapping[str, Any], max_tokens: int) -> None:
        _options(self._processor, options)

    def most_pixels(self, options: Mapping[str, Any]) -> int:
        size = self._processor.size
        most: int = _options(self._processor, options)[_MOST] * size["height"] * size["width"]
        return most

    def load(self, dtype: torch.dtype, device: torch.device) -> ImageTower:
        return _Tower(self._checkpoint, self._processor, dtype, device)


class _Tower:
    def __init__(
        self, checkpoint: Checkpoint, processor: Any, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._device, self._dtype, self._processor = device, dtype, processor
        classes = TowerClasses("InternVLVisionModel", "InternVLVisionConfig")
        self._tower = tower_of(checkpoint, classes, _TOWER, dtype, device)
        self._config = config = require_class("InternVLConfig")(**checkpoint.whole_config)
        module = ".models.internvl.modeling_internvl"
        name = "InternVLMultiModalProjector"
        self._projector = projector_of(checkpoint, name, module, config, dtype, device)
        self._shuffle = require_class("InternVLModel", module).pixel_shuffle

    def grid(self, width: int, height: int, options: Mapping[str, Any]) -> tuple[int, int]:
        """See `ImageTower`: (tiles, tokens of a tile)."""
        own = _options(self._processor, options)
        tiles = self._processor.get_number_of_image_patches(height, width, own)
        return tiles, self._config.image_seq_length

    def encode(self, image: "Image", options: Mapping[str, Any]) -> SpanEmbeddings:
        own = _options(self._processor, options)
        read = self._processor(images=[image], return_tensors="pt", **own)
        pixels = read["pixel_values"].to(self._device, self._dtype)
        layer = self._config.vision_feature_layer
        if layer == -1:
            found = self._tower(pixel_values=pixels).last_hidden_state
        else:
            found = self._tower(pixel_values=pixels, output_hidden_states=True).hidden_states[layer]
        if self._config.vision_feature_select_strategy == "default":
            found = found[:, 1:]  # without the token of the class
        side = round(found.shape[1] ** 0.5)
        squares = found.reshape(len(found), side, side, -1)
        merged = self._shuffle(None, squares, scale_factor=self._config.downsample_ratio)
        rows = self._projector(merged.flatten(1, 2)).flatten(0, 1)
        return SpanEmbeddings(rows, rows.new_empty((0, *rows.shape)))


def _options(processor: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """What the processor is called with."""
    given = dict(options)
    most = given.pop(_MOST, processor.max_patches)
    if given or type(most) is not int or not 1 <= most <= _MOST_TILES:
        raise ValueError(
            f"the option of the image processor is {_MOST}, the most tiles of an image, from 1 to "
            f"{_MOST_TILES}, not {dict(options)}"
        )
    least = min(processor.min_patches, most)
    return {"crop_to_patches": True, "min_patches": least, _MOST: most}
