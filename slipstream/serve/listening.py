"""Sockets, TLS, and HTTP connections with limits."""

import asyncio
import errno
import socket
import ssl
from http import HTTPStatus
from pathlib import Path
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from slipstream.core.errors import UsageError
from slipstream.core.flags import flag_name
from slipstream.serve.errors import ApiError
from slipstream.serve.limits import ServeLimits
from slipstream.serve.options import ServerOptions


class BoundedConnection(HttpToolsProtocol):
    """A connection with limits on its headers, on the time they take, and on unread answers.

    `connection_class` sets the class attributes, which the connections of a server share.

    Attributes:
        incomplete: connections without a complete request, the longest waiting first.
    """

    limits: ServeLimits
    incomplete: dict["BoundedConnection", None]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._refusal: ApiError | None = None
        self._header_bytes = 0
        self._in_headers = True
        self._receive_timer: asyncio.TimerHandle | None = None  # of an incomplete request
        self._send_timer: asyncio.TimerHandle | None = None  # of an unread response

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a request; over the limit, close the connection that has waited longest."""
        super().connection_made(transport)
        self._wait()
        if len(self.connections) > self.limits.max_connections:
            longest = next(iter(self.incomplete))
            longest.refuse(
                HTTPStatus.SERVICE_UNAVAILABLE, "this server has too many open connections"
            )

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._cancel_send_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse data; counts header bytes as they arrive, to refuse endless headers."""
        if self.transport.is_closing():
            return
        self._header_bytes += len(data) if self._in_headers else 0
        super().data_received(data)
        too_many = self._in_headers and self._header_bytes > self.limits.max_header_bytes
        if too_many and not self.transport.is_closing():
            self._answer(self._too_large())
        # Data that does not begin a request (empty lines, an unread body) is limited as well.
        if self.cycle is None or self.cycle.response_complete:
            self._wait()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers = True

    def on_headers_complete(self) -> None:
        """Start the application, whose middleware limits the time of the body."""
        self._in_headers, self._header_bytes = False, 0
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self.limits.max_header_bytes:
            self._refusal = self._too_large()
            raise self._refusal  # it stops the parser
        super().on_headers_complete()
        self._stop_waiting()

    def on_message_complete(self) -> None:
        """The request is complete; it may have been answered before."""
        super().on_message_complete()
        self._stop_waiting()
        self._in_headers, self._header_bytes = True, 0

    def pause_writing(self) -> None:
        """Close the connection if the client does not read within `send_timeout`."""
        super().pause_writing()
        if self._send_timer is None:
            self._send_timer = self.loop.call_later(self.limits.send_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel_send_timer()

    def send_400_response(self, msg: str) -> None:
        """Answer a request that cannot be parsed with an error in the protocol's form."""
        error, self._refusal = self._refusal, None
        self._answer(error or ApiError(HTTPStatus.BAD_REQUEST, "this is not an HTTP/1.1 request"))

    def refuse(self, status: HTTPStatus, message: str) -> None:
        """Answer with an error and close."""
        self._answer(ApiError(status, message))

    def _too_large(self) -> ApiError:
        return ApiError(
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
            f"the request's line and headers take more than {self.limits.max_header_bytes} bytes; "
            "send fewer or shorter ones",
        )

    def _answer(self, error: ApiError) -> None:
        body = error.body()
        self.transport.write(
            STATUS_LINE[error.status]
            + b"content-type: application/json\r\nconnection: close\r\ncontent-length: "
            + str(len(body)).encode()
            + b"\r\n\r\n"
            + body
        )
        self.transport.close()
        self._stop_waiting()

    def _wait(self) -> None:
        if self._receive_timer is None and not self.transport.is_closing():
            self._receive_timer = self.loop.call_later(self.limits.receive_timeout, self._too_slow)
            self.incomplete[self] = None

    def _stop_waiting(self) -> None:
        self.incomplete.pop(self, None)
        if self._receive_timer is not None:
            self._receive_timer.cancel()
            self._receive_timer = None

    def _too_slow(self) -> None:
        self._receive_timer = None
        answered: object = self.cycle  # None before the first request
        if answered is not None:  # the client has its response and does not expect another
            self.incomplete.pop(self, None)
            self.transport.close()
            return
        self.refuse(HTTPStatus.REQUEST_TIMEOUT, "the request did not arrive in time")

    def _cancel_send_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None


def connection_class(own: ServeLimits) -> type[BoundedConnection]:
    class Connection(BoundedConnection):
        pass

    Connection.limits, Connection.incomplete = own, {}
    return Connection


_TLS = ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers")


def tls_options(options: ServerOptions) -> dict[str, Any]:
    """uvicorn's TLS options, which are named as the server's; empty without a certificate.

    Raises:
        UsageError: the files or ciphers cannot be used, or there is no certificate to go with them.
    """
    given = {name: it for name in _TLS if (it := getattr(options, name))}
    certificate, key = options.ssl_certfile, options.ssl_keyfile
    authorities = options.ssl_ca_certs
    if certificate is None:
        if given:
            raise UsageError(f"{flag_name(next(iter(given)))} goes with --ssl-certfile; give both")
        return {}
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key, password=_refuse_encrypted_key)
    except (OSError, ValueError) as error:
        files = certificate if key is None else f"{certificate} with --ssl-keyfile {key}"
        raise UsageError(f"--ssl-certfile {files} cannot be used: {error}") from None
    try:
        if authorities is not None:
            context.load_verify_locations(authorities)
    except OSError as error:
        raise UsageError(f"--ssl-ca-certs {authorities} cannot be used: {error}") from None
    if options.ssl_cert_reqs and authorities is None:
        raise UsageError("--ssl-cert-reqs needs --ssl-ca-certs, which says whom to trust")
    try:
        context.set_ciphers(options.ssl_ciphers or "DEFAULT")
    except ssl.SSLError:
        raise UsageError(f"--ssl-ciphers: OpenSSL has no cipher {options.ssl_ciphers!r}") from None
    return given


