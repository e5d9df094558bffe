"""A drafter that names its target, given as the model."""

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream import LLM, CheckpointError, SamplingParams
from tests.drafters.heads import as_wrapper, write_eagle3

PROMPT: Any = {"prompt_token_ids": [5, 9, 14, 33]}
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def written(tiny_target: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wrapped") / "head"
    return as_wrapper(write_eagle3(folder, tiny_target, fit=True))


@pytest.fixture
def head(written: Path, tiny_target: str) -> Path:
    return renamed(written, tiny_target)


def renamed(head: Path, target: Any) -> Path:
    """The head, made for another target."""
    config = json.loads((head / "config.json").read_text())
    config["speculators_config"]["verifier"] = {"name_or_path": target}
    (head / "config.json").write_text(json.dumps(config))
    return head


def make(model: Path, **options: Any) -> LLM:
    return LLM(str(model), skip_tokenizer_init=True, num_kv_blocks=16, **options)


def test_its_target_is_loaded_and_it_drafts_as_many_tokens_as_it_says(
    head: Path, tiny_target: str
) -> None:
    llm = make(head)
    resolved = llm.engine.resolved
    assert (resolved.method, resolved.limits.num_speculative_tokens) == ("eagle3", 3)
    assert ("target", tiny_target) in [(name, value) for name, value, _ in resolved.reasons]
    output, plain = (it.generate(PROMPT, GREEDY)[0] for it in (llm, make(Path(tiny_target))))
    assert output.metrics.num_drafts > 0
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids


def test_what_the_user_says_of_drafting_counts(head: Path, tiny_draft: str) -> None:
    for config, method, count in (
        ({"num_speculative_tokens": 5}, "eagle3", 5),
        ({"num_speculative_tokens": 0}, None, 0),
        ({"method": "ngram"}, "ngram", 4),
        ({"model": tiny_draft, "num_speculative_tokens": 2}, "draft_model", 2),
        ([{"method": "ngram"}, {"model": str(head)}], "combination", 3),
    ):
        resolved = make(head, speculative_config=config).engine.resolved
        assert (resolved.method, resolved.limits.num_speculative_tokens) == (method, count)


def test_a_target_beside_the_drafter_may_be_a_relative_path(head: Path, tiny_target: str) -> None:
    link = head.parent / "model"
    link.symlink_to(tiny_target)
    assert make(renamed(head, "../model")).engine.resolved.method == "eagle3"


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("/nowhere/at-all", "is a drafter for /nowhere/at-all, which was not found"),
        (None, "names no target"),
        ("", "names no target"),
    ],
)
def test_a_target_that_is_not_found_is_named(head: Path, target: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as error:
        make(renamed(head, target))
    assert "give the target as the model" in str(error.value)


def test_a_drafter_for_a_drafter_is_refused(head: Path) -> None:
    with pytest.raises(CheckpointError, match="names as its target, is one as well"):
        make(renamed(head, str(head)))
