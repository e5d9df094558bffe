"""Conversions and checks of the values of `EngineConfig`."""

from collections.abc import Mapping
from typing import Any

from slipstream.core.errors import UsageError

QUANTIZATIONS = tuple(
    "fp8 int8 int8-dynamic int4 int4-g128 int4-asym int4-g128-asym mxfp4 nvfp4".split()
)
CACHE_DTYPES = tuple("auto int8 fp8 fp8_e4m3 bfloat16 float16 float32".split())
_OTHER_NAMES = {"w8a8": "int8-dynamic"}
MOST_DRAFTS = 1024  # draft tokens per step; far more than any drafter predicts correctly


def captures_of(
    compilation: Mapping[str, Any], sizes: object
) -> tuple[bool, tuple[int, ...] | None]:
    """(eager, CUDA graph sizes) as `compilation_config` sets them; its sizes take precedence over
    `sizes`.

    Raises:
        UsageError: it has other keys or values, or a size is not a positive integer.
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


def check_captures(most: int | None, max_num_seqs: int) -> None:
    """Raise UsageError if `max_num_seqs` is larger than `max_cudagraph_capture_size`."""
    if most is not None and most < max_num_seqs:
        raise UsageError(
            f"max_cudagraph_capture_size ({most}) must be at least max_num_seqs ({max_num_seqs}), "
            "as every step is captured; lower max_num_seqs, or give enforce_eager"
        )


def check_rows(rows: int | None, max_num_seqs: int) -> None:
    """Raise UsageError if `max_num_batched_tokens` is less than one token for each request."""
    if rows is not None and rows < max_num_seqs:
        raise UsageError(
            f"max_num_batched_tokens ({rows}) must be at least max_num_seqs ({max_num_seqs}), so "
            "that every request can get a token a step; raise it, or lower max_num_seqs "
            "(--max-num-seqs)"
        )


def check_expert_parallel(tensor_parallel_size: int, rank_check_interval: int | None) -> None:
    """Raise UsageError for options that expert parallelism does not support."""
    if tensor_parallel_size > 1:
        raise UsageError(
            "enable_expert_parallel shares experts over the processes of data_parallel_size, each "
            "of which has all else whole; give tensor_parallel_size 1, or leave out "
            "data_parallel_size: the processes of tensor_parallel_size share experts, too"
        )
    if rank_check_interval is not None:
        raise UsageError(
            "rank_check_interval compares processes that run the same requests; leave it out with "
            "enable_expert_parallel, whose processes have requests of their own"
        )


def joined_overrides(
    overrides: Mapping[str, Any] | None, short: Mapping[str, Any]
) -> Mapping[str, Any] | None:
    """`hf_overrides` with the fields in `short` added; UsageError for a key that is in both."""
    given = {name: value for name, value in short.items() if value is not None}
    if twice := given.keys() & (overrides or {}):
        raise UsageError(f"{min(twice)} is given by itself and in hf_overrides; give one")
    return {**(overrides or {}), **given} if given else overrides


def check_speculation(given: object) -> None:
    """Raise UsageError unless `speculative_config` is a mapping or a list of drafters."""
    if not isinstance(given, Mapping | list | tuple | None):
        raise UsageError(
            "speculative_config must be a mapping such as "
            '{"model": "...", "num_speculative_tokens": 4}, or None'
        )


def check_image_limits(limits: Mapping[str, Any], max_images: object) -> None:
    """Raise UsageError for a `limit_mm_per_prompt` that allows other media than images, or has an
    invalid number of images."""
    if others := {name for name, most in limits.items() if name != "image" and most}:
        raise UsageError(
            f"limit_mm_per_prompt: {', '.join(sorted(others))} is not read by any model here; "
            "leave it out, or give 0"
        )
    if type(max_images) is not int or max_images < 0:
        raise UsageError(f'limit_mm_per_prompt must be like {{"image": 4}}, not {dict(limits)!r}')


def media_hosts(domains: object) -> tuple[str, ...]:
    """`allowed_media_domains` in lower case; UsageError unless it is a list of hosts."""
    if not isinstance(domains, list | tuple) or not all(isinstance(it, str) for it in domains):
        raise UsageError(f"allowed_media_domains must be a list of hosts, not {domains!r}")
    return tuple(it.lower() for it in domains)


def known_quantization(name: str, value: object) -> str:
    """The canonical name of a precision for `quantization`; UsageError for unknown names."""
    found = _OTHER_NAMES.get(value, value) if isinstance(value, str) else None
    if found not in QUANTIZATIONS:
        raise UsageError(
            f"{name} must be {', '.join(QUANTIZATIONS[:-1])} or {QUANTIZATIONS[-1]}, or be left "
            f"out to multiply by the weights as they are, not {value!r}"
        )
    return found
