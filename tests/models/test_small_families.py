"""What the small dense families read of their configs and files; their maths: `test_parity.py`."""

from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.core.errors import CheckpointError
from slipstream.layers.attention import AttentionSpec
from slipstream.layers.parameters import Share
from slipstream.layers.rope import NO_ROPE
from slipstream.models.catalogue import read_decoder_config
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.decoder import Decoder
from slipstream.models.loading import LoadOptions, load_decoder
from tests.quantized_checkpoints import Format, awq, float8, gptq, packed_tensors, write_quantized

Json = dict[str, Any]
CPU = torch.device("cpu")

# Published config.json files, without what does not concern the network.
PHI4_MINI: Json = {
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "full_attn_mod": 1,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "interpolate_factor": 1,
    "lm_head_bias": False,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "phi3",
    "num_attention_heads": 24,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.75,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "long_factor": [32.0] * 48,
        "short_factor": [1.0] * 48,
        "type": "longrope",
    },
    "rope_theta": 10000.0,
    "sliding_window": 262144,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 200064,
}
SMOLLM3: Json = {
    "architectures": ["SmolLM3ForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "max_position_embeddings": 65536,
    "max_window_layers": 28,
    "mlp_bias": False,
    "model_type": "smollm3",
    "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0] * 9,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 4,
    "pretraining_tp": 2,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 5000000.0,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 128256,
}
SEED_OSS: Json = {
    "architectures": ["SeedOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.1,
    "attention_out_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "max_position_embeddings": 524288,
    "mlp_bias": False,
    "model_type": "seed_oss",
    "num_attention_heads": 80,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "residual_dropout": 0.1,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"rope_type": "default"},
    "rope_theta": 10000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 155136,
}
MINISTRAL3: Json = {
    "architectures": ["Ministral3ForCausalLM"],
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 262144,
    "model_type": "ministral3",
    "num_attention_heads": 32,
    "num_hidden_layers": 34,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 16.0,
        "llama_4_scaling_beta": 0.1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 16384,
        "rope_theta": 1000000.0,
        "rope_type": "yarn",
        "type": "yarn",
    },
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 131072,
}

