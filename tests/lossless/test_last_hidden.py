"""Drafters that read the target's last hidden state, through the whole engine.

The toy target's tokens go round in a cycle that these drafters know but for some tokens, so drafts
are accepted whole, in part and not at all.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slipstream import LLM, CheckpointError, RequestOutput, SamplingParams, UsageError
from slipstream.engine.prompts import EncodedPrompt
from slipstream.runner.device_batch import DeviceBatch
from slipstream.runner.device_state import DeviceState
from slipstream.runner.model_runner import Forward
from slipstream.runner.rows import RowLayout
from slipstream.sampling.verification import Verdict
from slipstream.speculative.heads.last_hidden import LastHidden
from tests.last_hidden_checkpoints import (
    NUM_HEADS,
    cycle,
    write_cycle_target,
    write_medusa,
    write_mlp,
    write_right_medusa,
    write_right_mlp,
)
from tests.padded_steps import use_padded_steps

METHODS = ("medusa", "mlp_speculator")
MAX_TOKENS = 40
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
PROMPTS: list[Any] = [
    {"prompt_token_ids": [(7 * start + 3 * index) % 96 for index in range(length)]}
    for start, length in ((1, 5), (2, 33), (3, 50), (4, 1), (5, 70), (6, 12), (7, 18), (8, 26))
]


@dataclass(frozen=True)
class Toy:
    """A target that repeats a cycle, and drafters that predict it."""

    target: str
    drafters: dict[str, str]

    def llm(self, method: str | None, count: int = 4, **options: Any) -> LLM:
        speculative: dict[str, Any] | None = None
        if method is not None:
            speculative = {"method": method, "model": self.drafters[method]}
            speculative["num_speculative_tokens"] = count
        sizes = {"num_kv_blocks": 400, "block_size": 8, "max_num_seqs": 6, "max_model_len": 128}
        options = {"skip_tokenizer_init": True, **sizes, **options}
        return LLM(self.target, speculative_config=speculative, **options)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    target = write_cycle_target(tmp_path_factory.mktemp("cycle"))
    folder = tmp_path_factory.mktemp("drafters")
    medusa = write_right_medusa(folder / "medusa", target)
    return Toy(
        target, {"medusa": medusa, "mlp_speculator": write_right_mlp(folder / "mlp", target)}
    )


def expected(prompt: Any, number: int = MAX_TOKENS) -> list[int]:
    after = cycle(96).tolist()
    token, answer = prompt["prompt_token_ids"][-1], []
    for _ in range(number):
        token = after[token]
        answer.append(token)
    return answer


def tokens(output: RequestOutput) -> list[int]:
    return list(output.outputs[0].token_ids)


# ---------------------------------------------------------------------- acceptance


@pytest.mark.parametrize("padded", [False, True], ids=["exact", "padded"])
@pytest.mark.parametrize("count", [1, 3, 7])
@pytest.mark.parametrize("method", METHODS)
def test_good_drafts_are_accepted(
    method: str, count: int, padded: bool, toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    if padded:
        use_padded_steps(monkeypatch)
    for options in ({}, {"max_num_batched_tokens": 24}, {"num_kv_blocks": 16}):
        llm = toy.llm(method, count, **options)
        outputs = llm.generate(PROMPTS, GREEDY)
        assert [tokens(output) for output in outputs] == [expected(it) for it in PROMPTS]
        drafts = sum(output.metrics.num_drafts for output in outputs)
        accepted = sum(output.metrics.num_accepted_tokens for output in outputs)
        # Four of five tokens are known to each head, whatever the others know.
        likely = sum(0.8**place for place in range(1, count + 1))
        assert 0.6 * likely < accepted / drafts < 1.2 * likely
        preempted = sum(output.metrics.num_preemptions for output in outputs)
        assert (preempted > 0) == ("num_kv_blocks" in options)


@pytest.mark.parametrize("padded", [False, True], ids=["exact", "padded"])
@pytest.mark.parametrize("method", METHODS)
def test_the_last_token_of_a_chunked_prompt_may_have_drafts_behind_it(
    method: str, padded: bool, toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row before it is that of the chunk before."""
    if padded:
        use_padded_steps(monkeypatch)
    after = cycle(96).tolist()
    last = next(token for token in range(96) if all(after[token] % 5 != it for it in (0, 1)))
    for length, at_once in ((24, False), (25, True), (26, False), (49, True)):
        prompt = [*range(length - 2), after.index(last), last]
        llm = toy.llm(method, max_num_batched_tokens=24)
        output = llm.generate([{"prompt_token_ids": prompt}], GREEDY)[0]
        assert tokens(output) == expected({"prompt_token_ids": prompt})
        assert output.outputs[0].from_draft[0] == at_once


