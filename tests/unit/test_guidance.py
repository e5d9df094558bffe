"""Steps whose requests follow grammars, without the package that reads grammars.

A guide of these tests allows what a rule of its own says, so that the way of the masks to the
device and back is tested wherever the engine runs, replayed on a GPU included.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream import LLM, RequestOutput, SamplingParams, StructuredOutput
from slipstream.core.structured import Advance
from slipstream.engine import guidance
from slipstream.engine.draft_guide import GuidedDraft
from slipstream.engine.prompts import TokensPrompt
from slipstream.runner.graphs import GraphRunner
from tests.checkpoints import VOCAB_SIZE
from tests.padded_steps import use_padded_steps

LENGTH = 24
WORDS = -(-VOCAB_SIZE // 32)
ON_GPU = torch.cuda.is_available()


def allowed_after(tokens: Sequence[int]) -> list[int]:
    """Token t is followed by tokens of the other parity; a multiple of 5 by one token only."""
    if not tokens:
        return list(range(1, 40))
    last = tokens[-1]
    if last % 5 == 0:
        return [(3 * last + 7) % 89 + 1]
    return list(range(1 + last % 2, VOCAB_SIZE, 2))


class RuleGuide:
    """Takes the place of `DraftGuide`."""

    problem = "refused"

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def advance(self, token: int) -> Advance:
        if not self.enter(token):
            return Advance.REFUSED
        return Advance.COMPLETE if len(self.tokens) == LENGTH else Advance.OPEN

    def enter(self, token: int) -> bool:
        allowed = token in allowed_after(self.tokens)
        if allowed:
            self.tokens.append(token)
        return allowed

    def leave(self) -> None:
        self.tokens.pop()

    def follow(self, guess: Sequence[int], room: int, certain: bool) -> GuidedDraft:
        path, kept, own = GuidedDraft([], [], 0), 0, True
        while len(path.token_ids) < room:
            place = len(path.token_ids)
            only = allowed_after([*self.tokens, *path.token_ids])
            if len(only) > 1 and not (own and place < len(guess)):
                break
            token = only[0] if len(only) == 1 else guess[place]
            own = own and place < len(guess) and guess[place] == token
            if token not in only and certain:
                break
            kept += own
            path.token_ids.append(token)
            path.forced.append(len(only) == 1)
            if token not in only:
                break
        return GuidedDraft(path.token_ids, path.forced, kept)


class Rules:
    """Takes the place of `Grammars`."""

    def __init__(self, *arguments: Any) -> None:
        """Rules need nothing."""

    def compile(self, structured: StructuredOutput) -> None:
        """This grammar needs no compilation."""

    def guide(self, structured: StructuredOutput, stop_token_ids: frozenset[int]) -> RuleGuide:
        return RuleGuide()

    def masks(self, rows: int) -> Tensor:
        return torch.full((rows, WORDS), -1, dtype=torch.int32)

    def fill(self, masks: Tensor, wanted: Sequence[tuple[RuleGuide, int, list[int]]]) -> None:
        for guide, first, tokens in wanted:
            for place in range(len(tokens) + 1):
                text = [*guide.tokens, *tokens[:place]]
                if any(t not in allowed_after(text[:i]) for i, t in enumerate(text)):
                    break
                bits = torch.zeros(WORDS * 32, dtype=torch.int64)
                bits[allowed_after(text)] = 1
                words = (bits.view(WORDS, 32) << torch.arange(32)).sum(1)
                masks[first + place] = words.to(torch.int32)


@pytest.fixture
def rules(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Engines built from here on follow rules; which graphs they ran."""
    monkeypatch.setattr("slipstream.engine.assembly.Grammars", Rules)
    monkeypatch.setattr(guidance, "DraftGuide", RuleGuide)
    ran: list[str] = []
    run = GraphRunner.run

    def noted(
        self: GraphRunner, name: str, function: Any, packed: Any, host: Any = None, **more: Any
    ) -> Any:
        ran.append(name if host is None else f"guided {name}")
        return run(self, name, function, packed, host, **more)

    monkeypatch.setattr(GraphRunner, "run", noted)
    return ran


