"""Images of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5: as many patches as the image is large."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from slipstream.models.checkpoint import Checkpoint
from slipstream.models.config_reader import architecture_names
from slipstream.models.vision.library import TowerClasses, image_processor, tower_of
from slipstream.models.vision.tower import ImageFamily, ImageTower, Placeholder, SpanEmbeddings

if TYPE_CHECKING:
    from PIL.Image import Image

_LAYERS = "deepstack_visual_indexes"
_EDGES = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
_PREFIXES = ("model.visual.", "visual.")
_OLDER = {
    "Qwen2VLForConditionalGeneration": TowerClasses(
        "Qwen2VisionTransformerPretrainedModel",
        "Qwen2VLVisionConfig",
        ".models.qwen2_vl.modeling_qwen2_vl",
    ),
    "Qwen2_5_VLForConditionalGeneration": TowerClasses(
        "Qwen2_5_VisionTransformerPretrainedModel",
        "Qwen2_5_VLVisionConfig",
        ".models.qwen2_5_vl.modeling_qwen2_5_vl",
    ),
}


class Qwen3VLFamily(ImageFamily):
    """Qwen's vision models: M-RoPE, and in Qwen3-VL features from several layers of the tower,
    which are added to the first layers of the decoder (DeepStack).

    Args:
        token: default id of the image placeholder.
        deep: default layers of the tower whose features are added.
    """

    prefixes = _PREFIXES
    several_axes = True

    def __init__(
        self,
        checkpoint: Checkpoint,
        token: int = 151655,
        deep: Sequence[int] = (8, 16, 24),
    ) -> None:
        config = checkpoint.whole_config
        token = config.get("image_token_id", token)
        super().__init__(checkpoint, Placeholder(token, token))
        self.num_added_layers = len(config["vision_config"].get(_LAYERS, deep)) if deep else 0

    @cached_property
    def _processor(self) -> Any:
        vision = self._checkpoint.whole_config["vision_config"]
        sizes = {
            "patch_size": vision.get("patch_size", 16),
            "temporal_patch_size": vision.get("temporal_patch_size", 2),
            "merge_size": vision.get("spatial_merge_size", 2),
        }
        return image_processor(self._checkpoint, "Qwen2VLImageProcessorPil", sizes)

    def require_options(self, options: Mapping[str, Any], max_tokens: int) -> None:
        least = _size(self._processor, options)["shortest_edge"]
        side = self._processor.patch_size * self._processor.merge_size
        if least // side**2 >= max_tokens:
            raise ValueError(
                f"with a shortest_edge (min_pixels) of {least} an image has {least // side**2} "
                f"tokens or more, but max_model_len is {max_tokens}; lower it"
            )

    def merged(self, own: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """See `ImageFamily`. Both may name an edge in either way."""
        edges, earlier = given.get("size"), own.get("size")
        if not isinstance(edges, Mapping):
            return {**own, **given}
        kept = {key: it for key, it in own.items() if _EDGES.get(key) not in edges}
        whole = {**earlier, **edges} if isinstance(earlier, Mapping) else edges
        return {**kept, **given, "size": whole}

    def most_pixels(self, options: Mapping[str, Any]) -> int:
        return _size(self._processor, options)["longest_edge"]

    def load(self, dtype: torch.dtype, device: torch.device) -> ImageTower:
        return _Tower(self._checkpoint, self._classes(), self._processor, dtype, device)

    def _classes(self) -> TowerClasses:
        # Mixtures have classes of their own for the same tower.
        (architecture,) = architecture_names(self._checkpoint.whole_config)
        model = architecture.removesuffix("ForConditionalGeneration")
        return TowerClasses(f"{model}VisionModel", f"{model}VisionConfig")


class Qwen2VLFamily(Qwen3VLFamily):
    """Qwen2-VL and Qwen2.5-VL: without DeepStack."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint, 151655, ())

    def _classes(self) -> TowerClasses:
        return _OLDER[architecture_names(self._checkpoint.whole_config)[0]]


def qwen3_5_family(checkpoint: Checkpoint) -> Qwen3VLFamily:
    """The family of Qwen3.5: like Qwen3-VL, but without DeepStack."""
    return Qwen3VLFamily(checkpoint, 248056, ())


class _Tower:
    def __init__(
        self,
        checkpoint: Checkpoint,
        classes: TowerClasses,
        processor: Any,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._device, self._dtype, self._processor = device, dtype, processor
        self._tower = tower_of(checkpoint, classes, _PREFIXES, dtype, device)
        self._merge = self._tower.config.spatial_merge_size

    def grid(self, width: int, height: int, options: Mapping[str, Any]) -> tuple[int, int]:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        size = _size(self._processor, options)
        side = self._processor.patch_size * self._merge
        least, most = size["shortest_edge"], size["longest_edge"]
        rows, columns = smart_resize(height, width, side, least, most)
        return rows // side, columns // side

    def encode(self, image: "Image", options: Mapping[str, Any]) -> SpanEmbeddings:
        size = _size(self._processor, options)
        read = self._processor(images=[image], return_tensors="pt", size=size)
        pixels, grid = read["pixel_values"], read["image_grid_thw"]
        pixels = pixels.to(self._device, self._dtype)
        found = self._tower(pixels, grid_thw=grid.to(self._device), return_dict=True)
        rows, deep = found.pooler_output, getattr(found, "deepstack_features", None) or ()
        added = torch.stack(list(deep)) if len(deep) else rows.new_empty((0, *rows.shape))
        return SpanEmbeddings(rows, added)


def _size(processor: Any, options: Mapping[str, Any]) -> dict[str, int]:
    """The minimum and the maximum number of pixels of an image."""
    size = {name: processor.size[name] for name in ("shortest_edge", "longest_edge")}
    given = dict(options)
    if isinstance(edges := given.get("size"), Mapping | None):
        size.update(edges or {})
        given.pop("size", None)
    for old, name in _EDGES.items():
        if (pixels := given.pop(old, None)) is not None:
            size[name] = pixels
    least, most, *others = size.values()
    if given or others or not all(type(it) is int for it in (least, most)):
        raise ValueError(
            f"options of the image processor are size (shortest_edge and longest_edge, both in "
            f"pixels of an image), min_pixels and max_pixels, not {dict(options)}"
        )
    if not 0 < least <= most:
        raise ValueError(
            f"shortest_edge (min_pixels) must be from 1 to longest_edge (max_pixels), but they are "
            f"{least} and {most}"
        )
    return size
