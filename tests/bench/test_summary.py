"""The arithmetic of a load, on time stamps that are written down."""

import math

import numpy
import pytest

from slipstream.bench.load import LoadRun, arrival_times
from slipstream.bench.options import ITL_PER_TOKEN, SummaryOptions, read_goodput
from slipstream.bench.record import CHUNKS, TOKENIZER, USAGE, Arrival, Record
from slipstream.bench.speculation import SpeculationCounts, from_metrics, from_usage
from slipstream.bench.summary import details, series, summarise, timeline
from slipstream.bench.tables import by_draft_tokens, speculation_rows
from slipstream.core.errors import UsageError


def record(
    sent: float, *chunks: tuple[float, int | None], tokens: int = 0, by: str = USAGE, **more: object
) -> Record:
    """A request whose chunks came at these times with so many tokens."""
    arrivals = [Arrival(time, count) for time, count in chunks]
    count = tokens or sum(number or 0 for _, number in chunks)
    made = Record(id="r", sent=sent, arrivals=arrivals, num_tokens=count, counted_by=by)
    for name, value in more.items():
        setattr(made, name, value)
    return made


FIRST = record(10.0, (10.5, 1), (10.6, 3), (10.9, 2), num_prompt_tokens=7)
SECOND = record(11.0, (11.25, 2), (12.25, 3), num_prompt_tokens=5)
FAILED = Record(id="f", sent=11.0, error="HTTP 429: full")


def run(*records: Record, left: int = 0) -> LoadRun:
    return LoadRun(records=list(records), began=10.0, ended=12.5, num_left=left, most_at_once=2)


def test_times_of_one_request() -> None:
    assert FIRST.ttft == pytest.approx(0.5)
    assert FIRST.latency == pytest.approx(0.9)
    assert FIRST.tpot == pytest.approx(0.4 / 5)  # six tokens: five after the first
    assert FIRST.chunk_gaps() == pytest.approx([0.1, 0.3])
    assert FIRST.token_gaps() == pytest.approx([0.1, 0, 0, 0.3, 0])
    assert SECOND.token_gaps() == pytest.approx([0, 1.0, 0, 0])  # the first two came at once
    assert record(0.0, (1.0, 1)).tpot is None


def test_gaps_of_tokens_are_known_only_where_counts_are() -> None:
    unknown = record(0.0, (1.0, None), (2.0, None), tokens=5)
    assert unknown.tokens_per_chunk() is None
    assert unknown.token_gaps() is None
    assert unknown.shares() == [(1.0, 2.5), (2.0, 2.5)]
    one_each = record(0.0, (1.0, None), (2.0, None), tokens=2, by=TOKENIZER)
    assert one_each.token_gaps() == [1.0]
    blind = record(0.0, (1.0, None), (2.0, None), tokens=2, by=CHUNKS)
    assert blind.token_gaps() is None
    assert series([FIRST, unknown])[ITL_PER_TOKEN] == []


def test_a_token_without_text_yet_is_no_gap() -> None:
    held = record(0.0, (1.0, 1), (2.0, 0), (3.0, 1))
    assert held.token_gaps() == [2.0]


def test_the_figures_of_a_load() -> None:
    options = SummaryOptions(percentiles=(50, 99), goodput=("ttft:300", "e2el:2000"))
    summary = summarise(run(FIRST, SECOND, FAILED, FAILED, left=3), None, options)
    expected = {
        "duration": 2.5,
        "completed": 2,
        "failed": 2,
        "not_finished": 3,
        "errors": {"HTTP 429: full": 2},
        "total_input_tokens": 12,
        "total_output_tokens": 11,
        "output_tokens_counted_by": ["usage"],
        "request_throughput": 2 / 2.5,
        "request_goodput": 1 / 2.5,  # the first took 500 ms to its first token
        "output_throughput": 11 / 2.5,
        "total_token_throughput": 23 / 2.5,
        "max_output_tokens_per_s": 6.0,
        "max_concurrent_requests": 2,
        "mean_ttft_ms": 375.0,
        "median_ttft_ms": 375.0,
        "std_ttft_ms": 125.0,
        "p50_ttft_ms": 375.0,
        "p99_ttft_ms": 497.5,
        "mean_tpot_ms": (80 + 250) / 2,
        "mean_e2el_ms": (900 + 1250) / 2,
        "mean_itl_ms": (100 + 300 + 1000) / 3,
        "median_itl_ms": 300.0,
        "mean_itl_per_token_ms": 1400 / 9,
        "median_itl_per_token_ms": 0.0,
        "spec_decode_source": "not reported",
    }
    for name, value in expected.items():
        assert summary[name] == (pytest.approx(value) if isinstance(value, float) else value), name


