"""A step on the device: its numbers, its padding, and the state that it works on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from slipstream import LLM
from slipstream.cache.spec import CacheSizes, ModelCache
from slipstream.core.batch import Batch, ScheduledRequest
from slipstream.core.request import Request
from slipstream.core.sampling_params import SamplingParams
from slipstream.core.step_form import CapturedForm, bucket_sizes
from slipstream.kernels import devices
from slipstream.kernels.registry import kernels_for
from slipstream.kernels.sampling import SampleRows
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.decoder import Decoder
from slipstream.models.loading import LoadOptions, load_decoder, no_progress_bar
from slipstream.runner import graphs
from slipstream.runner.device_batch import DeviceBatch, PackedBatch
from slipstream.runner.device_state import DeviceState
from slipstream.runner.graphs import APART, FULL, LEAN, GraphRunner
from slipstream.runner.model_runner import Forward, ModelRunner
from slipstream.runner.rows import PassRows, RowLayout
from slipstream.sampling.state import SamplingState, Uses
from tests.checkpoints import write_qwen3
from tests.padded_steps import DirectRecorder

CPU = torch.device("cpu")
GREEDY, SAMPLED = LEAN
K = 3
VOCAB = 12


def tensor(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def plan(
    slots: Sequence[int],
    drafts: Sequence[int] | None = None,
    uses: frozenset[Uses] = GREEDY,
    guesses: Sequence[Sequence[int]] | None = None,
) -> PackedBatch:
    """Decoding requests in these slots."""
    drafts = [0] * len(slots) if drafts is None else drafts
    ones = [1] * len(slots)
    return PackedBatch(slots, ones, drafts, [True] * len(slots), max(drafts), uses, guesses)


def form(*widths: int) -> CapturedForm:
    return CapturedForm(5, widths, packs=True)


# ---------------------------------------------------------------------- plans and batches


def test_a_plan_is_seven_rows_of_numbers() -> None:
    given = PackedBatch([4, 0], [1, 9], [3, 0], [True, False], 3, GREEDY)
    assert given.columns(3) == [[4, 0], [1, 9], [3, 0], [1, 0], [0, 0], [8, 8], [-1, -1]]


def test_guesses_are_padded_to_the_width() -> None:
    given = plan([4, 0, 1], [2, 0, 1], guesses=[[7, 8], [], [9]])
    assert given.columns(3)[7:] == [[7, 0, 9], [8, 0, 0], [0, 0, 0]]
    assert plan([4], [0], guesses=[[]]).columns(0) == [[4], [1], [0], [1], [0], [8], [-1]]


def test_a_turn_is_views_of_the_numbers() -> None:
    given = PackedBatch([4, 0], [1, 9], [2, 0], [True, False], 2, SAMPLED, [[7, 8], []])
    columns = torch.tensor(given.columns(2))
    batch = DeviceBatch.over(columns, 2, SAMPLED, exact=False)
    assert batch.num_requests == 2
    assert batch.slots.tolist() == [4, 0]
    assert batch.num_new_tokens.tolist() == [1, 9]
    assert batch.num_draft_tokens.tolist() == [2, 0]
    assert batch.at_end.tolist() == [True, False]
    assert batch.guesses.tolist() == [[7, 8], [0, 0]]
    assert (batch.width, batch.uses) == (2, SAMPLED)
    columns[1] = 5  # what a captured batch reads is replaced in place
    assert batch.num_new_tokens.tolist() == [5, 5]


def test_an_exact_turn_is_of_the_plans_requests_alone() -> None:
    batch = plan([4, 0, 2], [1, 0, 2]).on(CPU)
    assert batch.exact
    assert (batch.num_requests, batch.width) == (3, 2)
    assert batch.guesses.shape == (3, 0)
    starts = tensor(1, 2, 3)
    assert batch.rows(starts, tensor(1, 0, 2), 3).width is None
    padded = DeviceBatch.over(torch.tensor(plan([4]).columns(0)), 0, GREEDY, False)
    assert padded.rows(tensor(1), tensor(1), 3).width == 3


def test_an_exact_turn_says_what_the_host_knows() -> None:
    batch = plan([4, 0], [1, 0]).on(CPU, follows_results=True)
    assert batch.judges_all
    assert batch.draft_counts == [1, 0]
    rows = batch.target_rows(tensor(5, 7), tensor(1, 0), 1, None)
    assert rows.rereads is None  # nothing is computed again
    again = replace(plan([4, 0], [1, 0]), rereads=[0, 1]).on(CPU)
    assert not again.judges_all
    assert again.draft_counts is None  # it may have been planned ahead
    rows = again.target_rows(tensor(5, 7), tensor(1, 0), 1, None)
    assert rows.rereads is not None
    assert (rows.starts.tolist(), rows.lengths.tolist()) == ([5, 6], [2, 2])


def test_what_is_kept_of_a_batch_follows_its_numbers() -> None:
    batch = plan([4, 0], [2, 2]).on(CPU, follows_results=True)
    values, others = tensor(7, 8), tensor(1, 2)
    assert batch.all_draft
    assert batch.drafts_fill
    assert batch.where_drafts(batch.num_draft_tokens, values, others) is values
    assert (batch.no_tokens.tolist(), batch.zeros.tolist()) == ([[0, 0], [0, 0]], [0, 0])
    assert batch.draft_slots.tolist() == [4, 4, 0, 0]
    assert batch.draft_places.tolist() == [0, 1, 0, 1]
    rows = batch.target_rows(tensor(5, 7), batch.num_draft_tokens, 2, None)
    assert (rows.lengths.tolist(), rows.counts) == ([3, 3], [3, 3])
    rows = batch.target_rows(tensor(5, 7), tensor(0, 1), 2, None)  # other drafts than planned
    assert (rows.lengths.tolist(), rows.counts) == ([1, 2], ())
    rows = batch.target_rows(tensor(5, 7), batch.zeros, 0, None)
    assert (rows.lengths.tolist(), rows.counts) == ([1, 1], [1, 1])
    fewer = batch.asking_for(tensor(0, 1), 1)
    assert not fewer.all_draft
    assert not fewer.drafts_fill
    assert fewer.where_drafts(fewer.num_draft_tokens, values, others).tolist() == [1, 8]
    assert fewer.no_tokens.tolist() == [[0], [0]]
    assert fewer.draft_slots.tolist() == [4, 0]
    rows = fewer.target_rows(tensor(5, 7), fewer.num_draft_tokens, 1, None)
    assert (rows.lengths.tolist(), [*rows.counts]) == ([1, 2], [])


@pytest.mark.parametrize(
    "packed",
    [
        plan([4, 0], [2, 0]),
        plan([4, 0], [2, 1]),
        replace(plan([4, 0], [2, 2]), rereads=[0, 1]),  # features of one are not known yet
    ],
)
def test_not_all_drafts_fill_their_width(packed: PackedBatch) -> None:
    batch = packed.on(CPU, follows_results=True)
    assert not batch.drafts_fill
    wanted = batch.num_featured_drafts
    expected = torch.where(wanted > 0, tensor(7, 8), tensor(1, 2))
    assert batch.where_drafts(wanted, tensor(7, 8), tensor(1, 2)).equal(expected)


def test_the_numbers_of_a_step_are_sent_once(
    tiny_target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[PackedBatch] = []
    send = PackedBatch.on

    def on(packed: PackedBatch, *given: Any) -> DeviceBatch:
        sent.append(packed)
        return send(packed, *given)

    monkeypatch.setattr(PackedBatch, "on", on)
    llm = LLM(tiny_target, skip_tokenizer_init=True, num_kv_blocks=16)
    few = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    more = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    llm.generate([{"prompt_token_ids": [5, 9, 14]}, {"prompt_token_ids": [7]}], [few, more])
    # Both prompts; then both decode, and then the second one alone.
    assert [len(packed.slots) for packed in sent] == [2, 2, 1]


# ---------------------------------------------------------------------- graphs


class Counted(DirectRecorder):
    """Counts what is captured."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.captures = 0

    def __call__(self, function: Callable[[Any], Any], buffers: Any) -> Callable[[Any], Any]:
        self.captures += 1
        return super().__call__(function, buffers)


