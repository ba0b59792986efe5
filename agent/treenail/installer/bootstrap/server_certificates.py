"""Files of the certificates of servers on the bootstrap host, and of the CA that signs them.

cryptography takes 12 MiB. A forked process uses it, so that the bootstrap host at rest has none.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from treenail import errors, memory
from treenail.installer.bootstrap import certificate_request, forked
from treenail.installer.directory.install_files import InstallFiles

_LIMIT = 64 * 1024  # bytes of a certificate or key of this host
_CERTIFICATE_LIMIT = memory.MIB


@dataclass(frozen=True, slots=True)
class CaFiles:
    """Files of the CA of an installation."""

    certificate: Path
    key: Path
    is_own: bool = True
    """Whether the installation creates it where it is missing."""


def prepare_server_certificate(
    files: InstallFiles,
    ca: CaFiles,
    certificate: Path,
    key: Path,
    names: Sequence[str],
    now: float,
) -> certificate_request.IssuanceResult:
    """Make the two files of a server have a certificate that is valid for long.

    Raises `ConfigError` and `FileError`.
    """
    ca_certificate = files.read(ca.certificate, limit=_LIMIT)
    ca_key = b"" if ca_certificate is None else files.read(ca.key, limit=_LIMIT)
    for path, content in ((ca.certificate, ca_certificate), (ca.key, ca_key)):
        if content is None and not (ca.is_own and path == ca.certificate):
            raise errors.ConfigError(f"cannot read the CA: {path} does not exist")
    request = certificate_request.CertificateRequest(
        str(ca.certificate),
        str(ca.key),
        ca_certificate,
        ca_key or b"",
        files.read(certificate, limit=_LIMIT),
        tuple(names),
        now,
    )
    issued = forked.run_forked(partial(_issue_certificates, request))
    if issued.ca is not None:
        # The certificate is last: a key without one is replaced.
        files.write(ca.key, issued.ca.key)
        files.write(ca.certificate, issued.ca.certificate)
    if issued.server is not None:
        files.remove(certificate)
        files.write(key, issued.server.key)
        files.write(certificate, issued.server.certificate)
    return issued


def check_host_clock(
    files: InstallFiles, paths: Iterable[Path], others: Mapping[str, bytes], now: float
) -> None:
    """Raise `ConfigError` for a certificate that is not valid now.

    ``paths`` are files, which need not exist; ``others`` are certificates by their names.
    """
    certificates = {**_read_certificates(files, paths), **others}
    if any(content.strip() for content in certificates.values()):
        forked.run_forked(partial(_check_certificates, certificates, now))


def _read_certificates(files: InstallFiles, paths: Iterable[Path]) -> dict[str, bytes]:
    contents = ((str(path), files.read(path, limit=_CERTIFICATE_LIMIT)) for path in paths)
    return {name: content for name, content in contents if content is not None}


def _issue_certificates(
    request: certificate_request.CertificateRequest,
) -> certificate_request.IssuanceResult:
    from treenail.installer.bootstrap import installation_ca  # noqa: PLC0415  # cryptography

    return installation_ca.issue_certificates(request)


def _check_certificates(certificates: Mapping[str, bytes], now: float) -> None:
    from treenail.installer.bootstrap import installation_ca  # noqa: PLC0415  # cryptography

    installation_ca.check_certificates(certificates, now)
