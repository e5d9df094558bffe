"""Twins: random weights whose first layers are a draft that gets accepted."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import LLM, CheckpointError, SamplingParams
from slipstream.engine.prompts import TokensPrompt
from slipstream.kernels.reference import REFERENCE
from slipstream.kernels.reference.experts import experts, route
from slipstream.kernels.table import ExpertsParts
from slipstream.layers.parameters import Part
from slipstream.models import twin
from slipstream.models.catalogue import read_decoder_config
from slipstream.models.decoder import Decoder
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.precision import in_precision
from slipstream.models.twin import FIRST_LAYER_GAIN, LATE_SHARE, TwinSource
from tests.checkpoints import QWEN3

CPU = torch.device("cpu")
TARGET = {**QWEN3, "hidden_size": 64, "vocab_size": 192, "num_hidden_layers": 5}
LLAMA: dict[str, Any] = {
    **{key: value for key, value in TARGET.items() if key != "attention_bias"},
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "tie_word_embeddings": False,
}
EXPERTS: dict[str, Any] = {
    **{key: value for key, value in TARGET.items() if key != "eos_token_id"},
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "num_local_experts": 16,
    "num_experts_per_tok": 3,
    "intermediate_size": 48,
    "tie_word_embeddings": False,
}
SHARED: dict[str, Any] = {
    **LLAMA,
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "n_routed_experts": 12,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 2,
}
STACKED = {**LLAMA, "architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}
BEHIND = {**LLAMA, "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}
SCALED = {
    **LLAMA,
    "architectures": ["GraniteForCausalLM"],
    "model_type": "granite",
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.1,
    "logits_scaling": 8.0,
}
PROMPTS = [
    TokensPrompt(prompt_token_ids=[(i * i + 7 * j) % 190 for i in range(20)]) for j in range(3)
]


def write(folder: Path, config: dict[str, Any]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def make(target: str, draft: str | None, **options: Any) -> LLM:
    config = None if draft is None else {"model": draft, "num_speculative_tokens": 4}
    return LLM(
        target,
        load_format="twin",
        speculative_config=config,
        skip_tokenizer_init=True,
        num_kv_blocks=64,
        **options,
    )


def run(llm: LLM, temperature: float = 0.0) -> tuple[list[list[int]], float]:
    params = SamplingParams(temperature=temperature, max_tokens=60, ignore_eos=True, seed=1)
    outputs = llm.generate(PROMPTS, params)
    accepted = sum(output.metrics.num_accepted_tokens for output in outputs)
    drafts = sum(output.metrics.num_drafts for output in outputs)
    texts = [list(output.outputs[0].token_ids) for output in outputs]
    return texts, 1 + accepted / max(1, drafts)


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        *((TARGET, 1), (TARGET, 3), (LLAMA, 1), (LLAMA, 3), (EXPERTS, 1), (EXPERTS, 3)),
        *((SHARED, 2), (STACKED, 1), (BEHIND, 1), (SCALED, 1)),
    ],
)
def test_the_first_layers_are_a_draft_that_gets_accepted(
    tmp_path: Path, config: dict[str, Any], layers: int
) -> None:
    target = write(tmp_path / "target", config)
    draft = write(tmp_path / "draft", {**config, "num_hidden_layers": layers})
    plain, _ = run(make(target, None))
    drafted, length = run(make(target, draft))
    assert drafted == plain
    assert 2.2 < length < 4.7  # of 5: often accepted, and often refused
    assert 2.2 < run(make(target, draft), temperature=1.0)[1] < 4.7
    # The text goes on: it neither repeats a token nor a few of them.
    assert min(len(set(text)) for text in plain) > 15


def test_a_whole_copy_is_accepted_always(tmp_path: Path) -> None:
    target = write(tmp_path / "target", TARGET)
    assert run(make(target, write(tmp_path / "draft", TARGET)))[1] > 4.9


def test_a_seed_names_its_weights(tmp_path: Path) -> None:
    target = write(tmp_path / "target", TARGET)
    first, same, other = (run(make(target, None, seed=seed))[0] for seed in (1, 1, 2))
    assert first == same
    assert first != other


def test_a_tensor_depends_on_its_name_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else was drawn before it, in whatever dtype, alone or stacked with others."""
    shape = read_decoder_config({**TARGET, "dtype": "float32"})
    name = "model.layers.3.self_attn.{}_proj.weight"

    def matrix(dtype: torch.dtype, *letters: str) -> torch.Tensor:
        source = TwinSource(dtype, CPU, 0, shape)
        return source.matrix([Part(name.format(letter), 32) for letter in letters], 64)

    stacked, key = matrix(torch.float32, *"qkv"), matrix(torch.float32, "k")
    assert torch.equal(stacked[32:64], key)
    assert not torch.equal(stacked[:32], key)
    assert torch.equal(matrix(torch.bfloat16, "k"), key.to(torch.bfloat16))
    # Rows of a large matrix are drawn in batch.
    monkeypatch.setattr(twin, "_SLICE", 64 * 8)
    sliced = matrix(torch.float32, "k")
    assert len(torch.unique(sliced)) == sliced.numel()
    assert 0.9 < sliced.std() * 8 < 1.1