@pytest.mark.parametrize("kind", ["mapped", "shared"])
@pytest.mark.parametrize("padded", [False, True], ids=["exact", "padded"])
def test_heads_over_some_tokens_or_over_the_targets_rows(
    kind: str, padded: bool, toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if padded:
        use_padded_steps(monkeypatch)
    stored = load_file(Path(toy.drafters["medusa"]) / "medusa_lm_head.safetensors")
    if kind == "mapped":
        stored["token_map"] = torch.tensor([token for token in range(95, -1, -1) if token % 3])
    else:
        stored = {name: value for name, value in stored.items() if "linear" in name}
    path = write_medusa(tmp_path, stored)
    for batched in (512, 24):
        llm = Toy(toy.target, {"medusa": path}).llm("medusa", max_num_batched_tokens=batched)
        outputs = llm.generate(PROMPTS, GREEDY)
        assert [tokens(output) for output in outputs] == [expected(it) for it in PROMPTS]
        accepted = [token for it in outputs for token in accepted_tokens(it)]
        if kind == "mapped":
            assert len(accepted) > 40
            assert all(token % 3 for token in accepted)
        params = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True, seed=1)
        assert all(it.metrics.num_drafts > 0 for it in llm.generate(PROMPTS, params))


def accepted_tokens(output: RequestOutput) -> list[int]:
    sample = output.outputs[0]
    pairs = zip(sample.token_ids, sample.from_draft, strict=True)
    return [token for token, drafted in pairs if drafted]


# ---------------------------------------------------------------------- options


@pytest.mark.parametrize("count", [1, 3, NUM_HEADS])
@pytest.mark.parametrize("method", METHODS)
def test_a_path_alone_is_enough(method: str, count: int, toy: Toy, tmp_path: Path) -> None:
    """The kind is found, and K is the number of heads."""
    source = Path(toy.drafters[method])
    config = json.loads((source / "config.json").read_text())
    if method == "medusa":
        tensors = load_file(source / "medusa_lm_head.safetensors")
        kept = {name: value for name, value in tensors.items() if int(name[0]) < count}
        torch.save(kept, tmp_path / "medusa_lm_head.pt")  # without a config.json
    else:
        tensors = load_file(source / "model.safetensors")
        kept = {name: value for name, value in tensors.items() if int(name.split(".")[2]) < count}
        write_mlp(tmp_path, kept, {**config, "n_predict": count})
    llm = LLM(toy.target, speculative_config={"model": str(tmp_path)}, skip_tokenizer_init=True)
    assert llm.engine.resolved.method == method
    assert llm.engine.resolved.limits.num_speculative_tokens == count
    output = llm.generate(PROMPTS[:1], GREEDY)[0]
    assert tokens(output) == expected(PROMPTS[0])
    assert output.metrics.num_accepted_tokens > 0


def test_more_draft_tokens_than_heads_are_refused(toy: Toy) -> None:
    for method in METHODS:
        with pytest.raises(UsageError, match=f"at most {NUM_HEADS} tokens a step"):
            toy.llm(method, NUM_HEADS + 1)


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"model": None}, UsageError, "needs model, a checkpoint"),
    ({"draft_sample_method": "best"}, UsageError, "probabilistic or greedy"),
    ({"parallel_drafting": True}, UsageError, "parallel_drafting=True is not supported"),
    ({"draft_tensor_parallel_size": 2}, UsageError, "every rank runs the few layers"),
    ({"max_model_len": 0}, UsageError, "max_model_len must be positive"),
    ({"draft_vocab_size": 3}, UsageError, "unknown key draft_vocab_size"),
    ({"dtype": "int3"}, UsageError, "dtype must be one of"),
    ({"quantization": "awq"}, UsageError, "quantization must be fp8"),
    ({"model": "TARGET"}, CheckpointError, "is no checkpoint for method .* for draft_model"),
]


