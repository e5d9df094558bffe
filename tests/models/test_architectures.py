"""Every architecture's config, read as transformers reads it: the networks that it builds tell."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from slipstream.core.errors import CheckpointError
from slipstream.kernels.experts import ClampedGate, Routing, Scores
from slipstream.layers.attention import AttentionSpec
from slipstream.layers.experts import ExpertNames, ExpertsSpec
from slipstream.layers.layer import FeedForwardSpec, LayerSpec
from slipstream.layers.mlp import MLPSpec
from slipstream.layers.norm import LayerNorms
from slipstream.layers.parameters import InvalidSizesError
from slipstream.layers.rope import RopeConfig, rope_table
from slipstream.models.catalogue import ARCHITECTURES, read_decoder_config
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.config_reader import ConfigReader
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.precision import layer_matrices
from tests.models.delta_cases import HYBRID
from tests.models.gemma_cases import GEMMA
from tests.models.latent_cases import LATENT
from tests.models.small_cases import SMALL

Json = dict[str, Any]

TINY: Json = {
    "vocab_size": 32,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}
CLASSES: dict[str, Any] = {
    name: getattr(transformers, name)
    for name in (
        "Glm4MoeForCausalLM",
        "GptOssForCausalLM",
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "MixtralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
    )
}
OF_QWEN: Json = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
# What an architecture needs in addition to `TINY`.
MORE_KEYS: dict[str, Json] = {
    "Glm4MoeForCausalLM": {
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "head_dim": 8,
    },
    "GptOssForCausalLM": {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 6},
    # The size of heads as well: without it transformers cannot make Mixtral's YaRN.
    "MixtralForCausalLM": {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 6},
    "Qwen2MoeForCausalLM": {**OF_QWEN, "shared_expert_intermediate_size": 36},
    "Qwen3MoeForCausalLM": OF_QWEN,
}
LLAMA3: Json = {
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
ORIGINAL: Json = {"original_max_position_embeddings": 16}
YARN: Json = {"factor": 32.0, "beta_fast": 3.0, "beta_slow": 0.5, "truncate": False, **ORIGINAL}
SLIDES = ["full_attention", "sliding_attention", "full_attention"]

ROPES: list[Json] = [
    {},
    {"rope_theta": 500000},
    {"rope_theta": 1e6, "rope_scaling": None},
    {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2}},
    {"rope_theta": 1e6, "rope_scaling": {"rope_type": "linear", "factor": 2.5}},
    {"rope_theta": 1e6, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    {"rope_theta": 1e6, "rope_scaling": {"rope_type": "llama3", "type": "llama3", **LLAMA3}},
    {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
    {"rope_parameters": {"rope_theta": 1e6, "rope_type": "linear", "factor": 2.0}},
    {"rope_parameters": {"rope_theta": 1e6, "rope_type": "llama3", **LLAMA3}},
    {"rope_theta": 5.0, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
    {"rope_scaling": {"rope_theta": 1e6, "rope_type": "default"}, "rope_parameters": None},
    {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", "factor": 4.0, **ORIGINAL}},
    {"rope_parameters": {"rope_type": "yarn", "rope_theta": 150.0, **YARN}},
    {"rope_theta": 1e6, "rope_scaling": {"type": "dynamic", "factor": 4.0}},
]
VARIANTS: dict[str, list[Json]] = {
    "Glm4MoeForCausalLM": [
        {"attention_bias": True},
        {"use_qk_norm": True},
        {"norm_topk_prob": False, "routed_scaling_factor": 2.5},
        {"n_group": 3, "topk_group": 2},
        {"n_shared_experts": 2},
        {"first_k_dense_replace": 0},
        {"first_k_dense_replace": 2},
        {"n_routed_experts": ..., "num_local_experts": 7},
        {"partial_rotary_factor": 0.25},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.0}},
        {"num_attention_heads": 8, "num_key_value_heads": ...},
        {"rms_norm_eps": ..., "max_position_embeddings": ..., "topk_method": "noaux_tc"},
    ],
    "GptOssForCausalLM": [
        {"attention_bias": False},
        {"sliding_window": 8},
        {"layer_types": SLIDES},
        {"sliding_window": None, "layer_types": ["full_attention"] * 3},
        {"swiglu_limit": 2.0, "swiglu_alpha": 1.5},
        {"experts_per_token": 2, "initial_context_length": 4096},
        {"num_local_experts": ..., "num_experts": 5},
        {"head_dim": ..., "num_attention_heads": 8, "num_key_value_heads": ...},
        {"rms_norm_eps": ..., "max_position_embeddings": ...},
    ],
    "LlamaForCausalLM": [
        {"attention_bias": True},
        {"mlp_bias": True},
        {"head_dim": 10},
        {"num_key_value_heads": None},
        {"num_key_value_heads": ...},
        {"tie_word_embeddings": True},
        {"rms_norm_eps": ..., "max_position_embeddings": ..., "hidden_act": ...},
    ],
    "MistralForCausalLM": [
        {"sliding_window": None},
        {"sliding_window": 8},
        {"sliding_window": ...},
        {"head_dim": 10},
        {"head_dim": None},
        {"num_attention_heads": 8, "num_key_value_heads": ..., "head_dim": 4},
        {"rms_norm_eps": ..., "max_position_embeddings": ...},
    ],
    "MixtralForCausalLM": [
        {"sliding_window": None},
        {"sliding_window": 8},
        {"head_dim": None},
        {"num_local_experts": ..., "num_experts": 5},
        {"num_experts": 6},
        {"router_jitter_noise": 0.1, "router_aux_loss_coef": 0.02, "output_router_logits": True},
        {"num_attention_heads": 8, "num_key_value_heads": ..., "head_dim": 4},
        {"rms_norm_eps": ..., "max_position_embeddings": ...},
    ],
    "Qwen2ForCausalLM": [
        {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 1},
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3},
        {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 1},
        {"use_sliding_window": True, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": 8, "layer_types": SLIDES},
        {"layer_types": ["full_attention"] * 3},
        {"attention_bias": False},
        {"head_dim": 10},
        {"rms_norm_eps": ..., "max_position_embeddings": ...},
    ],
    "Qwen2MoeForCausalLM": [
        {"qkv_bias": False},
        {"norm_topk_prob": True},
        {"decoder_sparse_step": 2},
        {"mlp_only_layers": [1]},
        {"mlp_only_layers": [0, 2], "decoder_sparse_step": 1},
        {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 1},
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        {"use_sliding_window": True, "max_window_layers": 3},
        {"use_sliding_window": True, "sliding_window": 8, "layer_types": SLIDES},
        {"num_attention_heads": 16, "num_key_value_heads": ..., "head_dim": 4},
        {"rms_norm_eps": ..., "max_position_embeddings": ...},
    ],
    "Qwen3MoeForCausalLM": [
        {"attention_bias": True},
        {"norm_topk_prob": True},
        {"decoder_sparse_step": 3},
        {"mlp_only_layers": [2]},
        {"head_dim": 10},
        {"num_experts": ..., "num_local_experts": 7},
        {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 1},
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        {"use_sliding_window": True},
        {"num_attention_heads": 16, "num_key_value_heads": ..., "head_dim": 4},
        {"rms_norm_eps": ..., "max_position_embeddings": ...},
    ],
    "Qwen3ForCausalLM": [
        {"attention_bias": True},
        {"head_dim": 10},
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
        {"use_sliding_window": True, "sliding_window": 8, "layer_types": SLIDES},
        {"tie_word_embeddings": True},
        {"num_attention_heads": 32, "num_key_value_heads": ...},
        {"rms_norm_eps": ..., "max_position_embeddings": ...},
    ],
}
CASES = [
    pytest.param(name, change, id=f"{name}-{json.dumps(change, default=lambda _: 'missing')}")
    for name in CLASSES
    for change in [*VARIANTS[name], *ROPES]
]


def tiny(architecture: str, **changes: Any) -> Json:
    """A small config.json; a key changed to ... is left out."""
    model_type = CLASSES[architecture].config_class.model_type
    names = {"architectures": [architecture], "model_type": model_type}
    content = {**TINY, **MORE_KEYS.get(architecture, {}), **names, **changes}
    return {key: value for key, value in content.items() if value is not ...}


def built_by_transformers(content: Json) -> DecoderConfig:
    """The properties of the network that transformers builds from the same config.json."""
    network_class = CLASSES[content["architectures"][0]]
    config = network_class.config_class.from_dict(copy.deepcopy(content))
    with torch.device("meta"):
        network = network_class(config)
    return DecoderConfig(
        architecture=network_class.__name__,
        vocab_size=network.model.embed_tokens.weight.shape[0],
        hidden_size=network.model.embed_tokens.weight.shape[1],
        layers=tuple(layer_of(layer, config) for layer in network.model.layers),
        rms_norm_eps=network.model.norm.variance_epsilon,
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=network.lm_head.weight is network.model.embed_tokens.weight
        or config.tie_word_embeddings,
        dtype=config.dtype or torch.float32,
    )


def layer_of(layer: Any, config: Any) -> LayerSpec:
    """The properties of one layer of transformers."""
    attention = layer.self_attn
    head_dim = attention.head_dim
    mixer = AttentionSpec(
        num_heads=attention.q_proj.weight.shape[0] // head_dim,
        num_kv_heads=attention.k_proj.weight.shape[0] // head_dim,
        head_dim=head_dim,
        rope=RopeConfig(theta=1.0),  # compared by its table
        window=window_of(layer, config),
        qkv_bias=all_alike(attention.q_proj, attention.k_proj, attention.v_proj),
        output_bias=all_alike(attention.o_proj),
        qk_norm=hasattr(attention, "q_norm"),
        sinks=hasattr(attention, "sinks"),
    )
    norms = LayerNorms(layer.input_layernorm.variance_epsilon)
    return LayerSpec(mixer, feed_forward_of(layer.mlp), norms)


def feed_forward_of(mlp: Any) -> FeedForwardSpec:
    if not hasattr(mlp, "experts"):
        bias = all_alike(mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        return MLPSpec(mlp.up_proj.weight.shape[0], bias)
    clamped = hasattr(mlp, "router")  # as gpt-oss alone has it
    router = mlp.router if clamped else mlp.gate
    experts, one, other = mlp.experts.down_proj.shape
    corrected = hasattr(router, "e_score_correction_bias")
    scores = Scores.CHOSEN_SOFTMAX if clamped else Scores.SIGMOID if corrected else Scores.SOFTMAX
    routing = Routing(
        num_experts=experts,
        num_chosen=router.top_k,
        scores=scores,
        normalised=not clamped and getattr(router, "norm_topk_prob", True),  # Mixtral: always
        scale=getattr(router, "routed_scaling_factor", 1.0),
        num_groups=getattr(router, "num_group", 1),
        kept_groups=getattr(router, "topk_group", 1),
    )
    shared = getattr(mlp, "shared_expert", None) or getattr(mlp, "shared_experts", None)
    return ExpertsSpec(
        routing=routing,
        intermediate_size=one if clamped else other,
        router_bias=hasattr(router, "bias"),
        expert_bias=hasattr(mlp.experts, "down_proj_bias"),
        corrected=corrected,
        clamp=ClampedGate(mlp.experts.limit, mlp.experts.alpha) if clamped else None,
        shared_size=None if shared is None else shared.up_proj.weight.shape[0],
        shared_gate=hasattr(mlp, "shared_expert_gate"),
    )


def without_names(config: DecoderConfig) -> DecoderConfig:
    """The properties that transformers' modules do not show: rotations, and tensor names."""
    layers = tuple(
        replace(layer, feed_forward=replace(layer.feed_forward, names=ExpertNames()))
        if isinstance(layer.feed_forward, ExpertsSpec)
        else layer
        for layer in config.layers
    )
    return replace(config, layers=layers).with_fields({"rope": RopeConfig(theta=1.0)})


