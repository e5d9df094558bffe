"""The part of an address under which a proxy shows this server."""

from starlette.types import ASGIApp, Receive, Scope, Send


class UnderPrefix:
    """Takes the prefix off, where the proxy has not done so; whatever follows sees plain paths.

    Args:
        prefix: such as /models/a, without a slash at its end.
    """

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app, self._prefix = app, prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] == "http":
            path: str = scope["path"]
            if path == self._prefix or path.startswith(self._prefix + "/"):
                path = path[len(self._prefix) :] or "/"
            # The document names its servers by the root path.
            scope = {**scope, "path": path, "root_path": self._prefix}
        await self._app(scope, receive, send)
