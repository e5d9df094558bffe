"""Measuring what steps cost leaves nothing behind, and ends in time."""

from pathlib import Path
from typing import Any

import pytest

from slipstream import LLM, SamplingParams
from slipstream.core.batch import Batch
from slipstream.engine.drafting.calibration import calibrate
from slipstream.engine.drafting.costs import CostModel
from slipstream.engine.drafting.kept_costs import CACHE
from slipstream.engine.launcher import Launcher
from slipstream.engine.prompts import Prompt
from slipstream.engine.step_results import Launched
from slipstream.speculative.draft_model.context import ContextDrafter
from tests.drafters.assistants import write_sliding_target
from tests.padded_steps import use_padded_steps

K = 3
PROMPTS: list[Prompt] = [
    {"prompt_token_ids": [(start + place * step) % 90 for place in range(40)]}
    for start, step in ((5, 7), (11, 1), (5, 7))
]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=1, seed=3, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.8, max_tokens=12, ignore_eos=True),
]


def build(target: str, drafter: dict[str, Any] | None, **changes: Any) -> LLM:
    config = drafter and {"num_speculative_tokens": K, **drafter}
    options = {"skip_tokenizer_init": True, "num_kv_blocks": 48, "max_num_seqs": 6, **changes}
    return LLM(target, speculative_config=config, **options)


def measure(llm: LLM, widths: tuple[int, ...] = (0, 1, K), **options: Any) -> CostModel:
    engine = llm.engine
    graphs = engine._step._graphs
    costs = CostModel(None if graphs is None else graphs._form.bucket)
    assert calibrate(costs, engine._step, engine.resolved, widths, 16, **options)
    return costs


def outputs(llm: LLM) -> list[Any]:
    """Everything that a user sees, of two rounds, so that the second finds prefixes cached."""
    seen: list[Any] = []
    for _ in range(2):
        for one in llm.generate(PROMPTS, PARAMS):
            metrics = one.metrics
            seen.append((one.outputs[0].token_ids, metrics.num_accepted_tokens))
            seen.append((metrics.num_draft_tokens, metrics.num_cached_tokens))
    blocks, totals = llm.engine.scheduler.block_manager, llm.engine.metrics
    seen.append((blocks.num_queried_tokens, blocks.num_hit_tokens, blocks.num_available))
    drafts = totals.speculation.num_steps_by_draft_tokens
    seen.append((totals.num_steps, totals.num_output_tokens, drafts))
    return seen