def test_a_load_without_an_answer_has_no_times() -> None:
    summary = summarise(run(FAILED), None, SummaryOptions())
    assert summary["completed"] == 0
    assert summary["mean_ttft_ms"] is None
    assert summary["output_throughput"] == 0
    assert summary["request_goodput"] is None


def test_waiting_for_a_place_is_told_in_an_open_loop() -> None:
    waited = record(10.0, (10.5, 1), due=9.75)
    assert waited.queued == 0.25
    summary = summarise(run(waited), None, SummaryOptions())
    assert summary["mean_client_queue_time_ms"] == pytest.approx(250)
    assert "mean_client_queue_time_ms" not in summarise(run(FIRST), None, SummaryOptions())


def test_tokens_and_requests_by_second() -> None:
    told = timeline(run(FIRST, SECOND))
    assert told["output_tokens"] == [6, 2, 3]
    assert told["requests"] == [1, 1, 1]
    both = timeline(run(record(10.0, (12.1, 1)), record(10.5, (10.7, 1))))
    assert both["requests"] == [2, 1, 1]


def test_every_request_can_be_told() -> None:
    told = details(run(FIRST, FAILED))
    assert told["start_times"] == [0.0, 1.0]
    assert told["ttfts"] == [0.5, None]
    assert told["tokens_per_chunk"] == [[1, 3, 2], []]
    assert told["errors"] == [None, "HTTP 429: full"]


def test_goals_are_read() -> None:
    assert read_goodput(["ttft:200", "tpot:12.5"]) == {"ttft": 200, "tpot": 12.5}
    assert read_goodput([]) is None
    for wrong in ("ttft", "ttft:x", "itl:3", "ttft:0", "ttft:nan"):
        with pytest.raises(UsageError, match="--goodput must be such as ttft:200"):
            read_goodput([wrong])


def test_arrivals_have_the_rate_and_the_burstiness_asked() -> None:
    assert arrival_times(5, math.inf) is None
    for burstiness in (0.2, 1.0, 50.0):
        times = arrival_times(2001, 10, burstiness, seed=3)
        assert times is not None
        assert times[0] == 0
        assert times[-1] == pytest.approx(200)
        gaps = numpy.diff(times)
        assert (gaps >= 0).all()
        # A gamma distribution of shape a has a standard deviation of 1 / sqrt(a) means.
        assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.1)
    assert arrival_times(9, 3, seed=1) == arrival_times(9, 3, seed=1)
    assert arrival_times(9, 3, seed=1) != arrival_times(9, 3, seed=2)
    assert arrival_times(1, 3) == [0.0]
    for wrong in (0, -1, math.nan):
        with pytest.raises(UsageError):
            arrival_times(3, wrong)
        with pytest.raises(UsageError):
            arrival_times(3, 1, wrong)


PAGE = """# HELP {p}spec_decode_num_drafts x
# TYPE {p}spec_decode_num_drafts counter
{p}spec_decode_num_drafts{t}{{model_name="a b"}} {d}
{p}spec_decode_num_draft_tokens{t}{{model_name="a b"}} {n}
{p}spec_decode_num_accepted_tokens{t}{{model_name="a b"}} 1.2e+01
{p}spec_decode_num_accepted_tokens_per_pos{t}{{model_name="a",position="0"}} 8.0
{p}spec_decode_num_accepted_tokens_per_pos{t}{{model_name="a",position="1"}} 4.0
{p}spec_decode_num_draft_tokens_chosen{t}{{model_name="a",k="0"}} 2.0
{p}spec_decode_num_draft_tokens_chosen{t}{{model_name="a",k="2"}} {d}.0
{p}spec_decode_refused_drafting_seconds{t}{{model_name="a"}} {d}.5
{p}request_success_total 3
{p}gauge NaN
"""


@pytest.mark.parametrize(("prefix", "ending"), [("vllm:", "_total"), ("slipstream:", "")])
def test_counters_of_servers_are_read(prefix: str, ending: str) -> None:
    before = from_metrics(PAGE.format(p=prefix, t=ending, d=10, n=20))
    after = from_metrics(PAGE.format(p=prefix, t=ending, d=16, n=32))
    assert before is not None
    assert after is not None
    assert (before.num_drafts, before.num_draft_tokens) == (10, 20)
    assert (before.num_accepted_tokens, before.num_accepted_tokens_per_pos) == (12, [8, 4])
    assert before.acceptance_length == pytest.approx(2.2)
    assert before.acceptance_per_position == [0.8, 0.4]
    assert before.without_drafts is None
    gained = after.since(before)
    assert (gained.num_drafts, gained.num_draft_tokens, gained.num_accepted_tokens) == (6, 12, 0)
    assert f"{prefix}spec_decode_num_drafts" in gained.source
    assert gained.steps_by_draft_tokens == [0, 0, 6]
    assert gained.seconds_refused == 6
    assert from_metrics("process_cpu_seconds_total 3\n") is None


