"""Processes that end: none hangs, and none is left behind."""

import os
import signal
import subprocess
import sys
import weakref
from pathlib import Path
from threading import Event, Thread
from time import monotonic, sleep
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream import SamplingParams
from slipstream.core.errors import RanksLostError
from slipstream.core.request import Request
from slipstream.engine.ranks import processes
from slipstream.engine.ranks.division import DataParallelDivision
from slipstream.engine.ranks.messages import Writer
from slipstream.engine.ranks.processes import Followers
from slipstream.engine.ranks.ranks import Ranks, breaking_off
from slipstream.engine.step_results import RatedRows
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.loading import LoadOptions, load_decoder, no_progress_bar
from slipstream.runner.collectives import CollectiveError
from slipstream.sampling.logits import TokenLogprobs
from tests.lossless.test_greedy import make_prompts
from tests.ranks.conftest import Opener, Pool
from tests.serve.test_stopping import process

LONG = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
MOST_SECONDS = 10  # until whoever waits is told, and all processes have ended
SCRIPT = """
from slipstream import LLM, SamplingParams
llm = LLM("demo", tensor_parallel_size=2, max_num_seqs=2, threads=1)
for step in llm.stream("def main(", SamplingParams(max_tokens=2000, ignore_eos=True)):
    print("runs", flush=True)
"""


def children(parent: int) -> list[int]:
    """Processes that another one has started."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                numbers = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(numbers[1]) == parent and numbers[0] != "Z":
                found.append(int(entry.name))
    return found


def wait_until_gone(pids: list[int]) -> None:
    deadline = monotonic() + MOST_SECONDS
    while [pid for pid in pids if Path(f"/proc/{pid}").exists() and not is_zombie(pid)]:
        assert monotonic() < deadline
        sleep(0.05)


def is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize(
    ("number", "how"),
    [
        # Ranks that share experts lose one like this in an ordinary run, and so does a server.
        pytest.param(signal.SIGKILL, "ended with exit code -9", marks=pytest.mark.full),
        (signal.SIGSTOP, "was stopped by a signal for 2 s"),
    ],
)
def test_requests_end_with_an_error_when_a_rank_is_lost(
    number: signal.Signals, how: str, tiny_target: str, ranked: Opener, pool: Pool
) -> None:
    llm = ranked(tiny_target)
    (follower,) = pool.followers(2).processes
    outputs = llm.stream(make_prompts(6), LONG)
    next(outputs)
    errors: list[Exception] = []

    def read_on() -> None:
        try:
            for _ in outputs:
                pass
        except Exception as error:
            errors.append(error)

    os.kill(follower.pid, number)
    reader = Thread(target=read_on, daemon=True)
    reader.start()
    reader.join(MOST_SECONDS)
    assert not reader.is_alive()
    assert isinstance(errors[0], RanksLostError)
    assert str(errors[0]) == f"rank 1 of 2 {how}; the engine has ended: start it again"
    with pytest.raises(RanksLostError):
        llm.generate(make_prompts(1), LONG)


def test_what_several_ranks_say_of_a_lost_one_is_told_once() -> None:
    said = ["", str(CollectiveError()), "rank 3: no memory", str(CollectiveError())]
    processes = [SimpleNamespace(last_words=lambda words=words: words) for words in said]
    followers: Any = SimpleNamespace(loss="rank 1 of 5 ended", processes=processes)
    with pytest.raises(RanksLostError) as raised:
        Followers.check(followers)
    assert str(raised.value) == (
        "rank 1 of 5 ended; an exchange between ranks failed; rank 3: no memory; "
        "the engine has ended: start it again"
    )


class EndingRanks(Ranks):
    """One of them ends after a while."""

    num_checks = 0

    def check(self) -> None:
        self.num_checks += 1
        if self.num_checks == 3:
            raise RanksLostError("on purpose")


def test_a_load_breaks_off_when_a_rank_is_lost(tiny_target: str) -> None:
    ranks, checkpoint = EndingRanks(), Checkpoint(Path(tiny_target))
    bar = breaking_off(no_progress_bar, ranks)
    options = LoadOptions(torch.float32, torch.device("cpu"), "auto", 64, progress_bar=bar)
    with pytest.raises(RanksLostError, match="on purpose"):
        load_decoder(checkpoint, options)
    assert ranks.num_checks == 3


def test_ranks_that_differ_by_one_token_are_found(
    tiny_target: str, ranked: Opener, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The follower gets another last token of one prompt; nothing else is wrong."""
    tell = Writer._request
    prompts = make_prompts(3)

    def altered(self: Writer, request: Request) -> Any:
        function, (first, *rest) = tell(self, request)
        if isinstance(first, dict) and first["token_ids"] == prompts[1]["prompt_token_ids"]:
            first["token_ids"] = [*first["token_ids"][:-1], first["token_ids"][-1] ^ 1]
        return function, (first, *rest)

    monkeypatch.setattr(Writer, "_request", altered)
    llm = ranked(tiny_target, rank_check_interval=4)
    (follower,) = pool.followers(2).processes
    with pytest.raises(RanksLostError, match="hold different tokens"):
        llm.generate(prompts, LONG)
    assert follower.wait() == "ended with exit code 1"


