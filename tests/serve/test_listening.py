"""Sockets, certificates of clients, and what stands in the log."""

import io
import json
import logging
import ssl
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.core.errors import UsageError
from slipstream.core.sampling_params import SamplingParams
from slipstream.serve.listening import bind, listen, tls_options
from slipstream.serve.observers import ActivityLog
from slipstream.serve.options import LogOptions, ServerOptions
from slipstream.serve.run import guarded
from tests.serve.test_front import make_certificate, needs_openssl
from tests.serve.test_metrics import logs_to
from tests.serve.test_middleware import echo, request


def test_the_socket_of_a_server_that_is_gone_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with bind("", 0, path) as first:
        listen(first)
        with pytest.raises(UsageError, match=f"on {path}: another program does; .* --uds"):
            bind("", 0, path)
    assert path.is_socket()
    with bind("", 0, path) as second:
        assert second.getsockname() == str(path)
    path.unlink()
    path.write_text("not a socket")
    with pytest.raises(UsageError, match="--uds"):
        bind("", 0, path)
    assert path.read_text() == "not a socket"
    with pytest.raises(UsageError, match="a directory; give the path of a file for the socket"):
        bind("", 0, Path())


@needs_openssl
def test_certificates_of_clients(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    given: dict[str, Any] = {
        "ssl_certfile": certificate,
        "ssl_keyfile": key,
        "ssl_ca_certs": certificate,
        "ssl_cert_reqs": 2,
        "ssl_ciphers": "ECDHE+AESGCM",
    }
    assert tls_options(ServerOptions(**given)) == {**given, "ssl_cert_reqs": ssl.CERT_REQUIRED}
    for wrong, told in (
        ({"ssl_ca_certs": key}, "--ssl-ca-certs"),
        ({"ssl_cert_reqs": 1}, "needs --ssl-ca-certs"),
        ({"ssl_ciphers": "none-such"}, "--ssl-ciphers"),
    ):
        with pytest.raises(UsageError, match=told):
            tls_options(ServerOptions(ssl_certfile=certificate, ssl_keyfile=key, **wrong))


def test_pages_of_other_origins_may_do_what_is_allowed() -> None:
    options = ServerOptions(
        allowed_origins=("https://a",),
        allowed_methods=("PUT",),
        allowed_headers=("x-own",),
        allow_credentials=True,
    )
    app, _ = guarded(echo, options)
    asked = [
        (b"origin", b"https://a"),
        (b"access-control-request-method", b"PUT"),
        (b"access-control-request-headers", b"x-own"),
    ]
    status, _, headers = request(app, headers=asked, method="OPTIONS")
    assert status == 200
    assert headers[b"access-control-allow-credentials"] == b"true"
    assert headers[b"access-control-allow-methods"] == b"PUT"
    assert b"x-own" in headers[b"access-control-allow-headers"]


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    names = ("slipstream", "uvicorn", "slipstream.serve.access")
    kept = [(it, it.handlers[:], it.level, it.propagate) for it in map(logging.getLogger, names)]
    yield io.StringIO()
    for logger, handlers, level, propagate in kept:
        logger.handlers[:], logger.propagate, logger.disabled = handlers, propagate, False
        logger.setLevel(level)


def submission(prompt: str) -> Any:
    params = SamplingParams(temperature=0.5, max_tokens=7)
    return SimpleNamespace(prompt=prompt, prompt_token_ids=[1, 2], params=params, samples=[])


@pytest.mark.parametrize("level", ["info", "debug"])
def test_requests_are_logged_as_they_come(log: io.StringIO, level: str) -> None:
    options = LogOptions(enable_log_requests=True, max_log_len=4, log_level=level)
    logs_to(log, options)
    ActivityLog(options).request_added("id", submission("some prompt"))
    (line,) = log.getvalue().splitlines()
    assert "begun: 2 prompt tokens; temperature 0.5, max_tokens 7" in line
    assert "[id]" in line
    assert ("prompt 'some'" in line) == (level == "debug")
    ActivityLog(LogOptions()).request_added("id", submission("some prompt"))
    assert len(log.getvalue().splitlines()) == 1


def test_lines_can_be_left_out(log: io.StringIO) -> None:
    logs_to(log, LogOptions(disable_uvicorn_access_log=True, uvicorn_log_level="critical"))
    app, _ = guarded(echo, ServerOptions())
    request(app)
    logging.getLogger("uvicorn").error("x")
    assert log.getvalue() == ""
    logs_to(log, LogOptions())
    request(app)
    assert "POST /v1/completions 200" in log.getvalue()
    ActivityLog(LogOptions(disable_log_stats=True)).step_done(None)  # type: ignore[arg-type]


def test_a_file_configures_the_log(log: io.StringIO, tmp_path: Path) -> None:
    file = tmp_path / "log.json"
    file.write_text(
        json.dumps({"version": 1, "incremental": True, "loggers": {"slipstream": {"level": 35}}})
    )
    logs_to(log, LogOptions(log_config_file=file))
    assert logging.getLogger("slipstream").level == 35
    for text in ("{", "[]", '{"version": 2}'):
        file.write_text(text)
        with pytest.raises(UsageError, match="--log-config-file"):
            logs_to(log, LogOptions(log_config_file=file))
