"""Kinds of drafters are told apart by config.json and the names of their tensors."""

from typing import Any

import pytest

from slipstream.speculative.catalogue import recognise

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1}
QWEN = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 2}
BASE = {"model.layers.0.input_layernorm.weight", "model.layers.1.input_layernorm.weight"}
CASES: list[tuple[dict[str, Any], set[str], str]] = [
    (LLAMA, {"model.embed_tokens.weight", "model.layers.0.input_layernorm.weight"}, "draft_model"),
    (LLAMA, {"fc.weight", "layers.0.mlp.up_proj.weight"}, "eagle"),
    ({"model_type": "eagle", "model": LLAMA}, set(), "eagle"),
    ({**LLAMA, "draft_vocab_size": 32000}, set(), "eagle3"),
    (LLAMA, {"midlayer.hidden_norm.weight", "fc.weight"}, "eagle3"),
    (LLAMA, {"model.layers.0.hidden_norm.weight", "fc.weight"}, "eagle3"),
    (LLAMA, {"d2t", "fc.weight"}, "eagle3"),
    ({"architectures": ["LlamaForCausalLMEagle3"]}, set(), "eagle3"),
    ({**LLAMA, "draft_vocab_size": 9, "mask_token_id": None}, set(), "eagle3"),
    ({"speculators_model_type": "eagle3", "transformer_layer_config": LLAMA}, set(), "eagle3"),
    ({"architectures": ["LlamaForCausalLMEagle3"]}, {"mask_hidden"}, "p-eagle"),
    ({**LLAMA, "draft_vocab_size": 9, "ptd_token_id": 5}, set(), "p-eagle"),
    ({**LLAMA, "architectures": ["PEagleDraftModel"]}, set(), "p-eagle"),
    ({"speculators_model_type": "peagle"}, set(), "p-eagle"),
    ({**LLAMA, "dflash_config": {}}, {"fc.weight"}, "dflash"),
    ({"architectures": ["DFlashDraftModel"], "model_type": "qwen3"}, set(), "dflash"),
    ({**QWEN, "dflash_config": {"mask_token_id": 1}}, set(), "dflash"),
    ({"speculators_model_type": "dflash"}, set(), "dflash"),
    ({"speculators_model_type": "dspark"}, set(), "dspark"),
    ({"architectures": ["Qwen3DSparkModel"]}, set(), "dspark"),
    ({**QWEN, "dflash_config": {}}, {"markov_head.markov_w1.weight"}, "dspark"),
    ({"speculators_model_type": "dflash2"}, set(), "dflash2"),
    ({**QWEN, "dflash_config": {}, "architectures": ["DFlash2DraftModel"]}, set(), "dflash2"),
    ({"model_type": "gemma4_assistant"}, set(), "gemma4_assistant"),
    ({"model_type": "gemma4_unified_assistant"}, set(), "gemma4_assistant"),
    ({"architectures": ["Gemma4AssistantForCausalLM"]}, set(), "gemma4_assistant"),
    ({"model_type": "medusa"}, set(), "medusa"),
    ({"model_type": "mlp_speculator"}, set(), "mlp_speculator"),
    ({**LLAMA, "spd_type": "pard", "pard_token": 7}, set(), "pard"),
    ({**LLAMA, "pard2": True, "spd_type": "pard2"}, set(), "pard2"),
    (QWEN, {"mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight"}, "mtp"),
    (QWEN, {"model.mtp_layers.0.input_proj.weight"}, "mtp"),
    (QWEN, {"model.layers.2.eh_proj.weight", "model.layers.2.enorm.weight"}, "mtp"),
    ({"speculators_model_type": "mtp", "transformer_layer_config": QWEN}, set(), "mtp"),
    ({**QWEN, "architectures": ["Qwen3NextMTP"]}, set(), "mtp"),
    ({**QWEN, "model_type": "deepseek_mtp"}, set(), "mtp"),
    # A language model that has modules beside it can still draft as a whole.
    ({**QWEN, "mtp_num_hidden_layers": 1}, {*BASE, "mtp.fc.weight"}, "draft_model"),
    (
        {**QWEN, "num_nextn_predict_layers": 1},
        {*BASE, "model.layers.2.eh_proj.weight"},
        "draft_model",
    ),
    ({**QWEN, "architectures": 7}, BASE, "draft_model"),  # refused where the config is read
]


@pytest.mark.parametrize(("config", "names", "kind"), CASES)
def test_recognition(config: dict[str, Any], names: set[str], kind: str) -> None:
    assert recognise(config, names) == kind
