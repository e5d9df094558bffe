"""Images from where messages say that they are: in the message, in a file, or elsewhere."""

import base64
import binascii
import http.client
import io
import ipaddress
import socket
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urljoin, urlsplit

from slipstream.core.errors import UsageError

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_BYTES: Final = 32 << 20  # of an image as it is stored
MOST_PIXELS: Final = 40_000_000
SECONDS: Final = 10.0  # to fetch an image in
_MOST_REDIRECTS = 3
# What PIL reads without other programs, by the names that data URLs have for it.
_FORMATS: Final = {
    "PNG": ("image/png",),
    "JPEG": ("image/jpeg", "image/jpg"),
    "WEBP": ("image/webp",),
    "GIF": ("image/gif",),
    "BMP": ("image/bmp", "image/x-ms-bmp"),
}
_KINDS = ("text", "image", "image_pil", "image_url")
_EMBEDS_IPV4: Final = [ipaddress.ip_network(it) for it in ("64:ff9b::/96", "2002::/16")]


@dataclass(frozen=True)
class MediaReader:
    """Reads images by URL.

    Attributes:
        folder: files below it may be read; None: none may.
        domains: hosts that images may be fetched from.
    """

    folder: str | None = None
    domains: Sequence[str] = ()

    def open(self, url: str) -> "Image":
        """The image behind a data URL, or where the engine allows it a file or an address.

        Raises:
            UsageError: it is not there, not allowed, too large, or no image.
        """
        scheme = url.partition(":")[0].lower()
        if scheme == "data":
            return decode(*_data(url))
        if scheme == "file":
            return decode(self._file(url))
        if scheme in ("http", "https"):
            return decode(self._fetch(url))
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
            allowed = path.is_relative_to(root) and path.is_file()
        except (OSError, ValueError, RuntimeError):
            allowed = False
        if not allowed:  # nobody learns what else there is
            raise UsageError("there is no such image below --allowed-local-media-path")
        with path.open("rb") as file:
            return _bounded(file.read(MOST_BYTES + 1))

    def _fetch(self, url: str) -> bytes:
        deadline = monotonic() + SECONDS
        try:
            for _ in range(_MOST_REDIRECTS + 1):
                found = self._get(url, deadline)
                if isinstance(found, bytes):
                    return found
                url = urljoin(url, found)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise UsageError(f"an image cannot be fetched: {error}") from error
        raise UsageError("an image cannot be fetched: it is redirected too often")

    def _get(self, url: str, deadline: float) -> bytes | str:
        """What is there, or where it is instead; each place is checked anew."""
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
            while len(content) <= MOST_BYTES:
                connection.wait()
                if not (piece := answer.read1(1 << 16)):
                    break
                content += piece
            return _bounded(bytes(content))
        finally:
            connection.close()


class _Pinned(http.client.HTTPConnection):
    """A connection to an address that was checked, whatever the name stands for by now."""

    def __init__(self, host: str, port: int, address: str, deadline: float, scheme: str) -> None:
        super().__init__(host, port)
        self._address, self._deadline, self._scheme = address, deadline, scheme

    def connect(self) -> None:
        self.sock = socket.create_connection((self._address, self.port), self._left())
        if self._scheme == "https":
            context = ssl.create_default_context()
            self.sock = context.wrap_socket(self.sock, server_hostname=self.host)

    def wait(self) -> None:
        """Let the next read take no longer than is left of all."""
        left = self._left()
        if self.sock is not None:  # or all has been read
            self.sock.settimeout(left)

    def _left(self) -> float:
        left = self._deadline - monotonic()
        if left <= 0:
            raise TimeoutError(f"it takes more than {SECONDS:g} seconds")
        return left


def public_address(host: str, port: int) -> str:
    """The address of a host; UsageError where any of its addresses is not of the public network."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [ipaddress.ip_address(str(it[4][0]).partition("%")[0]) for it in found]
    for address in addresses:
        hides = any(address.version == it.version and address in it for it in _EMBEDS_IPV4)
        if not address.is_global or address.is_multicast or hides:
            raise UsageError("images are not fetched from networks that are not public")
    return str(addresses[0])


def decode(content: bytes, kind: str | None = None) -> "Image":
    """An image in RGB, turned as its camera was held.

    Args:
        kind: what it is said to be, such as image/png; None: nothing is said.

    Raises:
        UsageError: it is no image, another kind of image, broken, or too large.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise UsageError(
            "images need packages that are not installed; install them "
            "(pip install 'slipstream[vision]'), or leave images out"
        ) from error
    try:
        with Image.open(io.BytesIO(content), formats=list(_FORMATS)) as image:
            found = "JPEG" if image.format == "MPO" else image.format or ""  # several in one file
            if kind is not None and kind not in _FORMATS[found]:
                raise UsageError(f"an image that is said to be {kind} is {image.format}")
            width, height = image.size
            if width * height > MOST_PIXELS:
                raise UsageError(
                    f"an image has {width} x {height} pixels, but at most {MOST_PIXELS:,} are read"
                )
            return ImageOps.exif_transpose(image).convert("RGB")
    except UsageError:
        raise
    except Exception as error:  # whatever a broken file makes of its reader
        raise UsageError(
            f"an image cannot be read: it is broken, or not one of {', '.join(_FORMATS)}"
        ) from error


def take_images(messages: Sequence[Any], media: MediaReader) -> tuple[list[Any], list["Image"]]:
    """Messages with marks in place of images, and the images in order.

    Args:
        messages: whose contents may have parts of the types image_url (as OpenAI has it),
            image_pil or image, beside those of text.
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
            f"a part of the type {kind} needs an image under {kind!r}: a URL, or one of PIL's"
        )
    images.append(given)
    return {"type": "image"}


def _data(url: str) -> tuple[bytes, str | None]:
    """What a data URL holds, and what it says that it is."""
    head, comma, content = url.partition(",")
    kind, *options = head[5:].split(";")
    if not comma or "base64" not in options:
        raise UsageError("a data URL of an image must be like data:image/png;base64,...")
    if len(content) * 3 // 4 > MOST_BYTES + 3:
        raise UsageError(_TOO_LARGE)
    try:
        return _bounded(base64.b64decode(content, validate=True)), kind.lower() or None
    except binascii.Error as error:
        raise UsageError(f"a data URL of an image is not base64: {error}") from error


_TOO_LARGE = f"an image takes more than {MOST_BYTES >> 20} MiB; send a smaller one"


def _bounded(content: bytes) -> bytes:
    if len(content) > MOST_BYTES:
        raise UsageError(_TOO_LARGE)
    return content
