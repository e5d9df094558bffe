"""The playground at `GET /`: an HTML document, and files that browsers may cache forever.

The page loads nothing from other origins; its Content-Security-Policy forbids it. The path of its
files contains a digest of all of them, so a new version has new paths; the document, which has the
path, is revalidated every time. All URLs are relative, so that a reverse proxy may add a path.
"""

from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_DOCUMENT = "index.html"
_VERSION = "{{version}}"  # placeholder of the digest in the document
_POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",  # images of messages, before they are sent
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
# The system's table may say text/plain for modules, which browsers refuse.
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_FOR_EVER = "public, max-age=31536000, immutable"


@dataclass(frozen=True)
class _File:
    """One response: its bytes, and how they may be cached."""

    body: bytes
    media_type: str
    cache: str
    etag: str

    async def answer(self, request: Request) -> Response:
        headers = {**_HEADERS, "Cache-Control": self.cache, "ETag": self.etag}
        known = request.headers.get("if-none-match", "")
        if self.etag in (tag.strip().removeprefix("W/") for tag in known.split(",")):
            return Response(status_code=304, headers=headers)
        return Response(self.body, media_type=self.media_type, headers=headers)


def page_routes() -> list[Route]:
    """Routes of `GET /` and of the page's files; not in the OpenAPI document.

    The page holds no secrets, so these paths may be open on a server with API keys: requests that
    the page sends need a key.
    """
    folder = files("slipstream.serve.page") / "assets"
    known = [entry for entry in folder.iterdir() if _suffix(entry.name) in _TYPES]
    contents = {entry.name: entry.read_bytes() for entry in known}
    digest = sha256()
    for name, body in sorted(contents.items()):
        digest.update(f"{name}\0{len(body)}\0".encode() + body)
    version = digest.hexdigest()[:12]
    document = contents.pop(_DOCUMENT).replace(_VERSION.encode(), version.encode())
    answers = {"/": _file(_DOCUMENT, document, "no-cache")}
    for name, body in contents.items():
        answers[f"/page/{version}/{name}"] = _file(name, body, _FOR_EVER)
    return [
        Route(path, file.answer, methods=["GET"], include_in_schema=False)
        for path, file in answers.items()
    ]


def _suffix(name: str) -> str:
    return name[name.rfind(".") :]


def _file(name: str, body: bytes, cache: str) -> _File:
    return _File(body, _TYPES[_suffix(name)], cache, f'"{sha256(body).hexdigest()[:24]}"')
