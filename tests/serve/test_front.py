"""`slipstream serve` with what users of others bring: TLS, a prefix, a template, a profiler."""

import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from slipstream.core.errors import UsageError
from slipstream.serve.listening import tls_options
from slipstream.serve.options import ServerOptions

OPENSSL = shutil.which("openssl")
needs_openssl = pytest.mark.skipif(OPENSSL is None, reason="certificates are made with openssl")
TEMPLATE = "{% for it in messages %}[{{ it.name }}] {{ it.content }}\n{% endfor %}"
ASKED = {"prompt": "def main(", "max_tokens": 8, "temperature": 0}


def options(**given: Any) -> ServerOptions:
    return ServerOptions(served_model_name=("demo",), **given)


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """A self-signed certificate for this machine, and its key."""
    certificate, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        [
            *(str(OPENSSL), "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"),
            *("-subj", "/CN=localhost", "-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    return certificate, key


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("front")


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[httpx.Client]:
    """A client of a server in a process of its own, with all of these options at once."""
    certificate, key = make_certificate(folder)
    (folder / "template.jinja").write_text(TEMPLATE)
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "slipstream", "serve", "demo", "--port", "0", "--threads", "1"),
            *("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key)),
            *("--root-path", "/models/a", "--chat-template", str(folder / "template.jinja")),
            *("--enable-profiling", str(folder / "traces"), "--api-key", "k"),
        ],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "200"},
    )
    assert process.stderr is not None
    try:
        urls = (re.search(r"https://127\.0\.0\.1:\d+", line) for line in process.stderr)
        found = next(filter(None, urls))
        headers = {"Authorization": "Bearer k"}
        with httpx.Client(base_url=found[0], verify=False, headers=headers, timeout=60) as client:
            yield client
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.stderr.close()


def said(client: httpx.Client, path: str) -> str:
    answer = client.post(path, json=ASKED)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


@needs_openssl
def test_paths_with_and_without_the_prefix_are_one(client: httpx.Client) -> None:
    assert said(client, "/v1/completions") == said(client, "/models/a/v1/completions") != ""
    nobody = {"Authorization": "Bearer x"}
    for path in ("/health", "/models/a/health", "/models/a/", "/models/a"):
        assert client.get(path, headers=nobody).status_code == 200
    for path in ("/v1/models", "/models/a/v1/models", "/models/ab/health"):
        assert client.get(path, headers=nobody).status_code == 401
    assert client.get("/openapi.json").json()["servers"] == [{"url": "/models/a"}]


@needs_openssl
def test_a_template_of_ones_own_is_used(client: httpx.Client) -> None:
    messages = [{"role": "user", "content": "Hi", "name": "bob"}]
    asked: dict[str, Any] = {"messages": messages, "add_generation_prompt": False}
    tokens = client.post("/tokenize", json=asked).json()["tokens"]
    assert client.post("/detokenize", json={"tokens": tokens}).json()["prompt"] == "[bob] Hi\n"


@needs_openssl
def test_a_profile_is_of_the_steps_between_start_and_stop(
    client: httpx.Client, folder: Path
) -> None:
    assert client.post("/stop_profile").status_code == 409
    assert client.post("/start_profile").json() == {"running": True}
    assert client.post("/start_profile").status_code == 409
    said(client, "/v1/completions")
    trace = Path(client.post("/stop_profile").json()["trace"])
    assert trace.parent == folder / "traces"
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert {"slipstream: draft", "slipstream: target"} <= {event["name"] for event in events}
    assert client.post("/stop_profile").status_code == 409
    assert client.post("/start_profile", headers={"Authorization": "x"}).status_code == 401


@needs_openssl
def test_certificates_are_checked_before_anything_is_loaded(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    encrypted = options(ssl_certfile=certificate, ssl_keyfile=key)
    assert tls_options(encrypted)
    assert not tls_options(encrypted.for_replica("a"))  # the front alone is reached from outside
    other = tmp_path / "other"
    other.mkdir()
    for wrong in (certificate, tmp_path / "none.pem", make_certificate(other)[1], None):
        with pytest.raises(UsageError, match="cannot be used"):
            tls_options(options(ssl_certfile=certificate, ssl_keyfile=wrong))
    for path in ("models", "/models/", "/"):
        with pytest.raises(UsageError, match="--root-path must begin with a slash"):
            options(root_path=path)
