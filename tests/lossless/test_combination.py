"""Several drafters in one step: each guesses as it would alone, whoever guessed before."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams, UsageError
from slipstream.core.batch import DraftPlan, Split, StepReport
from slipstream.engine.draft_policy import Candidate
from slipstream.kernels.columns import ALL_COLUMNS
from slipstream.runner.device_batch import DeviceBatch
from slipstream.speculative.combination.drafter import CombinedDrafter, _completed
from slipstream.speculative.drafter import Draft, Drafter
from tests.draft_traffic import learn_costs_while_running
from tests.last_hidden_checkpoints import medusa_for
from tests.padded_steps import use_padded_steps

K = 4
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
PROMPTS: list[Any] = [
    {"prompt_token_ids": [(7 * start + step * index) % 96 for index in range(length)]}
    for start, step, length in ((1, 3, 5), (2, 5, 30), (3, 1, 9), (4, 7, 50))
]
STEPS = pytest.mark.parametrize("padded", [False, True], ids=["exact", "padded"])
MODELS = ("draft_model", "pard", "eagle", "eagle3", "medusa")


@dataclass
class Models:
    """Options of drafters with a network."""

    target: str
    options: dict[str, dict[str, Any]]

    def llm(self, speculative: Any, **options: Any) -> LLM:
        options = {"num_kv_blocks": 200, "block_size": 8, "max_model_len": 160, **options}
        return LLM(
            self.target,
            speculative_config=speculative,
            skip_tokenizer_init=True,
            enforce_eager=True,  # drafts are looked at, which a captured step has no time for
            **options,
        )

    def alone(self, name: str, count: int = K, **options: Any) -> LLM:
        return self.llm({**self.options[name], "num_speculative_tokens": count}, **options)

    def following(self, first: dict[str, Any], name: str, **options: Any) -> LLM:
        drafters = [first, self.options[name]]
        return self.llm({"drafters": drafters, "num_speculative_tokens": K}, **options)


@pytest.fixture(scope="module")
def models(tiny_target: str, tiny_draft: str, tiny_heads: dict[str, str]) -> Models:
    return Models(
        tiny_target,
        {
            "draft_model": {"model": tiny_draft},
            "pard": {"method": "pard", "model": tiny_draft, "pard_token": 90},
            "eagle": {"model": tiny_heads["eagle"]},
            "eagle3": {"model": tiny_heads["eagle3"]},
            "medusa": {"method": "medusa", "model": medusa_for(tiny_target)},
        },
    )


Seen = list[tuple[list[int], list[int]]]


def watch(drafter: Drafter) -> Seen:
    """Every draft from here on: the known tokens, and the guesses."""
    seen: Seen = []
    propose, state = drafter.propose, drafter._state  # type: ignore[attr-defined]

    def noted(batch: DeviceBatch) -> Draft:
        known = [state.token_ids[s, : state.num_tokens[s]].tolist() for s in batch.slots.tolist()]
        draft = propose(batch)
        for index, count in enumerate(draft.num_tokens.tolist()):
            if count:
                seen.append((known[index], draft.token_ids[index, :count].tolist()))
        return draft

    drafter.propose = noted  # type: ignore[method-assign]
    return seen


def combined(llm: LLM) -> CombinedDrafter:
    drafter = llm.engine._step._drafter
    assert isinstance(drafter, CombinedDrafter)
    return drafter


def tokens(outputs: Any) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


LOOKUPS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "min_match": 1},
    "suffix": {"method": "suffix", "min_match": 1, "suffix_decoding_max_spec_factor": 3},
    "custom": {"method": "custom", "model": "tests.user_drafters:LastFollower"},
}


@pytest.mark.parametrize(
    ("first", "name"),
    [*(("ngram", name) for name in MODELS), ("suffix", "draft_model"), ("custom", "eagle3")],
)
@STEPS
def test_a_drafter_that_was_passed_over_guesses_as_though_it_had_not(
    padded: bool, name: str, first: str, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its drafts after tokens that others drafted equal those after a prompt of these tokens."""
    plain = tokens(models.llm(None).generate(PROMPTS, GREEDY))
    if padded:
        use_padded_steps(monkeypatch)
    # Rows for a draft each and chunks beside it, so that some steps have no room for drafts.
    llm = models.following(LOOKUPS[first], name, max_num_batched_tokens=24, max_num_seqs=4)
    members = combined(llm)
    seen, whole = watch(members._on_device[-1].drafter), watch(members)
    outputs = llm.generate(PROMPTS, GREEDY)
    assert tokens(outputs) == plain
    taken = {tuple(known) for known, _ in whole} - {tuple(known) for known, _ in seen}
    drafted = [(known, guess) for known, guess in seen if (known, guess) in whole]
    assert drafted
    read_along = [pair for pair in seen if pair not in whole]
    assert taken or read_along
    monkeypatch.undo()
    fresh = models.alone(name, enable_prefix_caching=False)
    alone = watch(fresh.engine._step._drafter)
    one = SamplingParams(temperature=0, max_tokens=K + 2, ignore_eos=True)
    compared = 0
    for known, guess in seen[:: 1 + len(seen) // 12]:
        alone.clear()
        fresh.generate({"prompt_token_ids": known[:-1]}, one)
        expected = {tuple(text): other for text, other in alone}.get(tuple(known))
        if expected is not None:
            assert expected[: len(guess)] == guess[: len(expected)]
            compared += 1
    assert compared > 3


@pytest.mark.parametrize(
    ("first", "name"), [("ngram", "draft_model"), ("suffix", "pard"), ("ngram", "eagle3")]
)
@STEPS
def test_the_policy_says_how_much_each_drafts(
    padded: bool, name: str, first: str, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = tokens(models.llm(None).generate(PROMPTS, GREEDY))
    if padded:
        use_padded_steps(monkeypatch)
    learn_costs_while_running(monkeypatch)
    drafters = [LOOKUPS[first], models.options[name]]
    llm = models.llm({"drafters": drafters, "num_speculative_tokens": "auto"})
    policy, noise, by = llm.engine.scheduler.policy, random.Random(2), Counter[bool]()

    def plan(asked: Sequence[Candidate]) -> list[DraftPlan]:
        splits = [Split(*(noise.choice((0, 1, 2, 4)) for _ in range(2))) for _ in asked]
        pairs = zip(asked, splits, strict=True)
        return [DraftPlan(min(it.most, max(split)), split=split) for it, split in pairs]

    def observe(report: StepReport) -> None:
        for item, gain in zip(report.batch.requests, report.committed, strict=True):
            if item.split is None or not gain.num_draft_tokens:
                assert not item.num_draft_tokens or item.split
                continue
            by[gain.looked_up] += 1
            reads_along = 1  # the draft of a network that reads along is used
            most = item.split[0] if gain.looked_up else max(item.split[1], reads_along)
            assert gain.num_draft_tokens <= most

    monkeypatch.setattr(policy, "plan", plan)
    monkeypatch.setattr(policy, "observe", observe)
    assert tokens(llm.generate(PROMPTS, GREEDY)) == plain
    assert by[True] > 5
    assert by[False] > 5


@pytest.mark.parametrize("name", MODELS)
@STEPS
def test_where_nothing_matches_the_last_drafts_alone(
    padded: bool, name: str, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    if padded:
        use_padded_steps(monkeypatch)
    first = {"method": "ngram", "min_match": 90, "prompt_lookup_max": 90}
    params = SamplingParams(temperature=1.0, max_tokens=30, ignore_eos=True, seed=3)
    for own in (GREEDY, params):
        together = models.following(first, name).generate(PROMPTS, own)
        alone = models.alone(name).generate(PROMPTS, own)
        assert tokens(together) == tokens(alone)
        for ours, theirs in zip(together, alone, strict=True):
            assert (
                ours.metrics.num_accepted_tokens_per_pos
                == theirs.metrics.num_accepted_tokens_per_pos
            )


@pytest.mark.parametrize("first", ["ngram", "suffix"])
@STEPS
def test_acceptance_behind_a_prefix_hit_equals_acceptance_without(
    padded: bool, first: str, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    if padded:
        use_padded_steps(monkeypatch)
    lookup = {**LOOKUPS[first], "min_match": 3}
    if first == "suffix":
        lookup["suffix_decoding_max_cached_requests"] = 0
    llm = models.following(lookup, "eagle3")
    cold = llm.generate(PROMPTS[3], GREEDY)[0]
    warm = llm.generate(PROMPTS[3], GREEDY)[0]
    assert warm.metrics.num_cached_tokens == 48
    assert tokens([warm]) == tokens([cold])
    assert warm.metrics.num_accepted_tokens_per_pos == cold.metrics.num_accepted_tokens_per_pos


@pytest.mark.parametrize("first", ["ngram", "suffix"])
@pytest.mark.parametrize("name", ["eagle", "eagle3"])
@STEPS
def test_a_look_up_is_right_where_a_prefix_hit_leaves_one_token(
    padded: bool, name: str, first: str, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row that is computed again waits for the head, with those of accepted tokens."""
    prompt = {"prompt_token_ids": [*range(20, 28), *[7] * 25]}
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logit_bias={7: 50.0})
    if padded:
        use_padded_steps(monkeypatch)
    llm = models.following(LOOKUPS[first], name)
    cold, warm = llm.generate(prompt, params)[0], llm.generate(prompt, params)[0]
    assert warm.metrics.num_cached_tokens == 32
    assert tokens([warm]) == tokens([cold]) == [[7] * 40]
    assert warm.metrics.num_accepted_tokens > 20
    # The head has kept up: it drafts as it would without a hit.
    other = {"prompt_token_ids": [*prompt["prompt_token_ids"], *[7] * 20, 5, 9]}
    again = llm.generate(other, GREEDY)[0]
    assert again.metrics.num_cached_tokens >= 48
    fresh = models.following(LOOKUPS[first], name).generate(other, GREEDY)[0]
    assert tokens([again]) == tokens([fresh])


@pytest.mark.parametrize("name", ["draft_model", "eagle"])
@STEPS
def test_drafting_goes_on_after_a_while_without(
    padded: bool, name: str, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = tokens(models.llm(None).generate(PROMPTS, GREEDY))
    if padded:
        use_padded_steps(monkeypatch)
    llm = models.following(LOOKUPS["ngram"], name)
    scheduler, planned = llm.engine.scheduler, llm.engine.scheduler._most_drafts
    calls = iter(range(10_000))

    def most_drafts(*args: Any, **kwargs: Any) -> int:
        return 0 if 8 <= next(calls) < 50 else planned(*args, **kwargs)

    monkeypatch.setattr(scheduler, "_most_drafts", most_drafts)
    outputs = llm.generate(PROMPTS, GREEDY)
    assert tokens(outputs) == plain
    assert all(output.metrics.num_accepted_tokens > 0 for output in outputs)


@STEPS
def test_beyond_the_last_ones_length_the_others_go_on(
    padded: bool, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = tokens(models.llm(None).generate(PROMPTS, GREEDY))
    if padded:
        use_padded_steps(monkeypatch)
    drafters = [LOOKUPS["ngram"], {**models.options["eagle3"], "max_model_len": 20}]
    llm = models.llm(drafters)
    seen, whole = watch(combined(llm)._on_device[-1].drafter), watch(combined(llm))
    assert tokens(llm.generate(PROMPTS, GREEDY)) == plain
    assert max(len(known) for known, _ in whole) > 40
    assert all(len(known) + len(guess) <= 20 for known, guess in seen)


def test_a_drafter_that_can_make_up_for_it_is_left_out_of_exact_steps(models: Models) -> None:
    """Its passes would cost time there; prefixes are indexed only a little later."""
    repeated = {"prompt_token_ids": [1, 2, 3, 4] * 3}
    long = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, logit_bias={7: 50.0})
    llm = models.following(LOOKUPS["ngram"], "draft_model")
    members = combined(llm)
    seen, whole = watch(members._on_device[-1].drafter), watch(members)
    llm.generate(repeated, long)
    assert len(seen) < len(whole) / 4
    reread = [len(known) for known, guess in seen if len(guess) == 1]
    assert reread, "it never read along"
    again = llm.generate({"prompt_token_ids": [1, 2, 3, 4] * 3 + [7] * 90}, long)[0]
    assert again.metrics.num_cached_tokens >= 24


def test_each_request_keeps_who_drafted_for_it() -> None:
    """Lengths, certainty and q of a draft that two made."""
    first = Draft(
        token_ids=torch.tensor([[7, 8, 9], [0, 0, 0], [4, 0, 0]]),
        num_tokens=torch.tensor([3, 0, 1]),
        one_hot=torch.tensor([True, True, True]),
    )
    second = Draft(
        token_ids=torch.tensor([[1, 1], [5, 6], [1, 1]]),
        num_tokens=torch.tensor([1, 2, 1]),
        one_hot=torch.tensor([False, False, True]),
        probs=torch.rand(3, 2, 4),
        vocabulary=torch.tensor([1, 5, 6, 8]),
        written=True,
    )
    both = _completed(first, second)
    assert both.token_ids.tolist() == [[7, 8, 9], [5, 6, 0], [4, 0, 0]]
    assert both.num_tokens.tolist() == [3, 2, 1]
    assert both.one_hot.tolist() == [True, False, True]
    assert both.probs is not None
    assert second.probs is not None
    assert both.probs.shape == (3, 3, 4)
    assert both.probs[1, :2].equal(second.probs[1])
    assert both.vocabulary is second.vocabulary
    assert not both.written


@pytest.mark.parametrize("vocabulary", [None, torch.tensor([1, 5, 6, 8])], ids=["ids", "some"])
def test_a_guess_may_be_a_token_that_the_last_drafter_cannot_draft(
    vocabulary: torch.Tensor | None,
) -> None:
    draft = Draft(
        token_ids=torch.tensor([[3, 90], [1, 1]]),
        num_tokens=torch.tensor([2, 2]),
        one_hot=torch.tensor([True, False]),
        probs=torch.tensor([[[0.0] * 4] * 2, [[0.5, 0.5, 0, 0], [0.0] * 4]]),
        vocabulary=vocabulary,
    )
    certain = draft.certain_tokens(draft.chances(ALL_COLUMNS))
    assert certain is not None
    assert certain[1].tolist() == [False, True]


# ---------------------------------------------------------------------- options


def test_each_drafter_has_its_own_number_of_tokens(models: Models) -> None:
    """The combination drafts the largest number of any drafter, unless its own is given."""
    ngram, heads = {**LOOKUPS["ngram"], "num_speculative_tokens": 6}, models.options["medusa"]
    for drafters, outer, most, counts in (
        ([ngram, models.options["eagle"]], None, 6, [6, 4]),
        ([LOOKUPS["ngram"], models.options["eagle"]], None, 4, [4, 4]),
        ([LOOKUPS["ngram"], heads], None, 7, [7, 7]),
        ([LOOKUPS["ngram"], heads], 12, 12, [12, 7]),  # it has seven heads
        ([LOOKUPS["ngram"], {**heads, "num_speculative_tokens": 2}], None, 2, [2, 2]),
        ([ngram, {**heads, "num_speculative_tokens": 2}], 8, 8, [6, 2]),
    ):
        llm = models.llm({"drafters": drafters, "num_speculative_tokens": outer})
        assert llm.engine.resolved.limits.num_speculative_tokens == most
        assert [it.count for it in combined(llm)._on_device] == counts


def test_a_bare_list_is_a_combination(models: Models) -> None:
    llm = models.llm([LOOKUPS["ngram"], models.options["eagle"]])
    assert llm.engine.resolved.method == "combination"
    assert llm.engine.resolved.limits.cache_identity.startswith("eagle:")


def test_no_speculative_tokens_are_plain_decoding(models: Models) -> None:
    config = {"drafters": [LOOKUPS["ngram"], models.options["eagle"]], "num_speculative_tokens": 0}
    assert models.llm(config).engine.resolved.method is None


NGRAM = {"method": "ngram"}
WRONG: list[tuple[Any, str]] = [
    ({"method": "combination"}, "must be a list of two or more"),
    ({"drafters": [NGRAM]}, "must be a list of two or more"),
    ({"drafters": {"ngram": 1}}, "must be a list of two or more"),
    ([NGRAM, "DRAFT"], "must be a mapping of options, not '"),
    ([{"model": "DRAFT"}, NGRAM], "draft_model has a guess for every request.* put it last"),
    (
        [NGRAM, {"method": "suffix"}, {"model": "DRAFT"}],
        "suffix guesses on the host.* put it first",
    ),
    ([NGRAM, {"drafters": [NGRAM, NGRAM]}], "list its drafters"),
    (
        [NGRAM, {**NGRAM, "rejection_sample_method": "block"}],
        "give rejection_sample_method next to drafters",
    ),
    ([{**NGRAM, "num_speculative_tokens": 0}, {"model": "DRAFT"}], "take it out"),
    ([{**NGRAM, "min_match": 3, "prompt_lookup_min": 2}, {"model": "DRAFT"}], "give one of them"),
    ([{**NGRAM, "min_match": 9, "prompt_lookup_max": 5}, {"model": "DRAFT"}], "between 1 and"),
    ([NGRAM, {"model": "DRAFT", "min_match": 3}], "unknown key min_match for method draft_model"),
    ([NGRAM, {"model": "DRAFT", "enforce_eager": True}], "number 2 of drafters"),
    ([NGRAM, {"model": "DRAFT"}, {"method": "ngram", "x": 1}], "unknown key x"),
    (
        {
            "drafters": [{**NGRAM, "num_speculative_tokens": 8}, {"model": "DRAFT"}],
            "num_speculative_tokens": 4,
        },
        "is to guess 8 tokens and all together 4",
    ),
    ([NGRAM, {"model": "HEADS", "method": "medusa", "num_speculative_tokens": 9}], "at most 7"),
]


@pytest.mark.parametrize(("config", "message"), WRONG, ids=str)
def test_a_combination_that_cannot_be_is_refused(config: Any, message: str, models: Models) -> None:
    paths = {
        "DRAFT": models.options["draft_model"]["model"],
        "HEADS": models.options["medusa"]["model"],
    }

    def filled(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: filled(held) for key, held in value.items()}
        if isinstance(value, list):
            return [filled(held) for held in value]
        return paths.get(value, value)

    with pytest.raises(UsageError, match=message):
        models.llm(filled(config))