def window_of(layer: Any, config: Any) -> int | None:
    if config.model_type in ("mistral", "mixtral", "qwen3_moe"):
        return config.sliding_window  # of the whole model
    return getattr(layer.self_attn, "sliding_window", None)


def all_alike(*projections: Any) -> bool:
    (has_bias,) = {projection.bias is not None for projection in projections}
    return has_bias


def rotations(content: Json, size: int) -> torch.Tensor:
    """[positions, size] of transformers: cosines, then sines."""
    network_class = CLASSES[content["architectures"][0]]
    config = network_class.config_class.from_dict(copy.deepcopy(content))
    rotary = type(network_class(config).model.rotary_emb)(config)
    cos, sin = rotary(torch.zeros(1), torch.arange(50)[None])
    half = size // 2
    return torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1)


@pytest.mark.parametrize(("architecture", "change"), CASES)
def test_the_network_is_the_one_that_transformers_builds(architecture: str, change: Json) -> None:
    content = tiny(architecture, **change)
    found = read_decoder_config(content)
    assert without_names(found) == built_by_transformers(content)
    table = rope_table(found.head_dim, found.rope, 50, torch.device("cpu"))
    torch.testing.assert_close(table, rotations(content, table.shape[1]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("use_diff", [True, False])
@pytest.mark.parametrize("architecture", CLASSES)
def test_what_transformers_saves_can_be_read(architecture: str, use_diff: bool) -> None:
    content = tiny(architecture, dtype="bfloat16", rope_theta=1e6)
    config = CLASSES[architecture].config_class.from_dict(copy.deepcopy(content))
    saved = json.loads(config.to_json_string(use_diff=use_diff))
    assert read_decoder_config(saved) == read_decoder_config(content)


@pytest.mark.parametrize("architecture", CLASSES)
def test_old_and_new_spellings_read_the_same(architecture: str) -> None:
    old = tiny(
        architecture,
        torch_dtype="bfloat16",
        rope_theta=1e6,
        rope_scaling={"type": "llama3", **LLAMA3},
    )
    new = tiny(
        architecture,
        dtype="bfloat16",
        rope_parameters={"rope_type": "llama3", "rope_theta": 1e6, **LLAMA3},
        layer_types=None,
    )
    assert read_decoder_config(old) == read_decoder_config(new)


def test_llama3_scaling_falls_back_on_the_context_length() -> None:
    scaling = {"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": None}
    config = read_decoder_config(tiny("LlamaForCausalLM", rope_scaling=scaling))
    assert config.rope.original_max_position_embeddings == 64


# What is refused

UNSUPPORTED: list[tuple[str, Any]] = [
    ("hidden_act", "gelu"),
    ("model_type", "other"),
    ("is_encoder_decoder", True),
    ("rope_scaling", {"type": "yarn", "factor": 4.0, "ramp": 2.0, **ORIGINAL}),
    ("rope_scaling", {"type": "yarn"}),
    ("rope_scaling", {"type": "mrope", "factor": 4.0}),
    ("rope_scaling", {"type": "longrope", "factor": 4.0}),
    ("rope_parameters", {"rope_type": "default", "mrope_section": [1, 2]}),
    ("rope_parameters", {"full_attention": {"rope_type": "default"}}),
    ("rope_scaling", {"type": "linear"}),
    ("rope_scaling", {"type": "llama3", "factor": 8.0}),
    ("rope_scaling", {"rope_type": "linear", "type": "llama3", "factor": 8.0}),
    ("dtype", "float8_e4m3fn"),
    ("torch_dtype", "int8"),
    ("quantization_config", {"quant_method": "awq"}),
    ("attn_logit_softcapping", 50.0),
    ("final_logit_softcapping", 30.0),
    ("logit_scale", 0.0625),
    ("logits_scaling", 8.0),
    ("embedding_multiplier", 12.0),
    ("residual_multiplier", 0.22),
    ("query_pre_attn_scalar", 256),
    ("num_shared_experts", 1),
    ("attention_sinks", True),
    ("per_layer_config", {"0": {"num_key_value_heads": 1}}),
    ("layer_types", ["linear_attention"] * 3),
    ("layer_types", ["full_attention"] * 2),
    ("layer_types", "full_attention"),
]


# Keys of GLM-4.5 only; Qwen3's mixtures may have them for their norms.
OF_GLM: list[tuple[str, Any]] = [
    ("partial_rotary_factor", 0.5),
    ("rope_parameters", {"rope_type": "yarn", "factor": 4.0, "partial_rotary_factor": 0.5}),
    ("rope_parameters", {"rope_type": "default", "partial_rotary_factor": 0.5}),
    ("use_qk_norm", True),
]


@pytest.mark.parametrize(
    ("architecture", "key", "value"),
    [
        (name, key, value)
        for name in CLASSES
        for key, value in [*UNSUPPORTED, *(OF_GLM if name != "Glm4MoeForCausalLM" else [])]
        if (name, key) != ("Qwen3MoeForCausalLM", "use_qk_norm")
    ],
)
def test_other_maths_are_refused_by_name(architecture: str, key: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=rf'^config\.json: "{key}["\.]'):
        read_decoder_config(tiny(architecture, **{key: value}))


@pytest.mark.parametrize(
    ("architecture", "key", "changes"),
    [
        ("Glm4MoeForCausalLM", "scoring_func", {"scoring_func": "softmax"}),
        ("Glm4MoeForCausalLM", "topk_method", {"topk_method": "greedy"}),
        ("Glm4MoeForCausalLM", "sliding_window", {"sliding_window": 8}),
        ("Glm4MoeForCausalLM", "n_group", {"n_group": 4}),
        ("Glm4MoeForCausalLM", "n_group", {"n_group": 6}),
        ("Glm4MoeForCausalLM", "topk_group", {"n_group": 2, "topk_group": 3}),
        ("Glm4MoeForCausalLM", "num_experts_per_tok", {"n_group": 3, "num_experts_per_tok": 3}),
        ("Glm4MoeForCausalLM", "partial_rotary_factor", {"partial_rotary_factor": 0.4}),
        ("Glm4MoeForCausalLM", "routed_scaling_factor", {"routed_scaling_factor": float("nan")}),
        ("Glm4MoeForCausalLM", "routed_scaling_factor", {"routed_scaling_factor": 0.0}),
        ("GptOssForCausalLM", "swiglu_alpha", {"swiglu_alpha": float("nan")}),
        ("GptOssForCausalLM", "swiglu_limit", {"swiglu_limit": 0.0}),
        ("GptOssForCausalLM", "sliding_window", {"sliding_window": None}),
        ("GptOssForCausalLM", "num_experts_per_tok", {"experts_per_token": 3}),
        ("LlamaForCausalLM", "sliding_window", {"sliding_window": 8}),
        ("LlamaForCausalLM", "layer_types", {"layer_types": SLIDES}),
        ("LlamaForCausalLM", "num_experts", {"num_experts": 8}),
        ("LlamaForCausalLM", "num_local_experts", {"num_local_experts": 8}),
        ("MistralForCausalLM", "attention_bias", {"attention_bias": True}),
        ("MistralForCausalLM", "mlp_bias", {"mlp_bias": True}),
        ("MistralForCausalLM", "layer_types", {"sliding_window": 8, "layer_types": SLIDES}),
        ("MistralForCausalLM", "layer_types", {"layer_types": ["full_attention"] * 3}),
        ("MixtralForCausalLM", "attention_bias", {"attention_bias": True}),
        ("MixtralForCausalLM", "mlp_bias", {"mlp_bias": True}),
        ("MixtralForCausalLM", "num_experts", {"num_experts": 5}),
        ("MixtralForCausalLM", "num_local_experts", {"num_local_experts": ...}),
        ("MixtralForCausalLM", "num_experts_per_tok", {"num_experts_per_tok": 7}),
        ("MixtralForCausalLM", "norm_topk_prob", {"norm_topk_prob": True}),
        ("Glm4MoeForCausalLM", "mlp_layer_types", {"mlp_layer_types": [[]] * 3}),
        ("MixtralForCausalLM", "shared_expert_gate", {"shared_expert_gate": True}),
        ("Qwen2ForCausalLM", "mlp_bias", {"mlp_bias": True}),
        (
            "Qwen2MoeForCausalLM",
            "shared_expert_intermediate_size",
            {"shared_expert_intermediate_size": 0},
        ),
        ("Qwen2MoeForCausalLM", "mlp_bias", {"mlp_bias": True}),
        ("Qwen2MoeForCausalLM", "use_mrope", {"use_mrope": True}),
        ("Qwen3MoeForCausalLM", "num_experts", {"num_experts": ...}),
        ("Qwen3MoeForCausalLM", "num_experts", {"num_experts": 0}),
        ("Qwen3MoeForCausalLM", "moe_intermediate_size", {"moe_intermediate_size": 0}),
        ("Qwen3MoeForCausalLM", "decoder_sparse_step", {"decoder_sparse_step": 0}),
        ("Qwen3MoeForCausalLM", "mlp_only_layers", {"mlp_only_layers": [True]}),
        ("Qwen3MoeForCausalLM", "scoring_func", {"scoring_func": "sigmoid"}),
        ("Qwen3MoeForCausalLM", "n_shared_experts", {"n_shared_experts": 1}),
        ("Qwen3MoeForCausalLM", "mlp_bias", {"mlp_bias": True}),
        ("Qwen3MoeForCausalLM", "layer_types", {"layer_types": SLIDES}),
        ("Qwen2ForCausalLM", "use_mrope", {"use_mrope": True}),
        ("Qwen2ForCausalLM", "layer_types", {"sliding_window": 8, "layer_types": SLIDES}),
        (
            "Qwen3ForCausalLM",
            "layer_types",
            {"use_sliding_window": True, "sliding_window": None, "layer_types": SLIDES},
        ),
        ("Qwen3ForCausalLM", "mlp_bias", {"mlp_bias": True}),
        ("Qwen3ForCausalLM", "use_sliding_window", {"use_sliding_window": "yes"}),
    ],
)
def test_what_one_architecture_has_not(architecture: str, key: str, changes: Json) -> None:
    with pytest.raises(CheckpointError, match=f'"{key}"'):
        read_decoder_config(tiny(architecture, **changes))


@pytest.mark.parametrize(
    "key",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
    ],
)
@pytest.mark.parametrize("architecture", CLASSES)
def test_sizes_are_needed_and_sane(architecture: str, key: str) -> None:
    with pytest.raises(CheckpointError, match=f'"{key}" is missing'):
        read_decoder_config(tiny(architecture, **{key: ...}))
    with pytest.raises(CheckpointError, match=f'"{key}" must be an integer'):
        read_decoder_config(tiny(architecture, **{key: "24"}))
    for value in (0, -4):
        with pytest.raises(CheckpointError, match="must be"):
            read_decoder_config(tiny(architecture, **{key: value}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 3}, r'"num_attention_heads" \(4\) must be a multiple of'),
        ({"num_key_value_heads": 0}, '"num_key_value_heads" must be above 0'),
        ({"hidden_size": 26}, r'"hidden_size" \(26\) must be a multiple of num_attention_heads'),
        ({"head_dim": 5}, '"head_dim" must be even'),
        ({"head_dim": 0}, '"head_dim" must be above 0'),
        ({"rms_norm_eps": 0.0}, '"rms_norm_eps" must be above 0'),
        ({"rms_norm_eps": float("nan")}, '"rms_norm_eps" must be above 0'),
        ({"rope_theta": float("inf")}, '"rope_theta" must be above 0'),
        ({"rope_theta": -1.0}, '"rope_theta" must be above 0'),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, '"factor" must be above 0'),
        (
            {"rope_scaling": {"type": "llama3", **LLAMA3, "high_freq_factor": 1.0}},
            '"high_freq_factor" .* must be above "low_freq_factor"',
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_slow": 40.0}},
            '"beta_fast" .* must not be below "beta_slow"',
        ),
        (
            {"rope_theta": 1.0, "rope_scaling": {"type": "yarn", "factor": 4.0}},
            '"rope_theta" must not be 1',
        ),
        (
            {
                "rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "default"},
            },
            '"rope_scaling" and "rope_parameters" contradict each other',
        ),
        ({"architectures": None}, '"architectures" must name one architecture'),
        ({"architectures": ["a", "b"]}, '"architectures" must name one architecture'),
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "names GPT2LMHeadModel; supported are .*Glm4Moe.*, GptOss.*, MiMo.*, Qwen2.*, Qwen3",
        ),
        ({"architectures": [["x"]]}, '"architectures"'),
        ({"architectures": 7}, '"architectures" must be a list, not 7'),
        ({"layer_types": [{}] * 3}, '"layer_types" holds {}, but only'),
        ({"rms_norm_eps": 10**400}, '"rms_norm_eps" must be a number of ordinary size, not 1000'),
    ],
)
def test_contradictions(changes: Json, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        read_decoder_config(tiny("LlamaForCausalLM", **changes))
    assert str(caught.value).startswith("config.json: ")


def test_windows_are_positive() -> None:
    with pytest.raises(CheckpointError, match='"sliding_window" must be above 0'):
        read_decoder_config(tiny("MistralForCausalLM", sliding_window=0))


def test_a_decoder_has_layers() -> None:
    config = read_decoder_config(tiny("LlamaForCausalLM"))
    with pytest.raises(InvalidSizesError, match='"num_hidden_layers" must be above 0'):
        replace(config, layers=())


@pytest.mark.parametrize(
    ("key", "most"), [("num_hidden_layers", 4096), ("max_position_embeddings", 1 << 24)]
)
def test_a_config_of_absurdly_many_layers_or_positions_is_refused_at_once(
    key: str, most: int
) -> None:
    with pytest.raises(CheckpointError, match=f'"{key}" is 1000000000, but at most {most} work'):
        read_decoder_config(tiny("LlamaForCausalLM", **{key: 1_000_000_000}))


@pytest.mark.parametrize(
    ("architecture", "key", "value", "message"),
    [
        ("MixtralForCausalLM", "num_local_experts", 10**9, "is 1000000000, but at most 65536 work"),
        ("MixtralForCausalLM", "num_local_experts", 0, "must be above 0"),
        ("GptOssForCausalLM", "num_local_experts", -3, "must be above 0, not -3"),
        ("Glm4MoeForCausalLM", "n_routed_experts", 10**9, "is 1000000000, but at most 65536"),
        ("Qwen3MoeForCausalLM", "num_experts", 0, "must be above 0"),
    ],
)
def test_numbers_of_experts_are_refused_at_once_by_the_key_that_the_config_has(
    architecture: str, key: str, value: int, message: str
) -> None:
    with pytest.raises(CheckpointError, match=f'"{key}" {message}'):
        read_decoder_config(tiny(architecture, **{key: value}))


def test_matrices_with_more_bytes_than_torch_counts_are_refused() -> None:
    config = read_decoder_config(
        tiny("LlamaForCausalLM", num_attention_heads=10**9, head_dim=10**9)
    )
    with pytest.raises(CheckpointError, match=r"q_proj\.weight is part of .* x 24 numbers"):
        list(layer_matrices(config, torch.float32, None))


# Checkpoints


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_without_a_dtype_the_weights_tell(tmp_path: Path, stored: torch.dtype) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny("LlamaForCausalLM")))
    assert read_decoder_config(Checkpoint(tmp_path)).dtype == torch.float32  # no weights yet
    save_file(
        {"a": torch.ones(8, dtype=stored), "b": torch.ones(1)}, tmp_path / "model.safetensors"
    )
    assert read_decoder_config(Checkpoint(tmp_path)).dtype == stored


