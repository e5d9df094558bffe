"""Configs of models with gated delta nets: what they mean, and what is refused."""

from typing import Any

import pytest
import torch

from slipstream.core.errors import CheckpointError
from slipstream.layers.attention import AttentionSpec
from slipstream.layers.delta_net import DeltaNetSpec
from slipstream.models.catalogue import read_decoder_config
from tests.hybrid_checkpoints import COMMON
from tests.models.delta_cases import MIXED

CONFIG: dict[str, Any] = {
    **COMMON,
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
}


def test_every_fourth_layer_attends_where_no_types_are_given() -> None:
    config = {key: value for key, value in CONFIG.items() if key != "layer_types"}
    for change, attending in (({}, [3, 7]), ({"full_attention_interval": 3}, [2, 5])):
        layers = read_decoder_config({**config, "num_hidden_layers": 8, **change}).layers
        found = [i for i, layer in enumerate(layers) if isinstance(layer.mixer, AttentionSpec)]
        assert found == attending


def test_published_sizes_and_what_a_request_keeps() -> None:
    """Qwen3.5-9B: 48 MiB of states, 24 windows, and few bytes for draft tokens."""
    published = {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
        "mamba_ssm_dtype": "float32",
        "attn_output_gate": True,
        "mtp_num_hidden_layers": 1,
    }
    config = read_decoder_config(published)
    assert isinstance(config.layers[0].mixer, DeltaNetSpec)
    assert config.attention.rope.rotary_dim(config.head_dim) == 64
    layout = config.cache_layout(torch.bfloat16)
    window = 24 * 3 * 8192 * 2
    assert layout.bytes_per_request == (48 << 20) + window
    assert layout.bytes_per_token == 8 * 2 * 4 * 256 * 2
    assert layout.window(32768) is None  # that of the convolution is none of tokens in blocks
    assert layout.state_bytes(7) < 1.15 * layout.bytes_per_request


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attn_output_gate": False}, "attn_output_gate"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"full_attention_interval": 0}, "full_attention_interval"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim"),
        ({"linear_key_head_dim": 0}, "linear_key_head_dim"),
        ({"model_type": "qwen3_5"}, "model_type"),
        ({"intermediate_size": None}, "intermediate_size"),
    ],
    ids=str,
)
def test_what_is_not_there_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_decoder_config({**CONFIG, **change})


def test_experts_always_share_out_one() -> None:
    experts = {**CONFIG, **MIXED, "architectures": ["Qwen3_5MoeForCausalLM"]}
    experts |= {"model_type": "qwen3_5_moe_text", "intermediate_size": None}
    routing = read_decoder_config(experts).routing
    assert routing is not None
    assert routing.normalised
    with pytest.raises(CheckpointError, match="norm_topk_prob"):
        read_decoder_config({**experts, "norm_topk_prob": False})
