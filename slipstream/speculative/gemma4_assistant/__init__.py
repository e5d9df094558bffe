"""`gemma4_assistant`: small networks that attend to the target's own KV cache."""

from slipstream.speculative.method import CheckpointSigns, Method


def _recognise(signs: CheckpointSigns) -> bool:
    return (
        signs.model_type in ("gemma4_assistant", "gemma4_unified_assistant")
        or "Gemma4AssistantForCausalLM" in signs.architectures
    )


METHOD = Method(
    name="gemma4_assistant",
    module="slipstream.speculative.gemma4_assistant.network",
    recognise=_recognise,
    is_head=True,
)
