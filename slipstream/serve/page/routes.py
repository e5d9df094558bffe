"""Routes of the playground: one document, and files that browsers may keep for ever.

The page needs nothing from elsewhere, and its Content-Security-Policy holds it to that. Its files
stand under a path with a digest of them all, so a new version is a new path; the document, which
names that path, is revalidated every time. Every address in it is relative: a reverse proxy may
put the server under any prefix.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

_DOCUMENT = "index.html"
_VERSION = "{{version}}"  # in the document, where the digest goes
_POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
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
# Not left to the machine's own table, which may call a module text/plain: browsers refuse that.
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_FOR_EVER = "public, max-age=31536000, immutable"


@dataclass(frozen=True)
class _File:
    """One answer: the bytes, and how they may be kept."""

    body: bytes
    media_type: str
    cache: str
    etag: str

    def answer(self, request: Request) -> Response:
        headers = {**_HEADERS, "Cache-Control": self.cache, "ETag": self.etag}
        known = request.headers.get("if-none-match", "")
        if self.etag in (tag.strip().removeprefix("W/") for tag in known.split(",")):
            return Response(status_code=304, headers=headers)
        return Response(self.body, media_type=self.media_type, headers=headers)


def page_routes() -> list[Route]:
    """`GET /` and the page's files; no part of the server's OpenAPI, and open to all.

    The page itself tells nothing: an API key guards what it asks for, not the page.
    """
    contents = _read()
    version = _digest(contents)[:12]
    document = _document(contents.pop(_DOCUMENT), version)
    kept = {name: _file(name, body, _FOR_EVER) for name, body in contents.items()}

    async def index(request: Request) -> Response:
        return document.answer(request)

    async def asset(request: Request) -> Response:
        name, asked = request.path_params["name"], request.path_params["version"]
        if name not in kept:
            return PlainTextResponse("the page has no such file", 404, headers=_HEADERS)
        if asked != version:
            # A document of an older server, whose other files are gone: it must load anew.
            return PlainTextResponse("this version of the page is gone; reload", 404, _HEADERS)
        return kept[name].answer(request)

    return [
        Route("/", index, methods=["GET"], include_in_schema=False),
        Route("/page/{version}/{name}", asset, methods=["GET"], include_in_schema=False),
    ]


def _read() -> dict[str, bytes]:
    folder = files("slipstream.serve.page") / "assets"
    return {entry.name: entry.read_bytes() for entry in folder.iterdir() if entry.is_file()}


def _digest(contents: Mapping[str, bytes]) -> str:
    digest = sha256()
    for name in sorted(contents):
        digest.update(f"{name}\0{len(contents[name])}\0".encode() + contents[name])
    return digest.hexdigest()


def _document(source: bytes, version: str) -> _File:
    return _file(_DOCUMENT, source.replace(_VERSION.encode(), version.encode()), "no-cache")


def _file(name: str, body: bytes, cache: str) -> _File:
    suffix = name[name.rfind(".") :]
    return _File(body, _TYPES[suffix], cache, f'"{sha256(body).hexdigest()[:24]}"')
