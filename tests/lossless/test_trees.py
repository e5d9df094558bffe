"""Drafts that are trees: greedy output is the plain output, and so is sampled output with a seed.

Every node is sampled with the noise of plain decoding at its position, so the same seed must give
the same text; that the noise is used rightly is tested by chi-square in test_sampled.py.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from slipstream import LLM, RequestOutput, SamplingParams
from slipstream.core.batch import DraftPlan, StepReport
from slipstream.engine.draft_policy import Candidate
from slipstream.engine.prompts import EncodedPrompt
from tests.draft_traffic import learn_costs_while_running
from tests.lossless.test_greedy import (
    MAX_TOKENS,
    assert_case_came_about,
    make_llm,
    make_prompts,
    plain_tokens,
    tokens,
)
from tests.padded_steps import use_steps
from tests.pairwise import Case

TREES: dict[str, dict[str, Any]] = {
    "chain": {"speculative_token_tree": "[(0,), (0, 0), (0, 0, 0)]"},
    "siblings": {"speculative_token_tree": [[0], [1]]},
    "static": {
        "speculative_token_tree": "[(0,), (2,), (1,), (0, 0), (0, 3), (2, 1), (0, 0, 0), (0, 0, 1),"
        "(2, 1, 0), (0, 0, 0, 0)]"
    },
    "narrow": {
        "speculative_eagle_topk": 2,
        "speculative_num_steps": 4,
        "speculative_num_draft_tokens": 8,
    },
    "wide": {
        "speculative_eagle_topk": 6,
        "speculative_num_steps": 3,
        "num_speculative_tokens": 20,
    },
    "largest": {
        "speculative_eagle_topk": 10,
        "speculative_num_steps": 7,
        "speculative_num_draft_tokens": 63,
    },
}
AXES: dict[str, list[Any]] = {
    "head": ["eagle", "eagle3"],
    "tree": list(TREES),
    "batch": [1, 8],
    "rows": [512, 24],  # 24: prompts come in chunks, and trees are cut
    "blocks": [400, 16],  # 16 blocks of 8 tokens: requests are preempted
    "prefix": [False, True],
    "sampling": ["greedy", "penalties", "seeded", "everything"],
    "steps": ["exact", "padded"],
}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "penalties": {"temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 0.4},
    "seeded": {"temperature": 1.0, "seed": 11},
    "everything": {
        "temperature": 0.8,
        "seed": 11,
        "top_k": 30,
        "top_p": 0.95,
        "min_p": 0.01,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.2,
        "logit_bias": {5: 1.0, 9: -2.0},
    },
}


@pytest.mark.matrix(AXES, whole=True)
def test_output_is_the_plain_output(
    case: Case, tiny_target: str, tiny_heads: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    check(case, tiny_target, tiny_heads, monkeypatch)


def check(case: Case, target: str, heads: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = make_prompts(case["batch"])
    params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, **SAMPLINGS[case["sampling"]])
    expected = plain_tokens(target, case["batch"], params, case.get("dtype", "auto"))

    use_steps(case["steps"], monkeypatch)
    llm = make_llm(target, {"model": heads[case["head"]], **TREES[case["tree"]]}, case)
    if case["prefix"]:
        llm.generate(prompts, params)
    outputs = llm.generate(prompts, params)
    assert tokens(outputs) == expected
    drafted = [output.metrics.num_drafts > 0 for output in outputs]
    # If rows are scarce, large trees of the first requests leave none for the last ones.
    assert any(drafted) if case["rows"] == 24 else all(drafted)
    accepted = sum(output.metrics.num_accepted_tokens for output in outputs)
    assert accepted > 0 or case["batch"] == 1
    assert_case_came_about(case, outputs)


@pytest.mark.parametrize("tree", ["static", "wide"])
@pytest.mark.parametrize("steps", ["exact", "padded"])
def test_trees_of_all_sizes_that_the_policy_has(
    steps: str,
    tree: str,
    tiny_target: str,
    tiny_heads: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their results name the nodes that were accepted."""
    prompts, params = make_prompts(4), SamplingParams(temperature=1.0, seed=3, max_tokens=60)
    expected = plain_tokens(tiny_target, 4, params, "auto")
    use_steps(steps, monkeypatch)
    learn_costs_while_running(monkeypatch)
    head = {"model": tiny_heads["eagle3"], **TREES[tree], "num_speculative_tokens": "auto"}
    llm = make_llm(tiny_target, head, {"rows": 512, "blocks": 400})
    policy, drafted, sizes = llm.engine.scheduler.policy, list[tuple[int, ...]](), Counter[int]()

    def plan(asked: Sequence[Candidate]) -> list[DraftPlan]:
        size = policy.widths[len(drafted) % len(policy.widths)]
        return [DraftPlan(min(it.most, size)) for it in asked]

    def observe(report: StepReport) -> None:
        for item, gain in zip(report.batch.requests, report.committed, strict=True):
            sizes[gain.num_draft_tokens] += gain.num_accepted
            assert len(gain.nodes) == gain.num_accepted
            assert sorted({*gain.nodes}) == list(gain.nodes), "nodes rise along a path"
            assert max(gain.nodes, default=0) <= item.num_draft_tokens
            drafted.append(gain.nodes)

    monkeypatch.setattr(policy, "plan", plan)
    monkeypatch.setattr(policy, "observe", observe)
    assert tokens(llm.generate(prompts, params)) == expected
    assert all(sizes[size] for size in policy.widths[1:]), sizes
    assert any(max(nodes) > len(nodes) for nodes in drafted if nodes), "no path left the first"


