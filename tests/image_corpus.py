"""Broken and hostile images, and URLs that lead where nothing may be read: made, not stored."""

import base64
import io
import random
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from slipstream.engine.media import MOST_BYTES

NOISE = np.random.default_rng(0).integers(0, 255, (13, 21, 3), dtype=np.uint8)
PICTURE = Image.fromarray(NOISE)
KINDS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
# Other formats that Pillow writes and reads; all of them are refused here.
OTHERS = (
    *("AVIF", "BLP", "DDS", "DIB", "EPS", "ICNS", "ICO", "JPEG2000", "MSP", "PCX", "PDF"),
    *("PPM", "QOI", "SGI", "SPIDER", "TGA", "TIFF", "XBM"),
)
# Names that a resolver knows, and what it says of them.
PRIVATE_NAMES = {
    "intranet.example": ["10.1.2.3"],
    "metadata.example": ["169.254.169.254"],
    "mixed.example": ["93.184.215.14", "192.168.0.1"],
    "six.example": ["fd00::1"],
    "mapped.example": ["::ffff:127.0.0.1"],
    "compatible.example": ["::7f00:1"],
    "translated.example": ["::ffff:0:7f00:1"],
    "nat64.example": ["64:ff9b::7f00:1"],
    "local-nat64.example": ["64:ff9b:1::7f00:1"],
    "six-to-four.example": ["2002:7f00:1::"],
    "site.example": ["fec0::1"],
    "link.example": ["fe80::1%lo"],
    "carrier.example": ["100.64.0.1"],
    "cast.example": ["224.0.0.1"],
}
# Names of this very machine that the resolver of the system reads without asking anybody.
NUMBERS = (
    *("2130706433", "0x7f000001", "017700000001", "127.1", "0x7f.1", "0177.0.0.1", "127.0.0.1"),
    *("0", "[::1]", "[::]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[0:0:0:0:0:0:0:1]"),
    *("[64:ff9b::7f00:1]", "[::127.0.0.1]", "169.254.169.254", "0xa9fea9fe", "10.0.0.1"),
)


@dataclass(frozen=True)
class Case:
    """A URL.

    Attributes:
        answer: what is read where the file is whole after all; None: it must be refused.
        may_refuse: whether it may be refused all the same.
    """

    name: str
    url: str
    answer: Image.Image | None = None
    may_refuse: bool = False


def stored(kind: str = "PNG", mode: str = "RGB", **options: Any) -> bytes:
    file = io.BytesIO()
    PICTURE.convert(mode).save(file, kind, **options)
    return file.getvalue()


