"""Steps that are padded and launched ahead of their results change no token.

With the same drafter and K a seed promises the same text, so an engine that runs as though it
captured its steps (tests/padded_steps.py) is held against the same engine on exact steps.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import models, pre_tokenizers

from slipstream import LLM, RequestOutput, SamplingParams
from slipstream.core.batch import Batch, Committed, DraftPlan, StepReport
from slipstream.engine.draft_policy import Candidate
from slipstream.engine.prompts import EncodedPrompt
from slipstream.engine.samples import Submission
from slipstream.kernels.preparation import PlacedRows, RequestTables
from slipstream.kernels.registry import kernels_for
from slipstream.runner import device_state
from tests.checkpoints import VOCAB_SIZE
from tests.last_hidden_checkpoints import medusa_for, mlp_for
from tests.padded_steps import packed_rows, use_packed_steps, use_padded_steps

K = 4
MAX_TOKENS = 18
NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
DRAFTERS = ("none", "ngram", "draft_model")


@dataclass
class Ahead:
    """The steps that an engine's scheduler planned ahead.

    Attributes:
        batches: the steps.
        surplus: shares of requests that had ended when the results came, or were not waited for.
    """

    batches: list[Batch] = field(default_factory=list)
    surplus: int = 0

    @classmethod
    def of(cls, llm: LLM) -> "Ahead":
        seen, scheduler = cls(), llm.engine.scheduler
        plan, commit = scheduler.schedule_ahead, scheduler.commit

        def schedule_ahead(last: Batch) -> Batch | None:
            batch = plan(last)
            if batch is not None:
                seen.batches.append(batch)
            return batch

        def noted_commit(batch: Batch, committed: Sequence[Committed]) -> None:
            seen.surplus += sum(item.request.finished for item in batch.requests)
            commit(batch, committed)

        scheduler.schedule_ahead = schedule_ahead  # type: ignore[method-assign]
        scheduler.commit = noted_commit  # type: ignore[method-assign]
        return seen


@dataclass
class Pair:
    """One engine on exact steps and one on padded steps."""

    drafter: str
    exact: LLM
    padded: LLM
    ahead: Ahead

    def agree(self, prompts: list[Any], params: Any) -> list[RequestOutput]:
        """Run both; the padded outputs, which are the exact ones."""
        self.ahead.batches.clear()
        self.ahead.surplus = 0
        expected = self.exact.generate(prompts, params)
        outputs = self.padded.generate(prompts, params)
        for output, wanted in zip(outputs, expected, strict=True):
            assert_equal(output, wanted)
        check_empty(self.padded)
        return outputs


def assert_equal(output: RequestOutput, wanted: RequestOutput) -> None:
    for sample, other in zip(output.outputs, wanted.outputs, strict=True):
        assert sample.token_ids == other.token_ids
        assert (sample.finish_reason, sample.stop_reason) == (
            other.finish_reason,
            other.stop_reason,
        )
        assert sample.from_draft == other.from_draft
        assert sample.text == other.text
        assert (sample.logprobs is None) == (other.logprobs is None)
        for row, expected in zip(sample.logprobs or (), other.logprobs or (), strict=True):
            assert row.keys() == expected.keys()
            for token, candidate in row.items():
                # Matmuls of few rows may add up in another order on a CPU.
                assert candidate.logprob == pytest.approx(expected[token].logprob, abs=1e-4)
    ours, theirs = output.metrics, wanted.metrics
    assert (ours.num_steps, ours.num_drafts) == (theirs.num_steps, theirs.num_drafts)
    assert ours.num_draft_tokens == theirs.num_draft_tokens
    assert ours.num_accepted_tokens_per_pos == theirs.num_accepted_tokens_per_pos


def check_empty(llm: LLM) -> None:
    """Check that no request is left."""
    scheduler = llm.engine.scheduler
    scheduler.check_invariants()
    assert not scheduler.has_unfinished
    assert scheduler.block_manager.num_available == scheduler.block_manager.num_blocks


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tokenizer for the tiny models: token 7 is the word w7."""
    backend = tokenizers.Tokenizer(
        models.WordLevel({f"w{token}": token for token in range(VOCAB_SIZE)}, unk_token="w0")
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder: Path = tmp_path_factory.mktemp("words")
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    return str(folder)


@dataclass
class Maker:
    """Builds engines over the tiny models."""

    target: str
    draft: str
    words: str

    def one(self, drafter: str, **options: Any) -> LLM:
        speculative: dict[str, dict[str, Any]] = {
            "ngram": NGRAM,
            "draft_model": {"model": self.draft},
            "greedy_drafts": {"model": self.draft, "draft_sample_method": "greedy"},
            "subset": {"model": self.draft, "draft_vocab_size": 60},
            "medusa": {"method": "medusa", "model": medusa_for(self.target)},
            "mlp_speculator": {"method": "mlp_speculator", "model": mlp_for(self.target)},
        }
        config = options.pop("speculative_config", None)
        if config is not None:
            config["num_speculative_tokens"] = K
        elif drafter != "none":
            config = {**speculative[drafter], "num_speculative_tokens": K}
        if config is not None:  # so that texts tell what was drafted
            config = {**config, "rejection_sample_method": "rejection"}
        limits = {"num_kv_blocks": 200, "block_size": 8, "max_model_len": 128, "max_num_seqs": 6}
        given = {"tokenizer": self.words, **limits, **options}
        return LLM(self.target, speculative_config=config, **given)

    def padded(self, drafter: str, **options: Any) -> tuple[LLM, Ahead]:
        with pytest.MonkeyPatch.context() as patch:
            use_padded_steps(patch)
            llm = self.one(drafter, **options)
        return llm, Ahead.of(llm)

    def pair(self, drafter: str, **options: Any) -> Pair:
        return Pair(drafter, self.one(drafter, **options), *self.padded(drafter, **options))


@pytest.fixture(scope="module")
def make(tiny_target: str, tiny_draft: str, words: str) -> Maker:
    return Maker(tiny_target, tiny_draft, words)


@pytest.fixture(scope="module", params=DRAFTERS)
def pair(request: pytest.FixtureRequest, make: Maker) -> Pair:
    """Without a prefix cache: a hit may let a request draft a step earlier than the first time."""
    return make.pair(request.param, enable_prefix_caching=False)


def random_prompts(lengths: Sequence[int], seed: int = 0) -> list[Any]:
    """Random prompts that begin with repeated tokens, so that n-grams are found."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(1, VOCAB_SIZE, (size,), generator=generator) for size in lengths]
    return [{"prompt_token_ids": [*ids[:4].tolist(), *ids.tolist()]} for ids in drawn]


PROMPTS = random_prompts((5, 9, 14, 22, 3))
SEEDED: dict[str, Any] = {"temperature": 1.0, "max_tokens": MAX_TOKENS, "ignore_eos": True}


def seeded(number: int = len(PROMPTS), **params: Any) -> list[SamplingParams]:
    return [SamplingParams(**{"seed": seed, **SEEDED, **params}) for seed in range(number)]


# ---------------------------------------------------------------------- every parameter

WISHES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 1.3},
    "truncated": {"top_k": 9, "top_p": 0.9, "min_p": 0.02, "temperature": 0.8},
    "penalties": {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.2,
    },
    "greedy_penalties": {"temperature": 0, "frequency_penalty": 0.7},
    "bias": {"logit_bias": {5: 3.0, 6: -2.0}, "allowed_token_ids": list(range(3, 60))},
    "min_tokens": {"min_tokens": 9, "stop_token_ids": list(range(1, 40))},
    "n": {"n": 2},
    "no_drafts": {"num_speculative_tokens": 0},
}


@pytest.mark.parametrize("wish", WISHES)
def test_a_seed_gives_the_same_text_and_counts(pair: Pair, wish: str) -> None:
    pair.agree(PROMPTS, seeded(**WISHES[wish]))
    assert len(pair.ahead.batches) > 3


@pytest.mark.parametrize("wish", ["logprobs", "prompt_logprobs", "bad_words"])
def test_what_the_host_must_see_in_between_is_not_run_ahead(pair: Pair, wish: str) -> None:
    params: dict[str, Any] = {
        "logprobs": {"logprobs": 3, "presence_penalty": 0.3},
        "prompt_logprobs": {"prompt_logprobs": 2, "logprobs": 0},
        "bad_words": {"bad_words": ["w5", "w3 w4", "w9 w1 w2"], "temperature": 2.0},
    }[wish]
    outputs = pair.agree(PROMPTS, seeded(**params))
    assert not pair.ahead.batches
    if wish == "bad_words":
        assert all(5 not in output.outputs[0].token_ids for output in outputs)


def test_every_wish_may_stand_beside_every_other(pair: Pair) -> None:
    """One batch with all sampling features; the first requests end first."""
    wishes = [*WISHES.values(), {"logprobs": 1}, {"bad_words": ["w5", "w7 w8"]}]
    params = [
        replace(own, max_tokens=6 + 2 * index, seed=index, **wish)
        for index, (own, wish) in enumerate(zip(seeded(len(wishes)), wishes, strict=True))
    ]
    if pair.drafter != "none":
        params[3] = replace(params[3], num_speculative_tokens=1)
    for order in (params, params[::-1]):
        pair.agree(random_prompts((7,) * len(params), seed=3), order)
        assert pair.ahead.batches


@pytest.mark.parametrize("drafter", ["ngram", "draft_model", "block", "medusa"])
def test_packed_steps_say_what_exact_ones_say(
    drafter: str, make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The requests of a batch have different numbers of draft tokens, 0 among them."""
    options: dict[str, Any] = {"enable_prefix_caching": False}
    if drafter == "block":
        config = {"model": make.draft, "rejection_sample_method": "block"}
        options["speculative_config"] = config
    pair = make.pair(drafter, **options)
    use_packed_steps(monkeypatch)
    for wish in (*WISHES.values(), {"logprobs": 2}):
        params = [
            replace(own, num_speculative_tokens=(3 * index + 1) % (K + 1))
            for index, own in enumerate(seeded(**{"temperature": 1.0, **wish}))
        ]
        pair.agree(PROMPTS, params)
    packed = packed_rows(pair.padded)
    assert {bucket for bucket, _, _ in packed} >= {4, 6}
    assert all(rows < bucket * (width + 1) for bucket, width, rows in packed)


@pytest.mark.parametrize("drafter", ["greedy_drafts", "subset", "medusa", "mlp_speculator"])
def test_other_ways_to_draft_give_the_same_text(drafter: str, make: Maker) -> None:
    pair = make.pair(drafter)
    for params in ({}, {"top_p": 0.9, "presence_penalty": 0.3}):
        pair.agree(PROMPTS, seeded(**params))
        assert pair.ahead.batches


@pytest.mark.parametrize("most", [2, K + 1, K + 3])
def test_the_last_tokens_do_not_depend_on_when_they_were_planned(pair: Pair, most: int) -> None:
    """Near max_tokens the host plans ahead with an upper bound; the device knows how many drafts
    have room."""
    outputs = pair.agree(PROMPTS, seeded(max_tokens=most))
    assert all(len(output.outputs[0].token_ids) == most for output in outputs)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_max_model_len_is_reached_in_a_step_that_ran_ahead(drafter: str, make: Maker) -> None:
    length = 33  # a block of eight and one token more
    pair = make.pair(drafter, max_model_len=length)
    for params in (seeded(max_tokens=None), seeded(max_tokens=None, temperature=0.0)):
        for output in pair.agree(PROMPTS, params):
            sample = output.outputs[0]
            assert len(output.prompt_token_ids) + len(sample.token_ids) == length
            assert sample.finish_reason == "length"
    assert pair.ahead.batches
    assert pair.ahead.surplus or drafter == "none"  # who gains one token a step ends on time


@pytest.mark.parametrize("drafter", ["draft_model", "eagle3"])
def test_no_pass_reads_beyond_its_block_table(
    drafter: str, make: Maker, tiny_heads: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Close to max_model_len a chain has no room for K tokens, and its later passes no rows."""
    seen: list[int] = []
    ops = kernels_for(torch.device("cpu"))

    def noted(tables: RequestTables, *arguments: Any) -> PlacedRows:
        padded: PlacedRows = ops.preparation.expand_rows(tables, *arguments)
        room = tables.block_tables.shape[1] * tables.block_size
        seen.append(room - int(padded.inputs.paging.context_lens.max()))
        return padded

    preparation = copy(ops.preparation)
    monkeypatch.setattr(preparation, "expand_rows", noted)
    with_notes = replace(ops, preparation=preparation)
    monkeypatch.setattr(device_state, "kernels_for", lambda device: with_notes)
    use_padded_steps(monkeypatch)
    config: Any = {"model": tiny_heads.get(drafter, make.target), "num_speculative_tokens": 7}
    options: dict[str, Any] = {"num_kv_blocks": 100, "skip_tokenizer_init": True, "block_size": 8}
    llm = LLM(make.target, speculative_config=config, max_model_len=40, **options)
    outputs = llm.generate(PROMPTS, seeded(max_tokens=None, temperature=0.0))
    assert all(output.outputs[0].finish_reason == "length" for output in outputs)
    assert 0 <= min(seen) <= 1


class ByLength:
    """A policy under which the number of draft tokens changes from step to step."""

    reads_confidences = False

    def __init__(self, num_speculative_tokens: int) -> None:
        self.widths = (0, 1, num_speculative_tokens)

    def plan(self, candidates: Sequence[Candidate]) -> Sequence[DraftPlan]:
        asked = [it.request.num_tokens % (self.widths[-1] + 1) for it in candidates]
        return [DraftPlan(min(it.most, count)) for it, count in zip(candidates, asked, strict=True)]

    def observe(self, report: StepReport) -> None:
        """It does not learn."""


@pytest.mark.parametrize("drafter", ["ngram", "draft_model", "eagle3", "medusa"])
def test_a_policy_may_draft_another_number_in_each_step(
    drafter: str, make: Maker, tiny_heads: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = make.one("none").generate(PROMPTS, seeded(temperature=0))
    monkeypatch.setattr("slipstream.engine.assembly.FixedPolicy", ByLength)
    options: dict[str, Any] = {}
    if drafter in tiny_heads:
        options = {"speculative_config": {"model": tiny_heads[drafter]}}
    for llm in (make.one(drafter, **options), make.padded(drafter, **options)[0]):
        outputs = llm.generate(PROMPTS, seeded(temperature=0))
        for output, wanted in zip(outputs, expected, strict=True):
            assert output.outputs[0].token_ids == wanted.outputs[0].token_ids
        assert sum(output.metrics.num_draft_tokens for output in outputs) > 0


def test_beyond_the_drafters_length_a_step_that_ran_ahead_drafts_nothing(
    make: Maker, tiny_draft: str
) -> None:
    short = {"model": tiny_draft, "num_speculative_tokens": K, "max_model_len": 24}
    options: dict[str, Any] = {"num_kv_blocks": 100, "skip_tokenizer_init": True}
    exact = LLM(make.target, speculative_config=short, **options)
    with pytest.MonkeyPatch.context() as patch:
        use_padded_steps(patch)
        padded = LLM(make.target, speculative_config=short, **options)
    pair = Pair("draft_model", exact, padded, Ahead.of(padded))
    outputs = pair.agree(PROMPTS, seeded())
    assert outputs[0].metrics.num_draft_tokens > 0
    assert outputs[3].metrics.num_draft_tokens == 0  # its prompt is too long
    assert pair.ahead.batches


# ---------------------------------------------------------------------- who ends in between


def test_a_stop_token_inside_a_step_leaves_the_next_one_surplus(pair: Pair) -> None:
    """Some requests end early, which does not affect the others."""
    params = seeded(stop_token_ids=list(range(1, 20)))
    params[1::2] = seeded()[1::2]
    outputs = pair.agree(PROMPTS, params)
    reasons = {output.outputs[0].finish_reason for output in outputs}
    assert reasons == {"stop", "length"}
    assert pair.ahead.surplus


def stop_words(output: RequestOutput, place: int, number: int = 2) -> str:
    """The text of some tokens in the middle of an output."""
    ids = output.outputs[0].token_ids[place : place + number]
    return " ".join(f"w{token}" for token in ids)


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_a_request_while_the_next_step_is_under_way(
    include: bool, pair: Pair
) -> None:
    whole = pair.agree(PROMPTS, seeded())
    params = seeded()
    for index, place in ((0, 3), (2, 8), (4, 11)):
        params[index] = replace(
            params[index],
            stop=[stop_words(whole[index], place)],
            include_stop_str_in_output=include,
        )
    outputs = pair.agree(PROMPTS, params)
    for index, output in enumerate(outputs):
        sample, full = output.outputs[0], whole[index].outputs[0]
        assert list(sample.token_ids) == list(full.token_ids)[: len(sample.token_ids)]
        assert (sample.finish_reason == "stop") == (index in (0, 2, 4))
        assert (len(sample.token_ids) < MAX_TOKENS) == (index in (0, 2, 4))
    assert pair.ahead.surplus


def test_a_request_that_is_aborted_leaves_the_others_alone(pair: Pair) -> None:
    whole = pair.agree(PROMPTS, seeded())
    engine = pair.padded.engine
    for victim, steps in (("0", 2), ("3", 4)):
        for index, own in enumerate(seeded()):
            engine.add(str(index), encoded(PROMPTS[index]), own)
        done = {}
        for _ in range(steps):
            done |= {one.request_id: one for one in engine.step() if one.finished}
        assert engine._launched is not None, "nothing is under way"
        aborted = engine.abort(victim)
        assert aborted is not None
        done |= run_out(pair.padded) | {victim: aborted}
        for index, output in enumerate(whole):
            said, text = said_by(done[str(index)]), list(output.outputs[0].token_ids)
            assert said == (text[: len(said)] if str(index) == victim else text)
    assert pair.ahead.surplus >= 2


def encoded(prompt: dict[str, list[int]]) -> EncodedPrompt:
    return EncodedPrompt(None, prompt["prompt_token_ids"], ())


def run_out(llm: LLM) -> dict[str, Submission]:
    """Step to the end; what ended, by request id."""
    done = {}
    while llm.engine.has_unfinished:
        done |= {one.request_id: one for one in llm.engine.step() if one.finished}
        llm.engine.scheduler.check_invariants()
    check_empty(llm)
    return done


def said_by(submission: Submission) -> list[int]:
    return list(submission.output().outputs[0].token_ids)


def test_a_new_request_takes_the_slot_and_id_of_one_whose_step_is_under_way(pair: Pair) -> None:
    (expected,) = pair.exact.generate(PROMPTS[3], seeded(1, seed=9))
    engine = pair.padded.engine
    for steps in (1, 2, 4):
        for name, own in zip("ab", seeded(2, max_tokens=30), strict=True):
            engine.add(name, encoded(PROMPTS[0]), own)
        for _ in range(steps):
            engine.step()
        engine.abort("a")
        engine.add("a", encoded(PROMPTS[3]), seeded(1, seed=9)[0])
        assert said_by(run_out(pair.padded)["a"]) == list(expected.outputs[0].token_ids)


def test_requests_that_come_while_a_step_is_under_way_are_served(pair: Pair) -> None:
    """More requests than slots arrive one by one; each output is that of the request alone."""
    prompts = random_prompts((6, 11, 17, 4, 9, 8, 13, 5), seed=5)
    params = [replace(own, max_tokens=5 + 3 * index) for index, own in enumerate(seeded(8))]
    expected = [pair.exact.generate(*each)[0] for each in zip(prompts, params, strict=True)]
    engine, done = pair.padded.engine, {}
    for index, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
        engine.add(str(index), encoded(prompt), own)
        done |= {one.request_id: one for one in engine.step() if one.finished}
    done |= run_out(pair.padded)
    for index, output in enumerate(expected):
        assert said_by(done[str(index)]) == list(output.outputs[0].token_ids)


def test_streams_may_be_interleaved(pair: Pair) -> None:
    expected = pair.exact.generate(PROMPTS, seeded())
    llm = pair.padded
    streams = [llm.stream(prompt, own) for prompt, own in zip(PROMPTS, seeded(), strict=True)]
    last: list[Any] = [None] * len(streams)
    open_streams = set(range(len(streams)))
    while open_streams:
        for index in sorted(open_streams):
            try:
                last[index] = next(streams[index])
            except StopIteration:
                open_streams.discard(index)
        if 2 in open_streams and last[2].metrics.num_steps >= 3:
            streams[2].close()  # its reader has left
            open_streams.discard(2)
    for index, output in enumerate(expected):
        if index != 2:
            assert list(last[index].outputs[0].token_ids) == list(output.outputs[0].token_ids)
    check_empty(llm)


# ---------------------------------------------------------------------- load


def test_preemptions_and_chunks_change_no_sampled_text_without_a_drafter(make: Maker) -> None:
    """The cache is too small, and penalties must keep their counts."""
    params = seeded(max_tokens=40, presence_penalty=0.5, top_k=20)
    roomy = make.one("none").generate(PROMPTS, params)
    llm, ahead = make.padded("none", num_kv_blocks=12, max_num_batched_tokens=16, max_num_seqs=5)
    outputs = llm.generate(PROMPTS, params)
    for output, wanted in zip(outputs, roomy, strict=True):
        assert list(output.outputs[0].token_ids) == list(wanted.outputs[0].token_ids)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert ahead.batches
    check_empty(llm)


@pytest.mark.parametrize("drafter", ["ngram", "draft_model"])
def test_preemptions_and_chunks_change_no_greedy_text(drafter: str, make: Maker) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    plain = make.one("none").generate(PROMPTS, params)
    llm, ahead = make.padded(drafter, num_kv_blocks=12, max_num_batched_tokens=16, max_num_seqs=5)
    preemptions = 0
    for _ in range(2):  # the second time with a prefix cache full of what the first left
        outputs = llm.generate(PROMPTS, params)
        for output, wanted in zip(outputs, plain, strict=True):
            assert list(output.outputs[0].token_ids) == list(wanted.outputs[0].token_ids)
        preemptions += sum(output.metrics.num_preemptions for output in outputs)
        check_empty(llm)
    assert preemptions
    assert ahead.batches


def test_blocks_that_a_surplus_step_touched_are_good_prefixes(make: Maker) -> None:
    """Acceptance after a prefix hit, on blocks of requests that ended in mid-flight, equals
    acceptance without one."""
    llm, ahead = make.padded("draft_model")
    prompt = {"prompt_token_ids": list(range(1, 50))}
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    cold = llm.generate(prompt, params)[0]
    longer = {"prompt_token_ids": [*prompt["prompt_token_ids"], *cold.outputs[0].token_ids[:20]]}
    warm = llm.generate(longer, replace(params, max_tokens=10))[0]
    assert warm.metrics.num_cached_tokens >= 64
    assert list(warm.outputs[0].token_ids) == list(cold.outputs[0].token_ids)[20:]
    fresh = make.padded("draft_model")[0].generate(longer, replace(params, max_tokens=10))[0]
    assert warm.metrics.num_accepted_tokens_per_pos == fresh.metrics.num_accepted_tokens_per_pos
    assert ahead.batches


@pytest.mark.parametrize("drafter", ["none", "draft_model"])
def test_a_prefix_hit_gives_the_same_text_as_on_exact_steps(drafter: str, make: Maker) -> None:
    pair = make.pair(drafter)
    for _ in range(2):
        outputs = pair.agree(PROMPTS, seeded(n=2))
    assert sum(output.metrics.num_cached_tokens for output in outputs) > 0
    assert pair.ahead.batches


def test_nothing_runs_ahead_when_told_not_to(make: Maker) -> None:
    pair = make.pair("draft_model", async_scheduling=False)
    pair.agree(PROMPTS, seeded())
    assert not pair.ahead.batches


# ---------------------------------------------------------------------- bookkeeping


def test_a_step_that_nobody_needs_any_more_is_neither_waited_for_nor_counted(
    make: Maker,
) -> None:
    llm, _ = make.padded("draft_model")
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    engine = llm.engine
    engine.add("a", EncodedPrompt(None, [5, 9, 14], ()), params)
    for _ in range(4):
        engine.step()
    assert engine._launched is not None
    engine.abort("a")
    steps = engine.metrics.num_steps
    assert engine.step() == []
    assert engine.metrics.num_steps == steps
    assert engine._launched is None
    check_empty(llm)


def test_a_hit_that_leaves_one_token_may_wait_long_for_its_first_draft(make: Maker) -> None:
    """Without drafts the drafter falls behind, in a new slot."""
    options: dict[str, Any] = {"max_num_seqs": 3, "max_num_batched_tokens": 3, "block_size": 4}
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompt = EncodedPrompt(None, [5, 9, 14, 33, 5, 9, 2, 7, 1], ())
    texts = []
    for llm in (make.one("draft_model", **options), make.padded("draft_model", **options)[0]):
        engine = llm.engine
        engine.add("first", prompt, replace(params, max_tokens=3))
        run_out(llm)
        # A long prompt and a newcomer take the rows that drafts would need.
        alone = replace(params, num_speculative_tokens=0)
        engine.add("long", EncodedPrompt(None, [3, 4, 5, 6, 7], ()), replace(alone, max_tokens=2))
        engine.add("hit", prompt, params)
        engine.add("new", EncodedPrompt(None, [8], ()), replace(alone, max_tokens=1))
        output = run_out(llm)["hit"].output()
        assert output.metrics.num_cached_tokens == 8
        texts.append((list(output.outputs[0].token_ids), output.metrics.num_accepted_tokens))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("most", [8, 9, 10])
def test_drafts_end_early_beside_a_chunk_that_is_not_captured(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host plans ahead for more draft tokens than the request's `max_tokens` leaves."""
    use_padded_steps(monkeypatch)
    limits = {"num_kv_blocks": 60, "max_num_batched_tokens": 40, "max_num_seqs": 12}
    drafter = {"model": "demo/draft", "num_speculative_tokens": K}
    llm = LLM("demo", dtype="float32", speculative_config=drafter, max_model_len=400, **limits)
    failures: list[Exception] = []
    recover = llm.engine._recover
    monkeypatch.setattr(llm.engine, "_recover", lambda it: failures.append(it) or recover(it))
    first = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True)
    other = SamplingParams(temperature=0, max_tokens=3, bad_words=["self"])  # in exact steps
    prompts = [
        "class A:\n    def __init__(self, a):\n",
        "import numpy as np\nimport pandas as pd\n" * 9,
    ]
    texts = [output.outputs[0].text for output in llm.generate(prompts, [first, other])]
    given = zip(prompts, (first, other), strict=True)
    alone = [llm.generate(*each)[0].outputs[0].text for each in given]
    assert texts == alone
    assert not failures
