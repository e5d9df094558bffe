"""The flags of all commands that serve: where a server listens, whom it serves, and how."""

import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.cli.drafter_flags import DrafterFlags
from slipstream.cli.prompts import make_folder, read_template
from slipstream.cli.terminal import QUIET_STYLE, stderr_console
from slipstream.core.config import EngineConfig
from slipstream.core.errors import SlipstreamError, UsageError
from slipstream.core.flags import flag, given_flags, parse_object
from slipstream.serve.limits import ServeLimits
from slipstream.serve.options import AnswerOptions, LogOptions

if TYPE_CHECKING:
    from slipstream.serve.listening import Tls
    from slipstream.serve.run import Access, ServerOptions

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
        "Name of the model in requests (repeatable); answers have the first. [MODEL, or what a "
        "GGUF file is called without .gguf]",
        metavar="<name>",
    )
    api_key: tuple[str, ...] = flag(
        (),
        "Accept only requests with one of these keys (repeatable); better given in the "
        "environment, as SLIPSTREAM_API_KEY.",
        metavar="<key>",
        envvar="SLIPSTREAM_API_KEY",
    )
    uds: Path | None = flag(
        None,
        "Listen on a Unix domain socket at this path, in place of host and port.",
        metavar="<file>",
    )
    allowed_origins: tuple[str, ...] = flag(
        (),
        "Allow web pages of this origin to use the server (repeatable, or a JSON list); * allows "
        "all. [none]",
        metavar="<origin>",
        also=("--cors-origin",),
    )
    allowed_methods: tuple[str, ...] = flag(
        (),
        "Methods that pages of allowed origins may use (repeatable, or a JSON list); * allows all. "
        "[GET, POST]",
        metavar="<method>",
        hidden=True,
    )
    allowed_headers: tuple[str, ...] = flag(
        (),
        "Headers that pages of allowed origins may send (repeatable, or a JSON list). [*]",
        metavar="<header>",
        hidden=True,
    )
    allow_credentials: bool = flag(
        False, "Let pages of allowed origins send cookies and the like.", hidden=True
    )
    ssl_certfile: Path | None = flag(
        None, "Serve HTTPS with this certificate (PEM).", metavar="<file>"
    )
    ssl_keyfile: Path | None = flag(
        None, "The certificate's key. [in the certificate's file]", metavar="<file>"
    )
    ssl_ca_certs: Path | None = flag(
        None,
        "Authorities whose certificates of clients count (PEM).",
        metavar="<file>",
        hidden=True,
    )
    ssl_cert_reqs: int = flag(
        0,
        "Certificates of clients: 0 asks for none, 1 takes them, 2 needs them.",
        at_least=0,
        at_most=2,
        hidden=True,
    )
    ssl_ciphers: str | None = flag(
        None, "Ciphers up to TLS 1.2, as OpenSSL writes them. [uvicorn's]", hidden=True
    )
    root_path: str = flag(
        "", "Path under which a proxy offers this server, such as /models/a.", metavar="<path>"
    )
    enable_profiling: Path | None = flag(
        None,
        "Let clients profile the server (POST /start_profile, /stop_profile); traces are written "
        "to this folder.",
        metavar="<folder>",
    )
    profiler_config: Mapping[str, Any] | None = flag(
        None,
        'A folder for traces as {"torch_profiler_dir": FOLDER}; clients may then profile.',
        metavar="<json>",
        parse=parse_object,
        hidden=True,
    )
    disable_fastapi_docs: bool = flag(
        False, "Do not offer /openapi.json. (There are no pages about it.)", hidden=True
    )
    allow_synthetic: bool = flag(
        False,
        "Allow rejection_sample_method synthetic, for benchmarks: the texts are not the model's.",
    )
    lora_modules: tuple[str, ...] = flag(
        (),
        "An adapter that requests may name as their model (repeatable), with --enable-lora.",
        metavar="<name=folder>",
    )
    tool_call_parser: str | None = flag(
        None,
        "Format of tool calls: hermes, qwen3_coder, glm45, llama3_json, pythonic, mistral or "
        "openai. [found from the checkpoint]",
        panel="Answers",
    )
    reasoning_parser: str | None = flag(
        None,
        "qwen3, glm45, deepseek_r1, mistral or openai_gptoss; none leaves a model's reasoning in "
        "the content. [found from the checkpoint]",
    )
    chat_template: str | None = flag(
        None,
        "A chat template in place of the checkpoint's: a file, or the text of one.",
        metavar="<file>",
    )

    def template(self) -> str | None:
        """The text of --chat-template; raises UsageError if it is not valid."""
        return None if self.chat_template is None else read_template(self.chat_template)

    def traces(self) -> Path | None:
        """Make the folder of profiles; UsageError for other profilers."""
        config = dict(self.profiler_config or {})
        name, folder = "--enable-profiling", self.enable_profiling
        if config:
            name, given = "--profiler-config", config.pop("torch_profiler_dir", None)
            if config.pop("profiler", "torch") != "torch" or config or not isinstance(given, str):
                raise UsageError(
                    '--profiler-config takes {"profiler": "torch", "torch_profiler_dir": FOLDER} '
                    "and no other keys; or give --enable-profiling FOLDER"
                )
            folder = Path(given)
        if folder is not None:
            make_folder(name, folder)
        return folder

    def require_parsers(self) -> None:
        """Raise UsageError for unknown names of parsers."""
        from slipstream.serve.output.formats import CALLS_WITHIN, OFF, OUTPUT_FORMATS
        from slipstream.serve.tools.formats import NAMED

        for name, given, known in (
            ("--tool-call-parser", self.tool_call_parser, (*NAMED, *CALLS_WITHIN)),
            ("--reasoning-parser", self.reasoning_parser, (*OUTPUT_FORMATS, OFF)),
        ):
            if given is not None and given not in known:
                raise UsageError(
                    f"{name} must be one of {', '.join(known)}, not {given!r}; leave it out to "
                    "take what the checkpoint shows"
                )


