"""Decides whether an engine reads images, and makes its image reader."""

from collections.abc import Mapping
from typing import Any

from slipstream.core.config import EngineConfig
from slipstream.core.errors import UsageError
from slipstream.engine.images import ImageReader, TowerReader
from slipstream.engine.resolve import Resolved
from slipstream.engine.sizing import Reasons
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.config_reader import architecture_names
from slipstream.models.tokenizer import Tokenizer
from slipstream.models.vision.catalogue import VISION, image_family
from slipstream.models.vision.library import missing_packages
from slipstream.models.vision.tower import ImageFamily, ImageTower

_NAME = "images"
_UNSUPPORTED = "are not supported"


def require_images(config: EngineConfig, checkpoint: Checkpoint) -> None:
    """Raise UsageError for options that concern images, where the model reads text alone."""
    if image_family(checkpoint) is not None:
        return
    default_cache = EngineConfig.mm_processor_cache_gb
    given = {
        "limit_mm_per_prompt": (config.limit_mm_per_prompt or {}).get("image"),
        "mm_processor_kwargs": config.mm_processor_kwargs,
        "mm_processor_cache_gb": config.mm_processor_cache_gb not in (0, default_cache),
        "allowed_local_media_path": config.allowed_local_media_path,
        "allowed_media_domains": config.allowed_media_domains,
    }
    if names := [name for name, value in given.items() if value]:
        raise UsageError(
            f"{' and '.join(names)} cannot take effect: {checkpoint.path.name} reads no images "
            "here; leave out options of images, or give a model that reads them (docs/images.md)"
        )


def choose_family(
    config: EngineConfig, checkpoint: Checkpoint, max_tokens: int, reasons: Reasons
) -> ImageFamily | None:
    """The model's image family; None if images are not read, with the reason in `reasons`.

    Args:
        max_tokens: maximum number of tokens of a prompt.

    Raises:
        UsageError: options of images do not fit the model.
    """
    family = image_family(checkpoint)
    if family is None:
        if VISION in checkpoint.whole_config:
            [name] = architecture_names(checkpoint.whole_config)
            reasons.add(_NAME, 0, f"images of {name} {_UNSUPPORTED}")
        return None
    missing = missing_packages()
    if not config.max_images:
        reasons.add(_NAME, 0, "limit_mm_per_prompt")
    elif missing:
        reasons.add(_NAME, 0, f"{' and '.join(missing)} missing")
    elif not family.has_tower:
        reasons.add(_NAME, 0, "the checkpoint has no tensors that read images")
    else:
        if config.mm_processor_kwargs:
            _require_options(config.mm_processor_kwargs, family, max_tokens)
        _require_rows(config, family)
        reasons.add(_NAME, config.max_images, "most of a prompt (limit_mm_per_prompt)")
        return family
    return None


def _require_options(options: Mapping[str, Any], family: ImageFamily, max_tokens: int) -> None:
    try:
        family.require_options(options, max_tokens)
    except ValueError as error:
        raise UsageError(f"mm_processor_kwargs: {error}") from error


def _require_rows(config: EngineConfig, family: ImageFamily) -> None:
    """Raise UsageError where an image may never find room in a pass."""
    rows = config.max_num_batched_tokens
    if rows is not None and rows < (least := least_rows(config, family)):
        raise UsageError(
            f"max_num_batched_tokens ({rows}) must be at least {least}, since this model reads an "
            f"image of {_most_whole(config, family)} tokens in one pass with other requests; "
            'raise it, or do without images (limit_mm_per_prompt={"image": 0})'
        )


def least_rows(config: EngineConfig, family: ImageFamily) -> int:
    """Minimum rows of a pass with an image that must be read whole and a row of every request,
    if drafts take half of the other rows. 0 if images may be split."""
    most = _most_whole(config, family)
    return config.max_num_seqs + 2 * most + 1 if most else 0


def _most_whole(config: EngineConfig, family: ImageFamily) -> int:
    return family.most_whole(config.mm_processor_kwargs or {})


def image_reader(
    config: EngineConfig,
    resolved: Resolved,
    family: ImageFamily | None,
    tower: ImageTower | None,
    tokenizer: Tokenizer | None,
) -> ImageReader:
    if family is None or tower is None:
        return _none(resolved)
    limits = resolved.limits
    return TowerReader(
        tower,
        family,
        tokenizer,
        config.max_images,
        limits.max_model_len,
        config.mm_processor_kwargs or {},
        int(config.mm_processor_cache_gb * (1 << 30)),
        resolved.device,
        (limits.max_num_batched_tokens - limits.max_num_seqs - 1) // 2  # see `least_rows`
        if _most_whole(config, family)
        else None,
    )


def _none(resolved: Resolved) -> ImageReader:
    why = next((why for name, _, why in resolved.reasons if name == _NAME), None)
    if why is None:
        return ImageReader()
    if why.endswith("missing"):
        return ImageReader(
            f"images need packages that are not installed ({why}); install them "
            "(pip install 'slipstream[vision]'), or leave images out"
        )
    if why.endswith(_UNSUPPORTED):
        return ImageReader(f"{why}; leave them out, or use a model of docs/images.md")
    return ImageReader(f"this engine reads no images ({why}); leave them out, or change this")