def test_messages_name_the_file(tmp_path: Path) -> None:
    content = tiny("LlamaForCausalLM", num_key_value_heads=3)
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError) as caught:
        read_decoder_config(Checkpoint(tmp_path))
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: ")


def test_the_catalogue_is_complete() -> None:
    # transformers has no class for MiMo, which is a Qwen2 of another name.
    compared = {f"{case.architecture}ForCausalLM" for case in (*SMALL, *HYBRID, *GEMMA, *LATENT)}
    wrapped = {name for name in ARCHITECTURES if name.endswith("ForConditionalGeneration")}
    assert {*ARCHITECTURES} - wrapped == {*CLASSES, *compared, "MiMoForCausalLM"}
    own = {ARCHITECTURES[name] for name in {*ARCHITECTURES} - wrapped}
    # Those of one wrapper are of several families.
    own |= {ARCHITECTURES[f"{name}ForConditionalGeneration"] for name in ("InternVL", "Mistral3")}
    own |= {
        ARCHITECTURES[name] for name in wrapped if name.startswith("Qwen")
    }  # see test_images.py
    assert {ARCHITECTURES[name] for name in wrapped} <= own


@pytest.mark.parametrize("change", [*VARIANTS["Qwen2ForCausalLM"], *ROPES[:6]])
def test_mimo_is_a_qwen2(change: Json) -> None:
    change = {key: value for key, value in change.items() if value is not ...}
    qwen = tiny("Qwen2ForCausalLM", **change)
    mimo = {**qwen, "architectures": ["MiMoForCausalLM"], "model_type": "mimo"}
    found = read_decoder_config({**mimo, "num_nextn_predict_layers": 1})
    assert replace(found, architecture="Qwen2ForCausalLM") == read_decoder_config(qwen)
    for key, value in (("model_type", "qwen2"), ("mlp_bias", True), ("use_mrope", True)):
        with pytest.raises(CheckpointError, match=f'"{key}"'):
            read_decoder_config({**mimo, key: value})


