"""The engine's options, as users give them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.core.errors import UsageError
from slipstream.core.flags import check_fields, flag, parse_bytes

QUANTIZATIONS = (
    "fp8",
    "int8",
    "int8-dynamic",
    "int4",
    "int4-g128",
    "int4-asym",
    "int4-g128-asym",
    "mxfp4",
    "nvfp4",
)
_OTHER_NAMES = {"w8a8": "int8-dynamic"}
SpeculativeConfig = Mapping[str, Any] | Sequence[Mapping[str, Any]] | None


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything that an engine is built from; None lets the engine derive the value and say why.

    What each field means is said beside it, for readers and for `--help` alike.

    Args:
        speculative_config: the drafter; None is plain decoding. A list of drafters is short for
            {"drafters": list}.
        quantization: see docs/quantization.md; the drafter has a key of its own in
            `speculative_config`.
        skip_tokenizer_init: token ids in, token ids out.
        enforce_eager, async_scheduling, trust_remote_code: accepted from other engines' command
            lines; their effect is logged.
    """

    model: str = flag(
        "demo",
        "A local directory, a hub name, or the bundled demo; or a drafter whose config.json names "
        "its target.",
        argument=True,
    )
    tokenizer: str | None = flag(
        None, "Directory of a tokenizer to use in place of the model's.", panel="Engine"
    )
    revision: str | None = flag(None, "Branch, tag or commit of a hub name.")
    speculative_config: SpeculativeConfig = None
    dtype: str = flag("auto", "auto (the checkpoint's), bfloat16, float16 or float32.")
    device: str = flag("auto", "auto, cpu or cuda.", choices=("auto", "cpu", "cuda"))
    load_format: str = flag(
        "auto",
        "auto or safetensors: read the checkpoint's weights. dummy: random weights. twin: random "
        "weights whose output a drafter made of the model's first layers predicts.",
        choices=("auto", "safetensors", "dummy", "twin"),
    )
    quantization: str | None = flag(
        None,
        "Quantise the model's weight matrices while loading: fp8, mxfp4, nvfp4, or on a CPU int8, "
        "int8-dynamic, int4, int4-g128, int4-asym or int4-g128-asym. [none]",
    )
    batch_invariant: bool = flag(
        False, "A request's numbers do not depend on the requests batched with it; slower."
    )
    max_model_len: int | None = flag(
        None, "Maximum tokens of a request, prompt and output. [derived]", at_least=1
    )
    max_num_seqs: int = flag(64, "Maximum number of requests running at once.", at_least=1)
    max_num_batched_tokens: int | None = flag(
        None, "Maximum tokens in one forward pass of the model. [by device]", at_least=1
    )
    block_size: int = flag(16, "Tokens per block of the KV cache.", at_least=1)
    kv_cache_dtype: str = flag(
        "auto",
        "auto: the model's dtype. int8: half the memory of bfloat16, on CPUs.",
        choices=("auto", "int8", "bfloat16", "float16", "float32"),
    )
    kv_cache_memory: int | None = flag(
        None,
        "Memory for the KV cache, the drafter's included: bytes, 512M, 4G, 4GiB. [derived]",
        metavar="<bytes>",
        parse=parse_bytes,
        at_least=1,
    )
    num_kv_blocks: int | None = flag(
        None, "Size of the KV cache in blocks, in place of --kv-cache-memory.", at_least=1
    )
    threads: int | None = flag(None, "CPU threads. [by model size and cores]", at_least=1)
    enable_prefix_caching: bool = flag(
        True, "Reuse the KV cache of earlier requests that begin with the same tokens."
    )
    skip_tokenizer_init: bool = False
    seed: int = flag(
        0, "Random seed of requests without a seed of their own.", name="--engine-seed"
    )
    use_fp64_gumbel: bool = flag(False, "Compute the sampling noise in float64.")
    gpu_memory_utilization: float | None = flag(
        None, "Share of a GPU's memory to use, above 0 and at most 1.", above=0, at_most=1
    )
    tensor_parallel_size: int = flag(1, "Number of GPUs; only 1 so far.", also=("-tp",))
    enforce_eager: bool | None = flag(None, "Do not capture CUDA graphs.")
    async_scheduling: bool | None = flag(
        None, "Accepted for compatibility; --verbose tells its effect."
    )
    trust_remote_code: bool = flag(
        False, "Accepted for compatibility; code in a checkpoint is never run."
    )

    def __post_init__(self) -> None:
        check_fields(type(self), vars(self))
        if not isinstance(self.skip_tokenizer_init, bool):
            raise UsageError(
                f"skip_tokenizer_init must be true or false, not {self.skip_tokenizer_init!r}"
            )
        if self.kv_cache_memory is not None and self.num_kv_blocks is not None:
            raise UsageError("give kv_cache_memory or num_kv_blocks, not both")
        rows = self.max_num_batched_tokens
        if rows is not None and rows < self.max_num_seqs:
            raise UsageError(
                f"max_num_batched_tokens ({rows}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}), so that every request can get a token a "
                "step; raise it, or lower max_num_seqs (--max-num-seqs)"
            )
        if not isinstance(self.seed, int) or not -(1 << 63) <= self.seed < 1 << 64:
            raise UsageError(f"seed (--engine-seed) must be a 64-bit integer, not {self.seed!r}")
        if self.tensor_parallel_size != 1:
            raise UsageError(
                f"tensor_parallel_size={self.tensor_parallel_size!r} is not supported; use 1"
            )
        if self.quantization is not None:
            name = known_quantization("quantization", self.quantization)
            object.__setattr__(self, "quantization", name)  # frozen for everybody else
        if not isinstance(self.speculative_config, Mapping | list | tuple | None):
            raise UsageError(
                "speculative_config must be a mapping such as "
                '{"model": "...", "num_speculative_tokens": 4}, or None'
            )

    @property
    def drafter_options(self) -> Mapping[str, Any] | None:
        """`speculative_config` as a mapping."""
        given = self.speculative_config
        return given if isinstance(given, Mapping | None) else {"drafters": given}


def known_quantization(name: str, value: object) -> str:
    """The one name of a precision that weights can be rounded to; UsageError for others."""
    found = _OTHER_NAMES.get(value, value) if isinstance(value, str) else None
    if found not in QUANTIZATIONS:
        raise UsageError(
            f"{name} must be {', '.join(QUANTIZATIONS[:-1])} or {QUANTIZATIONS[-1]}, or be left "
            f"out to multiply by the weights as they are, not {value!r}"
        )
    return found
