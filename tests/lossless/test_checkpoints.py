"""Prefixes of models with recurrent states are resumed from checkpoints: the text is that of no
hit, and speculation costs no hits."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import LLM, RequestOutput, SamplingParams
from slipstream.cache.recurrent import RecurrentPool
from slipstream.engine.step_results import Launched, StepResult
from slipstream.runner.device_batch import DeviceBatch
from slipstream.speculative.catalogue import METHODS
from slipstream.speculative.drafter import Draft
from tests import fake_drafters
from tests.checkpoints import write_qwen3
from tests.drafters.heads import write_eagle3
from tests.hybrid_checkpoints import add_module, write_hybrid
from tests.lossless.test_greedy import remember, tokens
from tests.padded_steps import use_steps
from tests.pairwise import Case

BLOCK, MAX_TOKENS = 4, 19
AXES: dict[str, list[Any]] = {
    "drafter": ["none", "in turn", "ngram", "draft_model", "eagle3", "mtp"],
    "k": [1, 3, 7],
    "rows": [512, 24],  # 24: prompts come in chunks
    "blocks": [400, 40],  # 40: requests are preempted
    "places": [3, 8, None],
    "steps": ["exact", "padded"],  # padded steps are planned one ahead
}
STOPS = [3, 17, 30, 44, 58, 71, 85]
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def target(folder: Path) -> str:
    kind = "qwen3_5_text"
    return str(add_module(write_hybrid(folder / "target", kind), kind))


@pytest.fixture(scope="module")
def drafters(folder: Path) -> dict[str, Any]:
    shape = {"hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 6}
    alike = write_qwen3(folder / "alike", num_key_value_heads=2, head_dim=16, **shape)
    return {
        "in turn": {"method": "fake", "model": "in turn"},
        "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
        "draft_model": {"model": str(write_qwen3(folder / "draft"))},
        "eagle3": {"model": str(write_eagle3(folder / "eagle3", alike))},
        "mtp": {"method": "mtp"},
    }


def make_llm(target: str, speculative: dict[str, Any] | None, case: Case, **options: Any) -> LLM:
    if speculative is not None:
        speculative = {**speculative, "num_speculative_tokens": case["k"]}
    return LLM(
        target,
        speculative_config=speculative,
        skip_tokenizer_init=True,
        max_num_seqs=3,
        max_num_batched_tokens=case["rows"],
        num_kv_blocks=case["blocks"],
        num_state_checkpoints=case["places"],
        max_model_len=320,
        **{"block_size": BLOCK, **options},
    )


def random_ids(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 96, (count,), generator=generator).tolist()


def opening(talk: int, shared: int) -> list[int]:
    """The first prompt of a conversation; every other one has a common prefix of this length."""
    return random_ids(shared, 7 + talk % 2) + random_ids(9 + 4 * talk, talk)


class Talks:
    """Concurrent conversations: each prompt is the text so far and a new question."""

    def __init__(
        self,
        target: str,
        shared: int,
        count: int = 4,
        turns: int = 2,
        params: SamplingParams = GREEDY,
    ) -> None:
        self.params = params
        case = {"k": 0, "rows": 512, "blocks": 400, "places": 0}
        plain = make_llm(target, None, case)
        self.prompts: list[list[Any]] = []
        self.expected: list[list[list[int]]] = []
        said = [opening(talk, shared) for talk in range(count)]
        for turn in range(turns):
            self.prompts.append([{"prompt_token_ids": ids} for ids in said])
            self.expected.append(tokens(plain.generate(self.prompts[-1], params)))
            answers = zip(said, self.expected[-1], strict=True)
            said = [[*ids, *answer, *random_ids(5, turn)] for ids, answer in answers]
        assert not plain.engine.scheduler.block_manager.num_hit_tokens

    def remember(self) -> None:
        remember(
            [prompt for turn in self.prompts for prompt in turn],
            [answer for turn in self.expected for answer in turn],
        )

    def run(self, llm: LLM) -> list[RequestOutput]:
        """Run all requests, and check the texts."""
        outputs: list[RequestOutput] = []
        for prompts, expected in zip(self.prompts, self.expected, strict=True):
            outputs += llm.generate(prompts, self.params)
            assert tokens(outputs[-len(prompts) :]) == expected
        llm.engine.scheduler.check_invariants()
        return outputs


@pytest.fixture(scope="module")
def talks(target: str) -> Talks:
    return Talks(target, shared=30)


@pytest.mark.matrix(AXES)
def test_text_behind_a_checkpoint_is_that_of_a_fresh_prompt(
    case: Case,
    target: str,
    drafters: dict[str, Any],
    talks: Talks,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(METHODS, "fake", fake_drafters.METHOD)
    talks.remember()
    use_steps(case["steps"], monkeypatch)
    llm = make_llm(target, drafters.get(case["drafter"]), case)
    outputs = talks.run(llm)
    if case["blocks"] == 40:
        assert sum(output.metrics.num_preemptions for output in outputs) > 0
    elif case["places"] is None:
        assert sum(output.metrics.num_cached_tokens for output in outputs) > 0


@pytest.mark.parametrize("steps", ["exact", "padded"])
def test_speculation_costs_no_hits(
    steps: str, target: str, drafters: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Talks find equal prefixes with and without it, but for 1 %."""
    monkeypatch.setitem(METHODS, "fake", fake_drafters.METHOD)
    talks = Talks(target, shared=200)
    talks.remember()
    use_steps(steps, monkeypatch)
    rates = {}
    for name in ("none", *drafters):
        case = {"k": 3, "rows": 512, "blocks": 400, "places": None}
        llm = make_llm(target, drafters.get(name), case)
        talks.run(llm)
        rates[name] = hit_rate(llm)
    assert all(rate > 0.99 * rates["none"] for rate in rates.values()), rates
    assert rates["none"] > 0.5