def config_of(drafter: str, draft: str, heads: dict[str, str]) -> dict[str, Any] | None:
    """The `speculative_config` of a drafter, by a name or by its method."""
    configs: dict[str, dict[str, Any] | None] = {
        "none": None,
        "draft": {"model": draft},
        "windowed": {"model": draft, "draft_window": 32},
        "eagle3": {"model": heads["eagle3"]},
        "both": {"drafters": [{"method": "suffix"}, {"model": draft}]},
    }
    return configs.get(drafter, {"method": drafter})


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("drafter", ["none", "draft", "ngram", "suffix", "eagle3", "both"])
def test_nothing_is_left_behind(
    drafter: str,
    padded: bool,
    tiny_target: str,
    tiny_draft: str,
    tiny_heads: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if padded:
        use_padded_steps(monkeypatch)
    config = config_of(drafter, tiny_draft, tiny_heads)
    expected = outputs(build(tiny_target, config))
    llm = build(tiny_target, config)
    widths = (0, K) if drafter != "none" else (0,)
    costs = measure(llm, widths)
    scheduler = llm.engine.scheduler
    scheduler.check_invariants()
    assert not scheduler.has_unfinished
    assert scheduler.block_manager.usage == 0
    assert llm.engine.metrics.num_steps == 0
    assert outputs(llm) == expected
    scheduler.check_invariants()
    for requests in (1, 3, 6):
        assert costs.seconds(requests, 0, requests, 100 * requests) > 1e-5
        if drafter in ("draft", "eagle3"):
            assert costs.draft_seconds(requests, K, 100 * requests) > 1e-5


def test_layers_with_a_window_are_measured(tmp_path_factory: pytest.TempPathFactory) -> None:
    target = str(write_sliding_target(tmp_path_factory.mktemp("sliding") / "target"))
    expected = outputs(build(target, {"method": "ngram"}))
    llm = build(target, {"method": "ngram"})
    assert llm.engine.resolved.num_window_blocks
    measure(llm)
    assert outputs(llm) == expected
    llm.engine.scheduler.check_invariants()


class Clock:
    """Goes on by a tenth of a second whenever it is looked at."""

    def __init__(self) -> None:
        self.looks = 0

    def __call__(self) -> float:
        self.looks += 1
        return self.looks / 10


def test_the_budget_is_kept(
    tiny_target: str, tiny_draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, clock = build(tiny_target, {"model": tiny_draft}), Clock()
    launched: list[tuple[float, Batch]] = []
    launch = Launcher.launch

    def recorded(step: Launcher, batch: Batch) -> Launched:
        launched.append((clock.looks / 10, batch))
        return launch(step, batch)

    monkeypatch.setattr(Launcher, "launch", recorded)
    measure(llm, budget_seconds=1.0, now=clock)
    began = next(when for when, batch in launched if batch.is_decode)
    assert launched[-1][0] < began + 1.0 + 0.5  # what was begun in time was ended
    short = len(launched)
    launched.clear()
    clock.looks = 0
    measure(llm, budget_seconds=4.0, now=clock)
    assert len(launched) > 2 * short
    widths = [item.num_draft_tokens for _, batch in launched[:short] for item in batch.requests]
    assert {0, K} <= set(widths), "the most important come first"


def test_a_model_for_very_short_requests_is_not_measured(tiny_target: str) -> None:
    llm = LLM(tiny_target, skip_tokenizer_init=True, num_kv_blocks=8, max_model_len=8)
    costs = CostModel()
    assert not calibrate(costs, llm.engine._step, llm.engine.resolved, (0,), 16)
    assert costs.seconds(1, 0, 1, 8) > 0


@pytest.mark.parametrize("padded", [False, True])
def test_compiling_takes_nothing_from_the_budget(
    padded: bool, tiny_target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With captured steps, the first one that admits a number of requests compiles kernels."""
    if padded:
        use_padded_steps(monkeypatch)
    llm, seconds = build(tiny_target, {"method": "ngram"}), [0.0]
    measured: set[int] = set()
    launch = Launcher.launch

    def slow(step: Launcher, batch: Batch) -> Launched:
        seconds[0] += 5.0 if batch.admitted else 0.01
        measured.add(len(batch.requests))
        return launch(step, batch)

    monkeypatch.setattr(Launcher, "launch", slow)
    measure(llm, (0, K), budget_seconds=4.0, now=lambda: seconds[0])
    assert (6 in measured) == padded, "elsewhere nothing is compiled, and such time counts"


def test_contexts_are_measured_where_kept_costs_lack_them(
    tiny_target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first start may have ended before them. Then the next one has as much time again."""
    more = {"hf_overrides": {"max_position_embeddings": 4096}, "max_model_len": 4096}
    llm, seconds, lengths = build(tiny_target, None, num_kv_blocks=300, **more), [0.0], set[int]()
    engine, launch = llm.engine, Launcher.launch

    def slow(step: Launcher, batch: Batch) -> Launched:
        seconds[0] += 0.01
        lengths.update(item.start for item in batch.requests)
        return launch(step, batch)

    monkeypatch.setattr(Launcher, "launch", slow)
    costs = CostModel()
    for is_known in (False, True):
        assert costs.knows_contexts == is_known
        calibrate(costs, engine._step, engine.resolved, (0,), 16, 0.05, lambda: seconds[0])
        assert (max(lengths) < 1000) == is_known
        lengths.clear()


@pytest.mark.parametrize(("warm_up", "is_known"), [(True, True), (None, False)])
def test_engines_that_warm_up_estimate_the_speed_up_of_a_fixed_number(
    warm_up: bool | None,
    is_known: bool,
    tiny_target: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(CACHE, str(tmp_path))
    llm = build(tiny_target, {"method": "ngram"}, warm_up=warm_up)
    before = {row.drafts: row.seconds for row in llm.engine.costs}
    assert (before.keys() == {0, K}) is is_known
    metrics = [it.metrics for it in llm.generate(PROMPTS, PARAMS)]
    assert all((it.estimated_speedup is not None) is is_known for it in metrics)
    after = {row.drafts: row.seconds for row in llm.engine.costs}
    assert (before != after) is is_known, "steps are learned from"


@pytest.mark.parametrize("window", [256, None])
def test_prompts_that_a_draft_model_computes_late_are_measured(window: int | None) -> None:
    drafter = {"model": "demo/draft", "num_speculative_tokens": K, "draft_window": window}
    llm = LLM("demo", speculative_config=drafter, max_num_seqs=2, threads=1)
    costs = measure(llm, (0, K), late_tokens=late_tokens_of(llm))
    assert (late_tokens_of(llm) > 0) is (window is not None)
    assert (costs.prompt_seconds(256) > 0) is (window is not None)


def late_tokens_of(llm: LLM) -> int:
    drafter = llm.engine._step._drafter
    assert isinstance(drafter, ContextDrafter)
    return 0 if drafter._window is None else drafter._window.window
