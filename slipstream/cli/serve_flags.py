"""Flags of the server: where it listens, whom it lets in, what it takes on."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli.engine_flags import parse_bytes
from slipstream.core.errors import UsageError
from slipstream.serve.limits import ServeLimits

_LISTENING, _LIMITS, _LOG = "Listening", "Limits", "Log"
_LEVELS = ("debug", "info", "warning", "error")

_Texts = list[str] | None


@dataclass(frozen=True, kw_only=True)
class ListenFlags:
    """Where, under which name and for whom."""

    host: Annotated[
        str,
        typer.Option(
            help="Address to listen on; 0.0.0.0 is open to the network.",
            rich_help_panel=_LISTENING,
        ),
    ] = "127.0.0.1"
    port: Annotated[
        int,
        typer.Option(help="0 takes a free one.", min=0, max=65535, rich_help_panel=_LISTENING),
    ] = 8000
    served_model_name: Annotated[
        _Texts,
        typer.Option(
            metavar="<name>",
            help="Name that requests use, repeatable; the first is in answers. [MODEL]",
            rich_help_panel=_LISTENING,
        ),
    ] = None
    api_key: Annotated[
        _Texts,
        typer.Option(
            metavar="<key>",
            envvar="SLIPSTREAM_API_KEY",
            show_envvar=False,
            help="Let in only who sends one of these (repeatable); better in the environment, as "
            "SLIPSTREAM_API_KEY.",
            rich_help_panel=_LISTENING,
        ),
    ] = None
    cors_origin: Annotated[
        _Texts,
        typer.Option(
            metavar="<origin>",
            help="Web pages of this origin may use the server (repeatable); * is all. [none]",
            rich_help_panel=_LISTENING,
        ),
    ] = None
    tool_call_parser: Annotated[
        str | None,
        typer.Option(
            help="hermes, llama3_json or mistral. [found from the checkpoint]",
            rich_help_panel=_LISTENING,
        ),
    ] = None
    chat_template: Annotated[
        str | None,
        typer.Option(
            metavar="<file>",
            help="A chat template in place of the checkpoint's: a file, or the text of one.",
            rich_help_panel=_LISTENING,
        ),
    ] = None
    ssl_certfile: Annotated[
        Path | None,
        typer.Option(
            metavar="<file>",
            help="Speak TLS with this certificate (PEM).",
            rich_help_panel=_LISTENING,
        ),
    ] = None
    ssl_keyfile: Annotated[
        Path | None,
        typer.Option(
            metavar="<file>",
            help="Its key. [in the file of the certificate]",
            rich_help_panel=_LISTENING,
        ),
    ] = None
    root_path: Annotated[
        str,
        typer.Option(
            metavar="<path>",
            help="The path under which a proxy shows this server, such as /models/a.",
            rich_help_panel=_LISTENING,
        ),
    ] = ""
    enable_profiling: Annotated[
        Path | None,
        typer.Option(
            metavar="<folder>",
            help="Whoever may use the server may profile it (POST /start_profile, /stop_profile); "
            "traces go into this folder.",
            rich_help_panel=_LISTENING,
        ),
    ] = None
    reasoning_parser: Annotated[str | None, typer.Option(hidden=True)] = None
    enable_auto_tool_choice: Annotated[
        bool, typer.Option("--enable-auto-tool-choice", hidden=True)
    ] = False  # of other servers; here it always is
    allow_synthetic: Annotated[
        bool,
        typer.Option(
            "--allow-synthetic",
            help="Serve though rejection_sample_method is synthetic, for benchmarks: the texts are "
            "not the model's.",
            rich_help_panel=_LISTENING,
        ),
    ] = False

    def template(self) -> str | None:
        """The text of --chat-template; UsageError for one that is not valid."""
        given = self.chat_template
        if given is None:
            return None
        try:
            text = given if "{" in given else Path(given).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--chat-template {given} cannot be read: {error}") from None
        from jinja2 import TemplateSyntaxError

        from slipstream.models.chat_environment import make_environment

        try:
            make_environment().parse(text)
        except TemplateSyntaxError as error:
            raise UsageError(
                f"--chat-template is not valid: line {error.lineno}: {error.message}"
            ) from None
        return text

    def profiles(self) -> Path | None:
        """The folder of --enable-profiling, which is made."""
        folder = self.enable_profiling
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UsageError(
                    f"--enable-profiling {folder} cannot be made a folder ({error.strerror}); "
                    "name another"
                ) from None
        return folder

    def refuse_reasoning(self) -> None:
        """Raise UsageError for what other servers take apart."""
        if self.reasoning_parser is not None:
            raise UsageError(
                "--reasoning-parser is not supported: what a model thinks stays in the content, "
                "between its own marks; leave it out (chat_template_kwargs such as "
                '{"enable_thinking": false} ask a model not to think)'
            )


@dataclass(frozen=True, kw_only=True)
class LimitFlags:
    """The fields of `ServeLimits`; where they may be unbounded, 0 is that."""

    max_waiting: Annotated[
        int,
        typer.Option(
            "--max-waiting",
            "--max-queue",
            help="Most requests that wait for a place; 429 beyond.",
            rich_help_panel=_LIMITS,
        ),
    ] = ServeLimits.max_waiting
    request_timeout: Annotated[
        float,
        typer.Option(help="Seconds a request may take; 0 is any.", rich_help_panel=_LIMITS),
    ] = ServeLimits.request_timeout or 0.0
    drain_timeout: Annotated[
        float,
        typer.Option(
            help="Seconds that running requests have once the server is to stop; 0 is any.",
            rich_help_panel=_LIMITS,
        ),
    ] = ServeLimits.drain_timeout or 0.0
    max_body_bytes: Annotated[
        int | None,
        typer.Option(
            parser=parse_bytes,
            metavar="<bytes>",
            help="Largest body: bytes, 512K, 4M. [4M]",
            rich_help_panel=_LIMITS,
        ),
    ] = None
    max_json_depth: Annotated[
        int, typer.Option(help="Deepest nesting of a body.", rich_help_panel=_LIMITS)
    ] = ServeLimits.max_json_depth
    max_header_bytes: Annotated[
        int | None,
        typer.Option(
            parser=parse_bytes,
            metavar="<bytes>",
            help="Largest headers. [32K]",
            rich_help_panel=_LIMITS,
        ),
    ] = None
    max_connections: Annotated[
        int, typer.Option(help="Most connections open at once.", rich_help_panel=_LIMITS)
    ] = ServeLimits.max_connections
    receive_timeout: Annotated[
        float,
        typer.Option(help="Seconds in which a request must arrive.", rich_help_panel=_LIMITS),
    ] = ServeLimits.receive_timeout
    send_timeout: Annotated[
        float,
        typer.Option(help="Seconds an answer may lie unread.", rich_help_panel=_LIMITS),
    ] = ServeLimits.send_timeout
    keep_alive_timeout: Annotated[
        float,
        typer.Option(help="Seconds an idle connection stays open.", rich_help_panel=_LIMITS),
    ] = ServeLimits.keep_alive_timeout

    def limits(self) -> ServeLimits:
        """Raises UsageError for limits that cannot be."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in ("max_body_bytes", "max_header_bytes"):
            if values[name] is None:
                del values[name]
        for name in ("request_timeout", "drain_timeout"):
            values[name] = values[name] or None
        return ServeLimits(**values)


@dataclass(frozen=True, kw_only=True)
class LogFlags:
    """What the server writes about its work."""

    log_level: Annotated[
        str, typer.Option(help="debug, info, warning or error.", rich_help_panel=_LOG)
    ] = "info"
    log_json: Annotated[
        bool, typer.Option("--log-json", help="One JSON object a line.", rich_help_panel=_LOG)
    ] = False
    log_prompts: Annotated[
        bool,
        typer.Option("--log-prompts", help="Prompts and outputs, too.", rich_help_panel=_LOG),
    ] = False

    def check(self) -> None:
        """Raises UsageError for a level that there is not."""
        if self.log_level not in _LEVELS:
            raise UsageError(
                f"--log-level must be one of {', '.join(_LEVELS)}, not {self.log_level!r}"
            )
