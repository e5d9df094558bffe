"""Whether a server of several ranks ends well, whatever becomes of one of them.

    python -m benchmarks.rank_kills --trials 50 [--first 0] [--seed 1] [--ranks 2] [--limit 10]

Each trial serves the demo over gloo and does one of these to it, in turn, at a random moment of its
loading, of a prompt, of decoding or of idleness: SIGKILL or SIGSTOP to a follower, SIGKILL to the
leader, or Ctrl-C twice. A trial fails where a request is not told, the server goes on, its log does
not say which rank was lost, or a process is left, `--limit` seconds later; the exit code is 1 then.
On a machine that does other work a process may take long to end without hanging: then give a higher
limit, and look at `over_10_seconds` in the last line, which is one JSON document.
"""

import argparse
import http.client
import json
import os
import random
import re
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Thread
from time import monotonic, sleep

_READY_SECONDS = 600.0  # of a busy machine
_MOMENTS = ("loading", "prompt", "decoding", "idle")
_BLOWS = ("kill a follower", "stop a follower", "kill the leader", "Ctrl-C")


class Served:
    """`slipstream serve` with its log."""

    def __init__(self, ranks: int) -> None:
        command = ["serve", "demo", "--port", "0", "--threads", "1", "-tp", str(ranks)]
        self.began, self.log = monotonic(), ""
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "slipstream", *command],
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "NO_COLOR": "1",
                "COLUMNS": "200",
                "PYTHONFAULTHANDLER": "1",
            },
        )
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            self.log += line

    def whole_log(self) -> str:
        """The whole log of a process that has ended."""
        self._reader.join(10)
        return self.log

    @property
    def port(self) -> int:
        found = re.search(r"http://127\.0\.0\.1:(\d+)/v1", self.log)
        return int(found[1]) if found else 0

    def followers(self) -> list[int]:
        """The other ranks, of all processes that it has started."""
        return followers_of(self.popen.pid)


class Asked:
    """A request, and what its client read."""

    def __init__(self, port: int, prompt: str, max_tokens: int) -> None:
        self.read, self.ended = b"", 0.0
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        headers = {"Content-Type": "application/json"}
        self._connection.request("POST", "/v1/completions", json.dumps(body), headers)
        self._thread = Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        try:
            answer = self._connection.getresponse()
            while line := answer.readline():
                self.read += line
        except (OSError, http.client.HTTPException):
            self.read += b"error: the connection was closed"
        self.ended = monotonic()

    def told(self, deadline: float, cut: bool) -> str:
        """What is wrong with how it was told; nothing: it was.

        Args:
            cut: nobody is left who could say more than that the connection is closed.
        """
        self._thread.join(max(0.0, deadline - monotonic()))
        if self._thread.is_alive():
            return "a request hangs"
        whole = cut or b"error" in self.read or self.read.rstrip().endswith(b"data: [DONE]")
        return "" if whole else f"a request ended with {self.read[-200:]!r}"


def followers_of(leader: int) -> list[int]:
    """The other ranks that this process has started."""
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{leader}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return [pid for pid in found if b"ranks.follower" in command_of(pid)]


def command_of(pid: int) -> bytes:
    """The command line of a process; nothing: it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def is_there(pid: int) -> bool:
    """Whether a process runs; one that only waits to be looked at does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition: Callable[[], object], seconds: float) -> bool:
    """Whether it came true in time."""
    deadline = monotonic() + seconds
    while not condition():
        if monotonic() > deadline:
            return False
        sleep(0.02)
    return True


