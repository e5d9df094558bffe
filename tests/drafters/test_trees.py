"""Trees that EAGLE heads draft, against the oracle of the head, and what becomes of them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream import LLM, RequestOutput, SamplingParams
from slipstream.core.errors import SlipstreamError
from slipstream.runner.device_batch import DeviceBatch
from slipstream.speculative.drafter import Draft
from slipstream.speculative.trees.drafter import TreeDrafter
from tests.checkpoints import write_qwen3
from tests.drafters.heads import write_eagle1, write_eagle3
from tests.drafters.oracles import Eagle1, Eagle3, Head, Target
from tests.last_hidden_checkpoints import medusa_for
from tests.padded_steps import use_padded_steps

PROMPT = torch.randint(1, 96, (37,), generator=torch.Generator().manual_seed(3)).tolist()
GREEDY = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
PATHS = ((0,), (1,), (3,), (0, 0), (0, 2), (1, 0), (0, 0, 0), (0, 2, 1), (0, 2, 1, 0))
STATIC = {"speculative_token_tree": str(list(PATHS))}
DYNAMIC = {
    "speculative_eagle_topk": 4,
    "speculative_num_steps": 3,
    "speculative_num_draft_tokens": 13,
}


def make(target: str, head: Path | str, tree: dict[str, Any], **options: Any) -> LLM:
    options = {"num_kv_blocks": 64, "skip_tokenizer_init": True, **options}
    return LLM(target, speculative_config={"model": str(head), **tree}, **options)


def run(llm: LLM, params: SamplingParams = GREEDY) -> RequestOutput:
    return llm.generate({"prompt_token_ids": PROMPT}, params)[0]


Drafted = tuple[list[int], list[tuple[int, ...]]]


@pytest.fixture
def drafted(monkeypatch: pytest.MonkeyPatch) -> list[Drafted]:
    """(known tokens, the paths of the tree) of every draft from here on."""
    found: list[Drafted] = []
    propose = TreeDrafter.propose

    def recorded(self: TreeDrafter, batch: DeviceBatch) -> Draft:
        draft = propose(self, batch)
        for index, slot in enumerate(batch.slots.tolist()):
            count = int(draft.num_tokens[index])
            if not count:
                continue
            assert draft.tree is not None
            known = self._state.token_ids[slot, : int(self._state.num_tokens[slot])].tolist()
            paths: list[tuple[int, ...]] = [()]
            for node in range(1, count + 1):
                parent = int(draft.tree.parents[index, node])
                paths.append((*paths[parent], int(draft.token_ids[index, node - 1])))
            found.append((known, paths[1:]))
        return draft

    monkeypatch.setattr(TreeDrafter, "propose", recorded)
    return found


def chances(head: Head, known: list[int], path: tuple[int, ...]) -> Tensor:
    """[Vd], log probabilities after known tokens and a path of draft tokens, in a chain."""
    tokens, features = known[1:], head.features(known[:-1])
    scores, following = head.rows(tokens, features)
    for token in path:
        tokens = [*tokens, token]
        features = torch.cat((features, following[-1:]))
        scores, following = head.rows(tokens, features)
    return scores[-1].log_softmax(-1)


def token_of(head: Head, column: int) -> int:
    shift = int(head.weights["d2t"][column]) if "d2t" in head.weights else 0
    return column + shift


def static_paths(head: Head, known: list[int], count: int) -> list[tuple[int, ...]]:
    paths: dict[tuple[int, ...], tuple[int, ...]] = {(): ()}
    for ranks in sorted(PATHS, key=lambda ranks: (len(ranks), ranks))[:count]:
        above = paths[ranks[:-1]]
        order = chances(head, known, above).argsort(descending=True)
        paths[ranks] = (*above, token_of(head, int(order[ranks[-1]])))
    return list(paths.values())[1:]


def dynamic_paths(head: Head, known: list[int], count: int) -> list[tuple[int, ...]]:
    """EAGLE-2: the likeliest of all candidates, those of larger probability first."""
    frontier: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    candidates: list[tuple[float, tuple[int, ...]]] = []
    for _ in range(min(3, count // 4 + 1)):
        found = []
        for score, path in frontier:
            best = chances(head, known, path).topk(4)
            for value, column in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                found.append((score + value, (*path, token_of(head, column))))
        candidates.extend(found)
        frontier = sorted(found, reverse=True)[:4]
    return [path for _, path in sorted(candidates, reverse=True)[:count]]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("tree", ["static", "dynamic"])
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_trees_are_those_of_the_oracle(
    kind: str,
    tree: str,
    padded: bool,
    tiny_target: str,
    tmp_path: Path,
    drafted: list[Drafted],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also after accepted paths of all kinds, since features come from the rows of the path."""
    if kind == "eagle":
        folder = write_eagle1(tmp_path, tiny_target)
    else:
        folder = write_eagle3(tmp_path, tiny_target, draft_vocab=60)
    head = (Eagle1 if kind == "eagle" else Eagle3)(folder, Target(tiny_target))
    if padded:
        use_padded_steps(monkeypatch)
    keys = STATIC if tree == "static" else DYNAMIC
    llm = make(tiny_target, folder, keys, max_num_seqs=1, max_num_batched_tokens=20)
    output = run(llm, replace(GREEDY, repetition_penalty=1.3))
    assert output.metrics.num_accepted_tokens > 1
    assert len(output.metrics.num_accepted_tokens_per_pos) == (4 if tree == "static" else 3)
    assert len(drafted) > 8
    expected = static_paths if tree == "static" else dynamic_paths
    for known, paths in drafted[:: 2 if padded else 1]:
        assert paths == expected(head, known, len(paths)), len(known)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_tree_is_accepted_as_far_as_the_chain_in_it(
    kind: str, tiny_target: str, tiny_heads: dict[str, str]
) -> None:
    """A tree that holds the chain accepts at least as much after the same tokens; over a text
    AL is no smaller, and with more candidates it grows."""
    prompts: list[Any] = [{"prompt_token_ids": PROMPT[index:]} for index in range(8)]

    def acceptance_length(keys: dict[str, Any]) -> float:
        outputs = make(tiny_target, tiny_heads[kind], keys).generate(prompts, GREEDY)
        metrics = [output.metrics for output in outputs]
        accepted = sum(it.num_accepted_tokens for it in metrics)
        return 1 + accepted / sum(it.num_drafts for it in metrics)

    chain = acceptance_length({"num_speculative_tokens": 3})
    as_tree = acceptance_length({"speculative_token_tree": [[0], [0, 0], [0, 0, 0]]})
    static = acceptance_length({"speculative_token_tree": [[0], [1], [2], [0, 0], [0, 0, 0]]})
    dynamic = acceptance_length(DYNAMIC)
    assert as_tree == pytest.approx(chain)
    assert static > chain
    assert dynamic > chain


