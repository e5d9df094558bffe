"""`eagle`: EAGLE-1 heads, which EAGLE-2 uses unchanged."""

from slipstream.speculative.method import CheckpointSigns, Method


def _recognise(signs: CheckpointSigns) -> bool:
    fused = signs.names & {"fc.weight", "fusion_fc.weight"}
    return bool(fused) and "layers.0.input_layernorm.weight" not in signs.names


METHOD = Method(
    name="eagle",
    module="slipstream.speculative.eagle.network",
    model_types=("eagle",),
    architectures=("EagleLlamaForCausalLM",),
    recognise=_recognise,
    library_names=("eagle",),
    is_head=True,
    drafts_trees=True,
)