@dataclass(frozen=True, kw_only=True)
class ServingFlags:
    """The flags that `slipstream serve` and `slipstream deploy` share."""

    drafter: DrafterFlags
    engine: EngineConfig
    listen: ListenFlags
    answers: AnswerOptions
    limits: ServeLimits
    log: LogOptions

    def checked(self) -> "tuple[EngineConfig, ServerOptions]":
        """The options of the engine and of the server, checked before a model is loaded.

        Raises:
            UsageError: flags that are not valid or contradict each other.
            MissingPackagesError: what the server needs is not installed.
        """
        config, listen, answers = self.drafter.apply(self.engine), self.listen, self.answers
        _refuse_synthetic(config, listen.allow_synthetic)
        try:
            from slipstream.serve.adapters import parse_modules
            from slipstream.serve.run import ServerOptions
        except ModuleNotFoundError as error:
            raise MissingPackagesError(
                f"the server needs the package {error.name}; install it with: pip install "
                "'slipstream[serve]'"
            ) from error
        listen.require_parsers()
        self.log.config()
        if listen.lora_modules and not config.enable_lora:
            raise UsageError("--lora-modules goes with --enable-lora; give both")
        if answers.trust_request_lora and not config.enable_lora:
            raise UsageError("--trust-request-lora goes with --enable-lora; give both")
        return config, ServerOptions(
            names=listen.served_model_name or (_usual_name(config.model),),
            limits=self.limits,
            access=_access(listen),
            tls=_tls(listen),
            root_path=listen.root_path,
            tool_call_parser=listen.tool_call_parser,
            reasoning_parser=listen.reasoning_parser,
            chat_template=listen.template(),
            profiles=listen.traces(),
            adapters=tuple(parse_modules(listen.lora_modules)),
            answers=answers,
            log=self.log,
            show_document=not listen.disable_fastapi_docs,
        )


def _usual_name(model: str) -> str:
    """The model's name in requests: MODEL as given; for a GGUF file its name without the suffix."""
    path = Path(model)
    from slipstream.models.gguf.files import is_gguf, split_stem  # imports torch

    return split_stem(path) if is_gguf(path) else model


def _access(listen: ListenFlags) -> "Access":
    from slipstream.serve.run import Access

    defaults = Access()
    return Access(
        api_keys=listen.api_key,
        allowed_origins=_listed("--allowed-origins", listen.allowed_origins),
        allowed_methods=_listed("--allowed-methods", listen.allowed_methods)
        or defaults.allowed_methods,
        allowed_headers=_listed("--allowed-headers", listen.allowed_headers)
        or defaults.allowed_headers,
        allow_credentials=listen.allow_credentials,
    )


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


def _tls(listen: ListenFlags) -> "Tls | None":
    from slipstream.serve.listening import Tls

    if listen.ssl_certfile is None:
        for name in given_flags(listen):
            if name.startswith("--ssl-"):
                raise UsageError(f"{name} goes with --ssl-certfile; give both")
        return None
    return Tls(
        certificate=listen.ssl_certfile,
        key=listen.ssl_keyfile,
        authorities=listen.ssl_ca_certs,
        client_certificates=listen.ssl_cert_reqs,
        ciphers=listen.ssl_ciphers,
    )


def _refuse_synthetic(config: EngineConfig, allowed: bool) -> None:
    """Raise UsageError for forced acceptance, whose texts are not the target's."""
    options: dict[str, Any] = dict(config.drafter_options or {})
    if options.get("rejection_sample_method") == "synthetic" and not allowed:
        raise UsageError(
            "rejection_sample_method synthetic gives texts that are not the model's; add "
            "--allow-synthetic to serve them for a benchmark, or leave it out"
        )


def announce(
    listen: ListenFlags, options: "ServerOptions", sock: socket.socket, seconds: float
) -> None:
    """Print the address and an example request."""
    host, url, through = "", "http://localhost", ""
    if listen.uds is None:
        host, port = sock.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        url = f"http://{shown}:{port}"
    else:
        through = f"--unix-socket {listen.uds} "
    if options.tls is not None:
        url = url.replace("http", "https", 1)
    key = "-H 'Authorization: Bearer KEY' " if options.access.api_keys else ""
    name = options.names[0]
    console = stderr_console()
    where = f"{url}/v1, a page to try it at {url}" if listen.uds is None else str(listen.uds)
    line = f"{name} is served at {where} (loaded in {seconds:.1f} s)"
    console.print(line, soft_wrap=True, highlight=False)
    console.print(
        f"try: curl {through}{url}/v1/completions {key}-H 'Content-Type: application/json' -d "
        f'\'{{"model": "{name}", "prompt": "def main(", "temperature": 0}}\'',
        style=QUIET_STYLE,
        soft_wrap=True,
        highlight=False,
    )
    if host and not host.startswith(_LOOPBACK) and not options.access.api_keys:
        console.print(
            f"{host} is open to the network and no --api-key is set: anybody who reaches it may "
            "use it",
            soft_wrap=True,
            highlight=False,
        )
