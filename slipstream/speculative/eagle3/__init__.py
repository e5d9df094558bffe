"""`eagle3`: EAGLE-3 and EAGLE-3.1 heads."""

from slipstream.speculative.method import CheckpointSigns, Method

_ARCHITECTURES = {
    "Eagle3DraftModel",
    "Eagle3LlamaForCausalLM",
    "Eagle3Speculator",
    "LlamaEagle3DraftModel",
    "LlamaForCausalLMEagle3",
}


def is_eagle3(signs: CheckpointSigns) -> bool:
    """Whether a checkpoint has EAGLE-3's network, whether or not it drafts in parallel."""
    architectures, config = signs.architectures, signs.config
    if architectures & _ARCHITECTURES or any(it.startswith("Eagle3Qwen") for it in architectures):
        return True
    marked = not signs.names.isdisjoint({"d2t", "layers.0.hidden_norm.weight"})
    keys = "draft_vocab_size" in config or "eagle_config" in config
    return marked or keys or signs.has_tensors("midlayer.")


METHOD = Method(
    name="eagle3",
    module="slipstream.speculative.eagle3.network",
    recognise=is_eagle3,
    library_names=("eagle3",),
    is_head=True,
    drafts_trees=True,
)
