"""`slipstream serve`: an OpenAI-compatible server."""

import socket
from typing import TYPE_CHECKING, Any

import typer

from slipstream.cli.drafter_flags import DEMO, DrafterFlags
from slipstream.cli.engine_flags import EngineFlags, ModelArgument
from slipstream.cli.open_llm import open_llm
from slipstream.cli.run_flags import RunFlags
from slipstream.cli.serve_flags import LimitFlags, ListenFlags, LogFlags
from slipstream.cli.terminal import QUIET_STYLE, stderr_console
from slipstream.core.config import EngineConfig
from slipstream.core.errors import SlipstreamError, UsageError

if TYPE_CHECKING:
    from slipstream.serve.start import ServerOptions

_LOOPBACK = ("127.", "::1", "localhost")


class MissingPackagesError(SlipstreamError):
    """What the server needs is not installed."""


def serve(
    *,
    model: ModelArgument = DEMO,
    listen: ListenFlags,
    limits: LimitFlags,
    log: LogFlags,
    drafter: DrafterFlags,
    engine: EngineFlags,
    run: RunFlags,
) -> None:
    """Serve a model by the OpenAI protocol, with a drafter running ahead.

    Without MODEL the bundled demo is served. The first Ctrl-C or SIGTERM lets running requests
    finish, the second stops at once.
    """
    config = engine.config(model, drafter.config(model))
    _refuse_synthetic(config, listen.allow_synthetic)
    options = _options(model, listen, limits, log)
    from slipstream.serve.memory import keep_few_matmuls
    from slipstream.serve.page import page_routes
    from slipstream.serve.run import bind
    from slipstream.serve.run import listen as let_connect
    from slipstream.serve.start import start_server

    sock = bind(listen.host, listen.port)
    keep_few_matmuls()
    try:
        llm, seconds = open_llm(config, run.verbose)
        let_connect(sock)  # who reads the address may come at once
        _announce(listen, options, sock, seconds)
        code = start_server(llm.engine, config, options, sock, page_routes())
    finally:
        sock.close()
    raise typer.Exit(code)


def _options(model: str, listen: ListenFlags, limits: LimitFlags, log: LogFlags) -> "ServerOptions":
    """Checked before a model is loaded."""
    log.check()
    listen.refuse_reasoning()
    try:
        from slipstream.serve.run import Access, Front
        from slipstream.serve.start import ServerOptions
        from slipstream.serve.tools.formats import FORMATS
    except ModuleNotFoundError as error:
        raise MissingPackagesError(
            f"the server needs the package {error.name}; install it with: pip install "
            "'slipstream[serve]'"
        ) from error
    if listen.tool_call_parser is not None and listen.tool_call_parser not in FORMATS:
        raise UsageError(
            f"--tool-call-parser must be one of {', '.join(FORMATS)}, not "
            f"{listen.tool_call_parser!r}"
        )
    return ServerOptions(
        names=tuple(listen.served_model_name or (model,)),
        limits=limits.limits(),
        access=Access(
            api_keys=tuple(listen.api_key or ()), allowed_origins=tuple(listen.cors_origin or ())
        ),
        front=Front(
            certificate=listen.ssl_certfile, key=listen.ssl_keyfile, root_path=listen.root_path
        ),
        tool_call_parser=listen.tool_call_parser,
        chat_template=listen.template(),
        profiles=listen.profiles(),
        log_prompts=log.log_prompts,
        log_json=log.log_json,
        log_level=log.log_level,
    )


def _refuse_synthetic(config: EngineConfig, allowed: bool) -> None:
    """Forced acceptance is for benchmarks: the texts are not the target's."""
    options: dict[str, Any] = dict(config.drafter_options or {})
    if options.get("rejection_sample_method") == "synthetic" and not allowed:
        raise UsageError(
            "rejection_sample_method synthetic gives texts that are not the model's; add "
            "--allow-synthetic to serve them for a benchmark, or leave it out"
        )


def _announce(
    listen: ListenFlags, options: "ServerOptions", sock: socket.socket, seconds: float
) -> None:
    """Where it listens, and how to call it."""
    host, port = sock.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    scheme = "http" if options.front.certificate is None else "https"
    url = f"{scheme}://{shown}:{port}"
    key = "-H 'Authorization: Bearer KEY' " if options.access.api_keys else ""
    name = options.names[0]
    console = stderr_console()
    told = f"{name} is served at {url}/v1, a page to try it at {url} (loaded in {seconds:.1f} s)"
    console.print(told, soft_wrap=True, highlight=False)
    console.print(
        f"try: curl {url}/v1/completions {key}-H 'Content-Type: application/json' -d "
        f'\'{{"model": "{name}", "prompt": "def main(", "temperature": 0}}\'',
        style=QUIET_STYLE,
        soft_wrap=True,
        highlight=False,
    )
    if not host.startswith(_LOOPBACK) and not options.access.api_keys:
        console.print(
            f"{host} is open to the network and no --api-key is set: anybody who reaches it may "
            "use it",
            soft_wrap=True,
            highlight=False,
        )
