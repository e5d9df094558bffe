"""Adapters that PEFT wrote give the logits and greedy text that PEFT's own model gives."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from slipstream import LLM, LoRARequest, SamplingParams
from tests.adapters import ALL
from tests.checkpoints import VOCAB_SIZE

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of peft about transformers

CONFIGS: tuple[dict[str, Any], ...] = (
    {"r": 4, "lora_alpha": 8, "target_modules": [*ALL]},
    {"r": 8, "lora_alpha": 8, "target_modules": [*ALL], "use_rslora": True},
    {"r": 3, "lora_alpha": 5, "target_modules": "all-linear"},
    {"r": 16, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
)
PROMPTS = [[5, 9, 14, 3], [7, 11, 3, 20, 21], [11, 4, 60, 21, 8], [1, 2, 3, 4, 5, 6, 7, 8, 9]]
COUNT = 32
PARAMS = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, logprobs=VOCAB_SIZE)


def adapted(target: str, config: dict[str, Any], seed: int) -> Any:
    """PEFT's model with a random adapter."""
    base = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **config)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.15, generator=generator)
    return model


def answer(model: Any, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    """PEFT's greedy tokens, and the logits [COUNT, vocabulary] that they come from."""
    ids = torch.tensor([prompt])
    found = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=COUNT,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return found.sequences[0, len(prompt) :].tolist(), torch.cat(found.logits)


def check(output: Any, expected: tuple[list[int], torch.Tensor]) -> None:
    tokens, logits = expected
    (sample,) = output.outputs
    assert list(sample.token_ids) == tokens
    ours = [[row[it].logprob for it in range(VOCAB_SIZE)] for row in sample.logprobs]
    assert (torch.tensor(ours) - logits).abs().max() < 1e-4


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "LlamaForCausalLM"])
def test_logits_and_text_are_those_of_peft(
    architecture: str, tmp_path: Path, tiny_models: Any
) -> None:
    """Adapters run alone, and four of them in a batch."""
    target = tiny_models.of_architecture(architecture)
    requests, expected = [], []
    for seed, config in enumerate(CONFIGS):
        model = adapted(target, config, seed)
        model.save_pretrained(tmp_path / str(seed))
        requests.append(LoRARequest(f"adapter {seed}", seed + 1, tmp_path / str(seed)))
        expected.append([answer(model, prompt) for prompt in PROMPTS])
    llm = LLM(
        target,
        dtype="float32",
        enable_lora=True,
        skip_tokenizer_init=True,
        num_kv_blocks=64,
        max_model_len=64,
        logprobs_mode="raw_logits",
    )
    assert len({str(it[0]) for it in expected}) == len(CONFIGS), "adapters change the text"
    prompts: list[Any] = [{"prompt_token_ids": ids} for ids in PROMPTS]
    (alone,) = llm.generate(prompts[:1], PARAMS, requests[0])
    check(alone, expected[0][0])
    for place, output in enumerate(llm.generate(prompts, PARAMS, requests)):
        check(output, expected[place][place])
