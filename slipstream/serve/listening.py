"""Where a server listens: sockets and encryption."""

import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.core.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Tls:
    """How connections are encrypted.

    Args:
        certificate, key: PEM files; the key may be in the certificate's file.
        authorities: PEM file of those whose certificates of clients are accepted.
        client_certificates: 0: none are asked for, 1: they may be given, 2: they must be.
        ciphers: up to TLS 1.2, as OpenSSL writes them.

    Raises:
        UsageError: the files or ciphers cannot be used.
    """

    certificate: Path
    key: Path | None = None
    authorities: Path | None = None
    client_certificates: int = 0
    ciphers: str | None = None

    def __post_init__(self) -> None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(self.certificate, self.key, password=_refuse_encrypted_key)
        except (OSError, ValueError) as error:
            raise UsageError(
                f"--ssl-certfile {self.certificate} with --ssl-keyfile {self.key} cannot be used: "
                f"{error}"
            ) from None
        try:
            if self.authorities is not None:
                context.load_verify_locations(self.authorities)
        except OSError as error:
            raise UsageError(f"--ssl-ca-certs {self.authorities} cannot be used: {error}") from None
        if self.client_certificates and self.authorities is None:
            raise UsageError("--ssl-cert-reqs needs --ssl-ca-certs, which says whom to trust")
        try:
            context.set_ciphers(self.ciphers or "DEFAULT")
        except ssl.SSLError:
            raise UsageError(f"--ssl-ciphers knows no cipher {self.ciphers!r}") from None

    def options(self) -> dict[str, Any]:
        """For uvicorn, which has ciphers of its own where none are given."""
        given = {
            "ssl_certfile": self.certificate,
            "ssl_keyfile": self.key,
            "ssl_ca_certs": self.authorities,
            "ssl_cert_reqs": self.client_certificates,
            "ssl_ciphers": self.ciphers,
        }
        return {name: it for name, it in given.items() if it is not None}


def _refuse_encrypted_key() -> str:
    """Without it, the library asks for the password on the terminal."""
    raise ValueError("the key is encrypted; give one that is not")


def bind(host: str, port: int, path: Path | None = None) -> socket.socket:
    """A socket that is bound, to a file where `path` is given; UsageError where that fails.

    Done before a model is loaded, so that a port in use is known at once. Nobody can connect until
    `listen`.
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

    Raises UsageError where another server, which was bound at the same time, listens already.
    """
    try:
        sock.listen()
    except OSError as error:
        name = sock.getsockname()
        shown = name if isinstance(name, str) else f"{name[0]}:{name[1]}"
        raise _cannot_listen(shown, error) from error


def _remove_dead(path: Path) -> None:
    """Remove the socket of a server that is gone; nothing else."""
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()


def _cannot_listen(where: object, error: Exception) -> UsageError:
    return UsageError(f"cannot listen on {where} ({error}); choose another --host, --port or --uds")
