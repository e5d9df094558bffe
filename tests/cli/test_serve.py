"""`slipstream serve`: from flags to what the server is started with."""

import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from slipstream.cli.open_llm import open_llm
from slipstream.core.config import EngineConfig
from slipstream.core.errors import UsageError
from slipstream.engine.llm import LLM
from slipstream.serve.limits import ServeLimits
from slipstream.serve.listening import bind
from slipstream.serve.options import LogOptions, ServerOptions
from tests.cli.conftest import CommandLine
from tests.cli.fake_llm import ByteTokenizer, FakeLLM
from tests.cli.started import Started

DEMO_DRAFT = {"model": "demo/draft"}


def test_nothing_given_is_the_demo_on_loopback(slipstream: CommandLine, started: Started) -> None:
    ran = slipstream("serve", "--port", "0")
    assert ran.code == 0, ran.err
    ((config, options, (_, port)),) = started.calls
    assert config == EngineConfig(model="demo", speculative_config=DEMO_DRAFT, warm_up=True)
    assert options == ServerOptions(port=0, served_model_name=("demo",))
    assert f"http://127.0.0.1:{port}/v1" in ran.err
    assert "curl" in ran.err
    assert "Authorization" not in ran.err


def test_the_example_is_a_chat_where_the_model_can_chat(
    slipstream: CommandLine, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = slipstream("serve", "--port", "0")
    assert "/v1/chat/completions -H" in ran.err
    assert '"messages": [{"role": "user", "content": "Hello"}]}\'' in ran.err
    monkeypatch.setattr(ByteTokenizer, "settings", {})
    ran = slipstream("serve", "--port", "0")
    assert "/v1/completions -H" in ran.err
    assert '"prompt": "def main("' in ran.err
    ran = slipstream("serve", "--port", "0", "--chat-template", "{{ messages[0].content }}")
    assert "/v1/chat/completions -H" in ran.err


def test_a_server_need_not_warm_up(slipstream: CommandLine, started: Started) -> None:
    assert slipstream("serve", "--port", "0", "--no-warm-up").code == 0
    ((config, _, _),) = started.calls
    assert config.warm_up is False


def test_a_gguf_file_is_served_by_what_it_is_called(
    slipstream: CommandLine, started: Started
) -> None:
    ran = slipstream("serve", "models/some-Q4_K_M-00001-of-00002.gguf", "--port", "0")
    assert ran.code == 0, ran.err
    ((_, options, _),) = started.calls
    assert options.served_model_name == ("some-Q4_K_M",)


def test_every_flag_arrives(slipstream: CommandLine, started: Started, tmp_path: Path) -> None:
    line = (
        "serve some/model --host 127.0.0.1 --port 0 --served-model-name a --served-model-name b "
        "--api-key k1 --api-key k2 --cors-origin https://x.org --tool-call-parser hermes "
        "--max-queue 7 --request-timeout 0 --drain-timeout 9 --max-body-bytes 2M "
        "--max-json-values 8 --max-stored-responses 6 --max-stored-bytes 3K "
        "--max-header-bytes 16K --max-connections 99 --receive-timeout 3 "
        "--send-timeout 4 --keep-alive-timeout 5 --log-level debug --log-json --log-prompts "
        "--max-num-seqs 5 --drafter d -k 2 --root-path /m --chat-template {{messages}} "
        f"--enable-profiling {tmp_path / 'new' / 'traces'}"
    )
    ran = slipstream(*line.split())
    assert ran.code == 0, ran.err
    ((config, options, _),) = started.calls
    assert config == EngineConfig(
        warm_up=True,
        model="some/model",
        max_num_seqs=5,
        speculative_config={"model": "d", "num_speculative_tokens": 2},
    )
    assert options == ServerOptions(
        port=0,
        served_model_name=("a", "b"),
        api_key=("k1", "k2"),
        allowed_origins=("https://x.org",),
        limits=ServeLimits(
            max_waiting=7,
            request_timeout=None,
            drain_timeout=9.0,
            max_body_bytes=2 << 20,
            max_json_values=8,
            max_stored_responses=6,
            max_stored_bytes=3 << 10,
            max_header_bytes=16 << 10,
            max_connections=99,
            receive_timeout=3.0,
            send_timeout=4.0,
            keep_alive_timeout=5.0,
        ),
        root_path="/m",
        tool_call_parser="hermes",
        chat_template="{{messages}}",
        enable_profiling=tmp_path / "new" / "traces",
        log=LogOptions(log_prompts=True, log_json=True, log_level="debug"),
    )
    assert (tmp_path / "new" / "traces").is_dir()
    assert "Authorization: Bearer KEY" in ran.err
    assert "k1" not in ran.err


def test_the_key_may_stand_in_the_environment(
    slipstream: CommandLine, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_API_KEY", "secret")
    ran = slipstream("serve", "--port", "0", "--host", "0.0.0.0")
    assert started.calls[0][1].api_key == ("secret",)
    assert "open to the network" not in ran.err
    assert "secret" not in ran.err


def test_an_open_server_is_pointed_out(slipstream: CommandLine, started: Started) -> None:
    ran = slipstream("serve", "--port", "0", "--host", "0.0.0.0")
    assert "open to the network and no --api-key" in ran.err


def test_requests_that_were_cut_off_are_in_the_exit_code(
    slipstream: CommandLine, started: Started
) -> None:
    started.code = 1
    assert slipstream("serve", "--port", "0").code == 1


SYNTHETIC = (
    '{"model":"d","num_speculative_tokens":2,"rejection_sample_method":"synthetic",'
    '"synthetic_acceptance_length":2}'
)


def test_forced_acceptance_is_served_only_by_name(
    slipstream: CommandLine, started: Started
) -> None:
    refused = slipstream("serve", "m", "--port", "0", "-sc", SYNTHETIC)
    assert refused.code == 2
    assert "--allow-synthetic" in refused.err
    assert slipstream("serve", "m", "--port", "0", "-sc", SYNTHETIC, "--allow-synthetic").code == 0
    assert len(started.calls) == 1


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("--max-queue -1", "--max-waiting"),
        ("--request-timeout -1", "give 0 for no limit"),
        ("--served-model-name=", "--served-model-name must not be empty"),
        ("--allowed-origins example.org", "origins such as https://example.org"),
        ("--allowed-origins https://example.org/", "a scheme and no path"),
        ("--max-body-bytes lots", "--max-body-bytes"),
        ("--log-level loud", "--log-level"),
        ("--tool-call-parser xml", "--tool-call-parser"),
        ("--api-key é", "API key"),
        ("--host no.such.host.invalid", "--host"),
        ("--port 99999", "--port"),
        ("--temperature 1", "--temperature"),
        ("--reasoning-parser xml", "openai_gptoss, none"),
        ("--ssl-keyfile x", "--ssl-certfile"),
        ("--ssl-certfile /nowhere", "--ssl-certfile /nowhere cannot be used"),
        ("--root-path models", "--root-path"),
        ("--chat-template /nowhere", "--chat-template"),
        ("--chat-template {%x%}", "--chat-template is not valid: line 1"),
        ("--enable-profiling /dev/null/x", "--enable-profiling"),
    ],
)
def test_wrong_flags_are_found_before_a_model_is_loaded(
    slipstream: CommandLine, started: Started, fake_llm: type[FakeLLM], line: str, named: str
) -> None:
    ran = slipstream("serve", "--port", "0", *line.split())
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert named in ran.err
    assert fake_llm.made == []