@dataclass
class Captures:
    """A graph runner over five slots, and the batches that its function was given."""

    state: DeviceState
    sampling: SamplingState
    recorder: Counted
    runner: GraphRunner
    batches: list[DeviceBatch] = field(default_factory=list)
    snapshots: list[list[list[int]]] = field(default_factory=list)

    def run(self, given: PackedBatch, name: str = "step") -> Tensor:
        return self.runner.run(name, self.function, given)

    def function(self, batch: DeviceBatch) -> Tensor:
        self.batches.append(batch)
        columns = (batch.slots, batch.num_new_tokens, batch.num_draft_tokens, batch.at_end.long())
        guessed = batch.guesses.sum(1, keepdim=True).T.tolist() if batch.guesses.shape[1] else []
        self.snapshots.append([*(column.tolist() for column in columns), *guessed])
        guesses = batch.guesses.sum(1) if batch.guesses.shape[1] else 0
        return (
            batch.slots * 1000 + batch.num_new_tokens * 100 + batch.num_draft_tokens * 10 + guesses
        )


@pytest.fixture
def captures() -> Captures:
    state = DeviceState(5, 16, 4, CPU)
    sampling = SamplingState(state.num_slots, VOCAB, CPU)
    recorder = Counted()
    runner = GraphRunner(state, sampling, form(0, K), recorder)  # type: ignore[arg-type]
    return Captures(state, sampling, recorder, runner)


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5])
def test_the_first_rows_of_a_padded_batch_are_the_plans(captures: Captures, number: int) -> None:
    slots, drafts = [4, 2, 0, 3, 1][:number], [3, 0, 2, 1, 1][:number]
    result = captures.run(plan(slots, drafts))
    expected = captures.function(plan(slots, drafts).on(CPU))
    assert result[:number].tolist() == expected.tolist()
    padded, exact = captures.batches[-2:]
    assert (padded.exact, exact.exact) == (False, True)
    assert (padded.width, padded.uses) == (K, GREEDY)
    bucket = {1: 1, 2: 2, 3: 4, 4: 4, 5: 5}[number]
    assert padded.num_requests == bucket
    # Padding has the slot without tokens, computes nothing and gains nothing.
    assert padded.slots[number:].tolist() == [5] * (bucket - number)
    assert not padded.num_new_tokens[number:].any()
    assert not padded.num_draft_tokens[number:].any()
    assert not padded.at_end[number:].any()