@pytest.mark.parametrize("key", ["num_nextn_predict_layers", "mtp_num_hidden_layers"])
@pytest.mark.parametrize("architecture", CLASSES)
def test_modules_beside_a_model_do_not_change_it(architecture: str, key: str) -> None:
    content = tiny(architecture)
    assert read_decoder_config({**content, key: 1}) == read_decoder_config(content)


# Published checkpoints: their whole config.json

LLAMA31_8B: Json = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3",
    "use_cache": True,
    "vocab_size": 128256,
}
LLAMA32_1B: Json = {
    **LLAMA31_8B,
    "head_dim": 64,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "rope_scaling": {**LLAMA31_8B["rope_scaling"], "factor": 32.0},
    "tie_word_embeddings": True,
}
QWEN25_7B: Json = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.1",
    "use_cache": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
QWEN25_05B: Json = {
    **QWEN25_7B,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_window_layers": 21,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}
QWEN3_8B: Json = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_06B: Json = {
    **QWEN3_8B,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_window_layers": 28,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "tie_word_embeddings": True,
}
# MiMo-7B's config; the code beside its weights is not run.
MIMO_7B: Json = {
    **QWEN25_7B,
    "architectures": ["MiMoForCausalLM"],
    "attention_bias": True,
    "auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"},
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_window_layers": 36,
    "model_type": "mimo",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-05,
    "rope_theta": 640000,
    "sliding_window": 32768,
    "vocab_size": 151680,
}
MISTRAL_7B: Json = {
    "architectures": ["MistralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.0.dev0",
    "use_cache": True,
    "vocab_size": 32768,
}
MISTRAL_NEMO: Json = {
    **MISTRAL_7B,
    "head_dim": 128,
    "hidden_size": 5120,
    "max_position_embeddings": 131072,
    "num_hidden_layers": 40,
    "vocab_size": 131072,
}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (LLAMA31_8B, (4096, 14336, 32, 32, 8, 128, 128256, 500000.0, "llama3", 8.0, False)),
        (LLAMA32_1B, (2048, 8192, 16, 32, 8, 64, 128256, 500000.0, "llama3", 32.0, True)),
        (QWEN25_05B, (896, 4864, 24, 14, 2, 64, 151936, 1e6, "default", 1.0, True)),
        (QWEN25_7B, (3584, 18944, 28, 28, 4, 128, 152064, 1e6, "default", 1.0, False)),
        (QWEN3_06B, (1024, 3072, 28, 16, 8, 128, 151936, 1e6, "default", 1.0, True)),
        (QWEN3_8B, (4096, 12288, 36, 32, 8, 128, 151936, 1e6, "default", 1.0, False)),
        (MIMO_7B, (4096, 11008, 36, 32, 8, 128, 151680, 640000.0, "default", 1.0, False)),
        (MISTRAL_7B, (4096, 14336, 32, 32, 8, 128, 32768, 1e6, "default", 1.0, False)),
        (MISTRAL_NEMO, (5120, 14336, 40, 32, 8, 128, 131072, 1e6, "default", 1.0, False)),
    ],
)
def test_published_configs(content: Json, expected: tuple[Any, ...]) -> None:
    config = read_decoder_config(content)
    assert (
        config.hidden_size,
        config.intermediate_size,
        config.num_layers,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.vocab_size,
        config.rope.theta,
        config.rope.kind,
        config.rope.factor,
        config.tie_word_embeddings,
    ) == expected
    name = content["architectures"][0]
    has_bias = name in ("Qwen2ForCausalLM", "MiMoForCausalLM")
    attention = config.attention
    assert (attention.qkv_bias, attention.output_bias) == (has_bias, False)
    assert attention.qk_norm == (name == "Qwen3ForCausalLM")
    assert set(config.sliding_windows) == {None}
    assert config.dtype == torch.bfloat16


