"""A server around an engine, from its parts."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from socket import socket

from starlette.routing import Route

from slipstream.core.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.serve.activity import ActivityLog, Watchers
from slipstream.serve.app import create_app
from slipstream.serve.engine_thread import EngineThread
from slipstream.serve.limits import ServeLimits
from slipstream.serve.logs import set_up_logs
from slipstream.serve.metrics import ServerMetrics
from slipstream.serve.model import ServedModel
from slipstream.serve.run import Access, Front, serve


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """How to serve.

    Args:
        names: that requests may use for the model; at least one.
        tool_call_parser: a format of tool calls; found from the checkpoint when None.
        chat_template: in place of the checkpoint's.
        profiles: a folder for the traces of those who may profile the engine; None: nobody.
        log_prompts: prompts and outputs may stand in the log.
        log_json: the log is one JSON object a line.
        log_level: "debug", "info", "warning" or "error".
    """

    names: Sequence[str]
    limits: ServeLimits
    access: Access
    front: Front = field(default_factory=Front)
    tool_call_parser: str | None = None
    chat_template: str | None = None
    profiles: Path | None = None
    log_prompts: bool = False
    log_json: bool = False
    log_level: str = "info"


def start_server(
    engine: Engine,
    config: EngineConfig,
    options: ServerOptions,
    sock: socket,
    pages: Sequence[Route] = (),
) -> int:
    """Serve until a signal ends it; the exit code.

    Args:
        config: that the engine was built from.
        sock: to listen on.
        pages: routes besides those of the protocol, such as the playground's.
    """
    set_up_logs(options.log_json, options.log_level.upper())
    metrics = ServerMetrics(engine, options.names[0])
    watchers = Watchers([metrics, ActivityLog(show_text=options.log_prompts)])
    thread = EngineThread(engine, options.limits, watchers)
    model = ServedModel(
        names=options.names,
        config=config,
        engine=engine,
        thread=thread,
        tool_call_parser=options.tool_call_parser,
        chat_template=options.chat_template,
    )
    app = create_app(model, metrics, pages, options.profiles)
    # The page itself asks for the key.
    open_paths = (*options.access.open_paths, *(page.path for page in pages))
    access = replace(options.access, open_paths=open_paths)
    return serve(app, thread, sock, options.limits, access, options.front)