class Trials:
    """Runs all trials.

    Attributes:
        faults: what went wrong.
        seconds: from the blow to the end of all processes and answers, by what was done when.
    """

    def __init__(self, ranks: int, seed: int, limit: float) -> None:
        self._ranks, self._random, self._limit = ranks, random.Random(seed), limit
        self._load_seconds = 5.0  # from the followers' start until it listens
        self.faults: list[str] = []
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def run(self, number: int) -> None:
        """One trial: every blow meets every moment in sixteen of them."""
        blow, moment = _BLOWS[number % 4], _MOMENTS[number // 4 % 4]
        served = Served(self._ranks)
        pids: list[int] = []
        try:
            asked = self._wait_until(moment, served)
            pids = served.followers()
            struck = monotonic()
            self._strike(blow, served, pids)
            faults = self._judge(blow, served, asked, pids, struck + self._limit)
            took = monotonic() - struck
        finally:
            for pid in (served.popen.pid, *pids):
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            served.popen.wait()
        name = f"{blow}, {moment}"
        self.seconds[name].append(round(took, 2))
        self.faults += [f"trial {number} ({name}): {fault}" for fault in faults]
        print(f"{number:3} {name:30} {took:6.2f} s  {'; '.join(faults)}", flush=True)

    def _wait_until(self, moment: str, served: Served) -> list[Asked]:
        """Wait for a random moment of this kind; the requests that are open then."""
        assert wait_for(lambda: len(served.followers()) == self._ranks - 1, _READY_SECONDS)
        begun = monotonic()
        if moment == "loading":
            sleep(self._random.uniform(0, self._load_seconds))
            return []
        assert wait_for(lambda: served.port, _READY_SECONDS), served.log
        self._load_seconds = monotonic() - begun
        if moment == "idle":
            sleep(self._random.uniform(0, 1))
            return []
        lines = self._random.randrange(20, 100) if moment == "prompt" else 1
        asked = [Asked(served.port, "def main(x):\n" * lines, 2000) for _ in range(2)]
        if moment == "decoding":
            assert wait_for(lambda: all(it.read for it in asked), _READY_SECONDS)
        sleep(self._random.uniform(0, 0.5))
        return asked

    def _strike(self, blow: str, served: Served, pids: list[int]) -> None:
        if blow == "Ctrl-C":
            served.popen.send_signal(signal.SIGINT)
            sleep(0.2)
            served.popen.send_signal(signal.SIGINT)
        elif blow == "kill the leader":
            served.popen.kill()
        else:
            name = signal.SIGKILL if blow == "kill a follower" else signal.SIGSTOP
            os.kill(self._random.choice(pids), name)

    def _judge(
        self, blow: str, served: Served, asked: list[Asked], pids: list[int], deadline: float
    ) -> list[str]:
        """The error at the deadline, if any."""
        cut = blow == "kill the leader"
        faults = [fault for it in asked if (fault := it.told(deadline, cut))]
        if not wait_for(lambda: served.popen.poll() is not None, deadline - monotonic()):
            served.popen.send_signal(signal.SIGABRT)  # it then writes what it is doing
            return [*faults, f"the server goes on: {served.whole_log()[-4000:]}"]
        wait_for(lambda: not any(map(is_there, pids)), deadline - monotonic())
        faults += [f"process {pid} is left" for pid in pids if is_there(pid)]
        code, log = served.popen.returncode, served.whole_log()
        if "follower" in blow:
            if code != 1:
                faults.append(f"the exit code is {code}")
            if not re.search(rf"rank \d of {self._ranks} (ended|was stopped)", log):
                faults.append(f"the log does not say what was lost: {log[-500:]!r}")
        if "Traceback" in log:
            faults.append(f"there is a traceback: {log[-1500:]!r}")
        return faults


def main() -> None:
    """Read the arguments, run the trials, and print what they found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="the number of the first one")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--limit", type=float, default=10.0, help="seconds")
    options = parser.parse_args()
    # A shell that starts this in the background has it ignored, which children would inherit.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    trials = Trials(options.ranks, options.seed, options.limit)
    for number in range(options.first, options.first + options.trials):
        trials.run(number)
    every = sorted(it for found in trials.seconds.values() for it in found)
    summary = {
        "trials": len(every),
        "faults": trials.faults,
        "over_10_seconds": sum(it > 10 for it in every),
        "median_seconds": every[len(every) // 2],
        "largest_seconds": every[-1],
        "seconds": trials.seconds,
    }
    print(json.dumps(summary))
    sys.exit(1 if trials.faults else 0)


if __name__ == "__main__":
    main()
