"""Ranks that run requests of their own and share experts give the text of one process, in float32.

A rank may have more to do than the other, nothing, or no more.
"""

import os
import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream import LLM, LoRARequest, SamplingParams
from slipstream.core.batch import Batch, ScheduledRequest
from slipstream.core.errors import RanksLostError, UsageError
from slipstream.core.structured import StructuredOutput
from slipstream.engine import build
from slipstream.engine.launcher import Launcher
from slipstream.engine.ranks import leader, processes
from slipstream.engine.ranks.messages import Writer
from slipstream.models.checkpoint import Checkpoint, resolve_checkpoint
from tests.adapters import write_adapter
from tests.drafters.heads import write_eagle3
from tests.drafters.mtp_heads import add_mtp
from tests.lossless.test_greedy import make_prompts, plain_tokens, tokens
from tests.lossless.test_trees import TREES
from tests.mixture_checkpoints import write_mixture
from tests.models.parity_cases import Case
from tests.models.test_parity import CASES, write_checkpoint
from tests.models.test_quantized_experts import GPT_OSS as GROUPED
from tests.models.test_quantized_experts import fused_mxfp4
from tests.padded_steps import packed_rows, use_packed_steps
from tests.ranks.conftest import Opener, Pool

LENGTHS = (40, 3, 44, 33, 40, 2, 24, 50)
REQUESTS = [SamplingParams(temperature=0, max_tokens=it, ignore_eos=True) for it in LENGTHS]
NARROW = {
    "max_num_batched_tokens": 24,
    "num_kv_blocks": 13,
    "max_num_seqs": 8,
}  # chunks, preemption
WIDE = {"max_num_batched_tokens": 24}  # the second run finds prefixes
DRAFTERS: dict[str, Any] = {
    "plain": None,
    "draft_model": {"model": "draft"},
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "eagle3": {"model": "eagle3"},
    "mtp": {"method": "mtp"},
    "tree": {"model": "eagle3", "num_speculative_tokens": 10, **TREES["static"]},
}
Models = dict[str, str]


def apart(ranked: Opener, model: str, drafter: Any = None, size: int = 2, **options: Any) -> LLM:
    """An engine of processes with requests of their own."""
    own = {"tensor_parallel_size": 1, "rank_check_interval": None, "data_parallel_size": size}
    return ranked(model, drafter, enable_expert_parallel=True, **{**own, **options})


def alone(ranked: Opener, model: str, drafter: Any = None, **options: Any) -> LLM:
    return ranked(model, drafter, tensor_parallel_size=1, **options)


def plain(target: str, number: int) -> list[list[int]]:
    """The text of one process; computed once, since many tests compare with it."""
    return plain_tokens(target, number, REQUESTS[:number], "float32")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """GLM-4.5: its first layer is dense, others have a shared expert, and it has an MTP module."""
    folder = tmp_path_factory.mktemp("mixture")
    target = write_mixture(folder / "target", "glm4_moe", num_nextn_predict_layers=1)
    add_mtp(target, "deepseek", own_ends=True)
    return {
        "target": str(target),
        "draft": str(write_mixture(folder / "draft", "glm4_moe", keep_layers=1)),
        "eagle3": str(write_eagle3(folder / "eagle3", target, draft_vocab=80)),
    }


def drafter_of(name: str, models: Models, count: int | str = 4) -> Any:
    drafter = DRAFTERS[name]
    if drafter is None:
        return None
    named = {"model": models[drafter["model"]]} if "model" in drafter else {}
    if name == "tree":
        return {**drafter, **named}
    return {**drafter, **named, "num_speculative_tokens": count}


