"""Priorities and salts decide who runs and what is computed again, never what is said."""

from typing import Any

import pytest

from slipstream import LLM, SamplingParams
from tests.lossless.test_greedy import make_prompts

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
SEEDED = SamplingParams(temperature=1, seed=5, n=2, max_tokens=30, ignore_eos=True)


def make(target: str, draft: str, blocks: int, **options: Any) -> LLM:
    return LLM(
        target,
        speculative_config={"model": draft, "num_speculative_tokens": 4},
        dtype="float32",
        skip_tokenizer_init=True,
        block_size=8,
        num_kv_blocks=blocks,
        max_model_len=120,
        threads=1,
        **options,
    )


def placed(prompts: list[Any], priorities: list[int], salts: list[str]) -> list[Any]:
    every = zip(prompts, priorities, salts, strict=True)
    return [{**prompt, "priority": it, "cache_salt": salt} for prompt, it, salt in every]


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_what_is_said_does_not_depend_on_priorities_and_salts(
    params: SamplingParams, tiny_target: str, tiny_draft: str
) -> None:
    prompts: list[Any] = make_prompts(6)

    def said(llm: LLM, given: list[Any]) -> list[Any]:
        outputs = llm.generate(given, params)
        return [[list(sample.token_ids) for sample in output.outputs] for output in outputs]

    expected = said(make(tiny_target, tiny_draft, 400), prompts)
    llm = make(tiny_target, tiny_draft, 16, scheduling_policy="priority")
    for priorities in ([0] * 6, [5, 4, 3, 2, 1, 0], [0, -9, 7, 7, -9, 0]):
        given = placed(prompts, priorities, ["", "a", "", "a", "b", "b"])
        assert said(llm, given) == expected
        llm.engine.scheduler.check_invariants()
    assert llm.engine.scheduler.num_preemptions > 0


def test_requests_end_in_order_of_their_priorities(tiny_target: str, tiny_draft: str) -> None:
    llm = make(tiny_target, tiny_draft, 400, scheduling_policy="priority", max_num_seqs=1)
    given = placed(make_prompts(4), [2, 7, -1, 2], [""] * 4)
    ended = [it.request_id for it in llm.stream(given, GREEDY) if it.finished]
    assert ended == ["2", "0", "3", "1"]


def test_a_salt_finds_its_own_blocks_alone(tiny_target: str, tiny_draft: str) -> None:
    llm = make(tiny_target, tiny_draft, 400)
    prompts: list[Any] = [{"prompt_token_ids": [5, 9] * 20}]

    def cached(salt: str) -> int:
        [output] = llm.generate(placed(prompts, [0], [salt]), GREEDY)
        return output.metrics.num_cached_tokens

    assert [cached(salt) for salt in ("", "a", "b")] == [0, 0, 0]
    assert all(cached(salt) >= 32 for salt in ("", "a", "b"))
