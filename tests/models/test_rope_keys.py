"""Angles as transformers has them, from the keys of a config.json."""

import copy
from typing import Any

import pytest
import torch
import transformers

from slipstream.core.errors import CheckpointError
from slipstream.layers.attention import AttentionSpec
from slipstream.layers.parameters import InvalidSizesError
from slipstream.layers.rope import RopeConfig, rope_table
from slipstream.models.config_reader import ConfigReader
from slipstream.models.rope_keys import read_rope

Json = dict[str, Any]
POSITIONS = 300
ORIGINAL = "original_max_position_embeddings"
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
GPT_OSS = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def yarn(theta: float, original: int, **others: Any) -> Json:
    return {
        "rope_type": "yarn",
        "rope_theta": theta,
        "original_max_position_embeddings": original,
        **others,
    }


YARNS = {
    "gpt-oss": ("gpt_oss", 64, GPT_OSS),
    "qwen3": ("qwen3", 128, yarn(1e6, 32768, factor=4.0)),
    "deepseek": ("llama", 64, yarn(1e4, 4096, factor=40, mscale=0.7, mscale_all_dim=1.0)),
    "one mscale": ("llama", 64, yarn(1e4, 4096, factor=40.0, mscale=0.7)),
    "finetuned": ("llama", 16, yarn(1e4, 4096, factor=16.0, finetuned=True)),
    "own weight": ("mistral", 16, yarn(500.0, 64, factor=2.0, attention_factor=1.25)),
    "null factor": ("qwen2", 32, yarn(1e4, 1024, factor=None, beta_fast=8)),
    "not stretched": ("llama", 32, yarn(1e4, 2048, factor=1.0)),
    "all above": ("llama", 12, yarn(1e4, 7, factor=3.0)),
    "one pair": ("llama", 8, yarn(1e4, 512, factor=3.0, beta_fast=2.0, beta_slow=2.0)),
}


def read(content: Json, rotated: float | None = None) -> RopeConfig:
    reader = ConfigReader(copy.deepcopy(content), "config.json")
    return read_rope(reader, 131072, 10000.0, rotated)


def of_transformers(
    model_type: str, head_dim: int, content: Json, length: int = POSITIONS
) -> torch.Tensor:
    """[positions, 2, D / 2] cosines and sines."""
    config = transformers.AutoConfig.for_model(
        model_type,
        hidden_size=32,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=head_dim,
        num_hidden_layers=1,
        vocab_size=8,
        **{"max_position_embeddings": 131072, **copy.deepcopy(content)},
    )
    with torch.device("meta"):
        network = transformers.AutoModel.from_config(config)
    cos, sin = type(network.rotary_emb)(config)(torch.zeros(1), torch.arange(length)[None])
    if model_type != "gpt_oss":  # which has each angle once
        cos, sin = cos[..., : cos.shape[-1] // 2], sin[..., : sin.shape[-1] // 2]
    return torch.stack((cos[0], sin[0]), 1)


@pytest.mark.parametrize("nested", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("name", YARNS)
def test_yarn_is_that_of_transformers(name: str, nested: str) -> None:
    model_type, head_dim, keys = YARNS[name]
    table = rope_table(head_dim, read({nested: keys}), POSITIONS, torch.device("cpu"))
    expected = of_transformers(model_type, head_dim, {"rope_parameters": keys})
    # At 300 turns a difference of the last bit of a frequency is 2e-5.
    near, far = table[:8].view(8, 2, -1), table.view(POSITIONS, 2, -1)
    torch.testing.assert_close(near, expected[:8], rtol=0, atol=1e-6)
    torch.testing.assert_close(far, expected, rtol=0, atol=4e-5)


LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.5, 2.0, 3],
    "long_factor": [1.0, 4.0, 9.0, 32.0],
    "original_max_position_embeddings": 250,
}
BY_LENGTH: dict[str, Json] = {
    "dynamic": {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}},
    "long": {"rope_parameters": LONG},
    "long by factor": {"rope_parameters": {**LONG, "factor": 4.0, "rope_theta": 500.0}},
    "long by weight": {"rope_parameters": {**LONG, "attention_factor": 1.25}},
}


