"""What `slipstream serve` was started with."""

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.routing import Route

from slipstream.core.config import EngineConfig
from slipstream.serve.options import ServerOptions


@dataclass
class Started:
    """Stands in for `start_server`.

    Attributes:
        calls: the options and the address of each server; the properties are those of the last.
        code: that it ends with.
    """

    calls: list[tuple[EngineConfig, ServerOptions, Any]] = field(default_factory=list)
    code: int = 0

    def start(
        self,
        engine: Any,
        config: EngineConfig,
        options: ServerOptions,
        sock: socket.socket,
        pages: Sequence[Route],
        ready: Callable[[], None],
    ) -> int:
        assert "/" in {page.path for page in pages}
        ready()
        self.calls.append((config, options, sock.getsockname()))
        return self.code

    @property
    def config(self) -> EngineConfig:
        return self.calls[-1][0]

    @property
    def options(self) -> ServerOptions:
        return self.calls[-1][1]

    @property
    def host(self) -> str:
        address = self.calls[-1][2]
        return str(address if isinstance(address, str) else address[0])

    @property
    def port(self) -> int:
        return int(self.calls[-1][2][1])

    @property
    def drafter(self) -> object:
        return self.config.speculative_config
