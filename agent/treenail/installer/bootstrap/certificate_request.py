"""Input and output of the process that makes certificates. Pure."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class CertificateRequest:
    """Names of a server, and the certificates that exist."""

    certificate_file: str
    """For messages, as `key_file`."""
    key_file: str
    ca_certificate: bytes | None
    """PEM; None to create a CA."""
    ca_key: bytes = field(repr=False)
    server_certificate: bytes | None
    """PEM of an earlier start."""
    names: tuple[str, ...]
    """DNS names and IP addresses of the server."""
    now: float


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A certificate and its private key, PEM."""

    certificate: bytes
    key: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class IssuanceResult:
    """New certificates and keys; None where those of an earlier start are kept."""

    ca_pem: str
    """Certificate of the CA."""
    ca: KeyPair | None = None
    server: KeyPair | None = None
