"""Images by URL: broken and hostile ones get one clear sentence, and nothing private is read."""

import contextlib
import gc
import io
import os
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from slipstream.core.errors import UsageError
from slipstream.engine import media
from slipstream.engine.media import MediaReader, decode, public_address, take_images
from tests.image_corpus import NOISE, NUMBERS, PRIVATE_NAMES, Case, corpus, png, stored, url_of

KNOWN = ("allowed.example", *PRIVATE_NAMES, *(it.strip("[]") for it in NUMBERS))


def resident() -> int:
    """Bytes of memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is asked for a name, and nothing is connected to."""
    resolve = socket.getaddrinfo

    def known(host: str, port: int, **options: Any) -> list[Any]:
        if (found := PRIVATE_NAMES.get(host)) is not None:
            return [(2, 1, 6, "", (address, port)) for address in found]
        return list(resolve(host, port, flags=socket.AI_NUMERICHOST, **options))

    def connect(*_: object) -> None:
        raise AssertionError("a connection into a private network")

    monkeypatch.setattr(socket, "getaddrinfo", known)
    monkeypatch.setattr(socket, "create_connection", connect)


def mistake(reader: MediaReader, case: Case) -> str | None:
    """The error in the answer to a case; None if there is none."""
    try:
        image = reader.open(case.url)
    except UsageError as error:
        if len(str(error)) > 400 or "\n" in str(error):
            return f"a long sentence: {str(error)[:500]}"
        return "refused" if case.answer is not None and not case.may_refuse else None
    if case.answer is None:
        return f"read as {image}"
    same = image.size == case.answer.size and image.tobytes() == case.answer.tobytes()
    return None if image.mode == "RGB" and same else "read wrongly"


@pytest.mark.usefixtures("resolver")
def test_hostile_images_are_refused_in_a_sentence_and_odd_ones_read_right(tmp_path: Path) -> None:
    """Four passes: from the second on they leave no more memory behind than malloc's own habits."""
    (tmp_path / "a.png").write_bytes(stored())
    reader, cases = MediaReader(str(tmp_path), KNOWN), corpus(str(tmp_path))
    assert len({case.name for case in cases}) == len(cases) >= 200
    wrong = {case.name: said for case in cases if (said := mistake(reader, case)) is not None}
    assert wrong == {}
    before = [(mistake(reader, case), resident())[1] for case in cases][-1]
    for _ in range(2):
        for case in cases:
            mistake(reader, case)
    gc.collect()
    assert resident() - before < 32 << 20


@pytest.mark.parametrize(
    ("side", "told"),
    [(6_400, "6400 x 6400"), (10_000, "10000 x 10000"), (60_000, "far too many")],
)
def test_too_many_pixels_are_told_with_the_limit(side: int, told: str) -> None:
    """Also for more pixels than those at which PIL warns, and then refuses."""
    with pytest.raises(UsageError, match=f"has {told} pixels: at most 40,000,000 are read"):
        decode(png(side, side))


@pytest.mark.parametrize("kind", ["PNG", "BMP", "GIF", "WEBP", "JPEG"])
def test_images_are_read_in_rgb(kind: str) -> None:
    image = MediaReader().open(url_of(stored(kind), f"image/{kind.lower()}"))
    assert image.mode == "RGB"
    assert image.size == (21, 13)
    if kind in ("PNG", "BMP"):
        assert np.array_equal(np.array(image), NOISE)


def test_images_are_turned_as_the_camera_was_held() -> None:
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(NOISE).save(file, "JPEG", exif=exif)
    assert decode(file.getvalue()).size == (13, 21)