def test_answers_that_tell_are_summed() -> None:
    first = {"drafts": 4, "draft_tokens": 8, "accepted_tokens": 5, "steps": 5}
    second = {"drafts": 1, "draft_tokens": 3, "accepted_tokens": 1, "steps": 3}
    told = [
        record(0.0, (1.0, 1), usage={"speculation": first | {"accepted_per_position": [4, 1]}}),
        record(0.0, (1.0, 1), usage={"speculation": second | {"accepted_per_position": [1]}}),
        record(0.0, (1.0, 1)),
    ]
    counts = from_usage(told)
    assert counts is not None
    assert (counts.num_drafts, counts.num_accepted_tokens) == (5, 6)
    assert counts.num_accepted_tokens_per_pos == [5, 1]
    assert counts.acceptance_length == pytest.approx(2.2)
    assert counts.without_drafts == pytest.approx(3 / 8)
    summary = summarise(run(FIRST), counts, SummaryOptions())
    assert summary["spec_decode_acceptance_length"] == pytest.approx(2.2)
    assert summary["spec_decode_acceptance_rate"] == pytest.approx(100 * 6 / 11)
    assert summary["spec_decode_per_position_acceptance_rates"] == [1.0, 0.2]
    assert from_usage([FIRST]) is None


def test_the_speed_up_of_a_load_is_weighted_by_time() -> None:
    long = {"steps": 30, "drafts": 30, "steps_by_draft_tokens": [0, 10, 20]}
    long |= {"estimated_speedup": 2.0, "decode_seconds": 3.0, "refused_drafting_seconds": 0.5}
    short = {"steps": 2, "steps_by_draft_tokens": [2], "refused_drafting_seconds": 0.25}
    unknown = {**short, "estimated_speedup": None, "decode_seconds": 0.0}
    short |= {"estimated_speedup": 0.5, "decode_seconds": 1.0}
    counts = from_usage([record(0.0, usage={"speculation": it}) for it in (long, short, unknown)])
    summary = summarise(run(FIRST), counts, SummaryOptions())
    assert summary["spec_decode_estimated_speedup"] == pytest.approx((2 * 3 + 0.5 * 1) / 4)
    assert summary["spec_decode_refused_drafting_seconds"] == 1.0
    assert summary["spec_decode_steps_by_draft_tokens"] == [4, 10, 20]
    assert counts is not None
    rows = dict(speculation_rows(counts))
    assert rows["estimated speed-up"] == "1.62x plain"
    assert rows["time of refused drafts"] == "1.00 s"
    assert rows["draft tokens per step"] == "mean 1.5 (0: 12%, 1: 29%, 2: 59%)"


def test_what_a_source_does_not_report_is_none() -> None:
    counts = SpeculationCounts(3, 6, 2, [2], source="x")
    summary = summarise(run(FIRST), counts, SummaryOptions())
    for name in ("steps_by_draft_tokens", "estimated_speedup", "refused_drafting_seconds"):
        assert summary[f"spec_decode_{name}"] is None
    assert "draft tokens per step" not in dict(speculation_rows(counts))


def test_nothing_drafted_is_an_acceptance_length_of_one() -> None:
    none = SpeculationCounts(num_steps=9, source="x")
    assert (none.acceptance_length, none.acceptance_rate, none.without_drafts) == (1.0, 0.0, 1.0)


def test_of_auto_that_drafts_nothing_the_reason_is_told() -> None:
    note = "none: K is auto, and no draft was expected to save time"
    for counts, expected in (
        (SpeculationCounts(num_steps=9, source="x", adaptive=True), note),
        (SpeculationCounts(num_steps=9, source="x"), None),
        (SpeculationCounts(3, 6, 2, [2], source="x", adaptive=True), None),
    ):
        summary = summarise(run(FIRST), counts, SummaryOptions())
        assert summary["spec_decode_note"] == expected
        if not counts.num_drafts:
            assert dict(speculation_rows(counts)) == {"drafts": expected or "none"}


def test_of_many_numbers_of_draft_tokens_the_frequent_ones_are_shown() -> None:
    shown = by_draft_tokens([0, *[1] * 20, 79])
    assert shown.startswith("mean ")
    assert shown.count("%") == 16
    assert shown.endswith("21: 80%)")
