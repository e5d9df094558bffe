"""The front within Ray Serve's own proxies, which listen on every machine of a cluster.

A process of the cluster finds it by `CALLBACK` in its environment, and its settings by `SETTINGS`.
"""

import json
import os
from typing import Final

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from slipstream.deploy.front import Front
from slipstream.deploy.options import DeploymentPlan
from slipstream.deploy.routing import DIRECTORY
from slipstream.serve.limits import ServeLimits
from slipstream.serve.middleware import BodyLimits

CALLBACK: Final = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
SETTINGS: Final = "SLIPSTREAM_FRONT"


def environment(plan: DeploymentPlan) -> dict[str, str]:
    """The environment variables that a cluster's processes need for a plan."""
    settings = {
        "routing": plan.replicas.routing,
        "wait_timeout": plan.replicas.wait_timeout,
        "max_body_bytes": plan.server.limits.max_body_bytes,
    }
    return {
        CALLBACK: f"{__name__}:middlewares",
        SETTINGS: json.dumps(settings),
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def middlewares() -> list[Middleware]:
    """Called by each of Ray Serve's proxies."""
    return [Middleware(ProxyFront)]


class ProxyFront:
    """Answers all requests except those to the proxy's own paths."""

    def __init__(self, app: ASGIApp) -> None:
        settings = json.loads(os.environ.get(SETTINGS, "{}"))
        most = settings.pop("max_body_bytes", ServeLimits().max_body_bytes)
        self._front = Front(app, **settings)
        self._whole = BodyLimits(self._front, ServeLimits(max_body_bytes=most))
        self._follows = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._follows:
            self._follows = True
            DIRECTORY.follow(self._front.update)
        await self._whole(scope, receive, send)
