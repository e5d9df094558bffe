"""From options to numbers: what the engine will really do, and why."""

import logging
from dataclasses import dataclass, field

import torch

from slipstream.cache.kv_cache import KVLayout
from slipstream.core.config import EngineConfig
from slipstream.core.errors import UsageError
from slipstream.core.limits import StepLimits
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.loading import dtype_named
from slipstream.runner.memory import default_cache_bytes, require_memory, uses_gpu_memory
from slipstream.runner.threads import set_threads
from slipstream.sampling.verification import Verification
from slipstream.speculative.catalogue import Speculation

logger = logging.getLogger("slipstream")


@dataclass(frozen=True)
class Resolved:
    """The engine's numbers.

    Attributes:
        reasons: (name, value, why) of everything that was derived.
    """

    limits: StepLimits
    num_blocks: int
    bytes_per_block: int
    dtype: torch.dtype
    device: torch.device
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    method: str | None
    verification: Verification
    seed: int
    reasons: tuple[tuple[str, str, str], ...] = field(default=())


def resolve_device(config: EngineConfig) -> torch.device:
    """The device to run on; UsageError when it is not there."""
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("device=cuda, but torch sees no GPU; use device=cpu")
    return torch.device(config.device)


def resolve_dtype(config: EngineConfig, checkpoint_dtype: torch.dtype) -> torch.dtype:
    """The dtype of parameters and cache."""
    return checkpoint_dtype if config.dtype == "auto" else dtype_named(config.dtype)


def resolve_model_len(config: EngineConfig, shape: DecoderConfig) -> int:
    """The most tokens of a request, before the size of the cache is known."""
    longest = shape.max_position_embeddings
    if config.max_model_len is None:
        return longest
    if config.max_model_len > longest:
        raise UsageError(
            f"max_model_len={config.max_model_len} is more than the {longest} positions that the "
            f"model's config.json declares; use at most {longest}"
        )
    return config.max_model_len


class Reasons:
    """Collects what was derived and why, and logs it."""

    def __init__(self) -> None:
        self._rows: list[tuple[str, str, str]] = []

    def add(self, name: str, value: object, why: str) -> None:
        self._rows.append((name, str(value), why))
        logger.info("%s = %s (%s)", name, value, why)

    @property
    def rows(self) -> tuple[tuple[str, str, str], ...]:
        return tuple(self._rows)


def resolve(
    config: EngineConfig,
    shape: DecoderConfig,
    eos_token_ids: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    speculation: Speculation,
) -> Resolved:
    """Size the cache and fix the limits."""
    reasons = Reasons()
    layouts = [KVLayout(shape.num_layers, shape.num_kv_heads, shape.head_dim, dtype)]
    drafter = speculation.drafter
    if drafter.layout is not None:
        layouts.append(drafter.layout)
    bytes_per_block = config.block_size * sum(layout.bytes_per_token for layout in layouts)
    longest = resolve_model_len(config, shape)
    weight_bytes = shape.num_matrix_parameters * dtype.itemsize
    reasons.add("threads", *set_threads(device, config.threads, weight_bytes))
    num_blocks = _num_blocks(config, bytes_per_block, longest, device, reasons)
    max_model_len = _fit_model_len(config, longest, num_blocks * config.block_size, reasons)
    _require_memory(config, device, num_blocks * bytes_per_block, max_model_len)
    _note_accepted_flags(config, device, reasons)
    most = drafter.limits.max_speculative_tokens
    if most is not None and speculation.num_speculative_tokens > most:
        raise UsageError(
            f"this drafter guesses at most {most} tokens a step; lower num_speculative_tokens"
        )
    limits = StepLimits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        drafter_max_model_len=drafter.limits.max_model_len or max_model_len,
        num_speculative_tokens=speculation.num_speculative_tokens,
        drafts_behind_prompt=drafter.limits.drafts_behind_prompt,
        cache_identity=drafter.limits.cache_identity,
    )
    return Resolved(
        limits=limits,
        num_blocks=num_blocks,
        bytes_per_block=bytes_per_block,
        dtype=dtype,
        device=device,
        vocab_size=shape.vocab_size,
        eos_token_ids=eos_token_ids,
        method=speculation.method,
        verification=Verification(config.use_fp64_gumbel, speculation.synthetic_rates),
        seed=config.seed,
        reasons=reasons.rows,
    )


def _num_blocks(
    config: EngineConfig,
    bytes_per_block: int,
    max_model_len: int,
    device: torch.device,
    reasons: Reasons,
) -> int:
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    per_request = -(-max_model_len // config.block_size)
    wanted = config.max_num_seqs * per_request
    budget, why = default_cache_bytes(device, config.gpu_memory_utilization)
    if config.kv_cache_memory is not None:
        budget, why = config.kv_cache_memory, "kv_cache_memory"
    num_blocks = min(wanted, budget // bytes_per_block)
    if num_blocks < 1:
        raise UsageError(
            f"kv_cache_memory of {budget} bytes is less than one block of {bytes_per_block} bytes; "
            "give it more, or a smaller block_size"
        )
    enough = "as many as max_num_seqs requests of max_model_len can use"
    reasons.add("num_kv_blocks", num_blocks, enough if num_blocks == wanted else why)
    return num_blocks


def _fit_model_len(config: EngineConfig, longest: int, capacity: int, reasons: Reasons) -> int:
    """A derived limit shrinks to what the cache holds; one that was asked for stays.

    Requests that would not fit are then refused one by one, with the numbers.
    """
    if config.max_model_len is not None or longest <= capacity:
        return longest
    reasons.add("max_model_len", capacity, f"of the model's {longest} the cache holds these")
    return capacity


def _require_memory(
    config: EngineConfig, device: torch.device, cache_bytes: int, max_model_len: int
) -> None:
    """Say at once what cannot be allocated, by the name of the option that asked for it."""
    remedy = "lower kv_cache_memory or num_kv_blocks"
    require_memory(device, cache_bytes, "the KV cache", remedy)
    state_bytes = config.max_num_seqs * max_model_len * 4  # a token id each
    require_memory(device, state_bytes, "the state of the requests", "lower max_num_seqs")


def _note_accepted_flags(config: EngineConfig, device: torch.device, reasons: Reasons) -> None:
    """Say what becomes of options that other engines have and this device has no use for."""
    if config.enforce_eager is not None:
        reasons.add("enforce_eager", True, "no graphs are captured on this device")
    if config.async_scheduling:
        reasons.add("async_scheduling", False, "host and device take turns on this device")
    if config.trust_remote_code:
        reasons.add("trust_remote_code", False, "no code of a checkpoint is ever run")
    if config.gpu_memory_utilization is not None and not uses_gpu_memory(device):
        reasons.add("gpu_memory_utilization", "unused", "on a CPU, kv_cache_memory sets the cache")