def test_experts_of_a_layer_are_one_tensor() -> None:
    """Target and draft share them, their sum is as large as a dense part's, and routers spread."""
    config = read_decoder_config({**EXPERTS, "dtype": "float32"})
    short = read_decoder_config({**EXPERTS, "dtype": "float32", "num_hidden_layers": 1})

    def parts_of(layer: int, shape: DecoderConfig = config) -> ExpertsParts:
        source = in_precision(TwinSource(torch.float32, CPU, 0, config), None, REFERENCE)
        sublayer = Decoder(REFERENCE, source, shape, 16).layers[layer].feed_forward
        assert sublayer is not None
        assert isinstance(sublayer.parts, ExpertsParts)
        return sublayer.parts

    first, again = parts_of(0), parts_of(0, short)
    for one, other in ((first.gate_up, again.gate_up), (first.down, again.down)):
        assert one.floats is not None
        assert other.floats is not None
        assert torch.equal(one.floats, other.floats)
        assert len(torch.unique(one.floats)) > 0.99 * one.floats.numel()
    x = torch.randn(400, 64, generator=torch.Generator().manual_seed(0))
    # A dense part puts out about 0.6 of its gain.
    for layer, gain in ((0, FIRST_LAYER_GAIN), (2, FIRST_LAYER_GAIN * LATE_SHARE / 2)):
        found = parts_of(layer)
        assert 0.5 < float(experts(x, found).square().mean().sqrt() / gain) < 0.7
        counts = route(x, found.router)[0].flatten().bincount(minlength=16)
        assert 40 < counts.min() <= counts.max() < 120  # 75 each if all are alike


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"hidden_size": 32}, "hidden_size is 32 here and 64 in the target"),
    ({"num_hidden_layers": 6}, "num_hidden_layers is 6 here and 5"),
    ({"tie_word_embeddings": False}, "tie_word_embeddings is False here and True"),
    ({"rope_theta": 5.0}, "theta is 5.0 here"),
    ({"rms_norm_eps": 0.5}, "eps is 0.5 here"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[str(case[0]) for case in WRONG])
def test_a_draft_that_is_no_part_of_the_target_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    target = write(tmp_path / "target", TARGET)
    draft = write(tmp_path / "draft", {**TARGET, "num_hidden_layers": 1, **changes})
    with pytest.raises(CheckpointError, match=message) as caught:
        make(target, draft)
    assert "copy the target's config.json" in str(caught.value)


def test_a_twin_may_read_less_text_than_its_target(tmp_path: Path) -> None:
    target = write(tmp_path / "target", TARGET)
    shorter = {**TARGET, "num_hidden_layers": 1, "max_position_embeddings": 128}
    llm = make(target, write(tmp_path / "draft", shorter))
    assert llm.engine.resolved.limits.drafter_max_model_len == 128
