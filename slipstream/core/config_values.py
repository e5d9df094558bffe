"""Forms that values of an engine's fields have: precisions, captures, images, hosts."""

from collections.abc import Mapping
from typing import Any

from slipstream.core.errors import UsageError

QUANTIZATIONS = tuple(
    "fp8 int8 int8-dynamic int4 int4-g128 int4-asym int4-g128-asym mxfp4 nvfp4".split()
)
_OTHER_NAMES = {"w8a8": "int8-dynamic"}


def captures_of(
    compilation: Mapping[str, Any], sizes: object
) -> tuple[bool, tuple[int, ...] | None]:
    """(whether nothing is captured, the sizes that are) by a `compilation_config`, in which sizes
    go before those of the field.

    Raises:
        UsageError: it asks for anything else, or a size is no positive integer.
    """
    given = dict(compilation)
    sizes = given.pop("cudagraph_capture_sizes", sizes)
    eager = given.pop("cudagraph_mode", None) == "NONE"
    if other := given.keys() - {"mode", "level"}:
        raise UsageError(
            f"compilation_config: {', '.join(sorted(other))} is not supported; leave it out: "
            "kernels are compiled beforehand, and cudagraph_mode NONE turns graphs off"
        )
    if sizes is None:
        return eager, None
    listed: list[Any] = list(sizes) if isinstance(sizes, list | tuple) else [sizes]
    if any(type(size) is not int or size < 1 for size in listed):
        raise UsageError(f"cudagraph_capture_sizes must be positive integers, not {sizes}")
    return eager, tuple(listed)


def check_image_limits(limits: Mapping[str, Any], max_images: object) -> None:
    """Raise UsageError for a `limit_mm_per_prompt` that allows what no model reads, or whose
    number of images is none."""
    if others := {name for name, most in limits.items() if name != "image" and most}:
        raise UsageError(
            f"limit_mm_per_prompt: {', '.join(sorted(others))} is not read by any model here; "
            "leave it out, or give 0"
        )
    if type(max_images) is not int or max_images < 0:
        raise UsageError(f'limit_mm_per_prompt must be like {{"image": 4}}, not {dict(limits)!r}')


def media_hosts(domains: object) -> tuple[str, ...]:
    """`allowed_media_domains` in lower case; UsageError where it is no list of hosts."""
    if not isinstance(domains, list | tuple) or not all(isinstance(it, str) for it in domains):
        raise UsageError(f"allowed_media_domains must be a list of hosts, not {domains!r}")
    return tuple(it.lower() for it in domains)


def known_quantization(name: str, value: object) -> str:
    """The one name of a precision that weights can be rounded to; UsageError for others."""
    found = _OTHER_NAMES.get(value, value) if isinstance(value, str) else None
    if found not in QUANTIZATIONS:
        raise UsageError(
            f"{name} must be {', '.join(QUANTIZATIONS[:-1])} or {QUANTIZATIONS[-1]}, or be left "
            f"out to multiply by the weights as they are, not {value!r}"
        )
    return found