def test_files_are_read_below_one_folder_alone(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out.png"
    inside.mkdir()
    (inside / "a b.png").write_bytes(stored())
    outside.write_bytes(stored())
    (inside / "link.png").symlink_to(outside)
    reader = MediaReader(str(inside))
    assert reader.open(f"file://{inside}/a%20b.png").size == (21, 13)
    for path in (outside, inside / "../out.png", inside / "link.png", inside, inside / "none.png"):
        with pytest.raises(UsageError, match="no such image"):
            reader.open(f"file://{path}")
    with pytest.raises(UsageError, match="allowed-local-media-path"):
        MediaReader().open(f"file://{inside}/a%20b.png")


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.1.2.3", "192.168.0.1", "169.254.169.254", "172.16.0.1", "0.0.0.0"),
        *("100.64.0.1", "224.0.0.1", "255.255.255.255", "::1", "fe80::1", "fd00::1"),
        *("::ffff:127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "ff02::1", "::"),
    ],
)
def test_addresses_of_private_networks_are_refused(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = [(2, 1, 6, "", ("93.184.215.14", 80)), (2, 1, 6, "", (address, 80))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: known)
    with pytest.raises(UsageError, match="not public"):
        public_address("example.com", 80)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: known[:1])
    assert public_address("example.com", 80) == "93.184.215.14"


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        place = {
            "/away": "http://elsewhere.example/a.png",
            "/inside": "http://localhost:1/a.png",
            "/file": "file:///etc/passwd",
            "/round": "/round",
            "/near": "/a.png",
        }.get(self.path)
        self.send_response(302 if place else 200 if self.path != "/none" else 404)
        if place:
            self.send_header("Location", place)
        self.end_headers()
        content = bytes(media.MOST_BYTES + 1) if self.path == "/large" else stored()
        if not place:
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server that passes for a public one."""
    server = HTTPServer(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    check = public_address

    def known(host: str, port: int) -> str:
        return "127.0.0.1" if host == "example.com" else check(host, port)

    monkeypatch.setattr(media, "public_address", known)
    yield f"http://example.com:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_images_are_fetched_from_hosts_that_are_allowed(host: str) -> None:
    reader = MediaReader(domains=("example.com", "localhost"))
    assert reader.open(f"{host}/a.png").size == (21, 13)
    assert reader.open(f"{host}/near").size == (21, 13)
    for path, said in (
        ("away", "elsewhere.example"),
        ("inside", "not public"),
        ("file", "not fetched"),
        ("round", "too often"),
        ("none", "404"),
        ("large", "MiB"),
    ):
        with pytest.raises(UsageError, match=said):
            reader.open(f"{host}/{path}")
    with pytest.raises(UsageError, match="allowed-media-domains"):
        MediaReader(domains=("other.example",)).open(f"{host}/a.png")


def test_a_server_that_takes_too_long_is_left(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media, "SECONDS", -1.0)
    with pytest.raises(UsageError, match="seconds"):
        MediaReader(domains=("example.com",)).open(f"{host}/a.png")


@pytest.mark.parametrize(
    ("scheme", "first"),
    [
        ("http", b"HTTP/1.1 200 OK\r\nX: "),
        ("http", b"HTTP/1.1 200 OK\r\n\r\n"),
        ("http", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"),
        ("https", b"\x16\x03\x03\x3f\xff"),  # a long record of the handshake
    ],
    ids=["headers", "content", "chunks", "handshake"],
)
def test_a_server_that_sends_a_byte_at_a_time_is_left(
    scheme: str, first: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte is in time; the limit is for the whole request."""
    monkeypatch.setattr(media, "SECONDS", 0.4)
    monkeypatch.setattr(media, "public_address", lambda *_: "127.0.0.1")
    is_left = threading.Event()

    def drip(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection, contextlib.suppress(OSError):
            connection.sendall(first)
            for _ in range(200):
                connection.sendall(b"0")
                time.sleep(0.02)
            return
        is_left.set()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=drip, args=(listening,))
        thread.start()
        url = f"{scheme}://example.com:{listening.getsockname()[1]}/a.png"
        try:
            with pytest.raises(UsageError, match=r"fetched: it takes more than 0\.4 seconds"):
                MediaReader(domains=("example.com",)).open(url)
        finally:
            thread.join()
    assert is_left.is_set()


def test_parts_of_messages_that_are_not_read_are_named() -> None:
    for kind in ("video_url", "input_audio", "audio_url", "video", "file"):
        with pytest.raises(UsageError, match=kind):
            take_images([{"role": "user", "content": [{"type": kind, kind: {}}]}], MediaReader())
    with pytest.raises(UsageError, match="needs an image"):
        take_images([{"role": "user", "content": [{"type": "image"}]}], MediaReader())
    image = Image.fromarray(NOISE)
    parts = [{"type": "image_pil", "image_pil": image}, {"type": "text", "text": "a"}]
    plain, images = take_images([{"role": "user", "content": parts}, {"role": "x"}], MediaReader())
    assert plain == [{"role": "user", "content": [{"type": "image"}, parts[1]]}, {"role": "x"}]
    assert images == [image]
