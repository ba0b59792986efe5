"""The TLS certificate of the Ignition server; changed files are loaded while it serves."""

import logging
import ssl
from datetime import datetime
from pathlib import Path

from treenail import clocks, errors

log = logging.getLogger(__name__)

WARN_S = 7 * 86_400.0
"""Time before the end of a certificate from which the log warns."""

_EXPLICIT_VERSION, _UTC_TIME = 0xA0, 0x17
"""Tags of DER (X.690)."""

_Signature = tuple[tuple[int, int, int], ...]


class ServerCertificate:
    """A certificate chain and its key in PEM, in two files.

    Only one thread may call `reload_changed_files`.
    """

    def __init__(self, certificate: Path, key: Path) -> None:
        """Load the files; raise `UsageError`."""
        self._certificate = certificate
        self._key = key
        self._expires: float | None = None
        self._last_expiry_text = ""
        self._last_problem = ""
        try:
            self._signature = self._sign_files()
            self._context = self._load_context()
        except (OSError, ValueError) as error:
            raise errors.UsageError(
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
        has_changed = False
        try:
            # Before the files are read: a change during the load is seen the next time.
            signature = self._sign_files()
            if signature == self._signature:
                return
            has_changed, self._signature = True, signature
            self._context = self._load_context()
        except (OSError, ValueError) as error:
            problem = _describe_error(error)
            if has_changed or problem != self._last_problem:
                log.warning(
                    "cannot load certificate %s with key %s, continuing with the old one: %s",
                    self._certificate,
                    self._key,
                    problem,
                )
            self._last_problem = problem
            if isinstance(error, FileNotFoundError):
                # Load it when it is there, also with the size and time that it had before.
                self._signature = ()
        else:
            self._last_problem = ""
            log.info("loaded certificate %s", self._certificate)

    def check_expiry(self, now: float) -> None:
        """Log that machines refuse the certificate, or soon will; once for each."""
        text = _describe_expiry(self._expires, now)
        if text and text != self._last_expiry_text:
            log.warning(
                "certificate %s %s; renew it, and the server loads it", self._certificate, text
            )
        self._last_expiry_text = text

    def _sign_files(self) -> _Signature:
        statuses = (path.stat() for path in (self._certificate, self._key))
        return tuple((status.st_ino, status.st_size, status.st_mtime_ns) for status in statuses)

    def _load_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        # A machine connects once, so that it never resumes a session.
        context.num_tickets = 0
        # Without a password OpenSSL would ask for that of an encrypted key on the terminal.
        context.load_cert_chain(self._certificate, self._key, password=lambda: "")
        self._expires = read_expiry(self._certificate.read_text("ascii", "replace"))
        return context


def _describe_error(error: OSError | ValueError) -> str:
    if isinstance(error, ssl.SSLError):
        reason = (error.reason or "").replace("_", " ").lower()
        return reason or "expected PEM"
    return (isinstance(error, OSError) and error.strerror) or str(error)


def _describe_expiry(expires: float | None, now: float) -> str:
    if expires is None or now < expires - WARN_S:
        return ""
    verb = "expires" if now < expires else "expired, and machines refuse it: it ended"
    return f"{verb} at {clocks.format_rfc3339(expires)}"


def read_expiry(text: str) -> float | None:
    """Return the end of the first certificate in PEM, in seconds since the epoch.

    None for one that cannot be read: OpenSSL decides whether a certificate is valid.
    """
    _, begin, rest = text.partition(ssl.PEM_HEADER)
    body, end, _ = rest.partition(ssl.PEM_FOOTER)
    try:
        content = ssl.PEM_cert_to_DER_cert(f"{begin}{body}{end}")
        # Certificate, tbsCertificate: version [0], serial, algorithm, issuer, validity (RFC 5280).
        fields = _list_elements(_get_first(_get_first(content)))
        if fields[0][0] == _EXPLICIT_VERSION:
            fields = fields[1:]
        tag, moment = _list_elements(fields[3][1])[1]
        return _parse_time(tag, moment.decode("ascii"))
    except (ValueError, IndexError):
        return None


def _get_first(content: bytes) -> bytes:
    return _list_elements(content)[0][1]


def _list_elements(content: bytes) -> list[tuple[int, bytes]]:
    """Return tag and content of each DER element; raise IndexError or ValueError."""
    elements = []
    at = 0
    while at < len(content):
        tag, length, at = content[at], content[at + 1], at + 2
        # The long form of a length: the number of its octets comes first (X.690, 8.1.3.5).
        if length & 0x80:
            size = length & 0x7F
            length = int.from_bytes(content[at : at + size], "big")
            at += size
        elements.append((tag, content[at : at + length]))
        at += length
    return elements


def _parse_time(tag: int, text: str) -> float:
    # UTCTime has two digits of the year: from 50 they are of 19YY (RFC 5280, 4.1.2.5.1).
    if tag == _UTC_TIME:
        text = ("19" if int(text[:2]) >= 50 else "20") + text
    return datetime.strptime(f"{text[:-1]}+0000", "%Y%m%d%H%M%S%z").timestamp()
