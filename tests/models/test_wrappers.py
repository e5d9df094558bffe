"""Checkpoints of models that also see: their language model is read, the rest is left out."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers.utils import logging as transformers_logging

from slipstream import LLM
from slipstream.core.errors import CheckpointError, UsageError
from slipstream.layers.attention import AttentionSpec
from slipstream.models.catalogue import read_decoder_config
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.decoder import Decoder
from slipstream.models.loading import LoadOptions, load_decoder
from slipstream.models.wrappers import text_config, text_names
from tests.hybrid_checkpoints import COMMON, randomise
from tests.models.gemma_cases import GEMMA
from tests.models.parity_cases import MISTRAL, Case
from tests.models.small_cases import SMALL
from tests.models.test_parity import make_prompts, runner_logits, spread

VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": 48,
    "num_position_embeddings": 16,
}


@pytest.fixture(scope="module")
def wrapped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("wrapped")
    config = transformers.Qwen3_5Config(text_config=COMMON, vision_config=VISION)
    model = transformers.Qwen3_5ForConditionalGeneration(config).eval()
    randomise(model, torch.Generator().manual_seed(0))
    transformers_logging.disable_progress_bar()
    model.save_pretrained(folder)
    return folder, model


PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 16,
}


@pytest.mark.parametrize("case", [MISTRAL[1], SMALL[-1]], ids=str)
def test_language_models_of_either_kind(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = getattr(transformers, f"{case.architecture}Config")(
        vocab_size=97,
        num_hidden_layers=2,
        intermediate_size=70,
        max_position_embeddings=192,
        **case.changes,
    )
    config = transformers.Mistral3Config(text_config=text.to_dict(), vision_config=PIXTRAL)
    model = transformers.Mistral3ForConditionalGeneration(config).eval()
    randomise(model, torch.Generator().manual_seed(0))
    model.save_pretrained(tmp_path)
    prompts = make_prompts()
    for prompt, found in zip(prompts, runner_logits(load(tmp_path), prompts, (50, 7)), strict=True):
        with torch.inference_mode():
            expected = model(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    monkeypatch.setattr("slipstream.models.vision.catalogue._FAMILIES", {})
    llm = LLM(str(tmp_path), skip_tokenizer_init=True, num_kv_blocks=16)
    seen: Any = {
        "prompt_token_ids": [1, 2],
        "multi_modal_data": {"image": Image.new("RGB", (9, 9))},
    }
    told = "^images of Mistral3ForConditionalGeneration are not supported; leave them out, or"
    with pytest.raises(UsageError, match=told):
        llm.generate(seen)


def load(folder: Path) -> Decoder:
    options = LoadOptions(torch.float32, torch.device("cpu"), "auto", 192)
    return load_decoder(Checkpoint(folder), options)


def test_the_language_model_of_a_wrapper_gives_its_logits(wrapped: tuple[Path, Any]) -> None:
    folder, model = wrapped
    assert any("visual" in name for name in load_file(folder / "model.safetensors"))
    prompts = [[token % 96 for token in prompt] for prompt in make_prompts()]
    for prompt, found in zip(prompts, runner_logits(load(folder), prompts, (50, 7)), strict=True):
        with torch.inference_mode():
            expected = model(torch.tensor([prompt])).logits[0]
        # Relative as well: numbers are above 1, and libraries order sums by the processor.
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_the_language_model_of_gemma_3_under_either_prefix(tmp_path: Path) -> None:
    case = GEMMA[1]
    text = {"vocab_size": 97, "num_hidden_layers": 3, "max_position_embeddings": 192}
    vision = {**VISION, "num_attention_heads": 2, "num_hidden_layers": 1, "image_size": 28}
    config = transformers.Gemma3Config(
        text_config={**text, "intermediate_size": 70, **case.changes}, vision_config=vision
    )
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    spread(model, torch.Generator().manual_seed(2))
    transformers_logging.disable_progress_bar()
    model.save_pretrained(tmp_path)
    prompt = make_prompts()[2]
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0]
    tensors, prefixes = load_file(tmp_path / "model.safetensors"), ("language_model.model.",)
    assert any(name.startswith(prefixes) for name in tensors)
    for prefix in ("language_model.model.", "model.language_model."):
        renamed = {name.replace(prefixes[0], prefix): each for name, each in tensors.items()}
        save_file(renamed, tmp_path / "model.safetensors")
        (found,) = runner_logits(load(tmp_path), [prompt], (50, 7))
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_what_no_tower_is_called_is_not_passed_over(
    wrapped: tuple[Path, Any], tmp_path: Path
) -> None:
    tensors = load_file(wrapped[0] / "model.safetensors")
    save_file({**tensors, "model.other.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((wrapped[0] / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"model\.other\.weight"):
        load(tmp_path)


def test_keys_of_the_whole_count_where_they_are_its_own() -> None:
    inner = {"hidden_size": 4, "tie_word_embeddings": True, "eos_token_id": 7, "dtype": None}
    whole = {
        "architectures": ["AnyForConditionalGeneration"],
        "model_type": "any",
        "text_config": inner,
        "tie_word_embeddings": False,
        "eos_token_id": 8,
        "dtype": "bfloat16",
        "image_token_id": 3,
    }
    assert text_config(whole) == {
        "architectures": ["AnyForConditionalGeneration"],
        "hidden_size": 4,
        "tie_word_embeddings": False,
        "eos_token_id": 7,
        "dtype": "bfloat16",
    }
    plain = {**whole, "architectures": ["AnyForCausalLM"]}
    assert text_config(plain) is plain


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["model.layers.0.x", "lm_head.weight", "visual.y"], None),
        (
            ["model.language_model.layers.0.x", "lm_head.weight", "model.visual.y", "mtp.fc.z"],
            ["model.layers.0.x", "lm_head.weight", "mtp.fc.z"],
        ),
        (
            ["language_model.model.norm", "language_model.lm_head.weight", "vision_tower.y"],
            ["model.norm", "lm_head.weight"],
        ),
    ],
)
def test_names_lose_what_wraps_them(names: list[str], found: list[str] | None) -> None:
    assert list(text_names(names).values()) == (found or names)


def test_internvl_has_language_models_of_several_families() -> None:
    whole = {"architectures": ["InternVLForConditionalGeneration"], "model_type": "internvl"}
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "vocab_size": 300,
    }
    for kind, bias in (("qwen2", True), ("qwen3", False)):
        text = {**sizes, "model_type": kind}
        read = read_decoder_config(text_config({**whole, "text_config": text}))
        mixer = read.layers[0].mixer
        assert isinstance(mixer, AttentionSpec)
        assert (mixer.qkv_bias, read.architecture) == (bias, whole["architectures"][0])
    other = {**sizes, "model_type": "mamba"}
    with pytest.raises(
        CheckpointError, match="\"model_type\" is 'mamba', not one of gpt_oss, llam"
    ):
        read_decoder_config(text_config({**whole, "text_config": other}))
