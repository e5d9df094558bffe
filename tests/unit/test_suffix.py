"""Suffix drafting guesses what a rescan of all texts would guess."""

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream import LLM
from slipstream.core.batch import Batch, ScheduledRequest
from slipstream.core.request import Request, RequestStatus
from slipstream.core.sampling_params import SamplingParams, Verification
from slipstream.engine.prompts import TokensPrompt
from slipstream.runner.device_state import DeviceState
from slipstream.speculative.options import Options
from slipstream.speculative.suffix.drafter import (
    GuessLimits,
    PastOutputs,
    SuffixAutomaton,
    SuffixDrafter,
    read_options,
)

# Few tokens, or blocks of tokens that come again, so that there is much to find.
TOKENS = st.lists(st.integers(0, 3), max_size=50)
BLOCKS = st.lists(st.sampled_from([(0, 1, 2, 3, 4), (5, 6), (2, 3, 7), (1,)]), max_size=12)
TEXT = TOKENS | BLOCKS.map(lambda blocks: [token for block in blocks for token in block])
LIMITS = st.builds(
    GuessLimits,
    depth=st.integers(1, 12),
    spec_factor=st.sampled_from([0.0, 0.5, 1.0, 1.7, 4.0]),
    min_prob=st.sampled_from([0.0, 0.1, 0.4, 1.0]),
)


@settings(max_examples=300)
@given(st.lists(TEXT, max_size=4), TEXT, LIMITS, st.integers(1, 9))
def test_a_guess_is_that_of_a_rescan(
    texts: list[list[int]], context: list[int], limits: GuessLimits, most: int
) -> None:
    automaton = SuffixAutomaton(limits)
    for text in texts:
        automaton.add(text)
    guess = automaton.guess(context, most)
    assert (guess.token_ids, guess.score) == rescan(texts, context, limits, most)


@settings(max_examples=300)
@given(TEXT, LIMITS, st.integers(1, 9), st.randoms(use_true_random=False))
def test_a_growing_text_is_guessed_at_every_length(
    text: list[int], limits: GuessLimits, most: int, chance: Any
) -> None:
    automaton = SuffixAutomaton(limits)
    known = 0
    while known < len(text):
        more = chance.randint(1, 5)
        automaton.extend(text[known : known + more])
        known = min(known + more, len(text))
        guess = automaton.guess(text[:known], most)
        assert (guess.token_ids, guess.score) == rescan([text[:known]], text[:known], limits, most)


def rescan(
    texts: list[list[int]], context: list[int], limits: GuessLimits, most: int
) -> tuple[list[int], float]:
    """The definition: of all matches the best score, of equal ones the longest match."""
    best: tuple[list[int], float] = ([], 0.0)
    for matched in range(min(limits.depth, len(context)), 0, -1):
        longest = min(most, int(limits.spec_factor * matched + 1e-6), limits.depth - matched)
        tokens: list[int] = []
        probability, score = 1.0, 0.0
        while len(tokens) < longest:
            after = followers(texts, context[len(context) - matched :] + tokens)
            if not after:
                break
            counts = Counter(after)
            token = max(counts, key=lambda one: (counts[one], last_place(after, one)))
            probability *= counts[token] / len(after)
            if probability < limits.min_prob:
                break
            tokens.append(token)
            score += probability
        if score > best[1]:
            best = tokens, score
    return best


def followers(texts: list[list[int]], string: list[int]) -> list[int]:
    """The tokens after each occurrence, in order."""
    size = len(string)
    return [
        text[place]
        for text in texts
        for place in range(size, len(text))
        if text[place - size : place] == string
    ]


def last_place(tokens: list[int], token: int) -> int:
    return max(place for place, one in enumerate(tokens) if one == token)


def test_a_surer_text_is_guessed_further() -> None:
    """Longer matches and higher counts give more tokens."""
    limits = GuessLimits(depth=24, spec_factor=1.0, min_prob=0.3)
    phrase = list(range(10, 20))
    automaton = SuffixAutomaton(limits)
    automaton.add([*phrase, 1, *phrase, 2, *phrase, 3])
    assert [len(automaton.guess(phrase[:n], 8).token_ids) for n in (1, 2, 3, 6)] == [1, 2, 3, 5]
    automaton.add([*phrase, 2])
    assert automaton.guess(phrase[:6], 8).token_ids == [16, 17, 18, 19, 2, 10]


