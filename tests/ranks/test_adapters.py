"""Adapters over ranks: each has its share of the factors, and all of them say what one says."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream import LLM, LoRARequest, SamplingParams
from tests.adapters import write_adapter
from tests.drafters.heads import write_eagle3
from tests.hybrid_checkpoints import write_hybrid
from tests.lossless.test_greedy import make_prompts, tokens
from tests.models.small_cases import SMALL
from tests.models.test_adapters import MODULES
from tests.models.test_parity import write_checkpoint
from tests.models.test_quantized_experts import quantised
from tests.models.test_sharing import DENSE, FORMATS
from tests.ranks.conftest import Opener

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
NARROW = {"max_num_batched_tokens": 24, "num_kv_blocks": 16}  # chunks, preemption
WHOSE = (0, 1, -1, 2, 0, 1, -1, 2)


def requests_of(folder: Path, target: str, count: int = 3) -> list[LoRARequest]:
    paths = [write_adapter(folder / str(it), target, seed=it, rank=3 + it) for it in range(count)]
    return [LoRARequest(f"style-{it}", it + 1, path) for it, path in enumerate(paths)]


def mixed(adapters: Sequence[LoRARequest]) -> list[LoRARequest | None]:
    return [None if it < 0 else adapters[it] for it in WHOSE]


def texts_of_one(model: str, adapters: Sequence[LoRARequest], ranked: Opener) -> list[Any]:
    """The texts of one process."""
    llm = ranked(model, tensor_parallel_size=1, enable_lora=True)
    return tokens(llm.generate(make_prompts(8), GREEDY, mixed(adapters)))


@pytest.mark.parametrize(
    ("drafter", "room"),
    [
        pytest.param(None, NARROW, marks=pytest.mark.full),
        pytest.param({}, {"max_num_batched_tokens": 24}, marks=pytest.mark.full),
        ({"draft_tensor_parallel_size": 2}, NARROW),
        ({"draft_tensor_parallel_size": 2, "model": "self"}, {"max_num_batched_tokens": 24}),
        pytest.param({"method": "ngram"}, NARROW, marks=pytest.mark.full),
        pytest.param({"model": "head"}, NARROW, marks=pytest.mark.full),
    ],
    ids=["none", "draft", "shared draft", "shared self", "ngram", "head"],
)
def test_two_ranks_say_what_one_says(
    drafter: dict[str, Any] | None,
    room: dict[str, Any],
    tiny_target: str,
    tiny_draft: str,
    tmp_path: Path,
    ranked: Opener,
) -> None:
    """With fewer slots than adapters; adapters also apply where the target drafts for itself."""
    adapters = requests_of(tmp_path, tiny_target)
    expected = texts_of_one(tiny_target, adapters, ranked)
    own = drafter is not None and drafter.get("model") == "self"
    if drafter is not None:
        drafter = {"num_speculative_tokens": 3, "model": tiny_draft, **drafter}
        drafter |= {"model": tiny_target} if own else {}
        drafter = {"method": "ngram"} if "method" in drafter else drafter
    if drafter is not None and drafter.get("model") == "head":
        drafter["model"] = head = str(write_eagle3(tmp_path / "head", tiny_target))
        heads = [
            write_adapter(tmp_path / f"head-{it}", head, seed=it) for it in range(len(adapters))
        ]
        pairs = zip(adapters, heads, strict=True)
        adapters = [replace(it, draft_lora_path=path) for it, path in pairs]
    if own:
        adapters = [replace(it, draft_lora_path=it.lora_path) for it in adapters]
    llm = ranked(tiny_target, drafter, enable_lora=True, max_loras=2, **room)
    for _ in range(2):
        outputs = llm.generate(make_prompts(8), GREEDY, mixed(adapters))
        assert tokens(outputs) == expected
    if own:
        counted = llm.metrics.adapters.values()
        assert all(it.num_accepted_tokens == it.num_draft_tokens > 0 for it in counted)


@pytest.mark.parametrize(
    "kind",
    [
        *("Phi3", "Glm4", "groups"),
        *(pytest.param(it, marks=pytest.mark.full) for it in ("Starcoder2", "gated")),
    ],
)
def test_modules_of_every_form_are_shared(kind: str, tmp_path: Path, ranked: Opener) -> None:
    """Stacked in a checkpoint, with pairs beside each other, without a gate, with gates between the
    queries, and beside groups of columns that two ranks cannot halve."""
    if kind == "gated":
        target = write_hybrid(tmp_path / "target", "qwen3_next")
        modules: tuple[str, ...] = ("q_proj", "v_proj", "o_proj")
    elif kind == "groups":
        target = str(write_checkpoint(DENSE, tmp_path / "target"))
        modules = ("up_proj", "down_proj")
    else:
        case = next(it for it in SMALL if it.architecture == kind)
        target, modules = str(write_checkpoint(case, tmp_path / "target")), MODULES[kind]
    style = LoRARequest("style", 1, write_adapter(tmp_path / "style", target, targets=modules))
    if kind == "groups":
        quantised(Path(target), FORMATS["mxfp4"], lambda it: "mlp" in it, {})
    texts = []
    for size in (1, 2):
        llm = ranked(target, tensor_parallel_size=size, enable_lora=True)
        texts.append(tokens(llm.generate(make_prompts(4), GREEDY, style)))
    assert texts[0] == texts[1] != tokens(llm.generate(make_prompts(4), GREEDY))


def test_adapters_come_and_go_on_all_ranks(
    tiny_target: str, tmp_path: Path, ranked: Opener
) -> None:
    """An adapter with a used name in a used slot is another adapter."""
    adapters = requests_of(tmp_path, tiny_target)
    expected = texts_of_one(tiny_target, adapters, ranked)
    llm: LLM = ranked(tiny_target, enable_lora=True, max_loras=1)
    names = llm.engine.adapters
    for whose in (0, 1, 2, 1):
        place = WHOSE.index(whose)
        names.add("style", names.read(str(adapters[whose].lora_path)))
        prompt = replace(
            llm._encoder.encode(make_prompts(8)[place], GREEDY), adapter=names.named("style")
        )
        submission = llm.engine.add(str(whose), prompt, GREEDY)
        names.remove("style")  # who holds it goes on
        while not submission.finished:
            llm.engine.step()
        assert submission.error is None
        assert list(submission.output().outputs[0].token_ids) == expected[place]


@pytest.mark.breaks_steps
def test_a_step_that_fails_leaves_all_ranks_with_their_adapters(
    tiny_target: str, tmp_path: Path, ranked: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapters = requests_of(tmp_path, tiny_target)
    expected = texts_of_one(tiny_target, adapters, ranked)
    llm = ranked(tiny_target, enable_lora=True, max_loras=2)
    scheduler: Any = llm.engine.scheduler
    commit, failures = scheduler.commit, [3]

    def failing(*arguments: Any) -> None:
        failures[0] -= 1
        if failures[0] == 0:
            raise RuntimeError("broken off")
        commit(*arguments)

    monkeypatch.setattr(scheduler, "commit", failing)
    outputs = llm.generate(make_prompts(8), GREEDY, mixed(adapters))
    found = [list(it.outputs[0].token_ids) for it in outputs]
    assert found == expected
    assert failures[0] < 0
