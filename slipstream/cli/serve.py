"""`slipstream serve`: an OpenAI-compatible server."""

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from slipstream.cli.drafter_flags import DrafterFlags
from slipstream.cli.flags import RunFlags
from slipstream.cli.open_llm import open_llm
from slipstream.cli.paths import make_folder, read_text
from slipstream.cli.terminal import QUIET_STYLE, stderr_console
from slipstream.core.config import EngineConfig
from slipstream.core.errors import SlipstreamError, UsageError
from slipstream.core.flags import flag
from slipstream.serve.limits import ServeLimits

if TYPE_CHECKING:
    from slipstream.serve.run import ServerOptions

_LOOPBACK = ("127.", "::1")


class MissingPackagesError(SlipstreamError):
    """A package that the server needs is not installed."""


@dataclass(frozen=True, kw_only=True)
class ListenFlags:
    """Where the server listens, under which names, and for whom."""

    host: str = flag(
        "127.0.0.1", "Address to listen on; 0.0.0.0 is open to the network.", panel="Listening"
    )
    port: int = flag(8000, "0 takes a free port.", at_least=0, at_most=65535)
    served_model_name: tuple[str, ...] = flag(
        (),
        "Name of the model in requests (repeatable); answers have the first. [MODEL]",
        metavar="<name>",
    )
    api_key: tuple[str, ...] = flag(
        (),
        "Accept only requests with one of these keys (repeatable); better given in the "
        "environment, as SLIPSTREAM_API_KEY.",
        metavar="<key>",
        envvar="SLIPSTREAM_API_KEY",
    )
    cors_origin: tuple[str, ...] = flag(
        (),
        "Allow web pages of this origin to use the server (repeatable); * allows all. [none]",
        metavar="<origin>",
    )
    tool_call_parser: str | None = flag(
        None, "hermes, llama3_json, mistral or openai. [found from the checkpoint]"
    )
    reasoning_parser: str | None = flag(
        None,
        "openai_gptoss, or none to leave a model's reasoning in the content. [found from the "
        "checkpoint]",
    )
    chat_template: str | None = flag(
        None,
        "A chat template in place of the checkpoint's: a file, or the text of one.",
        metavar="<file>",
    )
    ssl_certfile: Path | None = flag(
        None, "Serve HTTPS with this certificate (PEM).", metavar="<file>"
    )
    ssl_keyfile: Path | None = flag(
        None, "The certificate's key. [in the certificate's file]", metavar="<file>"
    )
    root_path: str = flag(
        "",
        "Path under which a proxy offers this server, such as /models/a.",
        metavar="<path>",
    )
    enable_profiling: Path | None = flag(
        None,
        "Let clients profile the server (POST /start_profile, /stop_profile); traces are written "
        "to this folder.",
        metavar="<folder>",
    )
    enable_auto_tool_choice: bool = flag(False, hidden=True)  # of other servers; always on here
    allow_synthetic: bool = flag(
        False,
        "Allow rejection_sample_method synthetic, for benchmarks: the texts are not the model's.",
    )

    def template(self) -> str | None:
        """The text of --chat-template; raises UsageError if it is not valid."""
        given = self.chat_template
        if given is None:
            return None
        text = given if "{" in given else read_text("--chat-template", given)
        from jinja2 import TemplateSyntaxError

        from slipstream.models.chat_environment import make_environment

        try:
            make_environment().parse(text)
        except TemplateSyntaxError as error:
            raise UsageError(
                f"--chat-template is not valid: line {error.lineno}: {error.message}"
            ) from None
        return text

    def require_parsers(self) -> None:
        """Raise UsageError for names that no parser has."""
        from slipstream.serve.output.formats import CALLS_WITHIN, OFF, OUTPUT_FORMATS
        from slipstream.serve.tools.formats import FORMATS

        for name, given, known in (
            ("--tool-call-parser", self.tool_call_parser, (*FORMATS, *CALLS_WITHIN)),
            ("--reasoning-parser", self.reasoning_parser, (*OUTPUT_FORMATS, OFF)),
        ):
            if given is not None and given not in known:
                raise UsageError(
                    f"{name} must be one of {', '.join(known)}, not {given!r}; leave it out to "
                    "take what the checkpoint shows"
                )