def hit_rate(llm: LLM) -> float:
    blocks = llm.engine.scheduler.block_manager
    return blocks.num_hit_tokens / blocks.num_queried_tokens


def checkpoints(llm: LLM, prompt: Any) -> dict[bytes, tuple[torch.Tensor, torch.Tensor]]:
    """States and windows, by the digest of the block in front of them."""
    llm.generate([prompt], GREEDY)  # its first step writes those that are still to be written
    runner, states = llm.engine._step._runner, llm.engine.scheduler.block_manager._states
    (pool,) = runner._cache._states
    assert states is not None
    assert isinstance(pool, RecurrentPool)
    found = states._pool.index._block_of
    places = dict(zip(found, runner._cache.places_of([*found.values()]), strict=True))
    return {
        digest: (pool.states[:, place], pool.windows[:, place]) for digest, place in places.items()
    }


@pytest.mark.parametrize("k", [3, 7])
@pytest.mark.parametrize("steps", ["exact", "padded"])
def test_drafts_accepted_last_cost_no_hits(
    steps: str, k: int, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where answers are short, much of each is accepted in its last round, after which no pass
    follows that would include it in a state."""
    monkeypatch.setitem(METHODS, "fake", fake_drafters.METHOD)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    talks = Talks(target, shared=0, count=12, turns=4, params=params)
    talks.remember()
    use_steps(steps, monkeypatch)
    rates, written = [], []
    for speculative in (None, {"method": "fake", "model": "perfect"}):
        case = {"k": k, "rows": 512, "blocks": 800, "places": None}
        llm = make_llm(target, speculative, case, block_size=8)
        talks.run(llm)
        rates.append(hit_rate(llm))
        written.append(checkpoints(llm, talks.prompts[0][0]))
    assert rates[1] > 0.99 * rates[0] > 0.4, rates
    plain, ours = written
    both = plain.keys() & ours.keys()
    assert len(both) > 0.9 * len(plain) > 20, (len(both), len(plain))
    if not torch.cuda.is_available():
        for digest in both:
            assert all(map(torch.equal, plain[digest], ours[digest]))


def draft_what_follows(llm: LLM, talks: Talks) -> None:
    """Let the drafter of this engine draft the right tokens, without the host."""
    drafter = llm.engine._step._drafter
    turns = zip(talks.prompts, talks.expected, strict=True)
    pairs = [pair for turn in turns for pair in zip(*turn, strict=True)]
    texts = [[*prompt["prompt_token_ids"], *answer] for prompt, answer in pairs]

    def propose(batch: DeviceBatch) -> Draft:
        state, draft = drafter._state, replace(Draft.empty(batch), written=False)
        for row, slot in enumerate(batch.slots):
            known = state.token_ids[slot, : state.num_tokens[slot]].tolist()
            found = (it[len(known) :] for it in texts if it[: len(known)] == known)
            guess = next(found, [])[: batch.num_draft_tokens[row]]
            draft.token_ids[row, : len(guess)] = torch.tensor(guess)
            draft.num_tokens[row] = len(guess)
        return draft

    drafter.propose = propose  # type: ignore[method-assign]


def test_a_step_in_flight_includes_the_drafts_accepted_last(
    target: str, drafters: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that ends unexpectedly has a step in flight, which writes the checkpoint."""
    params = SamplingParams(temperature=0, max_tokens=40, stop_token_ids=STOPS, ignore_eos=True)
    talks = Talks(target, shared=0, count=12, turns=4, params=params)
    use_steps("padded", monkeypatch)
    rates = []
    for name in ("none", "ngram"):
        case = {"k": 7, "rows": 512, "blocks": 800, "places": None}
        llm = make_llm(target, drafters.get(name), case, block_size=8)
        if name != "none":
            draft_what_follows(llm, talks)
        outputs = talks.run(llm)
        rates.append(hit_rate(llm))
        assert llm.engine._step.runs_ahead
    assert sum(output.metrics.num_accepted_tokens for output in outputs) > 500
    assert rates[1] > 0.99 * rates[0] > 0.5, rates


def record_drafts(llm: LLM) -> dict[tuple[int, ...], list[int]]:
    """Record all further drafts."""
    drafter, seen = llm.engine._step._drafter, {}
    propose = drafter.propose

    def recorded(batch: DeviceBatch) -> Draft:
        state = drafter._state
        texts = [tuple(state.token_ids[it, : state.num_tokens[it]].tolist()) for it in batch.slots]
        draft = propose(batch)
        for text, ids, count in zip(texts, draft.token_ids, draft.num_tokens, strict=True):
            seen[text] = ids[:count].tolist()
        return draft

    drafter.propose = recorded  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("name", ["draft_model", "eagle3", "mtp"])
def test_drafts_and_acceptance_behind_a_checkpoint_are_those_without_a_hit(
    name: str, target: str, drafters: dict[str, Any], talks: Talks
) -> None:
    accepted, drafts = [], []
    for places in (0, None):
        case = {"k": 3, "rows": 512, "blocks": 400, "places": places}
        # What is recorded reads from the device, which a captured step has no time for.
        llm = make_llm(target, drafters[name], case, enforce_eager=True)
        drafts.append(record_drafts(llm))
        outputs = talks.run(llm)
        assert bool(sum(output.metrics.num_cached_tokens for output in outputs)) == (places is None)
        accepted.append([output.metrics.num_accepted_tokens_per_pos for output in outputs])
    assert accepted[0] == accepted[1]
    fresh, resumed = drafts
    assert len(fresh.keys() & resumed.keys()) > 0.9 * len(fresh) > 100
    assert {text: resumed[text] for text in fresh.keys() & resumed.keys()}.items() <= fresh.items()


@pytest.mark.breaks_steps
@pytest.mark.parametrize("steps", ["exact", "padded"])
def test_a_step_that_fails_is_done_again_without_its_checkpoints(
    steps: str,
    target: str,
    drafters: dict[str, Any],
    talks: Talks,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_steps(steps, monkeypatch)
    case = {"k": 3, "rows": 512, "blocks": 400, "places": None}
    llm = make_llm(target, drafters["mtp"], case)
    scheduler, step = llm.engine.scheduler, llm.engine._step
    finish, count = step.finish, 0

    def failing(launched: Launched) -> StepResult:
        nonlocal count
        count += 1
        if count == 9:
            assert scheduler.block_manager.num_checkpoints
            raise RuntimeError("broken off")
        return finish(launched)

    monkeypatch.setattr(step, "finish", failing)
    outputs = talks.run(llm)
    assert count > 9
    assert sum(output.metrics.num_cached_tokens for output in outputs) > 0