@pytest.mark.parametrize("part", ["_exactly", "_new_state", "_count_suffixes"])
def test_an_interrupted_text_is_taken_in_anew(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chaos found it (seed 5186): half of a state made every later step of a request fail."""
    text = [1, 2, 1, 3, 1, 2, 2, 1, 3]
    limits = GuessLimits(depth=6, spec_factor=2.0, min_prob=0.0)
    whole, broken = SuffixAutomaton(limits), SuffixAutomaton(limits)
    whole.add(text)
    broken.extend(text[:3])

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(broken, part, interrupt)
        with pytest.raises(KeyboardInterrupt):
            broken.extend(text[3:])
    broken.extend(text[broken.num_tokens :])
    assert broken.num_tokens == len(text)
    for length in range(1, len(text)):
        assert broken.guess(text[:length], 4) == whole.guess(text[:length], 4)


@pytest.mark.parametrize(("outputs", "tokens"), [(1, 999), (2, 999), (5, 999), (99, 20), (4, 11)])
def test_the_store_keeps_the_newest_outputs_within_its_bounds(outputs: int, tokens: int) -> None:
    options = {"max_cached_requests": outputs, "max_cached_tokens": tokens}
    store = PastOutputs(config(**options))
    chance = torch.Generator().manual_seed(outputs)
    for number in range(60):
        size = int(torch.randint(1, 9, (), generator=chance))
        store.add([100 + number] * size)
        assert store.automaton.num_tokens <= tokens
        kept = [n for n in range(60) if store.automaton.guess([100 + n], 1).token_ids]
        assert len(kept) <= outputs
        if size > 1:
            assert kept[-1] == number
    assert store.automaton.num_tokens > 0


def test_nothing_is_kept_when_nothing_may_be() -> None:
    for name in ("max_cached_requests", "max_cached_tokens"):
        store = PastOutputs(config(**{name: 0}))
        store.add([1, 1, 1, 1])
        assert store.automaton.num_tokens == 0


def test_an_output_longer_than_half_the_store_is_cut_at_its_front() -> None:
    store = PastOutputs(config(max_cached_tokens=20))
    store.add(list(range(100)))
    assert store.automaton.num_tokens == 10
    assert store.automaton.guess([95], 3).token_ids == [96]


def test_outputs_of_finished_requests_are_guessed_in_later_ones() -> None:
    drafter = SuffixDrafter(config(), DeviceState(2, 64, 8, torch.device("cpu")))
    first = request("a", [1, 2], output=[7, 8, 9, 5, 6])
    assert guesses(drafter, first) == [[]]
    drafter.forget([first])  # preempted: nothing is learnt
    assert guesses(drafter, request("b", [7, 8, 9])) == [[]]
    first.status = RequestStatus.FINISHED
    drafter.forget([first])
    assert guesses(drafter, request("c", [4, 7, 8, 9])) == [[5, 6]]
    assert guesses(drafter, request("d", [1, 2])) == [[]]  # prompts are not kept


def test_a_request_is_read_on_from_where_its_last_guess_was() -> None:
    drafter = SuffixDrafter(config(), DeviceState(2, 64, 8, torch.device("cpu")))
    growing = request("a", [1, 2, 3, 4, 9])
    assert guesses(drafter, growing) == [[]]
    growing.token_ids += [1, 2]
    assert guesses(drafter, growing) == [[3, 4]]
    growing.token_ids += [3, 4, 5, 1, 2, 3]
    assert guesses(drafter, growing) == [[4, 5, 1]]


def test_an_output_that_was_given_before_is_given_in_fewer_steps(tiny_target: str) -> None:
    prompt = TokensPrompt(prompt_token_ids=[5, 9, 14, 33])
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    outputs = {}
    for kept in (0, 4):
        speculative = {"method": "suffix", "suffix_decoding_max_cached_requests": kept}
        llm = LLM(
            tiny_target,
            speculative_config=speculative,
            skip_tokenizer_init=True,
            num_kv_blocks=16,
            enable_prefix_caching=False,
        )
        outputs[kept] = [llm.generate(prompt, params)[0] for _ in range(2)]
    texts = [output.outputs[0].token_ids for output in outputs[0] + outputs[4]]
    assert texts == texts[:1] * 4
    steps = {kept: [one.metrics.num_steps for one in runs] for kept, runs in outputs.items()}
    assert steps[0] == steps[4][:1] * 2
    assert steps[4][1] < steps[4][0]


def test_a_sampled_request_with_a_seed_does_not_see_other_texts() -> None:
    drafter = SuffixDrafter(config(), DeviceState(2, 64, 8, torch.device("cpu")))
    first = request("a", [1, 2], output=[7, 8, 9, 5, 6])
    first.status = RequestStatus.FINISHED
    drafter.forget([first])
    for params, expected in (
        (SamplingParams(temperature=1.0), [5, 6]),
        (SamplingParams(temperature=0, seed=3), [5, 6]),  # greedy text does not depend on drafts
        (SamplingParams(temperature=1.0, seed=3), []),
    ):
        assert guesses(drafter, request(repr(params), [4, 7, 8, 9], params=params)) == [expected]
    coupled = request("coupled", [4, 7, 8, 9], params=params)
    coupled.verification = Verification.COUPLED  # as little as greedy text
    assert guesses(drafter, coupled) == [[5, 6]]
    own = request("own", [4, 7, 8, 9, 7, 8], params=SamplingParams(temperature=1.0, seed=3))
    assert guesses(drafter, own) == [[9, 7]]


@pytest.mark.parametrize("method", ["rejection", "coupled", None])
def test_a_seeded_request_gives_the_same_text_again(tiny_target: str, method: str | None) -> None:
    llm = LLM(
        tiny_target,
        speculative_config={"method": "suffix", "rejection_sample_method": method},
        skip_tokenizer_init=True,
        num_kv_blocks=32,
    )
    prompts = [TokensPrompt(prompt_token_ids=[5, 9, 14, first]) for first in range(6)]
    params = SamplingParams(temperature=0.6, seed=7, max_tokens=40, ignore_eos=True)
    texts = [
        [output.outputs[0].token_ids for output in llm.generate(prompts, params)] for _ in range(3)
    ]
    assert texts[1:] == texts[:1] * 2


def config(**options: Any) -> Any:
    return read_options(Options({f"suffix_decoding_{key}": it for key, it in options.items()}))


def request(
    name: str,
    prompt: list[int],
    output: list[int] | None = None,
    params: SamplingParams | None = None,
) -> Request:
    made = Request(name, prompt, params or SamplingParams(), 0, frozenset(), 40, 4, 0)
    made.token_ids = [*prompt, *(output or [])]
    return made


def guesses(drafter: SuffixDrafter, *requests: Request) -> list[list[int]]:
    items = [ScheduledRequest(one, 0, 1, 4, [], False, True) for one in requests]
    return [list(guess or ()) for guess in drafter.prepare(Batch(tuple(items)))]
