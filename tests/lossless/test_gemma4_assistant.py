"""Gemma 4 with its assistant, which reads the target's cache, writes what it writes alone."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream import SamplingParams
from tests.drafters.assistants import write_gemma4_assistant
from tests.lossless.test_greedy import make_llm, make_prompts, tokens
from tests.lossless.test_sampled import check
from tests.models import test_parity
from tests.models.gemma_cases import GEMMA
from tests.models.parity_cases import Case
from tests.padded_steps import use_padded_steps

GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
CASES = [case for case in GEMMA if case.architecture == "Gemma4"]
# K, rows and blocks of the cache (with few, requests are preempted), padded steps.
SETTINGS = [(1, 24, 100, True), (3, 24, 26, False), (5, 512, 30, True), (7, 512, 100, False)]


def write(case: Case, folder: Path) -> tuple[str, str]:
    """A target and its assistant."""
    target = test_parity.write_checkpoint(replace(case, shard_size=None), folder / "target")
    return str(target), write_gemma4_assistant(folder / "assistant", target, case)


@pytest.mark.parametrize(
    ("case", "settings"), list(zip(CASES, SETTINGS, strict=True)), ids=lambda it: str(it)
)
def test_greedy_output_is_the_plain_output(
    case: Case,
    settings: tuple[int, int, int, bool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second time prompts are found in the prefix index."""
    (count, rows, blocks, padded), (target, assistant) = settings, write(case, tmp_path)
    # Without the first prompt, whose text of a case has two tokens that are equally likely.
    prompts, options = make_prompts(7)[1:], {"rows": rows, "blocks": blocks}
    expected = tokens(make_llm(target, None, {**options, "blocks": 200}).generate(prompts, GREEDY))
    if padded:
        use_padded_steps(monkeypatch)
    drafter: dict[str, Any] = {"model": assistant, "num_speculative_tokens": count}
    llm = make_llm(target, drafter, options)
    outputs = llm.generate(prompts, GREEDY)
    assert tokens(outputs) == expected
    assert tokens(llm.generate(prompts, GREEDY)) == expected
    assert sum(output.metrics.num_accepted_tokens for output in outputs) > 0
    llm.engine.scheduler.check_invariants()


def test_sampled_output_has_the_targets_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_parity, "VOCAB_SIZE", 6)
    target, assistant = write(CASES[0], tmp_path)
    check({"drafter": "assistant"}, (target, target), {"assistant": assistant}, None)
