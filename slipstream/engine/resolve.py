"""Resolves the options of an engine to numbers, each with the reason for it."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from slipstream.cache.spec import CacheLayout
from slipstream.core.config import EngineConfig
from slipstream.core.config_values import known_quantization
from slipstream.core.errors import DraftTooLongError, UsageError
from slipstream.core.sampling_params import SamplingDefaults, SamplingParams, Verification
from slipstream.core.step_form import StepLimits
from slipstream.engine.sizing import BlockBytes, Reasons, size_cache
from slipstream.kernels.attention import FLOAT8_PAGES
from slipstream.layers.parameters import WHOLE, Share
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.loading import dtype_named
from slipstream.models.quantized.module import StoredQuantization
from slipstream.runner.capability import (
    default_batched_tokens,
    default_dtype,
    has_kernels,
    invariance_note,
    quantization_note,
    require_quantization,
    require_stored,
    resolve_cache_dtype,
    sums_float8,
)
from slipstream.runner.graphs import captures_graphs
from slipstream.runner.memory import DeviceMemory, StepSizes, device_memory, uses_gpu_memory
from slipstream.speculative.drafter import LoadedDrafter
from slipstream.speculative.loading import Speculation
from slipstream.speculative.method import MOST_CHOSEN

logger = logging.getLogger("slipstream")

_NOT_INVARIANT = (
    "batch_invariant does not hold for fp8 matrices: tensor cores round sums of e4m3 by the shape "
    "of a tile"
)
_DRAFTER_KEY = "speculative_config: quantization"
# Where the engine chooses K it is above MOST_CHOSEN only if all requests together have no more rows
# than this (256 requests with 12 draft tokens): memory for logits and drafts is allocated for all.
_MOST_CHOSEN_ROWS = 256 * 13


@dataclass(frozen=True)
class Resolved:
    """The engine's numbers.

    Attributes:
        num_window_blocks, window: blocks for the target's layers with a window, and how many tokens
            they see at most; 0 where these layers keep all tokens.
        num_checkpoints: of the states of layers; 0 where they have none.
        checkpoint_interval: see `StatePlaces`.
        bytes_per_block: of all layers.
        cache_dtype: of the target's keys and values.
        verification: of all requests; None: coupled for those with a seed, rejection for others.
        captures: whether steps are captured in CUDA graphs.
        adaptive: how much is drafted is chosen step by step.
        knows_costs: the costs of steps are measured: K is chosen, or the engine warms up, so that
            the speed-up over plain decoding can be estimated.
        sampling_defaults: what a request gets for parameters that it leaves out.
        reasons: (name, value, why) of everything that was derived.
    """

    limits: StepLimits
    num_blocks: int
    num_window_blocks: int
    window: int
    num_checkpoints: int
    checkpoint_interval: int
    bytes_per_block: int
    dtype: torch.dtype
    cache_dtype: torch.dtype
    device: torch.device
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    method: str | None
    verification: Verification | None
    synthetic_rates: tuple[tuple[float, ...], ...]
    seed: int
    captures: bool
    adaptive: bool = False
    knows_costs: bool = False
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    reasons: tuple[tuple[str, str, str], ...] = field(default=())

    def verification_of(self, params: SamplingParams) -> Verification:
        """How the drafts of a request are judged."""
        if self.verification is not None:
            return self.verification
        return Verification.REJECTION if params.seed is None else Verification.COUPLED

    @property
    def cache_dtype_name(self) -> str:
        """The name of the dtype of keys and values, as in `--kv-cache-dtype`."""
        if self.cache_dtype == FLOAT8_PAGES:
            return "fp8_e4m3"
        return str(self.cache_dtype).removeprefix("torch.")

    @property
    def drafts(self) -> str:
        """K in words: the most draft tokens of a request in a step."""
        most = str(self.limits.num_speculative_tokens)
        return f"auto (up to {most})" if self.adaptive else most


def resolve_dtype(
    config: EngineConfig, stored: torch.dtype, device: torch.device, reasons: Reasons
) -> torch.dtype:
    """The dtype of parameters and cache, for a checkpoint in the dtype `stored`."""
    if config.dtype == "auto":
        dtype, why = default_dtype(device, stored)
        if why:
            reasons.add("dtype", str(dtype).removeprefix("torch."), why)
        return dtype
    dtype = dtype_named(config.dtype)
    if not has_kernels(device, dtype):
        logger.warning(
            "dtype %s is slow on a CPU, which has no kernels for it; bfloat16 and float32 are fast",
            config.dtype,
        )
    return dtype


def require_precision(config: EngineConfig, device: torch.device) -> None:
    """Raise UsageError for a quantization that the device or batch_invariant does not support."""
    if config.quantization is not None:
        require_quantization(device, "quantization", config.quantization)
        if config.batch_invariant and config.quantization == "fp8":
            raise UsageError(f"{_NOT_INVARIANT}; leave out batch_invariant or quantization")
    for quantization in _drafter_quantizations(config):
        require_quantization(device, "drafter quantization", quantization)


def require_stored_precision(
    config: EngineConfig, device: torch.device, name: str, stored: StoredQuantization
) -> None:
    """Raise UsageError if the device or batch_invariant does not allow the checkpoint's format."""
    require_stored(device, name, stored)
    if config.batch_invariant and sums_float8(device, stored):
        raise UsageError(f"{_NOT_INVARIANT}, in which {name} is stored; leave out batch_invariant")


