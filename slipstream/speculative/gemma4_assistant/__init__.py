"""`gemma4_assistant`: small networks that attend to the target's own KV cache."""

from slipstream.speculative.method import Method

METHOD = Method(
    name="gemma4_assistant",
    module="slipstream.speculative.gemma4_assistant.network",
    model_types=("gemma4_assistant", "gemma4_unified_assistant"),
    architectures=("Gemma4AssistantForCausalLM",),
    is_head=True,
)