DRAFTERS = ["draft_model", "subset", "ngram", "suffix", "eagle3", "tree", "combination"]
PROMPTS = [
    TokensPrompt(prompt_token_ids=[7 * place + index for place in range(1, 9)])
    for index in range(6)
]
TREE = "[(0,), (1,), (0, 0), (1, 0)]"
WISH = StructuredOutput(regex="a rule")
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.9, "seed": 4, "top_k": 30, "presence_penalty": 0.5},
}


def make(drafter: str | None, target: str, draft: str, heads: dict[str, str]) -> LLM:
    chosen: dict[str | None, dict[str, Any] | None] = {
        None: None,
        "draft_model": {"model": draft},
        "subset": {"model": draft, "draft_vocab_size": 60},
        "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
        "suffix": {"method": "suffix"},
        "eagle3": {"model": heads["eagle3"]},
        "tree": {
            "model": heads["eagle3"],
            "speculative_token_tree": TREE,
        },
        "combination": {"drafters": [{"method": "ngram", "min_match": 2}, {"model": draft}]},
    }
    config = chosen[drafter]
    if config is not None:
        config["num_speculative_tokens"] = 4
    return LLM(
        target,
        speculative_config=config,
        skip_tokenizer_init=True,
        num_kv_blocks=200,
        max_num_seqs=4,
        dtype="float32",
        enable_prefix_caching=False,
    )


def run(llm: LLM, sampling: str) -> list[RequestOutput]:
    common = {"max_tokens": 30, "ignore_eos": True, **SAMPLINGS[sampling]}
    params = [
        SamplingParams(**common, structured=None if place == 2 else WISH)
        for place in range(len(PROMPTS))
    ]
    return llm.generate(PROMPTS, params)


@pytest.fixture(scope="module")
def plain_runs() -> dict[str, list[RequestOutput]]:
    """The requests' outputs without a drafter, sampled on first use."""
    return {}


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafts_follow_the_rules(
    drafter: str,
    sampling: str,
    rules: list[str],
    tiny_target: str,
    tiny_draft: str,
    tiny_heads: dict[str, str],
    plain_runs: dict[str, list[RequestOutput]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Replayed as well as laid out exactly."""
    models = (tiny_target, tiny_draft, tiny_heads)
    if sampling not in plain_runs:
        plain_runs[sampling] = run(make(None, *models), sampling)
    plain = plain_runs[sampling]
    exact = run(make(drafter, *models), sampling) if not ON_GPU else None
    if not ON_GPU:
        use_padded_steps(monkeypatch)
    rules.clear()
    outputs = run(make(drafter, *models), sampling)
    assert rules.count("guided step") > 3
    for place, output in enumerate(outputs):
        sample = output.outputs[0]
        assert len(sample.token_ids) == (30 if place == 2 else LENGTH)
        assert sample.finish_reason == ("length" if place == 2 else "stop")
        if place != 2:
            for index, token in enumerate(sample.token_ids):
                assert token in allowed_after(sample.token_ids[:index])
    if exact is not None:
        assert texts(outputs) == texts(exact)
    if sampling == "greedy" or drafter == "tree":  # sampled as in plain decoding
        assert texts(outputs) == texts(plain)
    assert sum(it.metrics.num_steps for it in outputs) < sum(it.metrics.num_steps for it in plain)


def texts(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_other_batches_keep_their_one_graph(
    rules: list[str],
    tiny_target: str,
    tiny_draft: str,
    tiny_heads: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not ON_GPU:
        use_padded_steps(monkeypatch)
    llm = make("draft_model", tiny_target, tiny_draft, tiny_heads)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    before = texts(llm.generate(PROMPTS, params))
    run(llm, "sampled")
    rules.clear()
    assert texts(llm.generate(PROMPTS, params)) == before
    assert "step" in rules
    assert "guided step" not in rules
