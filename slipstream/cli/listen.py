"""The flags of all commands that serve, and what they mean for a server."""

import json
import re
import socket
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slipstream.cli.drafter_flags import DrafterFlags
from slipstream.cli.prompts import make_folder, read_template
from slipstream.cli.terminal import QUIET_STYLE, stderr_console
from slipstream.core.config import EngineConfig
from slipstream.core.errors import SlipstreamError, UsageError
from slipstream.serve.options import ServerOptions

_LOOPBACK = ("127.", "::1")


class MissingPackagesError(SlipstreamError):
    """A package that the server needs is not installed."""


@dataclass(frozen=True, kw_only=True)
class ServingFlags:
    """The flags that `slipstream serve` and `slipstream deploy` share."""

    drafter: DrafterFlags
    engine: EngineConfig
    server: ServerOptions

    def checked(self) -> tuple[EngineConfig, ServerOptions]:
        """The options of the engine and of the server, checked before a model is loaded.

        Names, templates and folders are settled.

        Raises:
            UsageError: flags that are not valid or contradict each other.
            MissingPackagesError: what the server needs is not installed.
        """
        config, server = self.drafter.apply(self.engine).warmed_up(), self.server
        _refuse_synthetic(config, server.allow_synthetic)
        try:
            import slipstream.serve.run  # noqa: F401  it imports all packages
            from slipstream.serve.adapters import parse_modules
            from slipstream.serve.listening import tls_options
        except ModuleNotFoundError as error:
            raise MissingPackagesError(
                f"the server needs the package {error.name}; install it with: pip install "
                "'slipstream[serve]'"
            ) from error
        _require_parsers(server)
        server.log.config()
        tls_options(server)
        parse_modules(server.lora_modules)
        for name, given in (
            ("--lora-modules", server.lora_modules),
            ("--trust-request-lora", server.answers.trust_request_lora),
        ):
            if given and not config.enable_lora:
                raise UsageError(f"{name} goes with --enable-lora; give both")
        template = server.chat_template
        return config, replace(
            server,
            served_model_name=server.served_model_name or (_usual_name(config.model),),
            allowed_origins=_origins(server),
            allowed_methods=_listed("--allowed-methods", server.allowed_methods),
            allowed_headers=_listed("--allowed-headers", server.allowed_headers),
            chat_template=None if template is None else read_template(template),
            enable_profiling=_traces(server),
            profiler_config=None,
        )


def _require_parsers(server: ServerOptions) -> None:
    from slipstream.serve.output.formats import CALLS_WITHIN, OFF, OUTPUT_FORMATS
    from slipstream.serve.tools.formats import NAMED

    for name, given, known in (
        ("--tool-call-parser", server.tool_call_parser, (*NAMED, *CALLS_WITHIN)),
        ("--reasoning-parser", server.reasoning_parser, (*OUTPUT_FORMATS, OFF)),
    ):
        if given is not None and given not in known:
            raise UsageError(
                f"{name} must be one of {', '.join(known)}, not {given!r}; leave it out to take "
                "what the checkpoint shows"
            )


def _traces(server: ServerOptions) -> Path | None:
    """Make the folder of profiles; UsageError for other profilers."""
    config = dict(server.profiler_config or {})
    name, folder = "--enable-profiling", server.enable_profiling
    if config:
        name, given = "--profiler-config", config.pop("torch_profiler_dir", None)
        if config.pop("profiler", "torch") != "torch" or config or not isinstance(given, str):
            raise UsageError(
                '--profiler-config takes {"profiler": "torch", "torch_profiler_dir": FOLDER} and '
                "no other keys; or give --enable-profiling FOLDER"
            )
        folder = Path(given)
    if folder is not None:
        make_folder(name, folder)
    return folder


def _usual_name(model: str) -> str:
    """The model's name in requests: MODEL as given; for a GGUF file its name without the suffix."""
    path = Path(model)
    from slipstream.models.gguf.files import is_gguf, split_stem  # imports torch

    return split_stem(path) if is_gguf(path) else model


def _listed(name: str, given: tuple[str, ...]) -> tuple[str, ...]:
    """The values of a flag that may be repeated or have a JSON list."""
    found: list[str] = []
    for text in given:
        listed: object = [text]
        if text.startswith("["):
            try:
                listed = json.loads(text)
            except ValueError:
                listed = None
        if not isinstance(listed, list) or not all(isinstance(it, str) for it in listed):
            raise UsageError(f'{name} takes a text or a JSON list such as ["*"], not {text!r}')
        found += listed
    return tuple(found)


def _origins(server: ServerOptions) -> tuple[str, ...]:
    """Origins in the form in which browsers send them, since they are compared as texts."""
    origins = _listed("--allowed-origins", server.allowed_origins)
    for origin in origins:
        if origin not in ("*", "null") and not re.fullmatch(r"[\w+.-]+://[^/]+", origin):
            raise UsageError(
                "--allowed-origins takes * or origins such as https://example.org, which have a "
                f"scheme and no path, not {origin!r}"
            )
    return origins


def _refuse_synthetic(config: EngineConfig, allowed: bool) -> None:
    """Raise UsageError for forced acceptance, whose texts are not the target's."""
    options: dict[str, Any] = dict(config.drafter_options or {})
    if options.get("rejection_sample_method") == "synthetic" and not allowed:
        raise UsageError(
            "rejection_sample_method synthetic gives texts that are not the model's; add "
            "--allow-synthetic to serve them for a benchmark, or leave it out"
        )


def announce(
    options: ServerOptions, sock: socket.socket, seconds: float, chats: bool = False
) -> None:
    """Print the address and an example: a chat, if the model is known to have a chat template."""
    host, url, through = "", "http://localhost", ""
    if options.uds is None:
        host, port = sock.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        url = f"http://{shown}:{port}"
    else:
        through = f"--unix-socket {options.uds} "
    if options.ssl_certfile is not None:
        url = url.replace("http", "https", 1)
    key = "-H 'Authorization: Bearer KEY' " if options.api_key else ""
    name = options.served_model_name[0]
    console = stderr_console()
    where = f"{url}/v1, a page to try it at {url}" if options.uds is None else str(options.uds)
    line = f"{name} is served at {where} (loaded in {seconds:.1f} s)"
    console.print(line, soft_wrap=True)
    path, content = "completions", '"prompt": "def main(", "temperature": 0'
    if chats:
        path, content = "chat/completions", '"messages": [{"role": "user", "content": "Hello"}]'
    console.print(
        f"try: curl {through}{url}/v1/{path} {key}-H 'Content-Type: application/json' -d "
        f'\'{{"model": "{name}", {content}}}\'',
        style=QUIET_STYLE,
        soft_wrap=True,
    )
    if host and not host.startswith(_LOOPBACK) and not options.api_key:
        console.print(
            f"{host} is open to the network and no --api-key is set: anybody who reaches it may "
            "use it",
            soft_wrap=True,
        )
