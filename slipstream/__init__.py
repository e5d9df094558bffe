"""LLM inference built around speculative decoding."""

TYPE_CHECKING = False  # as type checkers read it; importing typing would take 10 ms

if TYPE_CHECKING:
    from slipstream.core.adapters import LoRARequest
    from slipstream.core.errors import CheckpointError, GenerationError, SlipstreamError, UsageError
    from slipstream.core.outputs import CompletionOutput, RequestMetrics, RequestOutput
    from slipstream.core.sampling_params import SamplingParams
    from slipstream.core.structured import StructuredOutput
    from slipstream.engine.llm import LLM

__version__ = "0.1.0"

# Loaded on first use, so that `import slipstream` and `slipstream --help` do not import torch.
_HOMES = {
    "LLM": "slipstream.engine.llm",
    "CheckpointError": "slipstream.core.errors",
    "CompletionOutput": "slipstream.core.outputs",
    "GenerationError": "slipstream.core.errors",
    "LoRARequest": "slipstream.core.adapters",
    "RequestMetrics": "slipstream.core.outputs",
    "RequestOutput": "slipstream.core.outputs",
    "SamplingParams": "slipstream.core.sampling_params",
    "SlipstreamError": "slipstream.core.errors",
    "StructuredOutput": "slipstream.core.structured",
    "UsageError": "slipstream.core.errors",
}

__all__ = [
    "LLM",
    "CheckpointError",
    "CompletionOutput",
    "GenerationError",
    "LoRARequest",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "SlipstreamError",
    "StructuredOutput",
    "UsageError",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'slipstream' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
