"""The engine's options."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slipstream.core import config_values as values
from slipstream.core.errors import UsageError
from slipstream.core.flags import (
    check_fields,
    flag,
    parse_bytes,
    parse_count,
    parse_integers,
    parse_words,
    rare_flag,
)

# Formats that config.json declares: `quantization` must equal the checkpoint's format.
STORED_QUANTIZATIONS = (
    *("awq", "awq_marlin", "compressed-tensors", "gguf", "gptq", "gptq_marlin"),
    *("modelopt", "modelopt_fp4", "quark"),
)
DEFAULT_IMAGES = 16
SpeculativeConfig = Mapping[str, Any] | Sequence[Mapping[str, Any]] | None


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """All options of an engine. If an optional field is None, the engine derives the value and logs
    the reason.

    The fields' help texts describe them, and are shown by `--help`.

    Args:
        speculative_config: the drafter; None: plain decoding. A list of drafters is short for
            {"drafters": list}.
        quantization: see docs/quantization.md; for the drafter there is a key in
            `speculative_config`.
        rope_scaling, rope_theta: older forms of keys of `hf_overrides`, to which they are added.
        enforce_eager, async_scheduling, trust_remote_code: accepted from other engines' command
            lines; their effect is logged.
    """

    model: str = flag(
        "demo",
        "A local directory, a GGUF file, a hub name, or the bundled demo; or a drafter whose "
        "config.json names its target.",
        argument=True,
    )
    dtype: str = flag(
        "auto",
        "auto (the checkpoint's; bfloat16 for float16 on a CPU), bfloat16, float16 or float32.",
        panel="Engine",
    )
    device: str = flag("auto", "auto, cpu or cuda.", choices=("auto", "cpu", "cuda"))
    quantization: str | None = flag(
        None,
        f"Quantise the model's weight matrices while loading: {', '.join(values.QUANTIZATIONS)} "
        "(int8-dynamic on a CPU only). Formats of checkpoints (awq, gptq, compressed-tensors, "
        "modelopt, quark) are found by themselves. [none]",
        also=("-q",),
    )
    max_model_len: int | None = flag(
        None,
        "Maximum tokens of a request, prompt and output together: 8192, 8k, 8K, auto. [derived]",
        parse=parse_count,
        at_least=2,
    )
    max_num_seqs: int = flag(64, "Maximum number of requests running at once.", at_least=1)
    max_num_batched_tokens: int | None = flag(
        None,
        "Maximum tokens in one forward pass of the model. [by device]",
        parse=parse_count,
        at_least=1,
    )
    long_prefill_token_threshold: int = flag(
        0,
        "Most prompt tokens of a step in which other requests decode, so that their tokens come "
        "evenly while long prompts are read, which takes longer; 0: as many as fit.",
        parse=parse_count,
        at_least=0,
    )
    kv_cache_memory: int | None = flag(
        None,
        "Memory for the KV cache, the drafter's included: bytes, 512M, 4G, 4GiB. [derived]",
        also=("--kv-cache-memory-bytes",),
        parse=parse_bytes,
        at_least=1,
    )
    kv_cache_dtype: str = flag(
        "auto",
        "auto: the model's dtype. int8 on CPUs, fp8 (e4m3) on GPUs: half the memory of bfloat16.",
        choices=values.CACHE_DTYPES,
        remedy="give int8 on CPUs or fp8 on GPUs, or leave it out",
    )
    gpu_memory_utilization: float | None = flag(
        None, "Share of a GPU's memory to use, above 0 and at most 1.", above=0, at_most=1
    )
    threads: int | None = flag(None, "CPU threads. [by model size and cores]", at_least=1)
    enable_prefix_caching: bool = flag(
        True, "Reuse the KV cache of earlier requests that begin with the same tokens."
    )
    num_state_checkpoints: int | None = flag(
        None,
        "Number of checkpoints of recurrent layers' states that are kept for prefix caching; 0 "
        "keeps none. [by memory]",
        at_least=0,
    )
    enable_lora: bool = flag(
        False, "Serve LoRA adapters, each for the requests that ask for it (docs/adapters.md)."
    )
    max_loras: int = rare_flag(
        4,
        "Number of adapter slots on the device: the most adapters that running requests may use.",
        at_least=1,
    )
    max_lora_rank: int = rare_flag(16, "Maximum rank of an adapter.", at_least=1, at_most=256)
    batch_invariant: bool = flag(
        False, "A request's results do not depend on the requests batched with it; slower."
    )
    seed: int = flag(0, "Random seed of requests without a seed.", name="--engine-seed")
    generation_config: str = flag(
        "auto",
        "Source of default sampling parameters: auto is the model's generation_config.json, vllm "
        "is vLLM's neutral defaults, and a directory is one that has the file.",
        metavar="<auto|vllm|folder>",
    )
    override_generation_config: Mapping[str, Any] | None = flag(
        None,
        "Default sampling parameters, which override --generation-config: '{\"temperature\": 0.6}'",
    )
    tokenizer: str | None = flag(None, "Directory of a tokenizer to use instead of the model's.")
    revision: str | None = flag(None, "Branch, tag or commit of a hub name.")
    load_format: str = flag(
        "auto",
        "auto or safetensors: read the checkpoint's weights. For benchmarks: dummy (random ones) "
        "and twin (random weights, such that a drafter of the model's first layers predicts its "
        "output).",
        choices=("auto", "safetensors", "dummy", "twin"),
        remedy="convert other weights to safetensors with transformers' save_pretrained",
    )
    hf_overrides: Mapping[str, Any] | None = flag(
        None, "Values that override keys of config.json; objects are merged key by key."
    )
    download_dir: str | None = flag(
        None, "Directory for downloads from the hub. [the hub's cache]", metavar="<folder>"
    )
    hf_token: str | None = flag(
        None, "Access token for the hub. [from `hf auth login`]", metavar="<token>"
    )
    limit_mm_per_prompt: Mapping[str, Any] | None = flag(
        None,
        "Maximum number of images in a prompt: '{\"image\": 4}'; with 0 the vision tower is not "
        "loaded. [16]",
    )
    mm_processor_kwargs: Mapping[str, Any] | None = flag(
        None,
        "Settings that override the model's image processor: "
        '\'{"size": {"longest_edge": 1000000, "shortest_edge": 65536}}\'',
    )
    mm_processor_cache_gb: float = flag(
        1.0, "Host memory in GiB for the embeddings of recent images.", at_least=0
    )
    allowed_local_media_path: str | None = flag(
        None, "Folder whose images requests may name by file: URLs. [none]", metavar="<folder>"
    )
    allowed_media_domains: tuple[str, ...] = flag(
        (),
        "Comma-separated hosts from which images may be fetched; never hosts of private networks. "
        "[none]",
        metavar="<hosts>",
        parse=parse_words,
    )
    enforce_eager: bool | None = flag(None, "Do not capture CUDA graphs.")
    block_size: int = flag(16, "Tokens per block of the KV cache.", at_least=1)
    num_kv_blocks: int | None = flag(
        None,
        "Size of the KV cache in blocks, instead of --kv-cache-memory.",
        also=("--num-gpu-blocks-override",),
        at_least=1,
    )
    tokenizer_revision: str | None = rare_flag(
        None, "Branch, tag or commit of the tokenizer's hub name. [--revision]"
    )
    hf_config_path: str | None = rare_flag(
        None,
        "Directory or hub name of a config.json to use instead of the model's.",
        metavar="<folder>",
    )
    rope_scaling: Mapping[str, Any] | None = rare_flag(
        None, "RoPE scaling, instead of config.json's rope_scaling."
    )
    rope_theta: float | None = rare_flag(
        None, "RoPE's base frequency, instead of config.json's rope_theta.", above=0
    )
    speculative_config: SpeculativeConfig = None
    scheduling_policy: str = rare_flag(
        "fcfs",
        "fcfs: in order of arrival. priority: requests with a smaller `priority` go first; those "
        "with a large one may wait indefinitely.",
        choices=("fcfs", "priority"),
    )
    skip_tokenizer_init: bool = rare_flag(False, "Token ids in, token ids out: load no tokenizer.")
    logprobs_mode: str = rare_flag(
        "raw_logprobs",
        "raw_logprobs, or raw_logits to report logits instead.",
        choices=("raw_logprobs", "raw_logits"),
        remedy="log probabilities after temperature and penalties are not kept",
    )
    use_fp64_gumbel: bool = rare_flag(False, "Compute the sampling noise in float64.")
    tensor_parallel_size: int = flag(
        1,
        "Number of GPUs over which the model is split, or of processes on a CPU.",
        also=("-tp",),
        at_least=1,
    )
    data_parallel_size: int = flag(
        1,
        "Number of replicas that slipstream serve starts on this machine, each with a GPU or a "
        "share of the cores; with --enable-expert-parallel, number of processes of one engine, "
        "each with its own requests.",
        also=("-dp",),
        at_least=1,
    )
    enable_expert_parallel: bool = flag(
        False,
        "Split a mixture's experts over the processes of --data-parallel-size, which are then one "
        "engine; all other weights are replicated.",
        also=("-ep",),
    )
    rank_check_interval: int | None = rare_flag(
        None,
        "Every how many steps the processes of --tensor-parallel-size compare their tokens and "
        "counters, to detect faults. [never]",
        at_least=1,
    )
    cudagraph_capture_sizes: tuple[int, ...] | None = rare_flag(
        None,
        "Batch sizes, in requests, for which CUDA graphs are captured, besides --max-num-seqs: "
        "1,2,4,8. [derived]",
        parse=parse_integers,
    )
    warm_up: bool | None = rare_flag(
        None,
        "Run steps of all kinds while loading, so that no request waits until kernels of a GPU are "
        "compiled, and measure steps with a drafter. [serve, deploy, bench throughput, sweep and "
        "advise: yes; others: no]",
    )
    async_scheduling: bool | None = rare_flag(
        None, "Accepted for compatibility; --verbose tells its effect."
    )
    trust_remote_code: bool = rare_flag(
        False, "Accepted for compatibility; code in a checkpoint is never run."
    )
    enable_chunked_prefill: bool | None = rare_flag(
        None,
        "Long prompts are always computed in chunks.",
        choices=(True,),
        remedy="raise max_num_batched_tokens to read longer prompts at once",
    )
    tokenizer_mode: str = rare_flag(
        "auto",
        "auto or hf: tokenizer.json is always used.",
        choices=("auto", "hf"),
        remedy="make a tokenizer.json with transformers (save_pretrained), and leave this out",
    )
    config_format: str = rare_flag(
        "auto",
        "auto or hf: config.json is always read.",
        choices=("auto", "hf"),
        remedy="use the checkpoint in its Hugging Face form, which has a config.json",
    )
    safetensors_load_strategy: str | None = rare_flag(
        None,
        "eager or prefetch: files are always read from their beginning to their end.",
        choices=("eager", "prefetch"),
        remedy="weights are never mapped from their files; leave this out",
    )
    prefix_caching_hash_algo: str = rare_flag(
        "sha256",
        "sha256 or sha256_cbor: a cryptographic digest (BLAKE2b) always names blocks.",
        choices=("sha256", "sha256_cbor"),
        remedy="faster digests may collide; leave this out",
    )
    attention_backend: str | None = rare_flag(
        None,
        "TRITON_ATTN on a GPU, CPU_ATTN on a CPU: each device has one backend.",
        choices=("TRITON_ATTN", "CPU_ATTN"),
        remedy="leave this out to take the device's own",
    )
    max_cudagraph_capture_size: int | None = rare_flag(
        None, "At least --max-num-seqs, the largest captured batch.", at_least=1
    )
    optimization_level: int | None = rare_flag(
        None,
        "0 is --enforce-eager; 1, 2 and 3 change nothing: kernels are compiled beforehand.",
        also=("-O",),
        at_least=0,
        at_most=3,
    )
    compilation_config: Mapping[str, Any] | None = rare_flag(
        None,
        "The keys mode, cudagraph_mode and cudagraph_capture_sizes, which also have flags.",
        also=("-cc",),
    )

    def __post_init__(self) -> None:
        check_fields(type(self), vars(self))
        self._take_compilation()
        self._take_rope()
        values.check_image_limits(self.limit_mm_per_prompt or {}, self.max_images)
        self._set("allowed_media_domains", values.media_hosts(self.allowed_media_domains))
        if self.shares_experts:
            values.check_expert_parallel(self.tensor_parallel_size, self.rank_check_interval)
        if self.kv_cache_memory is not None and self.num_kv_blocks is not None:
            raise UsageError("give kv_cache_memory or num_kv_blocks, not both")
        values.check_rows(self.max_num_batched_tokens, self.max_num_seqs)
        if not isinstance(self.seed, int) or not -(1 << 63) <= self.seed < 1 << 64:
            raise UsageError(f"seed (--engine-seed) must be a 64-bit integer, not {self.seed!r}")
        if self.quantization not in (None, *STORED_QUANTIZATIONS):
            self._set("quantization", values.known_quantization("quantization", self.quantization))
        values.check_speculation(self.speculative_config)

    @property
    def shares_experts(self) -> bool:
        """Whether data parallel processes of one engine share the experts, and nothing else."""
        return self.enable_expert_parallel and self.data_parallel_size > 1

    @property
    def num_ranks(self) -> int:
        """Number of processes of the engine."""
        return self.data_parallel_size if self.shares_experts else self.tensor_parallel_size

    def warmed_up(self) -> "EngineConfig":
        """The config for a command that warms up unless it is told not to."""
        return replace(self, warm_up=self.warm_up is not False)

    @property
    def max_images(self) -> int:
        """Maximum number of images in a prompt."""
        most: int = (self.limit_mm_per_prompt or {}).get("image", DEFAULT_IMAGES)
        return most

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # the dataclass is frozen

    def _take_rope(self) -> None:
        """Move `rope_scaling` and `rope_theta` to `hf_overrides`."""
        short = {"rope_scaling": self.rope_scaling, "rope_theta": self.rope_theta}
        self._set("hf_overrides", values.joined_overrides(self.hf_overrides, short))
        self._set("rope_scaling", None)
        self._set("rope_theta", None)

    def _take_compilation(self) -> None:
        """Convert `compilation_config` to `enforce_eager` and `cudagraph_capture_sizes`."""
        eager, sizes = values.captures_of(
            self.compilation_config or {}, self.cudagraph_capture_sizes
        )
        if eager or self.optimization_level == 0:
            self._set("enforce_eager", True)
        self._set("cudagraph_capture_sizes", sizes)
        self._set("compilation_config", None)
        if not self.enforce_eager:
            values.check_captures(self.max_cudagraph_capture_size, self.max_num_seqs)

    @property
    def drafter_options(self) -> Mapping[str, Any] | None:
        """`speculative_config` as a mapping."""
        given = self.speculative_config
        return given if isinstance(given, Mapping | None) else {"drafters": given}