def test_a_capture_runs_on_padding_alone(captures: Captures) -> None:
    captures.run(plan([1, 2, 3], [1, 1, 1], guesses=[[7], [8], [9]]))
    captured, replayed = captures.snapshots
    assert captured == [[5] * 4, [0] * 4, [0] * 4, [0] * 4, [0] * 4]
    assert replayed == [[1, 2, 3, 5], [1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 0], [7, 8, 9, 0]]


def test_a_graph_serves_every_plan_of_its_size(captures: Captures) -> None:
    captures.run(plan([0, 1, 2], [3, 3, 3]))
    assert captures.recorder.captures == 1
    assert captures.run(plan([3, 4, 0, 1], [1, 2, 0, 0])).tolist() == [3110, 4120, 100, 1100]
    assert captures.run(plan([2, 3, 4], [1, 0, 0]))[:3].tolist() == [2110, 3100, 4100]
    assert captures.recorder.captures == 1
    assert len({batch.slots.data_ptr() for batch in captures.batches}) == 1


@pytest.mark.parametrize(
    ("other", "name"),
    [
        (plan([0], [1]), "propose"),
        (plan([0, 1], [1, 1]), "step"),
        (plan([0], [0]), "step"),
        (plan([0], [1], SAMPLED), "step"),
        (plan([0], [1], frozenset({Uses.TOP_K})), "step"),
        (plan([0], [1], guesses=[[7]]), "step"),
    ],
)
def test_another_kind_of_plan_has_a_graph_of_its_own(
    captures: Captures, other: PackedBatch, name: str
) -> None:
    captures.run(plan([0], [1]))
    captures.run(other, name)
    assert captures.recorder.captures == 2
    captures.run(plan([0], [1]))
    captures.run(other, name)
    assert captures.recorder.captures == 2


def test_without_drafts_there_is_no_width_and_are_no_guesses(captures: Captures) -> None:
    captures.run(plan([0, 1], guesses=[[], []]))
    captures.run(plan([1, 0]))
    assert captures.recorder.captures == 1
    assert all(batch.width == 0 for batch in captures.batches)
    assert captures.batches[-1].guesses.shape == (2, 0)


