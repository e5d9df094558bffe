"""The models with image input."""

from collections.abc import Callable, Mapping
from typing import Final

from slipstream.models.checkpoint import Checkpoint
from slipstream.models.config_reader import architecture_names
from slipstream.models.vision.gemma3 import Gemma3Family
from slipstream.models.vision.gemma4 import Gemma4Family, Gemma4UnifiedFamily
from slipstream.models.vision.internvl import InternVLFamily
from slipstream.models.vision.mistral3 import Mistral3Family
from slipstream.models.vision.qwen_vl import Qwen2VLFamily, Qwen3VLFamily, qwen3_5_family
from slipstream.models.vision.tower import ImageFamily

_FAMILIES: Final[Mapping[str, Callable[[Checkpoint], ImageFamily]]] = {
    "Gemma3ForConditionalGeneration": Gemma3Family,
    "Gemma4ForConditionalGeneration": Gemma4Family,
    "Gemma4UnifiedForConditionalGeneration": Gemma4UnifiedFamily,
    "InternVLForConditionalGeneration": InternVLFamily,
    "Mistral3ForConditionalGeneration": Mistral3Family,
    "Qwen2VLForConditionalGeneration": Qwen2VLFamily,
    "Qwen2_5_VLForConditionalGeneration": Qwen2VLFamily,
    "Qwen3VLForConditionalGeneration": Qwen3VLFamily,
    "Qwen3VLMoeForConditionalGeneration": Qwen3VLFamily,
    "Qwen3_5ForConditionalGeneration": qwen3_5_family,
    "Qwen3_5MoeForConditionalGeneration": qwen3_5_family,
}
VISION: Final = "vision_config"


def image_family(checkpoint: Checkpoint) -> ImageFamily | None:
    """The image family of a checkpoint; None if the model has no supported image input."""
    config = checkpoint.whole_config
    names = architecture_names(config)
    family = _FAMILIES.get(names[0]) if names else None
    if family is None or not isinstance(config.get(VISION), dict):
        return None
    return family(checkpoint)
