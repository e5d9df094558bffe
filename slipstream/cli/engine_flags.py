"""Flags of the engine, shared by the commands that run one."""

import re
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from slipstream.core.config import EngineConfig

ModelArgument = Annotated[
    str,
    typer.Argument(
        help="A local directory, a hub name, or the bundled demo; or a drafter "
        "whose config.json names its target."
    ),
]

_PANEL = "Engine"
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?B?)", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """ "512M", "4G", "4GiB" (powers of 1024), "4GB" (powers of 1000) or plain bytes."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a size; give bytes, or such as 512M, 4G, 4GiB")
    number, prefix, unit = match.groups()
    base = 1000 if prefix and unit.lower() == "b" else 1024
    return int(float(number) * base ** " KMGT".index(prefix.upper() or " "))


@dataclass(frozen=True, kw_only=True)
class EngineFlags:
    """The fields of `EngineConfig` but for the model and its drafter; `engine_seed` is its seed."""

    tokenizer: Annotated[
        str | None,
        typer.Option(help="Directory of another tokenizer.", rich_help_panel=_PANEL),
    ] = EngineConfig.tokenizer
    revision: Annotated[
        str | None,
        typer.Option(help="Branch, tag or commit of a hub name.", rich_help_panel=_PANEL),
    ] = EngineConfig.revision
    dtype: Annotated[
        str,
        typer.Option(help="auto, bfloat16, float16 or float32.", rich_help_panel=_PANEL),
    ] = EngineConfig.dtype
    device: Annotated[
        str,
        typer.Option(help="auto, cpu or cuda.", rich_help_panel=_PANEL),
    ] = EngineConfig.device
    load_format: Annotated[
        str,
        typer.Option(
            help="auto or safetensors; dummy draws random weights, twin such that a drafter of the "
            "model's first layers is accepted.",
            rich_help_panel=_PANEL,
        ),
    ] = EngineConfig.load_format
    quantization: Annotated[
        str | None,
        typer.Option(
            help="fp8, or on a CPU int8, int8-dynamic, int4, int4-g128, int4-asym or "
            "int4-g128-asym: rounds the model's matrices as they are loaded. [none]",
            rich_help_panel=_PANEL,
        ),
    ] = EngineConfig.quantization
    batch_invariant: Annotated[
        bool,
        typer.Option(
            "--batch-invariant",
            help="A request's numbers never depend on the requests beside it; slower.",
            rich_help_panel=_PANEL,
        ),
    ] = EngineConfig.batch_invariant
    max_model_len: Annotated[
        int | None,
        typer.Option(
            help="Most tokens of a request, prompt and output. [derived]", rich_help_panel=_PANEL
        ),
    ] = EngineConfig.max_model_len
    max_num_seqs: Annotated[
        int,
        typer.Option(help="Most requests running at once.", rich_help_panel=_PANEL),
    ] = EngineConfig.max_num_seqs
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(help="Most rows of one target pass. [by device]", rich_help_panel=_PANEL),
    ] = EngineConfig.max_num_batched_tokens
    block_size: Annotated[
        int,
        typer.Option(help="Tokens in a block of KV cache.", rich_help_panel=_PANEL),
    ] = EngineConfig.block_size
    kv_cache_dtype: Annotated[
        str,
        typer.Option(
            help="auto: the model's dtype; int8: half of bfloat16's memory, on CPUs.",
            rich_help_panel=_PANEL,
        ),
    ] = EngineConfig.kv_cache_dtype
    kv_cache_memory: Annotated[
        int | None,
        typer.Option(
            "--kv-cache-memory",
            parser=parse_bytes,
            metavar="<bytes>",
            help="For the KV cache: bytes, 512M, 4G, 4GiB. [derived]",
            rich_help_panel=_PANEL,
        ),
    ] = EngineConfig.kv_cache_memory
    num_kv_blocks: Annotated[
        int | None,
        typer.Option(help="Size of the KV cache in blocks instead.", rich_help_panel=_PANEL),
    ] = EngineConfig.num_kv_blocks
    threads: Annotated[
        int | None,
        typer.Option(help="CPU threads. [by model size and cores]", rich_help_panel=_PANEL),
    ] = EngineConfig.threads
    enable_prefix_caching: Annotated[
        bool,
        typer.Option(help="Reuse the KV cache of a common beginning.", rich_help_panel=_PANEL),
    ] = EngineConfig.enable_prefix_caching
    engine_seed: Annotated[
        int,
        typer.Option(help="Seed of requests that carry none.", rich_help_panel=_PANEL),
    ] = EngineConfig.seed
    use_fp64_gumbel: Annotated[
        bool,
        typer.Option(
            "--use-fp64-gumbel", help="Sampling noise in float64.", rich_help_panel=_PANEL
        ),
    ] = EngineConfig.use_fp64_gumbel
    gpu_memory_utilization: Annotated[
        float | None,
        typer.Option(help="Share of a GPU's memory to use.", rich_help_panel=_PANEL),
    ] = EngineConfig.gpu_memory_utilization
    tensor_parallel_size: Annotated[
        int,
        typer.Option(
            "--tensor-parallel-size", "-tp", help="Only 1 so far.", rich_help_panel=_PANEL
        ),
    ] = EngineConfig.tensor_parallel_size
    enforce_eager: Annotated[
        bool | None,
        typer.Option(help="Capture no graphs.", rich_help_panel=_PANEL),
    ] = EngineConfig.enforce_eager
    async_scheduling: Annotated[
        bool | None,
        typer.Option(help="Accepted; --verbose tells the effect.", rich_help_panel=_PANEL),
    ] = EngineConfig.async_scheduling
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code",
            help="Accepted; no code of a checkpoint is ever run.",
            rich_help_panel=_PANEL,
        ),
    ] = EngineConfig.trust_remote_code

    def config(self, model: str, speculative_config: dict[str, Any] | None) -> EngineConfig:
        """Raises UsageError for options that cannot be."""
        options = asdict(self)
        options["seed"] = options.pop("engine_seed")
        return EngineConfig(model=model, speculative_config=speculative_config, **options)
