"""TLS context and Authorization header of a connection, reloaded when their files change.

The kubelet replaces /var/lib/kubelet/pki/kubelet-client-current.pem long before the certificate
expires, and a service account token every hour. A check is one ``stat`` per file. When a new file
is unusable the last good one stays in use, and the error is logged once.
"""

import logging
import os
import re
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from treenail.errors import UnreachableError
from treenail.kube.transport.kubeconfig import ApiServerConfig

log = logging.getLogger(__name__)

T = TypeVar("T")
_FileStamps = tuple[tuple[int, int, int], ...]


class ApiCredentials:
    """TLS context and Authorization header for a transport. Thread-safe."""

    def __init__(self, config: ApiServerConfig) -> None:
        self._config = config
        files = [p for p in (config.ca, config.certificate, config.key) if p]
        self._context = _ReloadedValue(
            config, tuple(p for p in files if isinstance(p, str)), _make_tls_context
        )
        self._token = _ReloadedValue(
            config, (config.token_file,) if config.token_file else (), _read_token
        )

    def get_tls_context(self) -> ssl.SSLContext:
        """Return the TLS context: the same object while no file changes.

        Raises UnreachableError when a file is missing or unusable and no earlier one was good.
        """
        return self._context.get_value()

    def get_authorization(self) -> str:
        """Return the Authorization header; empty with a client certificate."""
        token = self._token.get_value()
        return f"Bearer {token}" if token else ""


class _ReloadedValue(Generic[T]):
    """A value made from files, and made again when a file changes."""

    def __init__(
        self,
        config: ApiServerConfig,
        files: tuple[str, ...],
        make: Callable[[ApiServerConfig], T],
    ) -> None:
        self._config = config
        # Each request looks at these files, and building a Path is slower than stat(2).
        self._files = tuple((name, config.locate(name)) for name in files)
        self._make = make
        self._lock = threading.Lock()
        self._last_stamps: _FileStamps | None = None
        self._last_good: tuple[T] | None = None

    def get_value(self) -> T:
        with self._lock:
            try:
                stamp = tuple(self._stat_file(name, path) for name, path in self._files)
                if self._last_good is None or stamp != self._last_stamps:
                    self._last_good = (self._make(self._config),)
                    self._last_stamps = stamp
            except UnreachableError as error:
                if self._last_good is None:
                    raise
                if self._last_stamps is not None:
                    log.warning("using the last good credentials: %s", error)
                self._last_stamps = None
            return self._last_good[0]

    def _stat_file(self, name: str, path: Path) -> tuple[int, int, int]:
        try:
            # Links are followed: the kubelet replaces files of a projected volume by a new link
            # ..data.
            status = path.stat()
        except OSError as error:
            raise _make_error(self._config, name, error.strerror or "read error") from error
        except ValueError as error:  # a NUL character in the path
            raise _make_error(self._config, name, str(error)) from error
        return (status.st_mtime_ns, status.st_ino, status.st_size)


def _make_tls_context(config: ApiServerConfig) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # The default of kube-apiserver (--tls-min-version).
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # kube-apiserver also offers h2, which this client does not speak.
    context.set_alpn_protocols(["http/1.1"])
    if not config.should_verify_tls:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    elif config.ca:
        _load_ca(config, context)
    else:
        context.load_default_certs()
    if config.certificate:
        _load_client_certificate(config, context)
    return context


def _load_ca(config: ApiServerConfig, context: ssl.SSLContext) -> None:
    try:
        context.load_verify_locations(cadata=_read_pem(config, config.ca).decode("ascii"))
    except (ssl.SSLError, UnicodeDecodeError, ValueError) as error:
        raise _make_error(config, config.ca, "no CA certificate in PEM") from error


def _load_client_certificate(config: ApiServerConfig, context: ssl.SSLContext) -> None:
    pem = _read_pem(config, config.certificate)
    if config.key != config.certificate:
        pem = pem + b"\n" + _read_pem(config, config.key)
    # SSLContext.load_cert_chain takes only paths (ssl.py). A memfd has one, is private to this
    # process, and disappears when closed.
    memory = os.memfd_create("client", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(memory), "wb") as writable:
            writable.write(pem)
        context.load_cert_chain(f"/proc/self/fd/{memory}", password=_refuse_passphrase)
    except (ssl.SSLError, OSError, ValueError):
        # Not chained: no frame with the key may get into a traceback.
        problem = "no usable client certificate with its key in PEM"
        raise _make_error(config, config.certificate, problem) from None
    finally:
        os.close(memory)


def _refuse_passphrase() -> str:
    """Raise, because OpenSSL would otherwise prompt for the passphrase on the terminal."""
    raise ValueError("the key is encrypted")


def _read_token(config: ApiServerConfig) -> str:
    if not config.token_file:
        return config.token
    raw = _read_pem(config, config.token_file).strip()
    token = raw.decode("ascii", errors="replace")
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise _make_error(config, config.token_file, "not one line of printable ASCII")
    return token


def _read_pem(config: ApiServerConfig, pem: str | bytes) -> bytes:
    if isinstance(pem, bytes):
        return pem
    try:
        return config.locate(pem).read_bytes()
    except OSError as error:
        raise _make_error(config, pem, error.strerror or "read error") from error


def _make_error(config: ApiServerConfig, pem: str | bytes, problem: str) -> UnreachableError:
    name = pem if isinstance(pem, str) else "inline PEM data"
    return UnreachableError(
        f"cannot use {name} of {config.source}: {problem}",
        remedy=f"fix {name}; the next request reads it again",
    )


_PEM_CERTIFICATE = re.compile(
    rb"-----BEGIN CERTIFICATE-----[A-Za-z0-9+/=\s]+-----END CERTIFICATE-----"
)
# Common name (2.5.4.3) in DER, as UTF8String or PrintableString, with the two bytes of its length
# (X.690, 8.1.3). The package cryptography would do the same with 20 MiB of memory.
_NODE_NAME = re.compile(
    rb"\x06\x03\x55\x04\x03[\x0c\x13](?:\x81|\x82(.))?(.)system:node:", re.DOTALL
)
_NODE_PREFIX = len("system:node:")


def read_node_name(config: ApiServerConfig) -> str:
    """Return the Node in a kubelet's client certificate; empty for another user or none.

    Raises UnreachableError for a file that is missing or has no certificate.
    """
    if not config.certificate:
        return ""
    # As in TLS, the first certificate is the client's. The others are of its issuers.
    pem = _PEM_CERTIFICATE.search(_read_pem(config, config.certificate))
    try:
        certificate = ssl.PEM_cert_to_DER_cert(pem[0].decode("ascii")) if pem else b""
    except ValueError:
        certificate = b""
    if not certificate:
        raise _make_error(config, config.certificate, "no certificate in PEM")
    name = _NODE_NAME.search(certificate)
    if name is None:
        return ""
    end = name.end() - _NODE_PREFIX + int.from_bytes((name[1] or b"") + name[2])
    return certificate[name.end() : end].decode("ascii", "replace")