def test_numbers_that_have_not_changed_are_not_copied_again(
    captures: Captures, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[Any] = []
    upload = devices.upload

    def noted(values: Any, device: torch.device) -> Tensor:
        copied.append(values)
        return upload(values, device)

    captures.run(plan([0, 1, 2], [3, 3, 3]))
    captures.run(plan([0, 1, 2]))
    monkeypatch.setattr(graphs, "upload", noted)
    for _ in range(3):
        assert captures.run(plan([0, 1, 2], [3, 3, 3]))[:3].tolist() == [130, 1130, 2130]
        assert captures.run(plan([0, 1, 2]))[:3].tolist() == [100, 1100, 2100]
    assert copied == []
    captures.run(plan([0, 1, 2], [3, 3, 2]))
    captures.run(plan([0, 1, 2], [3, 3, 2]))
    assert len(copied) == 1
    assert captures.run(plan([0, 1, 2], [3, 3, 3]))[:3].tolist() == [130, 1130, 2130]
    assert len(copied) == 2


def test_guesses_are_numbers_that_change(captures: Captures) -> None:
    assert captures.run(plan([0, 1], [2, 1], guesses=[[5, 1], [2]])).tolist() == [126, 1112]
    assert captures.run(plan([0, 1], [2, 1], guesses=[[5, 2], [2]])).tolist() == [127, 1112]


@pytest.mark.parametrize("guessed", [False, True])
def test_what_plain_requests_need_is_captured_at_once(captures: Captures, guessed: bool) -> None:
    captures.runner.capture_all(captures.function, guessed, no_progress_bar)
    num_captured = captures.recorder.captures
    assert num_captured == 2 * 2 * len(bucket_sizes(5))
    widths = [(batch.num_requests, batch.width) for batch in captures.batches]
    assert widths[0] == (5, K)  # the largest first
    assert widths == sorted(widths, key=lambda pair: (-pair[1], -pair[0]))
    for number in range(1, 6):
        for uses in LEAN:
            for drafts in (0, 2):
                guesses = [[1] * drafts] * number if guessed else None
                captures.run(plan(list(range(number)), [drafts] * number, uses, guesses))
    assert captures.recorder.captures == num_captured


def test_an_engine_without_drafts_captures_one_width(captures: Captures) -> None:
    runner = GraphRunner(captures.state, captures.sampling, form(0), captures.recorder)  # type: ignore[arg-type]
    runner.capture_all(captures.function, False, no_progress_bar)
    assert captures.recorder.captures == 2 * len(bucket_sizes(5))


def test_a_step_is_padded_to_the_smallest_width_that_holds_it(captures: Captures) -> None:
    state, sampling = captures.state, captures.sampling
    runner = GraphRunner(state, sampling, form(0, 1, 3), captures.recorder)  # type: ignore[arg-type]
    for drafts in range(4):
        runner.run("step", captures.function, plan([0], [drafts]))
        assert captures.batches[-1].width == {0: 0, 1: 1, 2: 3, 3: 3}[drafts]
    before = captures.recorder.captures
    runner.capture_all(captures.function, True, no_progress_bar)
    assert captures.recorder.captures - before == 3 * 2 * len(bucket_sizes(5))


def test_a_step_of_few_drafts_is_packed_into_the_rows_that_hold_them(
    captures: Captures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.core.step_form.row_totals", lambda *_: (6, 10, 16))
    monkeypatch.setattr(graphs, "WANTED_BEFORE_CAPTURE", 1)

    def rows(drafts: list[int], name: str = "step", packs: bool = True) -> int | None:
        given = plan(list(range(len(drafts))), drafts)
        captures.runner.run(name, captures.function, given, packs=packs)
        return captures.batches[-1].num_rows

    assert rows([3, 0, 0]) == rows([1, 1, 1]) == 6
    assert rows([3, 0, 1]) == rows([3, 3, 0, 0]) == 10
    assert rows([3, 3, 3, 0]) is None  # all the rows that four requests can have
    assert rows([3, 0, 0], "propose", packs=False) is None
    assert captures.recorder.captures == 4
    target = captures.batches[0].target_rows(tensor(0, 0, 0, 0), tensor(0, 0, 0, 0), 3, None)
    assert (target.width, target.total) == (4, 6)
    # A drafter that makes no more than one token each: as many rows as there can be.
    target = captures.batches[0].target_rows(tensor(0, 0, 0, 0), tensor(0, 0, 0, 0), 0, None)
    assert (target.width, target.total) == (1, None)


def test_a_total_of_rows_is_captured_when_it_has_been_wanted_often(
    captures: Captures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.core.step_form.row_totals", lambda *_: (6, 10, 16))
    monkeypatch.setattr(graphs, "WANTED_BEFORE_CAPTURE", 3)

    def rows(*drafts: int) -> int | None:
        given = plan(list(range(4)), drafts)
        captures.runner.run("step", captures.function, given, packs=True)
        return captures.batches[-1].num_rows

    assert [rows(3, 3, 0, 0) for _ in range(3)] == [None, None, 10]
    # Meanwhile one that is larger will do.
    assert [rows(2, 0, 0, 0) for _ in range(4)] == [10, 10, 6, 6]
    assert rows(3, 3, 0, 0) == 10
    assert rows(3, 3, 3, 3) is None
    assert captures.recorder.captures == 3


# ---------------------------------------------------------------------- the full variant


def admit(sampling: SamplingState, slot: int, **params: Any) -> Request:
    given = SamplingParams(**params)
    stops = frozenset(given.stop_token_ids)
    request = Request(str(slot), [1, 2], given, 0, stops, 16, 0, slot)
    sampling.admit({slot: request})
    return request


PENALTIES = frozenset({Uses.PENALTIES})


SPECIAL = (Uses.SAMPLING, Uses.BAD_WORDS, *sorted(APART, key=lambda use: use.name))


@pytest.mark.parametrize("use", sorted(APART, key=str))
def test_some_uses_stand_beside_the_others(captures: Captures, use: Uses) -> None:
    """Allowed tokens and verification modes are kept, whatever else a request uses."""
    apart = frozenset({use})
    for others, run in ((LEAN[0], LEAN[0]), (LEAN[1], LEAN[1]), (frozenset({Uses.TOP_K}), FULL)):
        captures.run(plan([0], [1], uses=others | apart))
        assert captures.batches[-1].uses == run | apart
    captures.run(plan([0], [0], uses=LEAN[1] | {Uses.BLOCK}))
    assert captures.batches[-1].uses == LEAN[1]


def test_graphs_of_drafts_are_captured_with_what_all_drafts_use(captures: Captures) -> None:
    state, sampling, block = captures.state, captures.sampling, frozenset({Uses.BLOCK})
    runner = GraphRunner(state, sampling, form(0, K), captures.recorder, block)  # type: ignore[arg-type]
    runner.capture_all(captures.function, False, no_progress_bar)
    before = captures.recorder.captures
    runner.run("step", captures.function, plan([0], [K], uses=LEAN[1] | block))
    runner.run("step", captures.function, plan([0], [0], uses=LEAN[1] | block))
    assert captures.recorder.captures == before


@pytest.mark.parametrize("use", [use for use in Uses if use not in SPECIAL])
def test_whatever_is_not_plain_runs_with_everything(captures: Captures, use: Uses) -> None:
    sampling = captures.sampling
    captures.run(plan([0], uses=frozenset({use})))
    assert captures.batches[-1].uses == FULL
    for made in (sampling.output_counts, sampling.prompt_mask, sampling.bias):
        assert made is not None


def test_plain_requests_need_no_tensors_over_the_vocabulary(captures: Captures) -> None:
    for uses in LEAN:
        captures.run(plan([0], uses=uses))
    assert captures.sampling.output_counts is None
    assert captures.sampling.bias is None


def test_tensors_that_are_replaced_drop_the_graphs_that_keep_their_addresses(
    captures: Captures,
) -> None:
    captures.run(plan([0]))
    captures.run(plan([0], uses=PENALTIES))
    captures.run(plan([0, 1], uses=PENALTIES))
    assert captures.recorder.captures == 3
    captures.run(plan([0], uses=frozenset({Uses.TOP_P, Uses.SAMPLING})))  # the same graph
    assert captures.recorder.captures == 3
    before = captures.sampling.generation
    admit(captures.sampling, 1, stop_token_ids=list(range(9)), min_tokens=2)  # one more than fit
    assert captures.sampling.generation > before
    captures.run(plan([0]))
    assert captures.recorder.captures == 3  # plain graphs never look
    captures.run(plan([0], uses=PENALTIES))
    assert captures.recorder.captures == 4
    captures.run(plan([0], uses=PENALTIES))
    captures.run(plan([0, 1], uses=PENALTIES))
    assert captures.recorder.captures == 5


# ---------------------------------------------------------------------- rows of a pass


def layout_of(*lengths: int) -> tuple[RowLayout, Tensor]:
    """Exact rows, and the number of each."""
    ends = tensor(*lengths).cumsum(0)
    count = int(ends[-1])
    request = torch.repeat_interleave(torch.arange(len(lengths)), tensor(*lengths))
    first = ends - tensor(*lengths)
    places = request, torch.arange(count) - first[request]
    rows = torch.arange(count)
    last = (ends - 1).clamp_min(0)
    layout = RowLayout(rows.int(), INPUTS, first, last, None, [0, *ends.tolist()], places)
    return layout, rows


def padded_layout(requests: int, width: int, *last: int) -> tuple[RowLayout, Tensor]:
    rows = torch.arange(requests * width)
    first = torch.arange(requests) * width
    return RowLayout(rows.int(), INPUTS, first, first + tensor(*last), width), rows


INPUTS: Any = None  # not looked at


def test_the_last_rows_of_exact_and_padded_passes() -> None:
    layout, rows = layout_of(3, 1, 2)
    assert layout.last(rows).tolist() == [2, 3, 5]
    layout, rows = padded_layout(2, 3, 1, 0)
    assert layout.last(rows).tolist() == [1, 3]
    for layout, rows in (layout_of(1, 1, 1), padded_layout(3, 1, 0, 0, 0)):
        assert layout.is_single
        assert layout.last(rows) is rows  # nothing to pick
    layout, rows = layout_of(0, 2, 1)
    assert not layout.is_single
    assert layout.last(rows)[1:].tolist() == [1, 2]


def test_the_ends_of_a_pass() -> None:
    layout, rows = layout_of(5, 1, 3, 2)
    assert layout.ends(rows, tensor(2, 1, 1, 2)).tolist() == [3, 4, 5, 8, 9, 10]
    assert layout.ends(rows, tensor(5, 1, 3, 2)) is rows
    layout, rows = padded_layout(2, 3, 1, 0)
    assert layout.ends(rows, tensor(1, 1)) is rows


def test_rows_that_are_all_judged_are_laid_out_already() -> None:
    layout, _ = layout_of(3, 1, 2)
    found = layout.judged(True)
    assert found is not None
    built = SampleRows.build(*(tensor(0, 0, 0),) * 2, torch.zeros(3, 3).long(), tensor(2, 0, 1),
                             tensor(1, 1, 1) > 0, num_rows=6)  # fmt: skip
    assert built.layout is not None
    for ours, theirs in zip(found, built.layout, strict=True):
        assert ours.equal(theirs)
    assert layout.judged(False) is None
    assert padded_layout(2, 3, 1, 0)[0].judged(False) is None


def test_the_heads_and_tails_of_requests_with_equally_many_rows() -> None:
    layout, rows = layout_of(3, 3)
    assert layout.num_each == 3
    assert layout.heads(rows, 3).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert layout.heads(rows, 2).tolist() == [[0, 1], [3, 4]]
    assert layout.tails(rows, tensor(2, 2), 2, fill=True).tolist() == [[1, 2], [4, 5]]
    assert layout.tails(rows, tensor(2, 1), 2).tolist() == [[1, 2], [5, 5]]
    wider = torch.arange(8.0).view(2, 4, 1)
    assert layout.spread(wider).flatten().tolist() == [0, 1, 2, 4, 5, 6]
    layout, rows = layout_of(2, 3)
    assert layout.num_each is None
    assert layout.tails(rows, tensor(2, 2), 2, fill=True).tolist() == [[0, 1], [3, 4]]
    assert layout_of(0, 2)[0].num_each is None
    assert padded_layout(2, 3, 1, 0)[0].num_each == 3


def test_the_heads_and_tails_of_a_pass() -> None:
    layout, rows = layout_of(3, 1, 2)
    assert layout.heads(rows, 2).tolist() == [[0, 1], [3, 4], [4, 5]]
    assert layout.tails(rows, tensor(2, 1, 1), 2).tolist() == [[1, 2], [3, 3], [5, 5]]
    index = layout.leading(tensor(2, 0, 1))
    assert rows[index].tolist() == [0, 1, 4]
    layout, rows = padded_layout(2, 3, 2, 1)
    assert layout.heads(rows, 3).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert layout.tails(rows, tensor(2, 1), 2).tolist() == [[1, 2], [4, 4]]
    assert rows[layout.leading(tensor(2, 0))].equal(rows)


@pytest.mark.parametrize("lengths", [(3, 1, 2), (1, 1, 1), (0, 3, 0), (2, 2, 2)])
def test_values_of_requests_go_to_their_rows_and_come_back(lengths: tuple[int, ...]) -> None:
    values = torch.arange(9.0).view(3, 3, 1) + 1
    layout, rows = layout_of(*lengths)
    spread = layout.spread(values)
    assert len(spread) == len(rows)
    kept = torch.arange(3) < tensor(*lengths).unsqueeze(1)
    assert layout.collect(spread, 3).equal(torch.where(kept.unsqueeze(2), values, 0))
    layout, rows = padded_layout(3, 3, 2, 2, 2)
    assert layout.spread(values).flatten().tolist() == list(range(1, 10))
    assert layout.collect(layout.spread(values), 3).equal(values)
    assert layout.request.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert layout.offset.tolist() == [0, 1, 2] * 3


# ---------------------------------------------------------------------- padded and exact passes

BLOCK, NUM_BLOCKS = 4, 24


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    path: Path = write_qwen3(tmp_path_factory.mktemp("batch"))
    return load_decoder(Checkpoint(path), LoadOptions(torch.float32, CPU, "auto", 64))


def runner_of(network: Decoder) -> tuple[ModelRunner, ModelCache, DeviceState]:
    """Three requests with the first tokens computed, and a slot for padding."""
    layout = network.config.cache_layout(torch.float32)
    cache = ModelCache(layout, CacheSizes(NUM_BLOCKS, BLOCK, 4, CPU))
    for pages in cache.layers:
        for page in pages:
            page.zero_()
    state = DeviceState(3, 31, BLOCK, CPU)
    generator = torch.Generator().manual_seed(1)
    state.token_ids[:3] = torch.randint(1, 96, (3, 32), generator=generator, dtype=torch.int32)
    tables = torch.randperm(NUM_BLOCKS, generator=generator).view(3, 8)
    state.block_tables[:3] = tables.to(torch.int32)
    runner = ModelRunner(network, cache, state)
    runner.forward(PassRows(tensor(0, 1, 2), tensor(0, 0, 0), tensor(9, 5, 26)))
    return runner, cache, state


def padded_pass(
    network: Decoder, lengths: Sequence[int], number: int
) -> tuple[ModelRunner, Forward, ModelCache]:
    """Four places for each of three requests, and for padding up to `number`."""
    runner, cache, state = runner_of(network)
    padding = [0] * (number - 3)
    slots = tensor(0, 1, 2, *[state.padding_slot for _ in padding])
    rows = PassRows(slots, tensor(9, 5, 26, *padding), tensor(*lengths, *padding), 4)
    return runner, runner.forward(rows), cache


@pytest.mark.parametrize("lengths", [(4, 1, 2), (1, 1, 1), (4, 4, 4), (2, 0, 3)])
@pytest.mark.parametrize("number", [3, 4, 6])
def test_padded_rows_are_the_exact_rows(
    lengths: tuple[int, int, int], number: int, network: Decoder
) -> None:
    exact_runner, exact_cache, _ = runner_of(network)
    exact = exact_runner.forward(PassRows(tensor(0, 1, 2), tensor(9, 5, 26), tensor(*lengths)))
    runner, padded, cache = padded_pass(network, lengths, number)
    assert padded.hidden.shape[0] == 4 * number
    logits, exact_logits = runner.logits(padded.hidden), exact_runner.logits(exact.hidden)
    # Not bit for bit: matmuls of one to four rows may sum in another order on a CPU.
    for request, length in enumerate(lengths):
        place, first = 4 * request, exact.layout.row_starts[request]
        rows, exact_rows = slice(place, place + length), slice(first, first + length)
        assert_close(padded.hidden[rows], exact.hidden[exact_rows], atol=1e-5, rtol=0)
        assert_close(logits[rows], exact_logits[exact_rows], atol=1e-5, rtol=0)
        if length:
            for forward, row in ((padded, place), (exact, first)):
                last = forward.layout.last(forward.hidden)
                assert last[request].equal(forward.hidden[row + length - 1])
    for ours, theirs in zip(cache.layers, exact_cache.layers, strict=True):
        for page, other in zip(ours, theirs, strict=True):
            # Zeros are places that nobody wrote: padding must leave them.
            assert (page == 0).equal(other == 0)
            assert_close(page, other, atol=1e-5, rtol=0)


def test_a_full_batch_has_the_exact_bits(network: Decoder) -> None:
    """Without padding rows, the two layouts are equal."""
    exact_runner, exact_cache, _ = runner_of(network)
    exact = exact_runner.forward(PassRows(tensor(0, 1, 2), tensor(9, 5, 26), tensor(4, 4, 4)))
    _, padded, cache = padded_pass(network, (4, 4, 4), 3)
    assert padded.hidden.equal(exact.hidden)
    for ours, theirs in zip(cache.layers, exact_cache.layers, strict=True):
        assert all(page.equal(other) for page, other in zip(ours, theirs, strict=True))


def test_rows_behind_the_last_position_write_nothing(network: Decoder) -> None:
    """A request near max_model_len has fewer rows than its places."""
    runner, cache, state = runner_of(network)
    state.token_ids[2, 31] = 77  # where tokens without a place land
    before = [[page.clone() for page in pages] for pages in cache.layers]
    forward = runner.forward(PassRows(tensor(2), tensor(30), tensor(1), 4))
    assert torch.isfinite(forward.hidden[0]).all()
    place = int(state.block_tables[2, 7]) * BLOCK + 2
    for pages, olds in zip(cache.layers, before, strict=True):
        for page, old in zip(pages, olds, strict=True):
            changed = (page != old).flatten(2).any(2).flatten()
            assert changed.nonzero().flatten().tolist() == [place]


# ---------------------------------------------------------------------- the device state


def scheduled(
    slot: int, tokens: Sequence[int], table: Sequence[int], admitted: bool, start: int = 0
) -> ScheduledRequest:
    request = Request("r", list(tokens), SamplingParams(), 0, frozenset(), 4, 0, 0)
    request.slot = slot
    return ScheduledRequest(request, start, 1, 0, table, admitted, reaches_end=True)


@pytest.fixture
def state() -> DeviceState:
    """Two slots of eight tokens, in blocks of two."""
    return DeviceState(2, 8, 2, CPU)


def test_an_admitted_request_is_loaded_and_others_are_left_alone(state: DeviceState) -> None:
    state.apply(Batch((scheduled(1, [5, 6, 7], [3, 2], True, start=2),)))
    assert state.token_ids[1, :3].tolist() == [5, 6, 7]
    assert state.num_tokens.tolist() == [0, 3, 0]
    assert state.num_computed.tolist() == [0, 2, 0]
    assert state.most_drafted.tolist() == [0, 6, 0]  # max_tokens is 4
    assert state.block_tables.tolist() == [[0] * 4, [3, 2, 0, 0], [0] * 4]
    state.num_tokens[1] = 6  # the device has come further than the host
    state.apply(Batch((scheduled(1, [5, 6, 7], [3, 2, 9], False),)))
    assert state.num_tokens.tolist() == [0, 6, 0]
    assert state.block_tables[1].tolist() == [3, 2, 9, 0]


def test_no_draft_reaches_max_model_len(state: DeviceState) -> None:
    state.apply(Batch((scheduled(0, [5] * 6, [0, 1, 2], True),)))
    assert int(state.most_drafted[0]) == 7


def test_only_changed_blocks_are_copied(
    state: DeviceState, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[Any] = []

    def noted(values: Any, device: torch.device) -> Tensor:
        if len(values) == 2:  # places in the tables and blocks; admission copies more
            copied.append(values)
        return torch.tensor(values, device=device)

    monkeypatch.setattr("slipstream.runner.device_state.upload", noted)
    table = [4, 5]
    items = (scheduled(0, [1], table, True), scheduled(1, [1], [6], True))
    state.apply(Batch(items))
    assert copied.pop() == [[0, 1, 4], [4, 5, 6]]
    state.apply(Batch(items))
    assert not copied
    table.append(7)  # tables are live views
    state.apply(Batch(items))
    assert copied.pop() == [[2], [7]]
    state.apply(Batch((scheduled(0, [1], [4], False),)))  # a rewind needs no copy
    assert not copied
    state.apply(Batch((scheduled(0, [1], [4, 8, 7], False),)))
    assert copied.pop() == [[1, 2], [8, 7]]
    assert state.block_tables[0].tolist() == [4, 8, 7, 0]
    # Another request in the slot, with some of the same blocks.
    state.apply(Batch((scheduled(0, [2], [4, 8, 1, 3], True),)))
    assert state.block_tables[0].tolist() == [4, 8, 1, 3]


OPS = kernels_for(CPU).preparation


def test_draft_tokens_stand_behind_the_known_ones_as_far_as_they_count(state: DeviceState) -> None:
    state.token_ids[:] = 90
    state.num_tokens[:] = tensor(3, 6, 0)
    drafts = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    OPS.write_tokens(state.tables, tensor(1, 0, 2), drafts, tensor(2, 3, 0))
    assert state.token_ids[0].tolist() == [90, 90, 90, 4, 5, 6, 90, 90, 90]
    assert state.token_ids[1].tolist() == [90] * 6 + [1, 2, 90]
    assert state.token_ids[2, 1:].tolist() == [90] * 8  # the first place is tentative
    assert state.num_tokens.tolist() == [3, 6, 0]
    OPS.write_tokens(state.tables, tensor(0), torch.zeros(1, 0, dtype=torch.int64), tensor(0))


def test_tokens_without_a_place_land_behind_the_last_position(state: DeviceState) -> None:
    state.token_ids[:] = 90
    state.num_tokens[0] = 7
    OPS.write_tokens(state.tables, tensor(0), torch.tensor([[1, 2, 3]]), tensor(3))
    assert state.token_ids[0, :8].tolist() == [90] * 7 + [1]
    state.num_tokens[0] = 8  # full: a surplus step adds its token all the same
    gained, _ = OPS.commit(
        state.tables, tensor(0), tensor(1), torch.tensor([True]), torch.tensor([[5]]), tensor(1),
        tensor(0),
    )  # fmt: skip
    assert gained.tolist() == [1]
    assert state.token_ids[0].tolist() == [90] * 7 + [1, 5]
    assert state.token_ids[1:].eq(90).all()


def test_a_commit_moves_the_counters_of_those_at_their_end(state: DeviceState) -> None:
    state.num_tokens[:] = tensor(3, 6, 0)
    state.num_computed[:] = tensor(2, 1, 0)
    tokens = torch.tensor([[7, 8, -1], [9, -1, -1], [4, -1, -1]])
    gained, accepted = OPS.commit(
        state.tables,
        tensor(0, 1, 2),
        tensor(1, 4, 0),
        torch.tensor([True, False, False]),  # a decoding one, a prompt chunk, padding
        tokens,
        tensor(2, 1, 1),
        tensor(1, 0, 0),
    )
    assert gained.tolist() == [2, 0, 0]
    assert accepted.tolist() == [1, 0, 0]
    assert state.num_tokens.tolist() == [5, 6, 0]
    assert state.num_computed.tolist() == [4, 5, 0]
    assert state.token_ids[0, 3:5].tolist() == [7, 8]


def test_padding_never_gets_anywhere(state: DeviceState) -> None:
    slots = tensor(0, 2, 2, 2)
    state.num_tokens[0] = 1
    for _ in range(3):
        OPS.commit(
            state.tables,
            slots,
            tensor(1, 0, 0, 0),
            torch.tensor([True, False, False, False]),
            torch.tensor([[5], [6], [7], [8]]),
            tensor(1, 1, 1, 1),
            tensor(0, 0, 0, 0),
        )
    assert state.num_tokens.tolist() == [4, 0, 0]
    assert state.num_computed.tolist() == [3, 0, 0]
