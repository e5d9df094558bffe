"""Images by URL: broken and hostile ones get one clear sentence, and nothing private is read."""

import base64
import io
import random
import socket
import struct
import threading
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from slipstream.core.errors import UsageError
from slipstream.engine import media
from slipstream.engine.media import MediaReader, decode, public_address, take_images

NOISE = np.random.default_rng(0).integers(0, 255, (13, 21, 3), dtype=np.uint8)


def stored(kind: str = "PNG", mode: str = "RGB") -> bytes:
    file = io.BytesIO()
    Image.fromarray(NOISE).convert(mode).save(file, kind)
    return file.getvalue()


def url_of(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def png(width: int, height: int, data: bytes = b"", *chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG that says what it likes of its size."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = [(b"IHDR", head), *chunks, (b"IDAT", zlib.compress(data)), (b"IEND", b"")]
    lines = (
        struct.pack(">I", len(it)) + name + it + struct.pack(">I", zlib.crc32(name + it))
        for name, it in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(lines)


def hostile() -> Iterator[tuple[str, str]]:
    """(name, URL)."""
    whole = {kind: stored(kind) for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP")}
    for kind, content in whole.items():
        name = f"image/{kind.lower()}"
        for share in (0, 1, 10, 30, 60):
            yield f"{kind} cut to {share}%", url_of(content[: len(content) * share // 100], name)
        wrong = "image/gif" if kind != "GIF" else "image/png"
        yield f"{kind} that is said to be another", url_of(content, wrong)
        yield f"{kind} that is said to be a program", url_of(content, "application/x-sh")
    draw = random.Random(0)
    for size in (1, 20, 400, 5000):
        yield f"{size} bytes of noise", url_of(draw.randbytes(size))
    for number in range(20):  # headers that are turned about
        turned = bytearray(whole["PNG"])
        for place in draw.sample(range(8, 40), 6):
            turned[place] ^= draw.randrange(1, 256)
        yield f"PNG with a wrong header {number}", url_of(bytes(turned))
    yield "a bomb", url_of(png(60_000, 60_000, bytes(1 << 20)))
    yield "a long bomb", url_of(png(2**31 - 1, 1))
    yield "no pixels", url_of(png(0, 0))
    yield "no data", url_of(png(4000, 4000))
    yield "a text bomb", url_of(png(1, 1, b"", (b"zTXt", b"a\0\0" + zlib.compress(bytes(1 << 26)))))
    yield "a program for PostScript", url_of(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    yield (
        "a picture of vectors",
        url_of(b'<svg xmlns="http://www.w3.org/2000/svg"/>', "image/svg+xml"),
    )
    yield "a page", url_of(b"<html></html>", "text/html")
    yield "a film", url_of(b"\0\0\0\x18ftypmp42" + bytes(64), "video/mp4")
    yield "too many bytes", url_of(bytes(media.MOST_BYTES + 1))
    yield "no base64", "data:image/png;base64,!!!!"
    yield "half a base64", "data:image/png;base64,abc"
    yield "no encoding", "data:image/png,abc"
    yield "no content", "data:image/png;base64"
    yield "nothing", ""
    for url in (
        *("ftp://example.com/a.png", "javascript:alert(1)", "gopher://localhost", "//x/a.png"),
        *("file:///etc/passwd", "file://../../etc/passwd", "http://example.com/a.png", "http://"),
        *("http://127.0.0.1/a.png", "http://[::1]/", "https://user@localhost/", "http://[bad/"),
        *("http://example.com:port/", "/etc/passwd", "a.png", "\0", "data:" * 3, "http:///x"),
    ):
        yield url, url


@pytest.mark.parametrize(("name", "url"), [pytest.param(*it, id=it[0]) for it in hostile()])
def test_hostile_images_are_refused_in_a_sentence(name: str, url: str) -> None:
    del name
    with pytest.raises(UsageError) as error:
        MediaReader().open(url)
    assert len(str(error.value)) < 400


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