def test_rounds_without_drafts_come_between(
    tiny_target: str, tiny_heads: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Features wait meanwhile, in fewer places than the tree has nodes."""
    from slipstream.engine.scheduler import Scheduler

    plain = LLM(tiny_target, skip_tokenizer_init=True, num_kv_blocks=64)
    expected = run(plain).outputs[0].token_ids
    most_drafts, calls = Scheduler._most_drafts, [0]

    def paused(self: Scheduler, *args: Any, **kwargs: Any) -> int:
        calls[0] += 1
        return 0 if calls[0] % 17 in range(3, 15) else most_drafts(self, *args, **kwargs)

    monkeypatch.setattr(Scheduler, "_most_drafts", paused)
    for padded in (False, True):
        if padded:
            use_padded_steps(monkeypatch)
        for tree in (STATIC, DYNAMIC):
            output = run(make(tiny_target, tiny_heads["eagle3"], tree))
            assert output.outputs[0].token_ids == expected
            assert 1 < output.metrics.num_drafts < output.metrics.num_steps - 4


def test_wrong_trees_are_refused(
    tiny_target: str, tiny_draft: str, tiny_heads: dict[str, str], tmp_path: Path
) -> None:
    windowed = write_qwen3(
        tmp_path / "windowed",
        use_sliding_window=True,
        sliding_window=3,
        max_window_layers=0,
    )
    head = write_eagle1(tmp_path / "head", tiny_target)
    wide = [[rank] for rank in range(61)]
    narrow = write_eagle3(tmp_path / "narrow", tiny_target, draft_vocab=60)
    synthetic = {
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": 2,
        "num_speculative_tokens": 9,
    }
    cases: list[tuple[str, Path | str, dict[str, Any], str]] = [
        (tiny_target, tiny_draft, STATIC, "draft_model drafts no trees, eagle and eagle3 do"),
        (tiny_target, medusa_for(tiny_target), {"method": "medusa", **STATIC}, "medusa drafts no"),
        (tiny_target, head, {**STATIC, "num_speculative_tokens": 4}, "9 draft tokens, .* says 4"),
        (tiny_target, head, {**STATIC, **synthetic}, "acceptance is forced for chains only"),
        (tiny_target, head, {**STATIC, "rejection_sample_method": "block"}, "block .* chains"),
        (
            tiny_target,
            head,
            {**STATIC, "rejection_sample_method": "standard"},
            "rejection .* chains",
        ),
        (tiny_target, narrow, {"speculative_token_tree": wide}, "61 likeliest .* drafts over 60"),
        (str(windowed), head, STATIC, "depth 4 needs a target whose windows .* window of 3"),
        (tiny_target, head, {"tree_depth": 3}, "unknown key tree_depth"),
    ]
    for target, model, keys, message in cases:
        with pytest.raises(SlipstreamError, match=message):
            make(target, model, keys)
    with pytest.raises(SlipstreamError, match="ngram drafts no trees"):
        LLM(tiny_target, speculative_config={"method": "ngram", **STATIC}, skip_tokenizer_init=True)
    both = {"drafters": [{"method": "ngram"}, {"model": str(head)}]}
    with pytest.raises(SlipstreamError, match="combination drafts no trees"):
        LLM(tiny_target, speculative_config={**both, **STATIC}, skip_tokenizer_init=True)
    both = {"drafters": [{"method": "ngram"}, {"model": str(head), **STATIC}]}
    with pytest.raises(SlipstreamError, match="unknown key speculative_token_tree"):
        LLM(tiny_target, speculative_config=both, skip_tokenizer_init=True)


def test_no_drafts_is_plain_decoding_whatever_the_tree(tiny_target: str) -> None:
    llm = make(tiny_target, "/nowhere", {"method": "eagle", "num_speculative_tokens": 0, **STATIC})
    assert run(llm).metrics.num_drafts == 0
