"""How a server ends: by one signal, by two, and by none that it could heed."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

NUM_STREAMS = 4


class Process:
    """`slipstream serve` as a user runs it."""

    def __init__(self, port: int, *flags: str) -> None:
        command = ["serve", "demo", "--port", str(port), "--threads", "1", *flags]
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "slipstream", *command],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "200"},
        )
        self.port = 0
        self._connections: list[http.client.HTTPConnection] = []
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            if found := re.search(r"http://127\.0\.0\.1:(\d+)/v1", line):
                self.port = int(found[1])
                break
        assert self.port, self.popen.wait()
        self.wait_until_it_listens()

    def wait_until_it_listens(self) -> None:
        for _ in range(600):
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return
            assert self.popen.poll() is None
            with suppress(subprocess.TimeoutExpired):
                self.popen.wait(0.05)
        raise AssertionError("it never listened")

    def ask(self, max_tokens: int, stream: bool) -> http.client.HTTPResponse:
        connection = self._connection()
        body = {
            "prompt": "def main(",
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": stream,
        }
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        return connection.getresponse()

    def health(self) -> int:
        connection = self._connection()
        connection.request("GET", "/health")
        return connection.getresponse().status

    def num_running(self) -> int:
        connection = self._connection()
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
        (line,) = [it for it in lines if it.startswith("slipstream:num_requests_running{")]
        return int(float(line.split()[-1]))

    def _connection(self) -> http.client.HTTPConnection:
        self._connections.append(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60))
        return self._connections[-1]

    def close(self) -> None:
        self.popen.kill()
        self.popen.communicate()
        for connection in self._connections:
            connection.close()

    def signal(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)

    def exit_code(self) -> int:
        return self.popen.wait(60)

    def log(self) -> str:
        assert self.popen.stderr is not None
        return self.popen.stderr.read()


@contextmanager
def process(port: int = 0, *flags: str) -> Iterator[Process]:
    server = Process(port, *flags)
    try:
        yield server
    finally:
        server.close()


def texts(stream: bytes) -> list[str]:
    """The texts of the events of a complete stream."""
    *events, done, rest = stream.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events]


def test_what_runs_is_finished_and_what_is_new_refused() -> None:
    """A new server takes over the port of one that was killed, and is then told to stop."""
    with process() as killed:
        killed.ask(2000, stream=True).readline()
        killed.signal(signal.SIGKILL)
        assert killed.exit_code() == -signal.SIGKILL
    with process(killed.port) as server:
        whole = json.loads(server.ask(150, stream=False).read())["choices"][0]["text"]
        streams = [server.ask(150, stream=True) for _ in range(NUM_STREAMS)]
        begun = [stream.readline() for stream in streams]
        server.signal(signal.SIGTERM)
        while server.health() != 503:
            assert server.popen.poll() is None
        refused = server.ask(5, stream=False)
        assert refused.status == 503
        assert json.loads(refused.read())["error"]["code"] == "unavailable"
        for first, stream in zip(begun, streams, strict=True):
            assert "".join(texts(first + stream.read())) == whole
        assert server.exit_code() == 0
        assert "stopping" in server.log()


def test_a_second_signal_stops_at_once() -> None:
    """Waiting clients get an error, and the log has no traceback of the intended stop."""
    with process() as server:
        stream = server.ask(2000, stream=True)
        stream.readline()
        with ThreadPoolExecutor() as pool:
            whole = pool.submit(server.ask, 2000, stream=False)
            while server.num_running() < 2:
                assert server.popen.poll() is None
            server.signal(signal.SIGTERM)
            while server.health() != 503:
                assert server.popen.poll() is None
            server.signal(signal.SIGTERM)
            assert whole.result().status == 503
        assert b"the server stopped" in stream.read()
        assert server.exit_code() == 1
        log = server.log()
        assert "cut off: 2 requests" in log
        assert "Traceback" not in log


def test_a_drain_has_its_time() -> None:
    with process(0, "--drain-timeout", "0.2") as server:
        stream = server.ask(2000, stream=True)
        stream.readline()
        server.signal(signal.SIGTERM)
        assert b"the server stopped" in stream.read()
        assert server.exit_code() == 1
        assert "Traceback" not in server.log()


def test_a_full_disk_behind_its_log_does_not_keep_it_from_serving() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = ["serve", "demo", "--port", str(port), "--threads", "1", "--no-speculation"]
    # Buffers that cannot be written are what Python complains of when it ends.
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with Path("/dev/full").open("w") as full:
        server = subprocess.Popen(
            [sys.executable, "-m", "slipstream", *command], stdout=full, stderr=full, env=buffered
        )
    try:
        status = 0
        while server.poll() is None and status != 200:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            with suppress(OSError):
                connection.request("GET", "/health")
                status = connection.getresponse().status
            connection.close()
            with suppress(subprocess.TimeoutExpired):
                server.wait(0.1)
        assert status == 200
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    finally:
        server.kill()
        server.wait()
