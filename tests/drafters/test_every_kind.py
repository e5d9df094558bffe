"""What holds for a drafter of any kind: prefix hits, pauses, preemption, lengths, many requests.

An ordinary run tries a fifth of the cases of each kind, so that every case is tried with several
kinds; the rest is for `scripts/test --all`, and so are kinds that keep the blocks of another one.
"""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from slipstream import SamplingParams
from slipstream.core.errors import UsageError
from slipstream.engine.scheduler import Scheduler
from tests.drafters.engines import GREEDY, PROMPT, SEEDED, K, check_drafts, forced, make, run
from tests.drafters.kinds import KINDS, Kind
from tests.drafters.recording import assert_drafts_are, record_drafts
from tests.padded_steps import use_padded_steps
from tests.stopping_policy import use_stopping_policy

# They extend dflash, pard and mtp: what a request leaves in a cache is kept by the same code.
EXTENDED = ("dflash2", "dspark", "pard2", "mtp_modules")
TO_THE_END = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)


@pytest.fixture(scope="session")
def kinds(tiny_target: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Kind]:
    """Made when they are first asked for."""
    folder = tmp_path_factory.mktemp("kinds")

    class Made(dict[str, Kind]):
        def __missing__(self, name: str) -> Kind:
            self[name] = KINDS[name](folder / name, tiny_target)
            return self[name]

    return Made()


@pytest.fixture(
    params=[pytest.param(it, marks=pytest.mark.full) if it in EXTENDED else it for it in KINDS]
)
def kind(request: pytest.FixtureRequest, kinds: dict[str, Kind]) -> Kind:
    return kinds[request.param]