@pytest.mark.parametrize("steps", ["exact", "padded"])
def test_words_and_stop_tokens_are_looked_for_along_the_way(
    steps: str, tiny_target: str, tiny_heads: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """bad_words over several tokens, and min_tokens, see the tokens between root and node."""
    prompts = [prompt["prompt_token_ids"] for prompt in make_prompts(4)]
    plain = make_llm(tiny_target, None, {"rows": 512, "blocks": 400})
    free = step_by_step(plain, prompts, (), greedy())
    words = tuple(tuple(text[at : at + 2]) for text in free for at in (9, 16, 24))
    early = greedy(min_tokens=12, stop_token_ids=[text[5] for text in free])
    use_steps(steps, monkeypatch)
    tree = {"model": tiny_heads["eagle3"], **TREES["static"]}
    trees = make_llm(tiny_target, tree, {"rows": 512, "blocks": 400})
    for banned, params in ((words, greedy()), ((), early)):
        expected = step_by_step(plain, prompts, banned, params)
        assert step_by_step(trees, prompts, banned, params) == expected
        assert expected != free


def step_by_step(
    llm: LLM, prompts: list[list[int]], words: tuple[tuple[int, ...], ...], params: SamplingParams
) -> list[list[int]]:
    """The output tokens of each prompt, none of which completes one of the words."""
    for index, ids in enumerate(prompts):
        llm.engine.add(str(index), EncodedPrompt(None, ids, words), params)
    ended: dict[str, list[int]] = {}
    while llm.engine.has_unfinished:
        for it in llm.engine.step():
            ended[it.request_id] = list(it.output().outputs[0].token_ids)
    return [ended[str(index)] for index in range(len(prompts))]


def greedy(**options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, **options)


@pytest.mark.parametrize("length", [33, 34, 40])
@pytest.mark.parametrize("rows", [24, 512])
def test_acceptance_after_a_prefix_hit_equals_acceptance_without(
    length: int, rows: int, tiny_target: str, tiny_heads: dict[str, str]
) -> None:
    prompt = (make_prompts(4)[3]["prompt_token_ids"] * 2)[:length]
    tree = {"model": tiny_heads["eagle3"], **TREES["static"]}
    llm = make_llm(tiny_target, tree, {"rows": rows, "blocks": 64})
    params = SamplingParams(temperature=1.0, max_tokens=60, ignore_eos=True, seed=5)
    cold, warm = run(llm, prompt, params), run(llm, prompt, params)
    assert cold.metrics.num_cached_tokens == 0
    assert warm.metrics.num_cached_tokens == (length - 1) // 8 * 8
    assert warm.metrics.num_accepted_tokens_per_pos == cold.metrics.num_accepted_tokens_per_pos
    assert warm.metrics.num_drafts == cold.metrics.num_drafts
    assert cold.metrics.num_accepted_tokens > 0


@pytest.mark.parametrize("tree", ["static", "narrow", "largest"])
@pytest.mark.parametrize("length", [20, 21, 33])
@pytest.mark.parametrize("steps", ["exact", "padded"])
def test_trees_are_cut_at_max_model_len(
    tree: str,
    length: int,
    steps: str,
    tiny_target: str,
    tiny_heads: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompt = make_prompts(1)[0]["prompt_token_ids"][:9]
    options: dict[str, Any] = {"max_model_len": length, "num_kv_blocks": 64, "block_size": 8}
    options["skip_tokenizer_init"] = True
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    expected = run(LLM(tiny_target, **options), prompt, params).outputs[0].token_ids
    assert 9 + len(expected) == length
    use_steps(steps, monkeypatch)
    speculative = {"model": tiny_heads["eagle"], **TREES[tree]}
    llm = LLM(tiny_target, speculative_config=speculative, **options)
    assert run(llm, prompt, params).outputs[0].token_ids == expected


def test_a_request_may_ask_for_fewer_nodes(tiny_target: str, tiny_heads: dict[str, str]) -> None:
    """It gets the first nodes of the tree; without any it decodes plainly."""
    tree = {"model": tiny_heads["eagle3"], **TREES["static"]}
    llm = make_llm(tiny_target, tree, {"rows": 512, "blocks": 64})
    each = [greedy(num_speculative_tokens=count) for count in (0, 1, 2, 5, 10)]
    outputs = llm.generate([make_prompts(2)[1]] * len(each), each)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    drafted = [
        output.metrics.num_draft_tokens / max(1, output.metrics.num_drafts) for output in outputs
    ]
    assert drafted == sorted(drafted)
    assert drafted[0] == 0
    assert drafted[1] == 1


@pytest.mark.parametrize("steps", ["exact", "padded"])
def test_logprobs_are_those_of_the_way(
    steps: str, tiny_target: str, tiny_heads: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = make_prompts(3)
    params = greedy(logprobs=2, repetition_penalty=1.2)
    plain = make_llm(tiny_target, None, {"rows": 512, "blocks": 400})
    expected = plain.generate(prompts, params)
    use_steps(steps, monkeypatch)
    tree = {"model": tiny_heads["eagle3"], **TREES["wide"]}
    outputs = make_llm(tiny_target, tree, {"rows": 512, "blocks": 400}).generate(prompts, params)
    assert sum(output.metrics.num_accepted_tokens for output in outputs) > 0
    for output, other in zip(outputs, expected, strict=True):
        ours, theirs = output.outputs[0].logprobs, other.outputs[0].logprobs
        assert ours is not None
        assert theirs is not None
        for row, wanted in zip(ours, theirs, strict=True):
            values = {token: it.logprob for token, it in row.items()}
            assert values == pytest.approx(
                {token: it.logprob for token, it in wanted.items()}, abs=1e-4
            )


def run(llm: LLM, prompt: list[int], params: SamplingParams) -> RequestOutput:
    return llm.generate({"prompt_token_ids": prompt}, params)[0]
