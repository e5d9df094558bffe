"""Weights that are no numbers: whose request ends, and whose goes on as though nothing was."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream import LLM, RequestOutput, SamplingParams
from tests.checkpoints import write_qwen3
from tests.padded_steps import use_padded_steps

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
SEEDED = SamplingParams(temperature=1, seed=5, max_tokens=16, ignore_eos=True)
PENALISED = SamplingParams(
    seed=5, max_tokens=16, ignore_eos=True, frequency_penalty=0.5, top_k=20, top_p=0.9, logprobs=1
)
WISHES = {"greedy": GREEDY, "seeded": SEEDED, "penalised": PENALISED}
POISON = 77
PROMPTS: list[Any] = [
    {"prompt_token_ids": ids} for ids in ([5, 9, 14, 3], [7, POISON, 3], [11, 4, 60, 21, 8])
]
SOUND = (0, 2)
Broken = Callable[[dict[str, torch.Tensor]], None]


def checkpoint(path: Path, breaks: Broken | None = None, **options: Any) -> str:
    folder = write_qwen3(path, **options)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    if breaks is not None:
        (file,) = folder.glob("*.safetensors")
        tensors = load_file(file)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        breaks(tensors)
        save_file(tensors, file, {"format": "pt"})
    return str(folder)


def embedding_row(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.embed_tokens.weight"][POISON] = torch.nan


def head_row(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"][13] = torch.nan


def everything(tensors: dict[str, torch.Tensor]) -> None:
    for tensor in tensors.values():
        tensor.fill_(torch.nan)


def projections(tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if "proj" in name:
            tensor *= 1e8


@pytest.fixture(autouse=True)
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading would refuse such weights; numbers may also overflow later, as these have."""
    monkeypatch.setattr("slipstream.models.safetensors_file._are_usable", lambda values: True)


@pytest.fixture(params=["exact", "padded"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "padded":
        use_padded_steps(monkeypatch)
    name: str = request.param
    return name


def make(target: str, draft: str | None = None, **options: Any) -> LLM:
    config = None if draft is None else {"model": draft, "num_speculative_tokens": 3}
    sizes: dict[str, Any] = {
        "num_kv_blocks": 12,
        "block_size": 8,
        "max_model_len": 64,
        "max_num_seqs": 4,
    }
    return LLM(target, speculative_config=config, skip_tokenizer_init=True, **sizes, **options)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def check_broken(llm: LLM, output: RequestOutput, given: int = 0) -> None:
    sample = output.outputs[0]
    assert sample.finish_reason == "error"
    assert "logits are not finite" in str(sample.stop_reason)
    assert len(sample.token_ids) == given
    llm.engine.scheduler.check_invariants()


@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafts"])
@pytest.mark.parametrize("wish", WISHES)
def test_a_request_whose_logits_are_no_numbers_ends_alone(
    wish: str, drafts: bool, form: str, tmp_path: Path, tiny_target: str, tiny_draft: str
) -> None:
    """Its prompt has a token with a NaN embedding; its blocks are reused by other requests."""
    draft = tiny_draft if drafts else None
    expected = tokens(make(tiny_target, draft).generate(PROMPTS, WISHES[wish]))
    llm = make(checkpoint(tmp_path, embedding_row), draft)
    for number in range(1, 3):
        outputs = llm.generate(PROMPTS, WISHES[wish])
        check_broken(llm, outputs[1])
        for place in SOUND:
            assert tokens(outputs)[place] == expected[place]
        assert llm.metrics.num_broken == number
    assert not llm.engine.has_unfinished


def test_a_broken_head_breaks_every_request(form: str, tmp_path: Path) -> None:
    llm = make(checkpoint(tmp_path, head_row))
    for output in llm.generate(PROMPTS, GREEDY):
        check_broken(llm, output)
    assert llm.metrics.num_broken == len(PROMPTS)


def test_numbers_that_overflow_in_a_norm_break_every_request(form: str, tmp_path: Path) -> None:
    """The norm gives zeros, so that all logits are 0, which are finite."""
    llm = make(checkpoint(tmp_path, projections))
    for output in llm.generate(PROMPTS, GREEDY):
        check_broken(llm, output)


@pytest.mark.parametrize("wish", WISHES)
def test_a_drafter_of_broken_numbers_changes_nothing(
    wish: str, form: str, tmp_path: Path, tiny_target: str
) -> None:
    """Greedy and in distribution: its tokens are judged as certain ones."""
    params = WISHES[wish]
    llm = make(tiny_target, checkpoint(tmp_path, everything, keep_layers=1))
    outputs = llm.generate(PROMPTS, params)
    if wish == "greedy":
        assert tokens(outputs) == tokens(make(tiny_target).generate(PROMPTS, params))
    for output in outputs:
        assert output.outputs[0].finish_reason == "length"
    assert sum(output.metrics.num_drafts for output in outputs) > 0
    assert llm.metrics.num_broken == 0


@pytest.mark.parametrize("batch", [400])
def test_broken_drafts_are_accepted_as_often_as_the_target_samples_them(
    batch: int, tmp_path: Path, tiny_target: str
) -> None:
    """Token 0, which a drafter without numbers guesses, comes as often as without drafts."""
    draft = checkpoint(tmp_path, everything, keep_layers=1)
    params = SamplingParams(temperature=1, max_tokens=3, ignore_eos=True, n=batch, seed=2)
    sizes: dict[str, Any] = {
        "num_kv_blocks": 600,
        "block_size": 8,
        "max_model_len": 64,
        "max_num_seqs": 100,
    }
    config = {"model": draft, "num_speculative_tokens": 3}
    llm = LLM(tiny_target, speculative_config=config, skip_tokenizer_init=True, **sizes)
    (output,) = llm.generate(PROMPTS[0], params)
    zeros = sum(sample.token_ids[1] == 0 for sample in output.outputs)
    assert output.metrics.num_drafts > 0
    assert zeros < 0.2 * batch  # always, if it were kept wherever the target may sample it