class Ended:
    """A process that has ended, but was not waited for."""

    rank = 1

    def __init__(self) -> None:
        self.kept: list[bool] = []
        self.losses: list[str] = []
        self.followers: Any = Watched(self)
        self.seen = weakref.ref(self.followers)

    def wait(self) -> str:
        return "ended"

    def end(self, seconds: float) -> None:
        self.followers = None  # as the main thread does at its end
        self.kept.append(self.seen() is not None)


class Watched:
    size = 2

    def __init__(self, process: Ended) -> None:
        self.lose = process.losses.append


@pytest.mark.parametrize("closing", [False, True])
def test_what_watches_a_process_keeps_no_connections(closing: bool) -> None:
    """A thread that ended them while this process exits would abort it."""
    process, closed = Ended(), Event()
    if closing:
        closed.set()
    given: Any = process.seen, process, closed
    processes._wait_for(*given)
    assert process.kept == [False]
    assert process.losses == ([] if closing else ["rank 1 of 2 ended"])


SIGNALS = [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.full)]


@pytest.mark.parametrize("number", SIGNALS)
def test_followers_end_with_their_leader(number: signal.Signals) -> None:
    leader = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert leader.stdout is not None
    assert leader.stdout.readline() == b"runs\n"
    followers = children(leader.pid)
    assert followers
    try:
        leader.send_signal(number)
        leader.communicate(timeout=MOST_SECONDS)
    finally:
        leader.kill()
        leader.communicate()
    wait_until_gone(followers)


@pytest.mark.parametrize("busy", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_server_ends_when_a_rank_is_killed(busy: bool) -> None:
    """Also a server that listens but does not serve yet."""
    with process(0, "-tp", "2") as server:
        followers = children(server.popen.pid)
        assert followers
        stream = server.ask(2000, stream=True) if busy else None
        if stream is not None:
            stream.readline()
        os.kill(followers[0], signal.SIGKILL)
        if stream is not None:
            assert b'"error"' in stream.read()
        assert server.popen.wait(MOST_SECONDS) == 1
        log = server.log()
        assert "rank 1 of 2 ended with exit code -9" in log
        assert "Traceback" not in log
        wait_until_gone(followers)


@pytest.mark.parametrize("rank", [0, 1])
def test_log_probabilities_that_one_rank_cannot_compute_leave_no_rank_waiting(rank: int) -> None:
    """Every rank exchanges numbers as ever; the leader alone raises, for that request."""

    def fail() -> TokenLogprobs:
        raise ValueError("no memory")

    sent: list[torch.Tensor] = []

    def stack(part: torch.Tensor) -> torch.Tensor:
        sent.append(part)
        return torch.stack((part, part))

    share: Any = SimpleNamespace(rank=rank, size=2, stack=stack)
    ranks: Any = SimpleNamespace(share=share, leads=not rank)
    pool: Any = SimpleNamespace()
    apart = DataParallelDivision(ranks, pool, torch.device("cpu"), False)
    rows = RatedRows(of_pass=True, places=(0, 1, 2), rank=rank)
    if rank:
        assert (apart.rated(rows, 4, fail).token_ids == -1).all()
    else:
        with pytest.raises(RuntimeError, match="rank 0 cannot compute log probabilities"):
            apart.rated(rows, 4, fail)
    assert [it.shape for it in sent] == [(3,), (3,), (3,), (3, 4), (3, 4)]
