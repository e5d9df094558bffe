"""What the page's routes send, without a browser."""

import re
import tomllib
from email.message import Message
from fnmatch import fnmatch
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import urljoin
from urllib.request import Request, urlopen

import pytest

import slipstream
from slipstream.serve.page import page_routes
from tests.serve.page.fake_server import FakeServer

ASSETS = Path(slipstream.__file__).parent / "serve" / "page" / "assets"
TEXTS = {file.name: file.read_text() for file in ASSETS.iterdir()}


def fetch(url: str, etag: str | None = None) -> tuple[int, Message, bytes]:
    request = Request(url, headers={} if etag is None else {"If-None-Match": etag})
    try:
        with urlopen(request, timeout=20) as answer:
            return answer.status, answer.headers, answer.read()
    except HTTPError as error:
        with error:
            return error.code, error.headers, error.read()


def linked(document: str) -> set[str]:
    return set(re.findall(r'(?:src|href)="([^"#]+)"', document))


def test_the_document_allows_its_own_files_and_nothing_else(server: FakeServer) -> None:
    status, headers, _ = fetch(server.url)
    assert status == 200
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    policy = dict(part.split(" ", 1) for part in headers["Content-Security-Policy"].split("; "))
    assert policy.pop("default-src") == "'none'"
    assert policy.pop("img-src") == "'self' data:"
    assert set(policy.values()) == {"'self'", "'none'"}
    assert policy["script-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"


def test_every_file_that_the_document_names_is_there_to_stay(server: FakeServer) -> None:
    _, _, body = fetch(server.url)
    paths = linked(body.decode())
    assert {Path(path).name for path in paths} == TEXTS.keys() - {"index.html"}
    for path in paths:
        assert not path.startswith(("/", "http")), "a proxy may put the server under a prefix"
        status, headers, content = fetch(urljoin(server.url, path))
        assert status == 200
        assert content.decode() == TEXTS[Path(path).name]
        assert "immutable" in headers["Cache-Control"]
        assert headers["X-Content-Type-Options"] == "nosniff"
    scripts = [path for path in paths if path.endswith(".js")]
    types = {fetch(urljoin(server.url, path))[1]["Content-Type"] for path in scripts}
    assert types == {"text/javascript; charset=utf-8"}


def test_the_document_is_asked_for_anew_and_sent_once(server: FakeServer) -> None:
    _, headers, _ = fetch(server.url)
    assert headers["Cache-Control"] == "no-cache"
    status, again, body = fetch(server.url, headers["ETag"])
    assert (status, body, again["ETag"]) == (304, b"", headers["ETag"])
    assert fetch(server.url, f'"other", W/{headers["ETag"]}')[0] == 304
    assert fetch(server.url, '"other"')[0] == 200


@pytest.mark.parametrize("path", ["page/0123456789ab/main.js", "page/../routes.py", "page/"])
def test_nothing_else_is_there(server: FakeServer, path: str) -> None:
    assert fetch(server.url + path)[0] == 404


def test_the_page_needs_no_key_and_is_no_part_of_the_protocol() -> None:
    routes = page_routes()
    assert routes[0].path == "/"
    assert len({route.path for route in routes}) == len(TEXTS)
    assert not any(route.include_in_schema for route in routes)


def test_the_page_holds_to_its_policy() -> None:
    """No inline script or style, and no address elsewhere."""
    for name, text in TEXTS.items():
        addresses = re.findall(r"(?:https?:)?//[\w.]+\.\w+[^\s\"'<]*", text)
        assert set(addresses) <= {"http://www.w3.org/2000/svg"}, name
        assert not re.search(r"\bon\w+=|style=\"|<style|javascript:|innerHTML|eval\(", text), name


def test_modules_stay_small() -> None:
    assert [name for name, text in TEXTS.items() if len(text.splitlines()) > 250] == []


def test_wheels_contain_the_page() -> None:
    project = tomllib.loads((ASSETS.parents[3] / "pyproject.toml").read_text())
    assert project["tool"]["scikit-build"]["wheel"]["packages"] == ["slipstream"]  # every file
    ignored = (ASSETS.parents[3] / ".gitignore").read_text().splitlines()
    for name in TEXTS:
        assert not any(fnmatch(name, pattern) for pattern in ignored), name