GPT_OSS_120B: Json = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "num_local_experts": 128,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "transformers_version": "4.55.0.dev0",
    "use_cache": True,
    "vocab_size": 201088,
}
QWEN3_30B_A3B: Json = {
    **QWEN3_8B,
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}
GLM_45_AIR: Json = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": [151329, 151336, 151338],
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 10944,
    "max_position_embeddings": 131072,
    "model_type": "glm4_moe",
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 46,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 151329,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.54.0",
    "use_cache": True,
    "use_qk_norm": False,
    "vocab_size": 151552,
}


@pytest.mark.parametrize(
    ("content", "total", "active", "windows", "intermediate_size"),
    [
        (GPT_OSS_120B, 116.8, 5.13, {128, None}, 4 * 2880),
        (QWEN3_30B_A3B, 30.5, 3.04, {None}, 6144),  # which its file has too
        (GLM_45_AIR, 106.9, 12.8, {None}, 10944),  # of the first layer
    ],
)
def test_published_mixtures(
    content: Json, total: float, active: float, windows: set[int | None], intermediate_size: int
) -> None:
    config = read_decoder_config(content)
    assert config.num_matrix_parameters == pytest.approx(total * 1e9, rel=5e-3)
    assert config.num_active_parameters == pytest.approx(active * 1e9, rel=5e-3)
    assert set(config.sliding_windows) == windows
    assert config.intermediate_size == intermediate_size


@pytest.mark.parametrize("content", [LLAMA31_8B, QWEN25_7B, QWEN3_8B, MISTRAL_7B])
def test_published_configs_saved_anew(content: Json) -> None:
    network_class = CLASSES[content["architectures"][0]]
    config = network_class.config_class.from_dict(copy.deepcopy(content))
    saved = json.loads(config.to_json_string())
    assert "rope_parameters" in saved
    assert read_decoder_config(saved) == read_decoder_config(content)


def test_a_drafter_may_take_keys_of_its_own_before() -> None:
    from slipstream.models import catalogue

    reader = ConfigReader(tiny("LlamaForCausalLM", pard_token=5), "config.json")
    assert reader.take("pard_token", int) == 5
    catalogue.decoder_config(reader)
    reader.finish()
