"""The engine's options, as users give them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.core.errors import UsageError

LOAD_FORMATS = ("auto", "safetensors", "dummy", "twin")
QUANTIZATIONS = (
    "fp8",
    "int8",
    "int8-dynamic",
    "int4",
    "int4-g128",
    "int4-asym",
    "int4-g128-asym",
)
_OTHER_NAMES = {"w8a8": "int8-dynamic"}
KV_CACHE_DTYPES = ("auto", "int8", "bfloat16", "float16", "float32")
SpeculativeConfig = Mapping[str, Any] | Sequence[Mapping[str, Any]] | None

_OPTIONAL_NUMBERS = (
    "max_model_len",
    "max_num_batched_tokens",
    "kv_cache_memory",
    "num_kv_blocks",
    "threads",
)
_SWITCHES = ("batch_invariant", "enable_prefix_caching", "skip_tokenizer_init", "use_fp64_gumbel")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything that an engine is built from; None lets the engine derive the value and say why.

    Args:
        model: a local directory, a hub name, or a bundled demo (`demo`, `demo/draft`). A drafter
            whose config.json names its target stands for both.
        tokenizer: a directory with another tokenizer than the model's own.
        revision: of a hub name.
        speculative_config: the drafter; None is plain decoding. A list of drafters is short for
            {"drafters": list}.
        dtype: "auto" takes the checkpoint's; or bfloat16, float16, float32.
        device: "auto", "cpu" or "cuda".
        load_format: "auto" and "safetensors" read the weights; "dummy" draws random ones from the
            config alone, "twin" such that a drafter of the target's first layers is accepted.
        quantization: rounds the target's matrices as they are loaded (docs/quantization.md): to
            e4m3 ("fp8") or, on CPUs, to integers ("int8", "int4" and their kinds). The drafter has
            a key of its own in `speculative_config`.
        batch_invariant: a request's numbers do not depend on the requests beside it, at a cost.
        max_model_len: most tokens of a request, prompt and output.
        max_num_seqs: most requests running at once.
        max_num_batched_tokens: most rows of one target pass.
        block_size: tokens in a block of KV cache.
        kv_cache_dtype: of the target's keys and values: "auto" takes `dtype`; "int8" rounds each
            head of a token to 8 bits, on CPUs.
        kv_cache_memory: bytes for the KV cache, drafter included.
        num_kv_blocks: its size in blocks instead.
        threads: of the CPU's ops, for the whole process.
        enable_prefix_caching: keep the blocks of ended requests for others that begin alike.
        skip_tokenizer_init: token ids in, token ids out.
        seed: of requests that carry none.
        use_fp64_gumbel: sampling noise in float64.
        gpu_memory_utilization: share of a GPU's memory to use.
        tensor_parallel_size: 1.
        enforce_eager, async_scheduling, trust_remote_code: accepted from other engines' command
            lines; what becomes of each is logged.
    """

    model: str = "demo"
    tokenizer: str | None = None
    revision: str | None = None
    speculative_config: SpeculativeConfig = None
    dtype: str = "auto"
    device: str = "auto"
    load_format: str = "auto"
    quantization: str | None = None
    batch_invariant: bool = False
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    block_size: int = 16
    kv_cache_dtype: str = "auto"
    kv_cache_memory: int | None = None
    num_kv_blocks: int | None = None
    threads: int | None = None
    enable_prefix_caching: bool = True
    skip_tokenizer_init: bool = False
    seed: int = 0
    use_fp64_gumbel: bool = False
    gpu_memory_utilization: float | None = None
    tensor_parallel_size: int = 1
    enforce_eager: bool | None = None
    async_scheduling: bool | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_choices()

    def _check_numbers(self) -> None:
        for name in ("max_num_seqs", "block_size"):
            _require_positive(name, getattr(self, name))
        for name in _OPTIONAL_NUMBERS:
            if getattr(self, name) is not None:
                _require_positive(name, getattr(self, name))
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
            raise UsageError(f"seed must be a 64-bit integer, not {self.seed!r}")

    def _check_choices(self) -> None:
        if self.tensor_parallel_size != 1:
            raise UsageError(
                f"tensor_parallel_size={self.tensor_parallel_size!r} is not supported; use 1"
            )
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name} must be true or false, not {getattr(self, name)!r}")
        _require_choice("load_format", self.load_format, LOAD_FORMATS)
        if self.quantization is not None:
            name = known_quantization("quantization", self.quantization)
            object.__setattr__(self, "quantization", name)  # frozen for everybody else
        _require_choice("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        _require_choice("device", self.device, ("auto", "cpu", "cuda"))
        share = self.gpu_memory_utilization
        if share is not None and not (isinstance(share, int | float) and 0 < share <= 1):
            raise UsageError(f"gpu_memory_utilization must be above 0 and at most 1, not {share!r}")
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


def _require_positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{name} must be an integer of at least 1, not {value!r}")


def _require_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UsageError(f"{name} must be one of {', '.join(choices)}, not {value!r}")