@pytest.mark.parametrize("length", [200, 250, 300])
@pytest.mark.parametrize("name", BY_LENGTH)
def test_angles_by_length_are_those_of_transformers(name: str, length: int) -> None:
    content = {**BY_LENGTH[name], "max_position_embeddings": 250 if name == "dynamic" else 131072}
    reader = ConfigReader(copy.deepcopy(content), "config.json")
    rope = read_rope(reader, content["max_position_embeddings"], 10000.0)
    table = rope_table(8, rope, length, torch.device("cpu"))
    expected = of_transformers("llama", 8, content, length)
    torch.testing.assert_close(table.view(length, 2, -1), expected, rtol=0, atol=4e-5)


def test_older_spellings_of_longrope() -> None:
    older = {key: value for key, value in LONG.items() if key not in ("rope_type", ORIGINAL)}
    content = {"rope_scaling": {**older, "type": "su"}, ORIGINAL: 250, "rope_theta": 1e4}
    assert read(content) == read({"rope_parameters": LONG})


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ({"rope_type": "longrope"}, '"rope_parameters.short_factor" is missing'),
        ({**LONG, "long_factor": ["a"]}, 'long_factor" must be a list of numbers'),
        ({**LONG, "short_factor": [1.0, 0.0, 1.0, 1.0]}, "short_factor"),
        (yarn(1e4, 64, factor=2.0, beta_fast=1e308), r"from 1e-09 to 1e\+09"),
        (yarn(1e4, 64, factor=2.0, beta_slow=1e-320), r"from 1e-09 to 1e\+09"),
        ({"rope_type": "dynamic"}, '"rope_parameters.factor" is missing'),
        ({"rope_type": "dynamic", "factor": 2.0, "alpha": 9}, 'alpha" is unknown'),
        (
            {"rope_type": "mrope"},
            "only default, linear, dynamic, llama3, yarn, proportional and longrope are",
        ),
    ],
    ids=str,
)
def test_wrong_keys_are_refused_by_name(content: Json, error: str) -> None:
    with pytest.raises((CheckpointError, InvalidSizesError), match=error):
        read({"rope_parameters": content})


def test_every_pair_has_its_factor() -> None:
    with pytest.raises(InvalidSizesError, match='"short_factor" has 4 numbers, but heads have 8'):
        AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=16, rope=read({"rope_scaling": LONG}))


PARTS: list[tuple[int, Json]] = [
    (16, {"partial_rotary_factor": 0.25}),
    (16, {}),
    (24, {"rope_parameters": {"rope_theta": 300.0, "partial_rotary_factor": 0.75}}),
    (16, {"rope_scaling": {"type": "linear", "factor": 2.0}, "partial_rotary_factor": 1.0}),
    (24, {"partial_rotary_factor": 0.5, "rope_parameters": {**GPT_OSS, "factor": 4.0}}),
]


@pytest.mark.parametrize(("head_dim", "content"), PARTS, ids=str)
def test_partial_rope_is_that_of_transformers(head_dim: int, content: Json) -> None:
    rope = read(content, rotated=0.5)
    expected = of_transformers("glm4_moe", head_dim, content)
    assert rope.rotary_dim(head_dim) == 2 * expected.shape[-1]
    table = rope_table(head_dim, rope, POSITIONS, torch.device("cpu"))
    torch.testing.assert_close(table.view(POSITIONS, 2, -1), expected, rtol=0, atol=4e-5)


@pytest.mark.parametrize("nested", [{}, {"rope_type": "llama3", "factor": 8.0, **LLAMA3}])
def test_a_family_that_rotates_whole_heads_refuses_less(nested: Json) -> None:
    assert read({"partial_rotary_factor": 1.0, "rope_parameters": nested}).rotated == 1.0
    less = {"partial_rotary_factor": 0.5}
    for content in ({**less, "rope_parameters": nested}, {"rope_parameters": {**nested, **less}}):
        with pytest.raises(CheckpointError, match=r'partial_rotary_factor" is 0\.5'):
            read(content)


@pytest.mark.parametrize("rotated", [0.1, 0.3])
def test_pairs_are_whole(rotated: float) -> None:
    with pytest.raises(InvalidSizesError, match=r'"partial_rotary_factor" \(0.\d\) must leave'):
        AttentionSpec(
            num_heads=2, num_kv_heads=1, head_dim=10, rope=RopeConfig(1e4, rotated=rotated)
        )


@pytest.mark.parametrize("rotated", [0.0, -0.5, 1.5])
def test_a_share_is_between_nothing_and_all(rotated: float) -> None:
    with pytest.raises(InvalidSizesError, match="partial_rotary_factor"):
        RopeConfig(1e4, rotated=rotated)