@dataclass(frozen=True, kw_only=True)
class LogFlags:
    """What the server logs and measures."""

    log_level: str = flag(
        "info",
        "debug, info, warning or error.",
        panel="Log",
        choices=("debug", "info", "warning", "error"),
    )
    log_json: bool = flag(False, "Log one JSON object per line.")
    log_prompts: bool = flag(False, "Log prompts and outputs, too.")
    metrics_prefix: str = flag(
        "slipstream",
        "Names of the metrics: vllm uses vLLM's names and labels where the meaning is the same, "
        "for dashboards made for it.",
        choices=("slipstream", "vllm"),
    )


def serve(
    *,
    listen: ListenFlags,
    limits: ServeLimits,
    log: LogFlags,
    drafter: DrafterFlags,
    engine: EngineConfig,
    run: RunFlags,
) -> None:
    """Serve a model by the OpenAI protocol.

    Requests share one engine, which decodes speculatively if there is a drafter. Without MODEL the
    bundled demo is served. The first Ctrl-C or SIGTERM lets running requests
    finish, the second stops at once.
    """
    config = drafter.apply(engine)
    _refuse_synthetic(config, listen.allow_synthetic)
    options = _options(engine.model, listen, limits, log)
    from slipstream.serve.memory import keep_few_matmuls
    from slipstream.serve.page import page_routes
    from slipstream.serve.run import bind, start_server
    from slipstream.serve.run import listen as let_connect

    sock = bind(listen.host, listen.port)
    keep_few_matmuls()
    try:
        llm, seconds = open_llm(config, run.verbose)
        let_connect(sock)  # before the address is printed
        _announce(listen, options, sock, seconds)
        code = start_server(llm.engine, config, options, sock, page_routes())
    finally:
        sock.close()
    raise typer.Exit(code)


def _options(
    model: str, listen: ListenFlags, limits: ServeLimits, log: LogFlags
) -> "ServerOptions":
    """Check the flags before a model is loaded."""
    if listen.enable_profiling is not None:
        make_folder("--enable-profiling", listen.enable_profiling)
    try:
        from slipstream.serve.run import Access, ServerOptions
    except ModuleNotFoundError as error:
        raise MissingPackagesError(
            f"the server needs the package {error.name}; install it with: pip install "
            "'slipstream[serve]'"
        ) from error
    listen.require_parsers()
    return ServerOptions(
        names=listen.served_model_name or (model,),
        limits=limits,
        access=Access(api_keys=listen.api_key, allowed_origins=listen.cors_origin),
        certificate=listen.ssl_certfile,
        key=listen.ssl_keyfile,
        root_path=listen.root_path,
        tool_call_parser=listen.tool_call_parser,
        reasoning_parser=listen.reasoning_parser,
        chat_template=listen.template(),
        profiles=listen.enable_profiling,
        log_prompts=log.log_prompts,
        log_json=log.log_json,
        log_level=log.log_level,
        metrics_prefix=log.metrics_prefix,
    )


def _refuse_synthetic(config: EngineConfig, allowed: bool) -> None:
    """Raise UsageError for forced acceptance, whose texts are not the target's."""
    options: dict[str, Any] = dict(config.drafter_options or {})
    if options.get("rejection_sample_method") == "synthetic" and not allowed:
        raise UsageError(
            "rejection_sample_method synthetic gives texts that are not the model's; add "
            "--allow-synthetic to serve them for a benchmark, or leave it out"
        )


def _announce(
    listen: ListenFlags, options: "ServerOptions", sock: socket.socket, seconds: float
) -> None:
    """Print the address and an example request."""
    host, port = sock.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    scheme = "http" if options.certificate is None else "https"
    url = f"{scheme}://{shown}:{port}"
    key = "-H 'Authorization: Bearer KEY' " if options.access.api_keys else ""
    name = options.names[0]
    console = stderr_console()
    line = f"{name} is served at {url}/v1, a page to try it at {url} (loaded in {seconds:.1f} s)"
    console.print(line, soft_wrap=True, highlight=False)
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