def test_nothing_is_announced_before_all_is_loaded(
    slipstream: CommandLine, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> int:
        raise UsageError("/nowhere has no adapter_config.json")

    monkeypatch.setattr("slipstream.serve.run.start_server", refuse)
    ran = slipstream("serve", "--port", "0")
    assert ran.code == 2
    assert "no adapter_config.json" in ran.err
    assert "is served at" not in ran.err


def test_a_port_in_use(slipstream: CommandLine, started: Started) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ran = slipstream("serve", "--port", str(port))
    assert ran.code == 2
    assert ran.err == (
        f"slipstream: cannot listen on 127.0.0.1:{port}: another program does; choose another "
        "--port\n"
    )


def test_a_port_that_another_server_took_while_the_model_was_loaded(
    slipstream: CommandLine, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sockets can be bound to one port, and only one can listen."""
    with bind("127.0.0.1", 0) as first:

        def load(*arguments: Any) -> tuple[LLM, float]:
            first.listen()
            return open_llm(*arguments)

        monkeypatch.setattr("slipstream.cli.serve.open_llm", load)
        ran = slipstream("serve", "--port", str(first.getsockname()[1]))
    assert ran.code == 2
    assert "another program does; choose another --port" in ran.err
    assert started.calls == []


def test_missing_packages_are_named(
    slipstream: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("slipstream.serve.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    ran = slipstream("serve", "--port", "0")
    assert ran.code == 1
    assert "uvicorn" in ran.err
    assert "slipstream[serve]" in ran.err
