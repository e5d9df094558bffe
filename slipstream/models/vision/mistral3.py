"""Images of Mistral 3: patches in a grid of the image's aspect ratio; a token ends each row."""

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
_EDGE = "longest_edge"


class Mistral3Family(ImageFamily):
    """Mistral Small 3.1 and later, and Ministral 3, with the tower of Pixtral."""

    prefixes = PROJECTOR

    def __init__(self, checkpoint: Checkpoint) -> None:
        config = checkpoint.whole_config
        token = config.get("image_token_index", config.get("image_token_id", 10))
        ids = declared_token_ids(checkpoint.path)
        row_end, end = ids.get("[IMG_BREAK]", 12), ids.get("[IMG_END]", 13)
        super().__init__(checkpoint, Placeholder(token, token, end, row_end=row_end))

    @cached_property
    def _processor(self) -> Any:
        config = self._checkpoint.whole_config
        vision = config["vision_config"]
        sizes = {"size": {_EDGE: vision.get("image_size", 1540)}}
        processor = image_processor(self._checkpoint, "PixtralImageProcessorPil", sizes)
        # A token is a square of patches. The files have the size of one patch.
        side = vision.get("patch_size", 14) * config.get("spatial_merge_size", 2)
        processor.patch_size = {"height": side, "width": side}
        return processor

    def require_options(self, options: Mapping[str, Any], max_tokens: int) -> None:
        _edge(self._processor, options)

    def most_pixels(self, options: Mapping[str, Any]) -> int:
        return _edge(self._processor, options) ** 2

    def load(self, dtype: torch.dtype, device: torch.device) -> ImageTower:
        return _Tower(self._checkpoint, self._processor, dtype, device)


class _Tower:
    def __init__(
        self, checkpoint: Checkpoint, processor: Any, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._device, self._dtype, self._processor = device, dtype, processor
        classes = TowerClasses("PixtralVisionModel", "PixtralVisionConfig")
        self._tower = tower_of(checkpoint, classes, _TOWER, dtype, device)
        config = require_class("Mistral3Config")(**checkpoint.whole_config)
        name = "Mistral3MultiModalProjector"
        module = ".models.mistral3.modeling_mistral3"
        self._projector = projector_of(checkpoint, name, module, config, dtype, device)
        layers = config.vision_feature_layer
        self._layers = [layers] if isinstance(layers, int) else [*layers]

    def grid(self, width: int, height: int, options: Mapping[str, Any]) -> tuple[int, int]:
        import numpy
        from transformers.image_utils import ChannelDimension
        from transformers.models.pixtral.image_processing_pil_pixtral import (
            get_resize_output_image_size,
        )

        edge, side = _edge(self._processor, options), self._processor.patch_size["height"]
        empty = numpy.broadcast_to(numpy.uint8(), (height, width, 3))  # has a shape, and no memory
        high, wide = get_resize_output_image_size(
            empty, (edge, edge), (side, side), ChannelDimension.LAST
        )
        if not high * wide:
            raise ValueError(f"it is too thin to be resized to a {_EDGE} of {edge}")
        return high // side, wide // side

    def encode(self, image: "Image", options: Mapping[str, Any]) -> SpanEmbeddings:
        size = {_EDGE: _edge(self._processor, options)}
        read = self._processor(images=[image], return_tensors="pt", size=size)
        sizes = read["image_sizes"].tolist()
        pixels = read["pixel_values"].to(self._device, self._dtype)
        found = self._tower(pixels, image_sizes=sizes, output_hidden_states=True, return_dict=True)
        features = torch.cat([found.hidden_states[layer] for layer in self._layers], dim=-1)
        rows = self._projector(features.squeeze(0), sizes)
        return SpanEmbeddings(rows, rows.new_empty((0, *rows.shape)))


def _edge(processor: Any, options: Mapping[str, Any]) -> int:
    """The most pixels of an image's longer side."""
    given = dict(options)
    size = given.pop("size", None) or {_EDGE: processor.size[_EDGE]}
    edge = size.get(_EDGE) if isinstance(size, Mapping) and len(size) == 1 else None
    if given or type(edge) is not int or edge < 1:
        raise ValueError(
            f"the option of the image processor is size, such as {{'size': {{'{_EDGE}': 1024}}}}, "
            f"not {dict(options)}"
        )
    return edge
