"""The flags of `vllm serve` that are refused, by the reason and the nearest alternative."""

from collections.abc import Mapping
from typing import Final

ONE_GPU = (
    "an engine runs on one machine, on several GPUs with --tensor-parallel-size; "
    "--data-parallel-size serves several replicas there, and slipstream deploy on a cluster"
)

READ_IN_PARTS: Final = (
    "prompts are split into chunks of up to --max-num-batched-tokens, with other requests; set that"
    " or --long-prefill-token-threshold, for steps in which others decode"
)

# A name that ends in ! is a switch.
REFUSED: Final[Mapping[str, str]] = {
    "adapters are in the model's dtype, for projections of attention and of feed-forward layers "
    "without experts, and all that are named stay in the host's memory (docs/adapters.md); leave "
    "it out": """
        default-mm-loras enable-mixed-moe-lora-format! enable-moe-shared-loras!
        enable-tower-connector-lora! fully-sharded-loras! lora-dtype lora-target-modules
        max-cpu-loras specialize-active-lora!""",
    "images are encoded outside the engine, without such settings, and neither video nor audio is "
    "read; leave it out": """
        disable-chunked-mm-input! ec-transfer-config enable-mm-embeds! interleave-mm-strings!
        media-io-kwargs mm-encoder-attn-backend mm-encoder-attn-dtype mm-encoder-fp8-scale-path
        mm-encoder-fp8-scale-save-margin mm-encoder-fp8-scale-save-path mm-encoder-only!
        mm-encoder-tp-mode mm-ipc-gpu-memory-gb mm-processor-cache-type
        mm-shm-cache-max-object-size-mb mm-tensor-ipc skip-mm-profiling! video-pruning-rate""",
    ONE_GPU: """
        all2all-backend cp-kv-cache-interleave-size cpu-distributed-timeout-seconds
        data-parallel-address data-parallel-backend data-parallel-external-lb!
        data-parallel-hybrid-lb! data-parallel-multi-port-external-lb! data-parallel-rpc-port
        data-parallel-supervisor-port dcp-comm-backend dcp-kv-cache-interleave-size
        disable-nccl-for-dp-synchronization! distributed-timeout-seconds
        dp-supervisor-probe-failure-threshold dp-supervisor-probe-interval-s
        dp-supervisor-probe-timeout-s enable-elastic-ep! enable-ep-weight-filter! enable-eplb!
        eplb-config expert-placement-strategy headless! master-addr master-port
        ray-workers-use-nsight!""",
    "batches are not split in two (dual batch overlap); leave it out": """
        dbo-decode-token-threshold dbo-prefill-token-threshold enable-dbo!""",
    "embeddings, scores and diffusion models are not served; serve a model that generates text": """
        diffusion-config enable-flash-late-interaction! io-processor-plugin pooler-config""",
    "recurrent states are float32, and copied at edges of blocks; --num-state-checkpoints sets "
    "how many copies are kept": """
        enable-mamba-cache-stochastic-rounding! gdn-prefill-backend mamba-backend mamba-block-size
        mamba-cache-dtype mamba-cache-mode mamba-cache-philox-rounds mamba-ssm-cache-dtype""",
    "no custom code is loaded but a drafter's (docs/drafters.md); in place of middleware, put a "
    "proxy in front of the server": """
        code-revision middleware model-class-overrides reasoning-parser-plugin tool-parser-plugin
        worker-extension-cls""",
    "custom logits processors are not supported; use logit_bias, allowed_token_ids, bad_words or "
    "structured_outputs in requests": "logits-processors",
    "weights and the KV cache stay on their device; use --quantization, --kv-cache-dtype int8 (fp8 "
    "on GPUs) or a shorter --max-model-len": """
        cpu-offload-params kv-offloading-backend offload-group-size offload-num-in-group
        offload-params offload-prefetch-step""",
    "the KV cache stays within this server; --enable-prefix-caching reuses it from request to "
    "request": "kv-events-config kv-sharing-fast-prefill! kv-transfer-config",
    "all layers keep keys and values in one dtype, int8 and fp8 with scales of their own; "
    "use --kv-cache-dtype": "calculate-kv-scales! kv-cache-dtype-skip-layers",
    "windows are as the model was trained; use a --max-model-len of the window's length": """
        disable-sliding-window!""",
    "blocks before a sliding window are always freed; leave it out": """
        disable-hybrid-kv-cache-manager!""",
    "each device has one kernel for each op, tuned beforehand; leave it out, or see "
    "--attention-backend and --device": """
        additional-config attention-config enable-bf16x3-router-gemm! enable-flashinfer-autotune!
        ir-op-priority jit-monitor-mode jit-monitor-verbose! kernel-config
        override-attention-dtype""",
    "--quantization names a precision for all matrices; what a checkpoint stores is read from its "
    "config.json": "quantization-config",
    "weights are read from safetensors, one file after the other, and nothing else is downloaded; "
    "see --load-format": """
        ignore-patterns max-parallel-loading-workers model-loader-extra-config pt-load-map-location
        safetensors-prefetch-block-size safetensors-prefetch-num-threads""",
    "weights do not change while they are served; start the server again": """
        weight-transfer-config""",
    "the server keeps its memory; stop it to free the device": """
        enable-cumem-allocator! enable-sleep-mode!""",
    "set CUDA_VISIBLE_DEVICES, or start the server under numactl": """
        device-ids numa-bind! numa-bind-cpus numa-bind-nodes""",
    "OpenTelemetry is not supported; use /metrics, --log-json, or --enable-profiling for a "
    "trace of steps": """
        collect-detailed-traces enable-layerwise-nvtx-tracing! otlp-traces-endpoint""",
    "/metrics has the cache's use, prefix hits and the time of every part of a step; --verbose "
    "tells what is captured": """
        cudagraph-metrics! enable-logging-iteration-details! enable-mfu-metrics! kv-cache-metrics!
        kv-cache-metrics-sample show-hidden-metrics-for-version""",
    "the log's line about a request has its times; return_speculation: true tells a client about "
    "its drafts": "enable-per-request-metrics!",
    "outputs are logged whole, at the end of their request; use --enable-log-outputs": """
        enable-log-deltas!""",
    "/health, /metrics and /ping are logged at level debug alone; use --disable-uvicorn-access-log "
    "for all": "disable-access-log-for-endpoints",
    "there are no pages about the protocol; /openapi.json describes it": "enable-offline-docs!",
    "prompts are text or token ids; send one of them": "enable-prompt-embeds!",
    "routing is not reported; leave it out": "enable-return-routed-experts!",
    "certificates are read at the start; start the server again, or let a proxy handle TLS": """
        enable-ssl-refresh!""",
    "no environment variable of vLLM is read; use flags": "fail-on-environ-validation!",
    "answers have no system_fingerprint; use --served-model-name to tell servers apart": """
        fingerprint-value""",
    "the server speaks only HTTP; use that, also over a socket (--uds)": "grpc!",
    "headers and bodies have limits of their own; use --max-header-bytes and --max-body-bytes": """
        h11-max-header-count h11-max-incomplete-event-size""",
    "no slots are reserved for draft tokens; use --num-speculative-tokens": "num-lookahead-slots",
    READ_IN_PARTS: "max-long-partial-prefills max-num-partial-prefills",
    "it is the number of tokens in a pass; use --max-num-batched-tokens": """
        max-num-scheduled-tokens""",
    "a prefix is matched by whole blocks; use --block-size": "prefix-match-unit",
    "the marks of reasoning follow from the format; use --reasoning-parser": "reasoning-config",
    "prompts are tokenized on two separate threads; leave it out": "renderer-num-workers",
    "give token ids as prompts of /v1/completions; --skip-tokenizer-init leaves texts out": """
        tokens-only!""",
    "tools run at the client, which sends their results in messages; leave it out": "tool-server",
}