GRANITE: Json = {
    "architectures": ["GraniteForCausalLM"],
    "attention_bias": False,
    "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12.0,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12800,
    "logits_scaling": 16.0,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "granite",
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000000.0,
    "tie_word_embeddings": True,
    "vocab_size": 49159,
}
OLMO3: Json = {
    "architectures": ["Olmo3ForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 8,
    "max_position_embeddings": 65536,
    "model_type": "olmo3",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "attention_factor": 1.2079441541679836,
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "yarn",
    },
    "rope_theta": 500000,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 100278,
}
EXAONE4: Json = {
    "architectures": ["Exaone4ForCausalLM"],
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 27392,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 16,
    "max_position_embeddings": 131072,
    "model_type": "exaone4",
    "num_attention_heads": 40,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 16.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 1000000,
    "sliding_window": 4096,
    "sliding_window_pattern": "LLLG",
    "tie_word_embeddings": False,
    "vocab_size": 102400,
}
GLM4: Json = {
    "architectures": ["Glm4ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 6144,
    "intermediate_size": 23040,
    "max_position_embeddings": 32768,
    "model_type": "glm4",
    "num_attention_heads": 48,
    "num_hidden_layers": 61,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 151552,
}
STARCODER2: Json = {
    "activation_function": "gelu",
    "architectures": ["Starcoder2ForCausalLM"],
    "embedding_dropout": 0.1,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 3072,
    "intermediate_size": 12288,
    "max_position_embeddings": 16384,
    "mlp_type": "default",
    "model_type": "starcoder2",
    "norm_epsilon": 1e-05,
    "norm_type": "layer_norm",
    "num_attention_heads": 24,
    "num_hidden_layers": 30,
    "num_key_value_heads": 2,
    "residual_dropout": 0.1,
    "rope_theta": 999999.4420358813,
    "sliding_window": 4096,
    "use_bias": True,
    "vocab_size": 49152,
}


@pytest.mark.parametrize(
    ("content", "billions", "context"),
    [
        (PHI4_MINI, 3.84, 4096),  # of 131072 with longrope's other factors
        (SMOLLM3, 3.08, 65536),
        (SEED_OSS, 36.15, 524288),
        (MINISTRAL3, 8.49, 262144),
        (GRANITE, 8.17, 131072),
        (OLMO3, 7.30, 65536),
        (EXAONE4, 32.0, 131072),
        (GLM4, 32.57, 32768),
        (STARCODER2, 3.03, 16384),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_published_configs(content: Json, billions: float, context: int) -> None:
    config = read_decoder_config(content)
    assert config.num_matrix_parameters == pytest.approx(billions * 1e9, rel=3e-3)
    assert config.usual_context == context


def test_layers_without_rope_are_listed_or_counted() -> None:
    config = read_decoder_config(SMOLLM3)
    ropes = [layer.mixer.rope for layer in config.layers if isinstance(layer.mixer, AttentionSpec)]
    assert [rope == NO_ROPE for rope in ropes] == [False, False, False, True] * 9
    counted = {key: value for key, value in SMOLLM3.items() if key != "no_rope_layers"}
    assert read_decoder_config(counted) == config


@pytest.mark.parametrize(
    ("content", "key", "value"),
    [
        (PHI4_MINI, "attention_bias", True),
        (PHI4_MINI, "lm_head_bias", True),
        (PHI4_MINI, "full_attn_mod", 2),
        (SMOLLM3, "use_sliding_window", True),
        (SMOLLM3, "no_rope_layers", [1, 0]),
        (SMOLLM3, "no_rope_layers", [2] * 36),
        (SMOLLM3, "no_rope_layer_interval", 0),
        (SMOLLM3, "layer_types", ["sliding_attention"] * 36),
        (SEED_OSS, "sliding_window", 8),
        (SEED_OSS, "partial_rotary_factor", 0.5),
        (MINISTRAL3, "attention_bias", True),
        (GRANITE, "residual_multiplier", 0.0),
        (OLMO3, "mlp_bias", True),
        (EXAONE4, "layer_types", None),  # a pattern of letters does not tell them
        (EXAONE4, "sliding_window", None),
        (GLM4, "sliding_window", 8),
        (STARCODER2, "norm_type", "rms_norm"),
        (STARCODER2, "hidden_act", "silu"),
        (MINISTRAL3, "rope_parameters", {"rope_theta": 1e6, "rope_type": "default"}),
    ],
)
def test_other_maths_are_refused(content: Json, key: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=rf'^config\.json: "{key}["\.]'):
        read_decoder_config({**content, key: value})


STORED: dict[str, Format] = {
    "gptq": gptq(group=32),
    "awq": awq(group=32),
    "packed": packed_tensors(group=32),
    "fp8": float8(),
}


def load(folder: Path, share: Share) -> Decoder:
    return load_decoder(
        Checkpoint(folder), LoadOptions(torch.float32, CPU, "auto", 64, share=share)
    )


@pytest.mark.parametrize("name", STORED)
def test_stacked_matrices_are_read_as_they_are_stored(
    name: str, tmp_path: Path, plain_torch: None
) -> None:
    """Also for several ranks, each with its rows of query, key and value."""
    meant = write_quantized(tmp_path, STORED[name], fuse=True)
    whole = meant["model.layers.0.self_attn.qkv_proj.weight"]
    ranks = [Share(rank, 2, reduce=lambda x: x, gather=lambda x: x) for rank in range(2)]
    for share in (Share(), *ranks):
        parts = [part.chunk(share.size)[share.rank] for part in whole.split([128, 64, 64])]
        weight = load(tmp_path, share).layers[0].mixer.qkv.weight  # type: ignore[union-attr]
        torch.testing.assert_close(weight.dequantised(), torch.cat(parts), rtol=0, atol=0)