@pytest.mark.parametrize(("changes", "error", "message"), WRONG, ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_a_wrong_key_or_value_is_refused(
    method: str, changes: dict[str, Any], error: type[Exception], message: str, toy: Toy
) -> None:
    config = {"method": method, "model": toy.drafters[method], **changes}
    config = {key: toy.target if value == "TARGET" else value for key, value in config.items()}
    config = {key: value for key, value in config.items() if value is not None}
    with pytest.raises(error, match=message):
        LLM(toy.target, speculative_config=config, skip_tokenizer_init=True, num_kv_blocks=16)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("option", [{"dtype": "bfloat16"}, {"draft_sample_method": "greedy"}])
def test_options_change_the_drafts_and_not_the_text(
    method: str, option: dict[str, Any], toy: Toy
) -> None:
    speculative = {"method": method, "model": toy.drafters[method], **option}
    llm = LLM(toy.target, speculative_config=speculative, skip_tokenizer_init=True)
    output = llm.generate(PROMPTS[:1], GREEDY)[0]
    assert tokens(output) == expected(PROMPTS[0])
    assert output.metrics.num_accepted_tokens > output.metrics.num_drafts


@pytest.mark.parametrize("method", METHODS)
def test_a_target_in_bfloat16(method: str, toy: Toy) -> None:
    outputs = toy.llm(method, dtype="bfloat16").generate(PROMPTS, GREEDY)
    assert [tokens(output) for output in outputs] == [expected(it) for it in PROMPTS]
    assert all(it.metrics.num_accepted_tokens > it.metrics.num_drafts for it in outputs)


def test_the_row_that_is_kept_is_behind_what_is_read_again() -> None:
    """A mixed step: a hit whose last cached token is read again, a chunk, and a verified draft."""
    state = DeviceState(3, 16, 4, torch.device("cpu"))
    last = LastHidden(state, 2, torch.float32)
    columns = torch.tensor(
        [[2, 0, 1], [2, 4, 1], [0, 0, 3], [1, 0, 1], [1, 0, 0], [8, 8, 8], [-1, -1, -1]]
    )
    batch = DeviceBatch.over(columns, 3, frozenset(), exact=True, most_rereads=1)
    hidden = torch.arange(11.0).unsqueeze(1).expand(-1, 2)  # rows 0-2, 3-6, 7-10
    first, final = torch.tensor([0, 3, 7]), torch.tensor([2, 6, 10])
    accepted = torch.tensor([0, 0, 2])
    tokens = torch.zeros(3, 4)
    verdict = Verdict(tokens.long(), torch.tensor([1, 0, 3]), accepted, largest=tokens)
    inputs: Any = None  # not looked at
    layout = RowLayout(torch.arange(11), inputs, first, final, None, (0, 3, 7, 11))
    last.keep(batch, verdict, Forward(hidden, layout))
    assert last.rows(batch.slots)[:, 0].tolist() == [2, 6, 9]


@pytest.mark.parametrize("method", METHODS)
def test_random_weights_draft_in_benchmarks(method: str, toy: Toy) -> None:
    llm = toy.llm(method, 3, load_format="dummy")
    assert llm.generate(PROMPTS[:2], GREEDY)[0].metrics.num_drafts > 0


@pytest.mark.parametrize("method", METHODS)
def test_a_slot_of_a_former_request_is_not_read(method: str, toy: Toy) -> None:
    """A hit on all but the last token drafts nothing in its first step, even where the slot's last
    row belongs to as many tokens."""
    prompt = [(5 * index) % 90 for index in range(49)]
    llm = toy.llm(method, max_num_seqs=1)
    engine = llm.engine
    one = SamplingParams(temperature=0, max_tokens=1)
    for name, ids in (("first", prompt), ("other", [*prompt[:47], 9])):
        engine.add(name, EncodedPrompt(None, ids, ()), one)
        while engine.has_unfinished:
            engine.step()
    engine.add("hit", EncodedPrompt(None, prompt, ()), GREEDY)
    while engine.has_unfinished:
        ended = engine.step()
    output = ended[0].output()
    assert output.metrics.num_cached_tokens == 48
    assert tokens(output) == expected({"prompt_token_ids": prompt})
    assert output.metrics.num_steps == output.metrics.num_drafts + 1
