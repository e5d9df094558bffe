"""The first steps of a server leave nothing behind, and are of the kinds that traffic has."""

from typing import Any

import pytest

from slipstream.core.batch import Batch
from slipstream.engine.launcher import Launcher
from slipstream.engine.step_results import Launched
from slipstream.engine.warm_up import warm_up
from slipstream.runner.captured_passes import PassSize
from tests.drafters.assistants import write_sliding_target
from tests.e2e.test_calibration import K, build, config_of, outputs
from tests.padded_steps import use_padded_steps


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """The steps that are launched from here on."""
    batches: list[Batch] = []
    launch = Launcher.launch

    def recorded(step: Launcher, batch: Batch) -> Launched:
        batches.append(batch)
        return launch(step, batch)

    monkeypatch.setattr(Launcher, "launch", recorded)
    return batches


def assert_nothing_is_left(target: str, drafter: dict[str, Any] | None, warm: bool | None) -> None:
    """Outputs after the first steps equal those without; `warm`: the option, None: run here."""
    expected = outputs(build(target, drafter))
    llm = build(target, drafter, warm_up=warm)
    if warm is None:
        warm_up(llm.engine._step, llm.engine.resolved, (0, K) if drafter else (0,), 16)
    scheduler = llm.engine.scheduler
    scheduler.check_invariants()
    assert scheduler.block_manager.usage == 0
    assert llm.engine.metrics.num_steps == 0
    assert outputs(llm) == expected
    scheduler.check_invariants()


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("drafter", ["none", "draft", "windowed", "ngram", "suffix", "eagle3"])
def test_nothing_is_left_behind(
    drafter: str,
    padded: bool,
    tiny_target: str,
    tiny_draft: str,
    tiny_heads: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    launched: list[Batch],
) -> None:
    config = config_of(drafter, tiny_draft, tiny_heads)
    if padded:
        use_padded_steps(monkeypatch)
    assert_nothing_is_left(tiny_target, config, True if padded else None)
    own = [batch for batch in launched if batch.requests[0].request.request_id[:10] == "artificial"]
    assert own
    widths = {item.num_draft_tokens for batch in own for item in batch.requests}
    assert widths == ({0} if drafter == "none" else {0, K})
    mixed = [batch for batch in own if len({it.is_prompt_chunk for it in batch.requests}) == 2]
    assert len(mixed) >= 4
    asked = [item.request.params for batch in own for item in batch.requests]
    assert {0.0, 0.8, 1.0} == {params.temperature for params in asked}
    assert any(params.seed is not None for params in asked)


def test_passes_of_adapters_are_captured_too(
    tiny_target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_padded_steps(monkeypatch)
    limits = {"max_num_batched_tokens": 64, "max_num_seqs": 2}
    llm = build(tiny_target, None, warm_up=True, enable_lora=True, **limits)
    passes = llm.engine._step._runner._captured
    assert passes is not None
    plain, adapted = set[PassSize](), set[PassSize]()
    for size, form in passes._graphs:
        (adapted if "adapters" in dict(form[2:-1]) else plain).add(size)
    assert adapted == {PassSize(32, 2), PassSize(64, 2)} <= plain


def test_layers_with_a_window(tmp_path_factory: pytest.TempPathFactory) -> None:
    target = str(write_sliding_target(tmp_path_factory.mktemp("sliding") / "target"))
    assert_nothing_is_left(target, {"method": "ngram"}, None)


def test_only_captured_steps_are_warmed_up(tiny_target: str, launched: list[Batch]) -> None:
    build(tiny_target, None, warm_up=True)
    assert not launched


@pytest.mark.parametrize("most", [1, 2, 5])
def test_small_engines(most: int, tiny_target: str, launched: list[Batch]) -> None:
    """Every step fits into the engine's limits."""
    options = {"max_num_seqs": most, "max_num_batched_tokens": 16, "max_model_len": 24}
    llm = build(tiny_target, {"method": "ngram"}, **options)
    warm_up(llm.engine._step, llm.engine.resolved, (0, K), 16)
    assert launched
    for batch in launched:
        assert len(batch.requests) <= most
        assert sum(it.num_new_tokens + it.num_draft_tokens for it in batch.requests) <= 16
        assert all(item.start + item.num_new_tokens <= 24 for item in batch.requests)