def _drafter_quantizations(config: EngineConfig) -> list[str]:
    """The quantization of the drafter, or of every member of a combination."""
    options = config.drafter_options or {}
    members = options.get("drafters")
    given = [options, *(members if isinstance(members, list | tuple) else ())]
    found = (one.get("quantization") for one in given if isinstance(one, Mapping))
    return [known_quantization(_DRAFTER_KEY, it) for it in found if it is not None]


def resolve_model_len(config: EngineConfig, shape: DecoderConfig) -> int:
    """Maximum tokens of a request, before the size of the cache is known."""
    if config.max_model_len is None:
        return shape.usual_context
    longest = shape.longest_context
    if config.max_model_len > longest:
        raise UsageError(
            f"max_model_len={config.max_model_len} is more than the {longest} positions that the "
            f"model's config.json declares; use at most {longest}, or stretch them (rope_scaling)"
        )
    return config.max_model_len


def resolve(
    config: EngineConfig,
    shape: DecoderConfig,
    eos_token_ids: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    speculation: Speculation,
    reasons: Reasons,
    share: Share = WHOLE,
    ranks: Share = WHOLE,
) -> Resolved:
    """Size the cache and fix the limits, equally on all ranks, which may share experts alone."""
    cache_dtype = resolve_cache_dtype(config.kv_cache_dtype, dtype, device, "kv_cache_dtype")
    drafter, longest = speculation.drafter, resolve_model_len(config, shape)
    layouts = [shape.cache_layout(cache_dtype, share), *filter(None, [drafter.layout])]
    blocks = BlockBytes.of(layouts, config.block_size, longest)
    rows, why = max_batched_tokens(config, device)
    if why:
        reasons.add("max_num_batched_tokens", rows, why)
    captures = captures_graphs(device, bool(config.enforce_eager) or speculation.enforce_eager)
    speculation, count = _fitting(speculation, longest, config.max_num_seqs)
    step = StepSizes(
        network=shape,
        itemsize=dtype.itemsize,
        max_num_batched_tokens=rows * (ranks.size // share.size),  # experts get all ranks' rows
        max_num_seqs=config.max_num_seqs,
        max_model_len=longest,
        num_speculative_tokens=count,
        draft_probabilities=bool(drafter.layouts) or drafter.limits.keeps_probabilities,
        graphs=captures,
        max_draft_rows=drafter.limits.draft_rows(count),
        layer_state=_layer_state(layouts, drafter, config.block_size, count),
    )
    counts = size_cache(config, _memory(device, ranks), step, blocks, reasons)
    max_model_len = _fit_model_len(config, longest, counts.num_blocks, reasons)
    _require_drafts(shape, layouts[0], speculation)
    _note_precision(config, device, reasons)
    _note_accepted_flags(config, device, captures, reasons)
    return Resolved(
        limits=_step_limits(config, rows, max_model_len, speculation, max_model_len < longest),
        num_blocks=counts.num_blocks,
        num_window_blocks=counts.num_window_blocks,
        window=blocks.window,
        num_checkpoints=counts.num_checkpoints,
        checkpoint_interval=blocks.interval,
        bytes_per_block=blocks.all,
        dtype=dtype,
        cache_dtype=cache_dtype,
        device=device,
        vocab_size=shape.vocab_size,
        eos_token_ids=eos_token_ids,
        method=speculation.method,
        verification=speculation.verification,
        synthetic_rates=speculation.synthetic_rates,
        seed=config.seed,
        captures=captures,
        adaptive=speculation.adaptive,
        knows_costs=speculation.adaptive or (count > 0 and bool(config.warm_up)),
        reasons=reasons.rows,
    )


def _memory(device: torch.device, share: Share) -> DeviceMemory:
    """The memory of one rank: its GPU's, or its share of the machine's."""
    memory = device_memory(device)
    free = share.least(memory.free) // (1 if memory.is_gpu else share.size)
    return replace(memory, free=free)


def _layer_state(
    layouts: Sequence[CacheLayout], drafter: LoadedDrafter, block_size: int, num_drafts: int
) -> int:
    """Bytes that layers keep for each request, whatever its length."""
    states = sum(layout.state_bytes(num_drafts) for layout in layouts)
    if drafter.window is None:
        return states
    return states + drafter.window.bytes_per_request(block_size, num_drafts)


def _step_limits(
    config: EngineConfig, rows: int, max_model_len: int, speculation: Speculation, reduced: bool
) -> StepLimits:
    drafter = speculation.drafter.limits
    return StepLimits(
        max_num_seqs=config.max_num_seqs,
        by_priority=config.scheduling_policy == "priority",
        max_num_batched_tokens=rows,
        prompts_beside_decoding=config.long_prefill_token_threshold or None,
        max_model_len=max_model_len,
        drafter_max_model_len=drafter.max_model_len or max_model_len,
        num_speculative_tokens=speculation.num_speculative_tokens,
        drafts_at_prefill=drafter.drafts_at_prefill,
        cache_identity=drafter.cache_identity,
        tree_depth=drafter.tree_depth,
        lookup_passes=drafter.lookup_passes,
        drafts_at_once=drafter.parallel,
        adaptive=speculation.adaptive,
        cache_bounds_length=reduced,
    )


def _require_drafts(shape: DecoderConfig, layout: CacheLayout, speculation: Speculation) -> None:
    """Raise UsageError where the drafter cannot draft that much (DraftTooLongError), or drafts
    trees and the target's states follow one chain."""
    limits = speculation.drafter.limits
    most = limits.max_speculative_tokens
    if most is not None and speculation.num_speculative_tokens > most:
        raise DraftTooLongError(most)
    if layout.bytes_per_request and limits.tree_depth is not None:
        raise UsageError(
            f"{shape.architecture} has layers that keep a state of each request, which follows one "
            "chain of tokens, so trees of draft tokens are not supported; let the drafter draft "
            "chains"
        )


def _fitting(
    speculation: Speculation, max_model_len: int, max_num_seqs: int
) -> tuple[Speculation, int]:
    """One token and K draft tokens have to fit into a text: UsageError if a given K is too large,
    and a smaller one if the engine chooses. Returns K, too."""
    count = speculation.num_speculative_tokens
    is_chain = speculation.drafter.limits.tree_depth is None  # trees are cut at the last position
    if is_chain and speculation.adaptive:
        count = min(count, max(MOST_CHOSEN, _MOST_CHOSEN_ROWS // max_num_seqs - 1))
        speculation = replace(speculation, num_speculative_tokens=count)
    if is_chain and count >= max_model_len:
        if speculation.adaptive and max_model_len > 1:
            count = max_model_len - 1
            return replace(speculation, num_speculative_tokens=count), count
        raise UsageError(
            f"num_speculative_tokens={count} does not fit max_model_len={max_model_len}; use at "
            f"most {max_model_len - 1}"
        )
    return speculation, count


def max_batched_tokens(config: EngineConfig, device: torch.device) -> tuple[int, str]:
    """Maximum rows of a pass, and the reason; an empty one if the user set it."""
    if config.max_num_batched_tokens is not None:
        return config.max_num_batched_tokens, ""
    rows, why = default_batched_tokens(device)
    if rows < config.max_num_seqs:
        rows, why = config.max_num_seqs, "max_num_seqs, so that every request can get a token"
    return rows, why


def _note_precision(config: EngineConfig, device: torch.device, reasons: Reasons) -> None:
    if config.quantization is not None:
        note = quantization_note(device, config.quantization)
        reasons.add("quantization", config.quantization, note)
    for quantization in dict.fromkeys(_drafter_quantizations(config)):
        note = quantization_note(device, quantization)
        reasons.add("drafter quantization", quantization, note)
    if config.batch_invariant:
        reasons.add("batch_invariant", True, invariance_note(device))


def _fit_model_len(config: EngineConfig, longest: int, num_blocks: int, reasons: Reasons) -> int:
    """Reduce a derived limit to the capacity of the cache; keep one that the user set.

    In the latter case requests that do not fit are refused one by one.
    """
    capacity = num_blocks * config.block_size
    if config.max_model_len is not None or longest <= capacity:
        return longest
    reasons.add("max_model_len", capacity, f"reduced from the model's {longest}: KV cache capacity")
    return capacity


def _note_accepted_flags(
    config: EngineConfig, device: torch.device, captures: bool, reasons: Reasons
) -> None:
    """Note the effect of options that are accepted for compatibility with other engines."""
    if config.enforce_eager is not None:
        why = "enforce_eager" if uses_gpu_memory(device) else "nothing is captured on a CPU"
        reasons.add("enforce_eager", not captures, why)
    if config.async_scheduling and not captures:
        reasons.add("async_scheduling", False, "without graphs, host and device take turns")
    backend = "TRITON_ATTN" if uses_gpu_memory(device) else "CPU_ATTN"
    if config.attention_backend not in (None, backend):
        raise UsageError(
            f"attention_backend is {config.attention_backend}, but {device.type} has {backend}; "
            "leave it out"
        )
    if config.trust_remote_code:
        reasons.add("trust_remote_code", False, "no code of a checkpoint is ever run")
    if config.gpu_memory_utilization is not None and not uses_gpu_memory(device):
        reasons.add("gpu_memory_utilization", "unused", "on a CPU, kv_cache_memory sets the cache")