def _refuse_encrypted_key() -> str:
    """Password callback that raises; without one, OpenSSL asks for it on the terminal."""
    raise ValueError("the key is encrypted; give one that is not")


def bind(host: str, port: int, path: Path | None = None) -> socket.socket:
    """Bind a socket to the address, or to the file `path`; raises UsageError if that fails.

    Called before the model is loaded, so that a port in use is reported early. Clients cannot
    connect before `listen`.
    """
    address: Any
    try:
        if path is not None:
            family, kind, protocol, address = socket.AF_UNIX, socket.SOCK_STREAM, 0, str(path)
            _remove_dead(path)
        else:
            family, kind, protocol, _, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
        except BaseException:
            sock.close()
            raise
    except (OSError, OverflowError) as error:
        raise _cannot_listen(path or f"{host}:{port}", error) from error
    return sock


def listen(sock: socket.socket) -> None:
    """Let clients connect; they wait until the event loop runs.

    Raises UsageError if another server, which was bound at the same time, already listens.
    """
    try:
        sock.listen()
    except OSError as error:
        name = sock.getsockname()
        shown = Path(name) if isinstance(name, str) else f"{name[0]}:{name[1]}"
        raise _cannot_listen(shown, error) from error


def _remove_dead(path: Path) -> None:
    """Remove the socket file if no server listens on it; refuses other files."""
    if path.is_dir():  # an empty path is the current directory
        raise UsageError(
            f"--uds {path} is a directory; give the path of a file for the socket, or leave --uds "
            "out to listen on --host and --port"
        )
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()


def _cannot_listen(where: Path | str, error: Exception) -> UsageError:
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        name = "--uds" if isinstance(where, Path) else "--port"
        return UsageError(f"cannot listen on {where}: another program does; choose another {name}")
    return UsageError(f"cannot listen on {where} ({error}); choose another --host, --port or --uds")