@pytest.fixture(params=["exact", "padded"])
def steps(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def answers() -> dict[Any, tuple[int, ...]]:
    """The targets' outputs without a drafter."""
    return {}


def plain(
    kind: Kind, answers: dict[Any, tuple[int, ...]], prompt: list[int], **options: Any
) -> tuple[int, ...]:
    params = options.pop("params", GREEDY)
    key = (kind.target, repr(params), tuple(prompt), repr(options))
    if key not in answers:
        output = run(make(kind.target, None, **options), params, prompt)
        answers[key] = tuple(output.outputs[0].token_ids)
    return answers[key]


@pytest.mark.parametrize("options", [{"max_num_batched_tokens": 16}, {"block_size": 8}], ids=str)
def test_chunks_and_padded_steps_draft_the_same(
    options: dict[str, Any], steps: str, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    if steps == "padded":
        use_padded_steps(monkeypatch)
    llm = check_drafts(
        kind.target, kind.config, kind.oracle, monkeypatch, max_num_seqs=1, **options
    )
    assert llm.metrics.num_steps > 32


@pytest.mark.parametrize("length", [33, 34, 40])
@pytest.mark.parametrize("rows", [24, 512])
def test_acceptance_after_a_prefix_hit_equals_acceptance_without(
    length: int, rows: int, kind: Kind
) -> None:
    """With block_size 8, a hit leaves one token of a prompt of 33 to compute, and two of 34."""
    if kind.early and length == 33:
        length = 37
    prompt = [*PROMPT, *PROMPT][:length]
    options = {"block_size": 8, "max_num_seqs": 2, "max_num_batched_tokens": rows}
    llm = make(kind.target, kind.config, **options)
    cold, warm = run(llm, SEEDED, prompt).metrics, run(llm, SEEDED, prompt).metrics
    assert cold.num_cached_tokens == 0
    assert warm.num_cached_tokens == (length - 1) // 8 * 8
    assert warm.num_accepted_tokens_per_pos == cold.num_accepted_tokens_per_pos
    assert warm.num_drafts == cold.num_drafts
    assert cold.num_accepted_tokens > 0


@pytest.mark.parametrize(
    ("length", "kind"),
    [
        pytest.param(
            length,
            name,
            marks=() if (index + length) % 2 else pytest.mark.full,
            id=f"{name}-{length}",
        )
        for index, name in enumerate(KINDS)
        for length in (33, 40)
    ],
    indirect=["kind"],
)
def test_drafts_behind_a_prefix_hit_are_the_oracles(
    length: int, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind blocks of another request, of another next token; of the same one, wholly; and of a
    text that was drafted."""
    prompt = [*PROMPT, *PROMPT][:length]
    llm = make(kind.target, kind.config, block_size=8)
    few = replace(GREEDY, max_tokens=24)
    run(llm, replace(GREEDY, max_tokens=8), [*prompt[:24], 7, 7, 7, 7])
    drafted = record_drafts(monkeypatch)
    output = run(llm, few, prompt)
    assert output.metrics.num_cached_tokens == 24
    again = run(llm, few, prompt)
    assert again.metrics.num_cached_tokens == (length - 1) // 8 * 8
    longer = [*prompt, *output.outputs[0].token_ids[:20]]
    assert run(llm, few, longer).metrics.num_cached_tokens == (len(longer) - 1) // 8 * 8
    assert_drafts_are(drafted, kind.oracle)


@pytest.mark.parametrize("pause", [1, 3, 4, 5, 9, 14])
def test_drafting_goes_on_rightly_after_a_pause(
    pause: int,
    steps: str,
    kind: Kind,
    answers: dict[Any, tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """K = 0 for some steps: what waits meanwhile is as much as a round can read, or more."""
    expected = plain(kind, answers, PROMPT)
    if steps == "padded":
        use_padded_steps(monkeypatch)
    llm = make(kind.target, kind.config)
    drafted, calls = record_drafts(monkeypatch), iter(range(1000))
    most_drafts = Scheduler._most_drafts

    def paused(self: Scheduler, *args: Any, **kwargs: Any) -> int:
        count = most_drafts(self, *args, **kwargs)
        return 0 if 3 <= next(calls) < 3 + pause else count

    monkeypatch.setattr(Scheduler, "_most_drafts", paused)
    assert tuple(run(llm, GREEDY).outputs[0].token_ids) == expected
    known = [len(item.known) for item in drafted]
    assert max(after - before for before, after in pairwise(known)) > pause
    assert_drafts_are(drafted, kind.oracle)


def test_confidences_are_the_oracles_largest_probabilities(
    steps: str, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    policies = use_stopping_policy(monkeypatch)
    if steps == "padded":  # whose chains are as long as they were planned
        use_padded_steps(monkeypatch)
    drafted = record_drafts(monkeypatch)
    run(make(kind.target, kind.config), GREEDY)
    gains = [gain for _, gain in policies[0].seen if gain.num_draft_tokens]
    assert gains
    for item, gain in zip(drafted, gains, strict=False):
        _, logits = kind.oracle.drafts(item.known, item.planned)
        expected = [float(row.double().softmax(-1).amax()) for row in logits]
        assert gain.confidences == pytest.approx(expected[: len(item.tokens)], abs=1e-4)


def test_chains_that_end_early_leave_the_drafter_as_it_should_be(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verdicts are forced, so that chains of all lengths are accepted to all lengths."""
    policies = use_stopping_policy(monkeypatch)
    drafted = record_drafts(monkeypatch)
    llm = make(kind.target, kind.config, speculative=forced(), block_size=8, max_num_seqs=3)
    prompts: list[Any] = [{"prompt_token_ids": [*PROMPT[index:], 5, index]} for index in range(3)]
    llm.generate(prompts, GREEDY)
    lengths = [drafted for planned, drafted in policies[0].asked if planned == K]
    assert len(set(lengths)) > 1
    assert_drafts_are(drafted, kind.oracle)


def test_preempted_requests_draft_what_the_oracle_drafts(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts: list[Any] = [{"prompt_token_ids": [*PROMPT[index:], 5, index]} for index in range(4)]
    llm = make(kind.target, kind.config, num_kv_blocks=18, block_size=8, max_num_seqs=4)
    drafted = record_drafts(monkeypatch)
    outputs = llm.generate(prompts, GREEDY)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert_drafts_are(drafted, kind.oracle)


@pytest.mark.parametrize("length", [40, 41, 48])
def test_nothing_goes_beyond_max_model_len(
    length: int,
    steps: str,
    kind: Kind,
    answers: dict[Any, tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = plain(kind, answers, PROMPT[:9], params=TO_THE_END, max_model_len=length)
    if steps == "padded":
        use_padded_steps(monkeypatch)
    drafted = record_drafts(monkeypatch)
    speculative = {"num_speculative_tokens": min(kind.most, 7)}
    llm = make(kind.target, kind.config, max_model_len=length, speculative=speculative)
    output = run(llm, TO_THE_END, PROMPT[:9])
    assert 9 + len(output.outputs[0].token_ids) == length
    assert tuple(output.outputs[0].token_ids) == expected
    assert max(len(item.known) + len(item.tokens) for item in drafted) <= length - 1
    assert_drafts_are(drafted, kind.oracle)


def test_beyond_the_drafters_max_model_len_nothing_is_drafted(
    kind: Kind, answers: dict[Any, tuple[int, ...]]
) -> None:
    llm = make(kind.target, kind.config, speculative={"max_model_len": 20})
    output = run(llm, GREEDY, PROMPT[:9])
    assert tuple(output.outputs[0].token_ids) == plain(kind, answers, PROMPT[:9])
    assert output.metrics.num_draft_tokens > 0
    assert run(llm, GREEDY).metrics.num_drafts == 0
    assert run(llm, GREEDY, PROMPT[:9]).metrics.num_drafts == output.metrics.num_drafts


def test_more_requests_times_k_than_rows_of_the_target(
    steps: str,
    kind: Kind,
    answers: dict[Any, tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A drafter's pass may have 2K rows a request; the target's budget is a tenth of that."""
    prompts = [PROMPT[index : 30 + index] for index in range(8)]
    expected = [plain(kind, answers, prompt) for prompt in prompts]
    if steps == "padded":
        use_padded_steps(monkeypatch)
    llm = make(
        kind.target,
        kind.config,
        speculative={"num_speculative_tokens": kind.most},
        max_num_batched_tokens=24,
        max_num_seqs=8,
        num_kv_blocks=200,
        block_size=8,
    )
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], GREEDY)
    assert [tuple(output.outputs[0].token_ids) for output in outputs] == expected
    assert all(output.metrics.num_drafts > 0 for output in outputs)


def test_a_request_may_ask_for_fewer_draft_tokens(
    kind: Kind, answers: dict[Any, tuple[int, ...]]
) -> None:
    """Or for none: whoever does not draft shares blocks with those that do where they hold nothing
    of the drafter's."""
    llm = make(kind.target, kind.config, block_size=8)
    for count in (0, 1, 3):
        params = SamplingParams(
            temperature=0,
            max_tokens=40,
            ignore_eos=True,
            repetition_penalty=1.3,
            num_speculative_tokens=count,
        )
        output = run(llm, params)
        assert tuple(output.outputs[0].token_ids) == plain(kind, answers, PROMPT)
        assert len(output.metrics.num_accepted_tokens_per_pos) == count
        if count == 1:
            assert (output.metrics.num_cached_tokens > 0) == kind.shares


@pytest.mark.parametrize("quantization", ["int8-dynamic", "int4"])
def test_drafters_in_integers_leave_the_output_as_it_is(
    quantization: str, kind: Kind, answers: dict[Any, tuple[int, ...]]
) -> None:
    """Widths of 48 and 80 have no groups of four bits: int8 takes their place."""
    llm = make(kind.target, {**kind.config, "quantization": quantization}, block_size=8)
    output = run(llm, GREEDY)
    assert tuple(output.outputs[0].token_ids) == plain(kind, answers, PROMPT)
    assert output.metrics.num_drafts > 0


EIGHT_BITS = "fp8" if torch.cuda.is_available() else "int8"


def test_keys_and_values_of_eight_bits_change_no_text(
    kind: Kind, answers: dict[Any, tuple[int, ...]]
) -> None:
    """Their rounding changes what is drafted, in blocks that are smaller."""
    config = {**kind.config, "kv_cache_dtype": EIGHT_BITS}
    whole = make(kind.target, kind.config).engine.resolved
    if kind.shares or not whole.limits.cache_identity:
        with pytest.raises(UsageError, match="unknown key kv_cache_dtype"):
            make(kind.target, config)
        return
    llm = make(kind.target, config)
    assert llm.engine.resolved.bytes_per_block < whole.bytes_per_block
    output = run(llm, GREEDY)
    assert tuple(output.outputs[0].token_ids) == plain(kind, answers, PROMPT)
    assert output.metrics.num_drafts > 0
