"""Two replicas of the demo on Ray Serve, one of which dies while it answers."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed: the extra deploy"
)

MARK = f"SLIPSTREAM_TEST={os.getpid()}"


@pytest.fixture
def served() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`slipstream serve --data-parallel-size 2`: where it listens, and its process."""
    command = ["serve", "demo", "--data-parallel-size", "2", "--port", "0", "--threads", "1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "slipstream", *command],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env={
            **os.environ,
            **dict([MARK.split("=")]),
            "OMP_NUM_THREADS": "1",
            "NO_COLOR": "1",
            "COLUMNS": "200",
        },
    )
    assert process.stderr is not None
    drain = ThreadPoolExecutor(1)
    lines: list[str] = []
    try:
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"is served at (http://127\.0\.0\.1:\d+)/v1", line):
                drain.submit(process.stderr.read)  # the pipe must not fill
                yield found[1], process
                break
        else:
            raise AssertionError("".join(lines))
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            assert process.wait(60) == 0
        finally:
            process.kill()
            drain.shutdown()
            process.stderr.close()


def ask(address: str, path: str, **fields: Any) -> bytes:
    body = json.dumps(fields).encode() if fields else None
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(address + path, body, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return bytes(answer.read())


def running(address: str) -> dict[str, int]:
    """Requests that run, by replica."""
    page = ask(address, "/metrics").decode()
    opened = re.findall(r'slipstream:num_requests_running\{replica="(\w+)"[^}]*\} (\S+)', page)
    return {name: int(float(count)) for name, count in opened}


def wait_for(condition: Callable[[], Any]) -> Any:
    for _ in range(1200):
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError("it never happened")


def replica_processes() -> list[int]:
    """Those of this test alone: the mark is in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            is_replica = (folder / "cmdline").read_bytes().startswith(b"ray::ServeReplica")
            if is_replica and MARK.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:  # it has ended
            continue
    return found


def test_the_replicas_are_replaced_as_soon_as_they_are_announced(
    served: tuple[str, subprocess.Popen[str]],
) -> None:
    address, process = served
    before = {*replica_processes()}
    process.send_signal(signal.SIGHUP)
    wait_for(lambda: not before & {*replica_processes()} and len(running(address)) == 2)
    answered = json.loads(ask(address, "/v1/completions", prompt="def main(", max_tokens=4))
    assert answered["usage"]["completion_tokens"] == 4


def test_a_conversation_survives_a_replica(served: tuple[str, subprocess.Popen[str]]) -> None:
    address, _ = served
    first = json.loads(ask(address, "/v1/responses", input="def main(", max_output_tokens=4))
    for _ in range(3):  # wherever requests go by load, this one goes to where it is stored
        more = {"previous_response_id": first["id"], "input": "go on", "max_output_tokens": 4}
        assert json.loads(ask(address, "/v1/responses", **more))["status"] != "failed"
    assert len(running(address)) == 2
    before = replica_processes()
    long = {"max_tokens": 1500, "stream": True, "ignore_eos": True}
    with ThreadPoolExecutor(2) as pool:
        answers = [
            pool.submit(ask, address, "/v1/completions", prompt=it, **long)
            for it in ("async def main(", "import os")
        ]
        wait_for(lambda: [*running(address).values()] == [1, 1])
        os.kill(before[0], signal.SIGKILL)
        ends = [answer.result()[-200:] for answer in answers]
    assert sum(b"replica_lost" in end for end in ends) == 1
    assert all(end.endswith(b"data: [DONE]\n\n") for end in ends)
    answered = json.loads(ask(address, "/v1/completions", prompt="def main(", max_tokens=4))
    assert answered["usage"]["completion_tokens"] == 4
    wait_for(lambda: len(running(address)) == 2)