def run_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are built from here on run padded steps, on all ranks."""
    use_packed_steps(monkeypatch)
    monkeypatch.setattr(processes, "FOLLOWER", "tests.ranks.padded_follower")


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The number of requests that each of two ranks has, step by step."""
    seen: list[list[int]] = []
    launch = Launcher.launch

    def noted(self: Launcher, batch: Batch) -> Any:
        ranks = [item.rank for item in batch.requests]
        seen.append([ranks.count(0), ranks.count(1)])
        return launch(self, batch)

    monkeypatch.setattr(Launcher, "launch", noted)
    return seen


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(it, marks=pytest.mark.full) if it in ("ngram", "eagle3") else it
        for it in DRAFTERS
    ],
)
def test_the_text_is_the_text_of_one_process(
    name: str, models: Models, ranked: Opener, loads: list[list[int]]
) -> None:
    """Prompts come in chunks, some requests are preempted, and ranks are busy unequally."""
    prompts = make_prompts(8)
    expected = plain(models["target"], 8)
    loads.clear()
    llm = apart(ranked, models["target"], drafter_of(name, models), **NARROW)
    outputs = llm.generate(prompts, REQUESTS)
    assert tokens(outputs) == expected
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert any(one and other and one != other for one, other in loads)
    if DRAFTERS[name] is not None:
        assert llm.metrics.speculation.num_accepted_tokens > 0


def test_prefixes_are_found_on_both_ranks(models: Models, ranked: Opener) -> None:
    """And a drafter whose costs are measured on both."""
    prompts = make_prompts(8)
    expected = plain(models["target"], 8)
    llm = apart(ranked, models["target"], drafter_of("eagle3", models, "auto"), **WIDE)
    first = llm.generate(prompts, REQUESTS)
    again = llm.generate(prompts, REQUESTS)
    assert tokens(first) == tokens(again) == expected
    assert sum(output.metrics.num_cached_tokens for output in again) > 0
    llm.engine.scheduler.check_invariants()


def test_a_rank_that_is_empty_or_ends_first(
    models: Models, ranked: Opener, loads: list[list[int]]
) -> None:
    """Either rank: the leader's one request ends before the other's, and one comes alone."""
    prompts = make_prompts(3)
    llm = alone(ranked, models["target"])
    single = [[out] for out in tokens(llm.generate(prompts, REQUESTS[0]))]
    expected = tokens(llm.generate(prompts[:2], REQUESTS[:2]))
    swapped = tokens(llm.generate(prompts[:2], REQUESTS[1::-1]))
    llm = apart(ranked, models["target"], drafter_of("draft_model", models))
    loads.clear()
    assert tokens(llm.generate(prompts[:2], REQUESTS[:2])) == expected
    assert [1, 1] in loads
    assert loads[-1] == [1, 0]
    assert tokens(llm.generate(prompts[:2], REQUESTS[1::-1])) == swapped
    assert loads[-1] == [0, 1]
    loads.clear()
    for prompt, text in zip(prompts, single, strict=True):
        assert tokens(llm.generate([prompt], REQUESTS[0])) == text
    assert all(sum(load) == 1 for load in loads)


