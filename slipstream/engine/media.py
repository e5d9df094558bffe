"""Reads images from data URLs, files and web addresses."""

import base64
import http.client
import io
import ipaddress
import socket
import ssl
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock, Timer
from time import monotonic
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urljoin, urlsplit

from slipstream.core.errors import UsageError

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_BYTES: Final = 32 << 20  # bytes of an image as stored
MOST_PIXELS: Final = 40_000_000
MOST_PIXELS_TOGETHER: Final = 160_000_000  # pixels of all images of a prompt, four bytes each
SECONDS: Final = 10.0  # time limit for fetching an image
_MOST_REDIRECTS = 3
# Formats that PIL reads without other programs, by their names in data URLs.
_FORMATS: Final = {
    "PNG": ("image/png",),
    "JPEG": ("image/jpeg", "image/jpg"),
    "WEBP": ("image/webp",),
    "GIF": ("image/gif",),
    "BMP": ("image/bmp", "image/x-ms-bmp"),
}
_KINDS = ("text", "image", "image_pil", "image_url")
_MOST_SCANS: Final = 100  # scans of a JPEG, usually about ten; each takes as long as a whole image
_OPENING: Final = Lock()
_RUNS: Final = (1, 2)  # compressed BMPs, which PIL would unpack in a Python loop
_LONGEST_REASON: Final = 200  # characters of a library's message, which may repeat the whole URL
# Not covered by Python's checks: IPv4 within IPv6, site-local, documentation, protocols.
_NOT_PUBLIC: Final = [
    ipaddress.ip_network(it)
    for it in (
        *("::/96", "::ffff:0:0:0/96", "64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "fec0::/10"),
        *("3fff::/20", "5f00::/16", "192.0.0.0/24", "192.88.99.0/24"),
    )
]


@dataclass(frozen=True)
class MediaReader:
    """Reads images by URL.

    Attributes:
        folder: folder whose files may be read; None: no files.
        domains: hosts that images may be fetched from.
    """

    folder: str | None = None
    domains: Sequence[str] = ()

    def open(self, url: str, most_pixels: int = MOST_PIXELS) -> "Image":
        """Read the image at a data URL, or, if allowed, in a file or at a web address.

        Args:
            most_pixels: see `decode`.

        Raises:
            UsageError: there is no such image, it is not allowed, or it is too large.
        """
        scheme = url.partition(":")[0].lower()
        if scheme == "data":
            return decode(*_data(url), most_pixels)
        if scheme == "file":
            return decode(self._file(url), None, most_pixels)
        if scheme in ("http", "https"):
            return decode(self._fetch(url), None, most_pixels)
        raise UsageError("the URL of an image must begin with data:, http:, https: or file:")

    def _file(self, url: str) -> bytes:
        if self.folder is None:
            raise UsageError(
                "files of the server are not read; send the image in a data URL, or start the "
                "server with --allowed-local-media-path"
            )
        root = Path(self.folder).resolve()
        try:
            path = Path(unquote(urlsplit(url).path)).resolve(strict=True)
            if path.is_relative_to(root) and path.is_file():
                with path.open("rb") as file:
                    return _bounded(file.read(MOST_BYTES + 1))
        except UsageError:
            raise
        except (OSError, ValueError, RuntimeError):
            pass
        # One message for all cases, which does not reveal which files exist.
        raise UsageError("there is no such image below --allowed-local-media-path")

    def _fetch(self, url: str) -> bytes:
        deadline = monotonic() + SECONDS
        try:
            for _ in range(_MOST_REDIRECTS + 1):
                found = self._get(url, deadline)
                if isinstance(found, bytes):
                    return found
                url = urljoin(url, found)
        except UsageError:
            raise
        except (OSError, http.client.HTTPException, ValueError) as error:
            late = monotonic() >= deadline
            reason = f"it takes more than {SECONDS:g} seconds" if late else str(error)
            reason = reason[:_LONGEST_REASON]
            raise UsageError(f"an image cannot be fetched: {reason}") from error
        raise UsageError("an image cannot be fetched: it is redirected too often")

    def _get(self, url: str, deadline: float) -> bytes | str:
        """The content at an address, or the address it redirects to; each address is checked."""
        parts = urlsplit(url)
        host = (parts.hostname or "").lower()
        if parts.scheme not in ("http", "https") or host not in self.domains:
            raise UsageError(
                f"images are not fetched from {host[:100]!r}; send the image in a data URL, or "
                "start the server with --allowed-media-domains"
            )
        port = parts.port or (443 if parts.scheme == "https" else 80)
        connection = _Pinned(host, port, public_address(host, port), deadline, parts.scheme)
        try:
            target = parts.path or "/"
            connection.request("GET", f"{target}?{parts.query}" if parts.query else target)
            answer = connection.getresponse()
            if answer.status in (301, 302, 303, 307, 308):
                return answer.headers.get("Location") or ""
            if answer.status != 200:
                raise UsageError(f"an image cannot be fetched: {host} answers {answer.status}")
            content = bytearray()
            while len(content) <= MOST_BYTES and (piece := answer.read1(1 << 16)):
                content += piece
            connection.left()  # an answer that was cut off at the deadline may look complete
            return _bounded(bytes(content))
        finally:
            connection.end()


class _Pinned(http.client.HTTPConnection):
    """A connection to the address that was checked, even if the name now resolves to another.

    It is shut down at the deadline, whatever it does then: the timeout of a socket begins again
    with every byte that arrives.
    """

    def __init__(self, host: str, port: int, address: str, deadline: float, scheme: str) -> None:
        super().__init__(host, port)
        self._address, self._deadline, self._scheme = address, deadline, scheme
        self._watched: tuple[Timer, socket.socket] | None = None

    def connect(self) -> None:
        self.sock = socket.create_connection((self._address, self.port), self.left())
        left = self.left()
        # A duplicate, since `self.sock` is replaced by TLS and closed before the content is read.
        twin = self.sock.dup()
        timer = Timer(left, _shut_down, (twin,))
        timer.daemon = True
        timer.start()
        self._watched = timer, twin
        if self._scheme == "https":
            context = ssl.create_default_context()
            self.sock = context.wrap_socket(self.sock, server_hostname=self.host)

    def left(self) -> float:
        """The seconds until the deadline; TimeoutError if it is over."""
        left = self._deadline - monotonic()
        if left <= 0:
            raise TimeoutError
        return left

    def end(self) -> None:
        """Close the connection for good; `close` is also called when only the headers are read."""
        self.close()
        if self._watched is not None:
            timer, twin = self._watched
            timer.cancel()
            timer.join()
            twin.close()


def _shut_down(connection: socket.socket) -> None:
    with suppress(OSError):  # the other side may have left
        connection.shutdown(socket.SHUT_RDWR)


def public_address(host: str, port: int) -> str:
    """The address of a host; UsageError if any of its addresses is not public."""
    # It cannot be interrupted: a slow name server may hold its caller beyond the deadline.
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [ipaddress.ip_address(str(it[4][0]).partition("%")[0]) for it in found]
    for address in addresses:
        known = any(address.version == it.version and address in it for it in _NOT_PUBLIC)
        if not address.is_global or address.is_multicast or known:
            raise UsageError("images are not fetched from networks that are not public")
    return str(addresses[0])


def decode(content: bytes, kind: str | None = None, most_pixels: int = MOST_PIXELS) -> "Image":
    """Decode an image to RGB, rotated as its EXIF data says.

    Args:
        kind: the declared type, such as image/png; None: none is declared.
        most_pixels: the rest of `MOST_PIXELS_TOGETHER` after the prompt's other images.

    Raises:
        UsageError: it is not an image, has another type, or is broken or too large.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise UsageError(
            "images need packages that are not installed; install them "
            "(pip install 'slipstream[vision]'), or leave images out"
        ) from error
    most_pixels = min(most_pixels, MOST_PIXELS)
    try:
        # PIL's own limit is above ours. Entering this in two threads at once could keep the filter.
        with _OPENING, warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            opened = Image.open(io.BytesIO(content), formats=list(_FORMATS))
        with opened as image:
            # MPO: several images in one file.
            found = "JPEG" if image.format == "MPO" else image.format or ""
            if kind is not None and kind not in _FORMATS[found]:
                raise UsageError(f"an image that is said to be {kind[:50]} is {image.format}")
            _require_quick(image, content, most_pixels)
            return as_rgb(_upright(image))
    except (UsageError, MemoryError):
        raise
    except Image.DecompressionBombError as error:
        raise _too_many("far too many", most_pixels) from error
    except Exception as error:  # broken files may raise anything
        raise UsageError(
            f"an image cannot be read: it is broken, or not one of {', '.join(_FORMATS)}"
        ) from error


def _require_quick(image: "Image", content: bytes, most_pixels: int) -> None:
    """Before decoding, raise UsageError if an image would take too much time or memory."""
    width, height = image.size
    if width * height > most_pixels:
        raise _too_many(f"{width} x {height}", most_pixels)
    if content.count(b"\xff\xda") > _MOST_SCANS and image.format in ("JPEG", "MPO"):
        raise UsageError(
            f"an image is a JPEG of more than {_MOST_SCANS} scans, which would take too long; "
            "store it again"
        )
    if image.format == "BMP" and image.info.get("compression") in _RUNS:
        raise UsageError("an image is a compressed BMP, which is not read; store it as PNG")


def _too_many(count: str, most: int) -> UsageError:
    return UsageError(
        f"an image has {count} pixels: at most {most:,} are read, and {MOST_PIXELS_TOGETHER:,} of "
        "all images of a prompt; send a smaller one"
    )


def _upright(image: "Image") -> "Image":
    """Rotate an image as its EXIF data says, if it has valid data."""
    from PIL import ImageOps

    image.load()
    try:
        return ImageOps.exif_transpose(image)
    except MemoryError:
        raise
    except Exception:  # broken metadata
        return image


def as_rgb(image: "Image") -> "Image":
    """Convert to RGB: transparent pixels become white, 16-bit values keep their upper 8 bits."""
    from PIL import Image

    if image.mode.startswith("I;16"):
        image = image.point(lambda value: value / 256).convert("L")
    if not image.has_transparency_data:
        return image.convert("RGB")
    seen = image.convert("RGBA")
    page = Image.new("RGB", image.size, "white")
    page.paste(seen, mask=seen.getchannel("A"))
    return page


def take_images(messages: Sequence[Any], media: MediaReader) -> tuple[list[Any], list["Image"]]:
    """Replace images in messages by marks; returns the messages and the images in order.

    Args:
        messages: their contents may have parts of type image_url (as in OpenAI's protocol),
            image_pil or image, besides text.
    """
    images: list[Image] = []
    plain = []
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list | tuple):
            parts = [_marked(part, media, images) for part in content]
            message = {**message, "content": parts}
        plain.append(message)
    return plain, images


def _marked(part: Any, media: MediaReader, images: list["Image"]) -> Any:
    kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
    if kind not in _KINDS:
        raise UsageError(
            f"a part of the type {kind!r} is not supported: only text and images are read, "
            "neither video nor audio; leave it out, or give frames as images"
        )
    if kind == "text":
        return part
    given = part.get(kind)
    if isinstance(given, Mapping):
        given = given.get("url")
    if isinstance(given, str):
        given = media.open(given)
    if not hasattr(given, "convert"):
        raise UsageError(
            f"a part of the type {kind} needs an image under {kind!r}: a URL, or a PIL image"
        )
    images.append(given)
    return {"type": "image"}


def _data(url: str) -> tuple[bytes, str | None]:
    """The content of a data URL, and its declared type."""
    head, comma, content = url.partition(",")
    kind, *options = head[5:].split(";")
    if not comma or "base64" not in (it.strip().lower() for it in options):
        raise UsageError("a data URL of an image must be like data:image/png;base64,...")
    if len(content) * 3 // 4 > MOST_BYTES + 3:
        raise UsageError(_TOO_LARGE)
    try:
        return _bounded(base64.b64decode(content, validate=True)), kind.strip().lower() or None
    except ValueError as error:
        raise UsageError(f"a data URL of an image is not base64: {error}") from error


_TOO_LARGE = f"an image takes more than {MOST_BYTES >> 20} MiB; send a smaller one"


def _bounded(content: bytes) -> bytes:
    if len(content) > MOST_BYTES:
        raise UsageError(_TOO_LARGE)
    return content