def url_of(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def png(width: int, height: int, data: bytes = b"", *chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG whose header may have any size."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = [(b"IHDR", head), *chunks, (b"IDAT", zlib.compress(data)), (b"IEND", b"")]
    lines = (
        struct.pack(">I", len(it)) + name + it + struct.pack(">I", zlib.crc32(name + it))
        for name, it in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(lines)


def corpus(folder: str = "/nowhere") -> list[Case]:
    """All cases; local files may only be read below `folder`."""
    return [*_cut(), *_mislabelled(), *_garbled(), *_bombs(), *_odd(), *_texts(), *_urls(folder)]


def _named(kind: str) -> str:
    return f"image/{kind.lower()}"


def _read(content: bytes) -> Image.Image:
    """The image that Pillow reads from a whole file."""
    with Image.open(io.BytesIO(content)) as image:
        return image.convert("RGB")


def _cut() -> Iterator[Case]:
    """The end of a file may be spared where it holds no pixels."""
    for kind in KINDS:
        content = stored(kind)
        whole = _read(content)
        for share in (0, 1, 3, 10, 30, 60, 90):
            cut = content[: len(content) * share // 100]
            yield Case(f"{kind} cut to {share}%", url_of(cut, _named(kind)))
        for lost in (1, 2, 5, 12):
            cut = content[:-lost]
            yield Case(f"{kind} without its last {lost}", url_of(cut, _named(kind)), whole, True)


def _mislabelled() -> Iterator[Case]:
    for kind in KINDS:
        for name in ("image/tiff", "image/gif" if kind != "GIF" else "image/png", "text/html"):
            yield Case(f"{kind} that is said to be {name}", url_of(stored(kind), name))
    yield Case("a name without end", url_of(stored(), "image/" + "x" * 100_000))
    for kind in OTHERS:
        mode = {"MSP": "1", "XBM": "1", "SPIDER": "F", "BLP": "P"}.get(kind, "RGB")
        content = stored(kind, mode)
        yield Case(f"{kind} that is said to be PNG", url_of(content))
        yield Case(f"{kind} by its own name", url_of(content, _named(kind)))
        yield Case(f"{kind} without a name", url_of(content, ""))


def _garbled() -> Iterator[Case]:
    draw = random.Random(0)
    for size in (1, 20, 400, 5000):
        yield Case(f"{size} bytes of noise", url_of(draw.randbytes(size)))
    for kind in KINDS:
        magic = stored(kind)[:12]
        yield Case(
            f"noise after the first bytes of {kind}", url_of(magic + draw.randbytes(400), "")
        )
    for number in range(20):  # headers that are turned about
        turned = bytearray(stored())
        for place in draw.sample(range(8, 40), 6):
            turned[place] ^= draw.randrange(1, 256)
        yield Case(f"PNG with a wrong header {number}", url_of(bytes(turned)))


def _bombs() -> Iterator[Case]:
    yield Case("a bomb", url_of(png(60_000, 60_000, bytes(1 << 20))))
    yield Case("a long bomb", url_of(png(2**31 - 1, 1)))
    yield Case("just too large", url_of(png(40_000_001, 1)))
    yield Case("no pixels", url_of(png(0, 0)))
    yield Case("no height", url_of(png(4, 0)))
    yield Case("no data", url_of(png(2000, 2000)))
    huge = zlib.compress(bytes(1 << 26))
    for name, chunk in (("zTXt", b"a\0\0" + huge), ("iTXt", b"a\0\1\0\0\0" + huge)):
        yield Case(f"a bomb in {name}", url_of(png(1, 1, b"", (name.encode(), chunk))))
    yield Case("a bomb in a profile", url_of(png(1, 1, b"", (b"iCCP", b"a\0\0" + huge))))
    jpeg = bytearray(stored("JPEG"))
    frame = jpeg.index(b"\xff\xc0") + 5
    for height, width in ((65_000, 65_000), (0, 21), (60_000, 1_000), (13, 0)):
        jpeg[frame : frame + 4] = struct.pack(">HH", height, width)
        yield Case(f"JPEG of {width} x {height}", url_of(bytes(jpeg), "image/jpeg"))
    slow = stored("JPEG", progressive=True)
    scan = slow[slow.rindex(b"\xff\xda") : -2]
    yield Case("JPEG of 1000 scans", url_of(slow[:-2] + scan * 1000 + slow[-2:], "image/jpeg"))
    gif = bytearray(stored("GIF"))
    gif[6:10] = struct.pack("<HH", 65_535, 65_535)
    yield Case("GIF on a huge screen", url_of(bytes(gif), "image/gif"))
    canvas = (16_382).to_bytes(3, "little") * 2
    for flags in (0, 2):  # a picture, a film
        chunk = b"VP8X" + struct.pack("<I", 10) + bytes([flags, 0, 0, 0]) + canvas
        body = b"WEBP" + chunk + stored("WEBP")[12:]
        content = b"RIFF" + struct.pack("<I", len(body)) + body
        yield Case(f"WebP on a huge canvas {flags}", url_of(content, "image/webp"))
    for width, height in ((30_000, 30_000), (2**31 - 1, 2**31 - 1), (21, -(2**31)), (-21, 13)):
        bmp = bytearray(stored("BMP"))
        bmp[18:26] = struct.pack("<ii", width, height)
        yield Case(f"BMP of {width} x {height}", url_of(bytes(bmp), "image/bmp"))
    for kind in (1, 2):
        yield Case(f"BMP in runs {kind}", url_of(_runs(kind), "image/bmp"))
    for head in (
        b"P6 60000 60000 255\n",
        b"P7\nWIDTH 60000\nHEIGHT 60000\nENDHDR\n",
        b"qoif\0\0\xea\x60",
    ):
        yield Case(f"a bomb of {head[:4]!r}", url_of(head + bytes(64), ""))
    yield Case("too many bytes", url_of(bytes(MOST_BYTES + 1)))
    yield Case("too many characters", "data:image/png;base64," + "A" * (2 * MOST_BYTES))


def _runs(kind: int) -> bytes:
    """A BMP of 250 x 250 in run lengths."""
    data = bytes([250, 0, 0, 0]) * 250 + b"\0\1"
    bits, offset = 8 if kind == 1 else 4, 14 + 40 + (1024 if kind == 1 else 64)
    info = struct.pack("<IiiHHIIiiII", 40, 250, 250, 1, bits, kind, len(data), 0, 0, 0, 0)
    head = b"BM" + struct.pack("<IHHI", offset + len(data), 0, 0, offset)
    return head + info + bytes(offset - 54) + data


def _odd() -> Iterator[Case]:
    """Whole files, which must be read right."""
    for kind, modes in (
        ("PNG", ("1", "L", "P", "LA", "RGBA", "RGB")),
        ("GIF", ("1", "L", "P", "RGBA")),
        ("BMP", ("1", "L", "P", "RGBA")),
        ("JPEG", ("L", "CMYK")),
        ("WEBP", ("RGBA", "L")),
    ):
        for mode in modes:
            content = stored(kind, mode)
            yield Case(f"{kind} in {mode}", url_of(content, _named(kind)), _read(content))
    deep = NOISE[:, :, 0].astype(np.uint16)
    file = io.BytesIO()
    Image.fromarray(deep * 256 + 255).save(file, "PNG")
    grey = Image.fromarray(NOISE[:, :, 0]).convert("RGB")
    yield Case("PNG of 16 bits", url_of(file.getvalue()), grey)
    file = io.BytesIO()
    clear = PICTURE.convert("RGBA")
    clear.putalpha(0)
    clear.save(file, "PNG")
    white = Image.new("RGB", PICTURE.size, "white")
    yield Case("PNG that is all transparent", url_of(file.getvalue()), white)
    painted = PICTURE.convert("P")
    file = io.BytesIO()
    painted.save(file, "PNG", transparency=bytes(256))
    yield Case("a palette that is all transparent", url_of(file.getvalue()), white)
    for kind in ("PNG", "GIF", "WEBP"):
        file = io.BytesIO()
        PICTURE.save(file, kind, save_all=True, append_images=[white] * 50, lossless=True)
        content = file.getvalue()
        yield Case(f"{kind} that moves", url_of(content, _named(kind)), _read(content))
    for tail in (b"PK\3\4" + bytes(50), b"<script>alert(1)</script>", b"%PDF-1.4", stored("GIF")):
        yield Case(f"PNG with {tail[:4]!r} after it", url_of(stored() + tail), PICTURE)
    for turn in (0, 9, 65_535):
        exif = Image.Exif()
        exif[0x0112] = turn
        yield Case(f"turned by {turn}", url_of(stored(exif=exif)), PICTURE)
    for broken in (b"Exif\0\0", b"Exif\0\0MM\0*\xff\xff\xff\xff", b"Exif\0\0" + b"II*\0" * 9):
        yield Case(f"broken EXIF {len(broken)}", url_of(stored(exif=broken)), PICTURE)
    text = (b"tEXt", b"Raw profile type exif\0\nexif\n  99\nnothex")
    three = png(1, 1, b"\0abc", text)
    yield Case("EXIF that is no hex", url_of(three), _read(png(1, 1, b"\0abc")))


def _texts() -> Iterator[Case]:
    for name, kind, content in (
        ("PostScript", "image/png", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"),
        ("vectors", "image/svg+xml", b'<svg xmlns="http://www.w3.org/2000/svg"/>'),
        ("vectors as PNG", "image/png", b'<?xml version="1.0"?><svg/>'),
        (
            "entities",
            "image/png",
            b'<!DOCTYPE a [<!ENTITY b SYSTEM "file:///etc/passwd">]><a>&b;</a>',
        ),
        ("a page", "text/html", b"<html></html>"),
        ("a document", "application/pdf", b"%PDF-1.7\n"),
        ("a document as PNG", "image/png", b"%PDF-1.7\n" + stored()),
        ("a film", "video/mp4", b"\0\0\0\x18ftypmp42" + bytes(64)),
        ("an archive", "image/png", b"PK\3\4" + stored()),
        ("a script with an image", "image/gif", b"GIF89a/*" + bytes(20) + b"*/=1;alert(1)"),
        ("JSON", "image/png", b"{}"),
    ):
        yield Case(name, url_of(content, kind))
    good = base64.b64encode(stored()).decode()
    for number, text in enumerate(
        (
            *("!!!!", "abc", "=", "====", "\u00e9", "\U0001f600" * 9, "A" * 101, "\0"),
            *(
                good[:-1],
                good[:40] + "\n" + good[40:],
                good.replace("/", "_").replace("+", "-") + "-",
            ),
            *(" " + good, good + "#", "%41" * 20),
        )
    ):
        yield Case(f"base64 that is wrong {number}", f"data:image/png;base64,{text}")
    for url in (
        *(
            "data:image/png,abc",
            "data:image/png;base64",
            "data:",
            "data:,",
            "data:" * 3,
            "",
            "data",
        ),
        *(f"data:image/png;base32,{good}", f"data:base64,{good}", "data:" + "x" * 100_000),
    ):
        yield Case(f"data URL {url[:30]!r}", url)


def _urls(folder: str) -> Iterator[Case]:
    for url in (
        *("ftp://example.com/a.png", "javascript:alert(1)", "gopher://localhost", "//x/a.png"),
        *("/etc/passwd", "a.png", "\0", "http:///x", "ws://example.com/", "blob:http://a/b"),
        *(
            "about:blank",
            "jar:file:///a!/b",
            "dict://localhost:11211/stat",
            "php://input",
            "s3://a/b",
        ),
        *("http://", "http://[bad/", "http://example.com:port/", "http://example.com:99999999/"),
        *("http://example.com/a.png", "https://user@localhost/", "http:example.com", "http:/a"),
        *("http://allowed.example@127.0.0.1/", "http://127.0.0.1#@allowed.example/"),
        *("http://127.0.0.1?@allowed.example/", "http://allowed.example.evil.example/"),
        *("http://allowed.example%00.evil.example/", "http://allowed.example./", "http://\u24d0/"),
        *("http://intranet.example/\r\nHost: a", "http://" + "a" * 70 + ".example/"),
        *(" http://allowed.example/", "http://allowed.example\t.evil.example/"),
    ):
        yield Case(f"URL {url[:40]!r}", url)
    for host in (*PRIVATE_NAMES, *NUMBERS):
        yield Case(f"host {host}", f"http://{host}/a.png")
    yield Case("a private host by TLS", "https://intranet.example:8443/a.png")
    yield Case("a private host behind a name", "http://allowed.example@metadata.example/latest")
    for path in (
        *("/etc/passwd", "/../../etc/passwd", f"{folder}/../../../../etc/passwd", "/dev/zero"),
        *(f"{folder}/%2e%2e/%2e%2e/etc/passwd", f"{folder}/a.png%00.png", f"{folder}/none.png"),
        *(folder, f"{folder}/" + "a" * 5000, f"{folder}x/a.png", "/proc/self/environ", "%ff", ""),
    ):
        yield Case(f"file {path[-30:]!r}", f"file://{path}")
    for url in (
        "file:etc/passwd",
        "file://localhost/etc/passwd",
        "FILE:///etc/passwd",
        "file://[bad",
    ):
        yield Case(f"file URL {url}", url)
