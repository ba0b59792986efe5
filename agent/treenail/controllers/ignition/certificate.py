"""The TLS certificate of the Ignition server; changed files are loaded while it serves."""

import logging
import ssl
from pathlib import Path

from treenail.errors import UsageError

log = logging.getLogger(__name__)

_Signature = tuple[tuple[int, int, int], ...]


class ServerCertificate:
    """A certificate chain and its key in PEM, in two files.

    Only one thread may call `reload_changed_files`.
    """

    def __init__(self, certificate: Path, key: Path) -> None:
        """Load the files; raise `UsageError`."""
        self._certificate = certificate
        self._key = key
        try:
            self._signature = self._sign_files()
            self._context = self._load_context()
        except (OSError, ValueError) as error:
            raise UsageError(
                f"cannot load certificate {certificate} with key {key}: {_describe_error(error)}",
                remedy="name the PEM files with --certificate and --key",
            ) from error

    @property
    def context(self) -> ssl.SSLContext:
        """The context for new connections."""
        return self._context

    def reload_changed_files(self) -> None:
        """Load the files if one of them changed; log an error and continue with the old ones.

        A new context replaces the old one, because connections in progress use that.
        """
        try:
            # Before the files are read: a change during the load is seen the next time.
            signature = self._sign_files()
            if signature == self._signature:
                return
            self._signature = signature
            self._context = self._load_context()
        except (OSError, ValueError) as error:
            if self._signature:
                log.warning(
                    "cannot load certificate %s with key %s, continuing with the old one: %s",
                    self._certificate,
                    self._key,
                    _describe_error(error),
                )
            if isinstance(error, FileNotFoundError):
                # Log a missing file once, and load it when it is there.
                self._signature = ()
        else:
            log.info("loaded certificate %s", self._certificate)

    def _sign_files(self) -> _Signature:
        found = (path.stat() for path in (self._certificate, self._key))
        return tuple((each.st_ino, each.st_size, each.st_mtime_ns) for each in found)

    def _load_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        # A machine connects once, so that it never resumes a session.
        context.num_tickets = 0
        # Without a password OpenSSL would ask for that of an encrypted key on the terminal.
        context.load_cert_chain(self._certificate, self._key, password=lambda: "")
        return context


def _describe_error(error: OSError | ValueError) -> str:
    if isinstance(error, ssl.SSLError):
        reason = (error.reason or "").replace("_", " ").lower()
        return reason or "expected PEM"
    return (isinstance(error, OSError) and error.strerror) or str(error)