@pytest.mark.parametrize(
    "name",
    [
        "draft_model",
        *(pytest.param(it, marks=pytest.mark.full) for it in ("plain", "ngram", "tree")),
    ],
)
def test_ranks_agree_on_the_shapes_of_captured_steps(
    name: str,
    models: Models,
    ranked: Opener,
    loads: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps are padded and packed as on a GPU; a rank without requests runs padding alone. With a
    draft model all ranks run the first steps of a server before."""
    prompts = make_prompts(8)
    params = REQUESTS
    if packs := name in ("draft_model", "ngram"):
        pairs = zip(REQUESTS, (1, 2, 3, 4, 1, 2, 3, 4), strict=True)
        params = [replace(it, num_speculative_tokens=count) for it, count in pairs]
    expected = plain(models["target"], 8)
    run_padded(monkeypatch)
    llm = apart(ranked, models["target"], drafter_of(name, models), warm_up=name == "draft_model")
    loads.clear()
    assert tokens(llm.generate(prompts, params)) == expected
    assert any(one != other for one, other in loads)
    assert bool(packed_rows(llm)) == packs


@pytest.mark.parametrize("name", ["draft_model", "tree"])
def test_requests_of_all_kinds(name: str, models: Models, ranked: Opener) -> None:
    """Seeds, penalties, and log probabilities of prompts and outputs, on both ranks."""
    params = [
        SamplingParams(seed=5, max_tokens=16),
        SamplingParams(seed=6, max_tokens=16, temperature=0.7, top_k=20, top_p=0.9, n=2),
        SamplingParams(temperature=0, max_tokens=16, logprobs=2, prompt_logprobs=1),
        SamplingParams(temperature=0, max_tokens=16, repetition_penalty=1.3, logprobs=1),
        SamplingParams(temperature=0, max_tokens=16, logprobs=2, min_tokens=3),
    ]
    prompts, drafter = make_prompts(len(params)), drafter_of(name, models, 3)
    found = [
        opened(ranked, models["target"], drafter).generate(prompts, params)
        for opened in (alone, apart)
    ]
    texts = [[[list(it.token_ids) for it in out.outputs] for out in run] for run in found]
    assert texts[0] == texts[1]
    for index in (2, 3, 4):
        one, other = (
            [*(run[index].prompt_logprobs or ()), *(run[index].outputs[0].logprobs or ())]
            for run in found
        )
        assert len(one) == len(other) > 15
        for own, rivals in zip(one, other, strict=True):
            if own is None or rivals is None:
                assert own is rivals
                continue
            assert {it: own[it].logprob for it in own} == pytest.approx(
                {it: rivals[it].logprob for it in own}, abs=2e-3
            )


def test_adapters_are_whole_on_each_rank(tmp_path: Path, ranked: Opener) -> None:
    """With fewer slots than adapters."""
    target, prompts = str(write_mixture(tmp_path / "target", "glm4_moe")), make_prompts(8)
    modules = ("q_proj", "o_proj")
    paths = [write_adapter(tmp_path / it, target, seed=int(it), targets=modules) for it in "012"]
    adapters = [LoRARequest(f"style-{it}", it + 1, path) for it, path in enumerate(paths)]
    whose = [None if it % 4 == 3 else adapters[it % 3] for it in range(8)]
    bare = plain(target, 8)
    found = []
    for opened in (alone, apart):
        llm = opened(ranked, target, enable_lora=True, max_loras=2)
        found.append(tokens(llm.generate(prompts, REQUESTS, whose)))
    assert found[0] == found[1] != bare


@pytest.mark.parametrize("padded", [pytest.param(False, marks=pytest.mark.full), True])
def test_each_rank_walks_the_grammars_of_its_requests(
    padded: bool, tmp_path: Path, ranked: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where steps of other requests are captured, and after a preemption."""
    demo = resolve_checkpoint("demo")
    kept = {"vocab_size": Checkpoint(demo).config["vocab_size"]}
    target = write_mixture(tmp_path / "target", "qwen3_moe", **kept)
    draft = write_mixture(tmp_path / "draft", "qwen3_moe", keep_layers=1, **kept)
    for file in demo.glob("tokenizer*"):
        shutil.copy(file, target)
    structured = StructuredOutput(regex="[0-9]{12,14}(-[ab]{11,13}){1,2}")
    follows = SamplingParams(temperature=0, max_tokens=40, structured=structured)
    free = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    params = [follows, free, replace(follows, temperature=1, seed=3), follows, free, follows]
    prompts = ["x = ", "def main(", "print(", "for it in", "import ", "y" * 40]
    drafter = {"model": str(draft), "num_speculative_tokens": 3}
    options: dict[str, Any] = {"skip_tokenizer_init": False, "num_kv_blocks": 13}
    expected = tokens(alone(ranked, str(target), drafter, **options).generate(prompts, params))
    if padded:
        run_padded(monkeypatch)
    llm = apart(ranked, str(target), drafter, **options)
    outputs = llm.generate(prompts, params)
    assert tokens(outputs) == expected
    for index in (0, 2, 3, 5):
        assert re.fullmatch(structured.regex or "", outputs[index].outputs[0].text)


@pytest.mark.breaks_steps
def test_a_step_that_fails_is_undone(
    models: Models, ranked: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, calls = make_prompts(4), list[int]()
    expected = plain(models["target"], 4)
    llm = apart(ranked, models["target"])
    commit = llm.engine.scheduler.commit

    def failing(*given: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise ZeroDivisionError("on purpose")
        commit(*given)

    monkeypatch.setattr(llm.engine.scheduler, "commit", failing)
    assert tokens(llm.generate(prompts, REQUESTS[:4])) == expected
    assert len(calls) > 4


@pytest.mark.breaks_steps
@pytest.mark.parametrize("place", [0, 1])
def test_a_rank_that_fails_alone_fails_with_the_other(
    place: int, models: Models, ranked: Opener, loads: list[list[int]]
) -> None:
    """Only the request that causes the failure ends with an error."""
    prompts: list[Any] = make_prompts(4)
    expected = plain(models["target"], 4)
    bad = {"prompt_token_ids": [95, *prompts[0]["prompt_token_ids"]]}
    drafter = {"method": "custom", "model": "tests.user_drafters:Fussy"}
    llm = apart(ranked, models["target"], {**drafter, "num_speculative_tokens": 3})
    prompts.insert(place, bad)
    params = [*REQUESTS[:4]]
    params.insert(place, REQUESTS[0])
    loads.clear()
    engine = llm.engine
    submissions = [
        engine.add(str(at), llm._encoder.encode(prompt, own), own)
        for at, (prompt, own) in enumerate(zip(prompts, params, strict=True))
    ]
    while engine.has_unfinished:
        engine.step()
    assert sorted(loads[0]) == [2, 3]
    assert [it.error is None for it in submissions] == [it != place for it in range(5)]
    assert tokens([it.output() for it in submissions if it.error is None]) == expected


@pytest.mark.breaks_steps
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_before_a_step_begins_is_heard_of(
    rank: int, models: Models, ranked: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one does not wait for it: both undo the step."""
    prompts, failed = make_prompts(4), list[Batch]()
    expected = plain(models["target"], 4)
    llm = apart(ranked, models["target"])
    apply, write = llm.engine._step._state.apply, Writer._scheduled
    steps: list[Batch] = []

    def failing(batch: Batch) -> None:
        steps.append(batch)
        if rank == 0 and len(steps) == 8:
            failed.append(batch)
            raise ZeroDivisionError("on purpose")
        apply(batch)

    def altered(self: Writer, item: ScheduledRequest) -> Any:
        made, (rest, slot, kept, gained) = write(self, item)
        if rank == item.rank == 1 and gained[0] and len(steps) > 8 and not failed:
            failed.append(Batch((item,)))
            gained = [["no block"], *gained[1:]]
        return made, (rest, slot, kept, gained)

    monkeypatch.setattr(llm.engine._step._state, "apply", failing)
    monkeypatch.setattr(Writer, "_scheduled", altered)
    assert tokens(llm.generate(prompts, REQUESTS[:4])) == expected
    assert [batch.is_decode for batch in failed] == [True]


def test_an_error_behind_the_pass_of_one_rank_is_told(
    models: Models, ranked: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other waits for the results of this one, so the engine ends."""

    def failing(*given: Any) -> Any:
        raise ZeroDivisionError("on purpose")

    llm = apart(ranked, models["target"])
    monkeypatch.setattr(leader, "_SETTLE_SECONDS", 0.5)
    monkeypatch.setattr(llm.engine._step, "_verify", failing)
    with pytest.raises(RanksLostError, match=r"on purpose.*rank 1 of 2 does not answer"):
        llm.generate(make_prompts(4), REQUESTS[:4])


def test_requests_end_with_an_error_when_a_rank_is_lost(
    models: Models, ranked: Opener, pool: Pool
) -> None:
    """Requests of the other ranks end as well."""
    llm = apart(ranked, models["target"])
    (follower,) = pool.followers(2).processes
    outputs = llm.stream(make_prompts(4), REQUESTS[0])
    next(outputs)
    os.kill(follower.pid, signal.SIGKILL)
    with pytest.raises(RanksLostError, match="rank 1 of 2 ended with exit code -9"):
        for _ in outputs:
            pass
    with pytest.raises(RanksLostError):
        llm.generate(make_prompts(1), REQUESTS[0])


@pytest.mark.full
@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_moe", "glm4_moe_lite", "qwen2_moe"])
@pytest.mark.parametrize("size", [2, 4])
def test_families(kind: str, size: int, tmp_path: Path, ranked: Opener) -> None:
    target = str(write_mixture(tmp_path / "target", kind))
    drafter = {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 3}
    prompts = make_prompts(8)
    expected = plain(target, 8)
    llm = apart(ranked, target, drafter, size, **NARROW)
    assert tokens(llm.generate(prompts, REQUESTS)) == expected


MIXTURES = [
    case
    for case in CASES
    if case.architecture in ("Qwen3_5Moe", "DeepseekV3") or case.changes.get("enable_moe_block")
]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(it, id=str(it), marks=() if it.architecture == "Gemma4" else pytest.mark.full)
        for it in MIXTURES
    ],
)
def test_every_kind_of_layer_is_beside_shared_experts(
    case: Case, tmp_path: Path, ranked: Opener
) -> None:
    """Delta nets, latent attention, and a dense part beside the experts."""
    target = str(write_checkpoint(replace(case, shard_size=None), tmp_path / "target"))
    prompts = make_prompts(8)
    expected = plain(target, 8)
    drafter = {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 3}
    llm = apart(ranked, target, drafter, **NARROW)
    assert tokens(llm.generate(prompts, REQUESTS)) == expected
    assert tokens(llm.generate(prompts, REQUESTS)) == expected  # after prefixes


def test_experts_in_four_bits(tmp_path: Path, ranked: Opener) -> None:
    """gpt-oss as it is stored, with three groups of 32 columns in each expert."""
    folder = write_checkpoint(GROUPED, tmp_path / "target")
    fused_mxfp4(folder)
    prompts = make_prompts(4)
    expected = tokens(alone(ranked, str(folder)).generate(prompts, REQUESTS[:4]))
    assert tokens(apart(ranked, str(folder)).generate(prompts, REQUESTS[:4])) == expected


def test_what_is_not_supported_is_refused(
    models: Models,
    tiny_target: str,
    tmp_path: Path,
    ranked: Opener,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    odd = str(write_mixture(tmp_path / "odd", "qwen3_moe", moe_intermediate_size=23))
    draft = {"model": models["draft"], "draft_tensor_parallel_size": 2}
    monkeypatch.setattr(build, "start_ranks", None)  # nothing is started
    attempts: list[tuple[Callable[[], Any], str]] = [
        (lambda: apart(ranked, tiny_target), "has no experts that 2 processes could share"),
        (lambda: apart(ranked, odd), r"\(23\) cannot be split over 2 ranks; .* \(1\)"),
        (lambda: apart(ranked, models["target"], draft), "does not divide the target's"),
        (
            lambda: apart(ranked, models["target"], tensor_parallel_size=2),
            "give tensor_parallel_size 1, or leave out data_parallel_size",
        ),
        (
            lambda: apart(ranked, models["target"], rank_check_interval=3),
            "rank_check_interval compares",
        ),
        (
            lambda: alone(ranked, models["target"], data_parallel_size=2),
            "is for slipstream serve, which starts as many whole replicas",
        ),
    ]
    for attempt, told in attempts:
        with pytest.raises(UsageError, match=told):
            attempt()
