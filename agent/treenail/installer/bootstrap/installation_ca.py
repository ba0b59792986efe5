"""The CA of an installation, and the certificates of servers on the bootstrap host.

The CA is given, such as the root CA of the OpenShift installer, or created once and kept. The keys
are EC keys: making RSA keys takes seconds. Certificates are checked before anything starts, because
they show a wrong clock of the host. `server_certificates` has the files.
"""

import datetime as dt
import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import replace

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from treenail.errors import ConfigError
from treenail.installer.bootstrap import certificate_request

_CA_DAYS, _SERVER_DAYS = 3650, 365
_RENEW_DAYS = 30
_SKEW = dt.timedelta(hours=25)
"""A machine whose clock is a day behind accepts the certificates."""
_CA_NAME = "treenail-installation"

_Key = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey


class InstallationCa:
    """Signs the certificates of servers on the bootstrap host."""

    def __init__(self, certificate: x509.Certificate, key: _Key, *, where: str) -> None:
        self._certificate = certificate
        self._key = key
        self._where = where

    @property
    def pem(self) -> str:
        """The certificate of the CA."""
        return self._certificate.public_bytes(serialization.Encoding.PEM).decode()

    def make_key_pair(self, names: Sequence[str], now: float) -> certificate_request.KeyPair:
        """Make a certificate for DNS names and IP addresses.

        Raises `ConfigError` if the CA is not valid now.
        """
        moment = _convert_time(now)
        begin, end = read_validity(self._certificate)
        if not begin <= moment < end:
            raise ConfigError(
                f"cannot make a certificate: that of the CA in {self._where} is valid from "
                f"{format_moment(begin)} to {format_moment(end)}, and this host's clock shows "
                f"{format_moment(moment)}",
                remedy="correct the clock with: chronyc makestep; or name another CA",
            )
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = (
            _begin_certificate(_make_name(names[0]), self._certificate.subject, key)
            # A certificate that outlives its CA is refused by some clients.
            .not_valid_after(min(moment + dt.timedelta(days=_SERVER_DAYS), end))
            .not_valid_before(max(moment - _SKEW, begin))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_make_key_usage(is_authority=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.SubjectAlternativeName(_parse_names(names)), critical=False)
            .add_extension(_make_key_identifier(self._certificate), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return certificate_request.KeyPair(
            certificate.public_bytes(serialization.Encoding.PEM), _encode_key(key)
        )

    def can_reuse(self, certificate: bytes, names: Sequence[str], now: float) -> bool:
        """Return whether a certificate is of this CA, has these names and is valid for long."""
        try:
            parsed = x509.load_pem_x509_certificate(certificate)
            self._verify_signature(parsed)
            listed = parsed.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        except (ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound):
            return False
        moment, (begin, end) = _convert_time(now), read_validity(parsed)
        is_valid = begin <= moment < end - dt.timedelta(days=_RENEW_DAYS)
        return is_valid and list(listed.value) == _parse_names(names)

    def _verify_signature(self, certificate: x509.Certificate) -> None:
        """Raise `InvalidSignature` for a certificate of another CA."""
        signature, content = certificate.signature, certificate.tbs_certificate_bytes
        if isinstance(self._key, rsa.RSAPrivateKey):
            self._key.public_key().verify(signature, content, padding.PKCS1v15(), hashes.SHA256())
        else:
            self._key.public_key().verify(signature, content, ec.ECDSA(hashes.SHA256()))


def issue_certificates(
    request: certificate_request.CertificateRequest,
) -> certificate_request.IssuanceResult:
    """Return what is missing; raise `ConfigError`."""
    ca = None
    if request.ca_certificate is None:
        request = create_ca(request)
        ca = certificate_request.KeyPair(request.ca_certificate or b"", request.ca_key)
    authority = load_ca(request)
    known, names, now = request.server_certificate, request.names, request.now
    if known is not None and authority.can_reuse(known, names, now):
        return certificate_request.IssuanceResult(authority.pem, ca)
    server = authority.make_key_pair(names, now)
    return certificate_request.IssuanceResult(authority.pem, ca, server)


def load_ca(request: certificate_request.CertificateRequest) -> InstallationCa:
    """Return the CA of a request; raise `ConfigError`."""
    certificate_file, key_file = request.certificate_file, request.key_file
    try:
        # The first one signs; others may follow.
        parsed = x509.load_pem_x509_certificate(request.ca_certificate or b"")
        loaded = serialization.load_pem_private_key(request.ca_key, password=None)
    except (ValueError, TypeError) as error:
        # Without its cause, which may contain a part of the key.
        raise ConfigError(
            f"cannot use the CA in {certificate_file} and {key_file}: expected a certificate and "
            "an unencrypted private key in PEM"
        ) from error
    if not isinstance(loaded, ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey):
        raise ConfigError(f"cannot use the CA in {key_file}: expected an EC or RSA key")
    public = parsed.public_key()
    if not isinstance(public, ec.EllipticCurvePublicKey | rsa.RSAPublicKey) or (
        _encode_public_key(loaded.public_key()) != _encode_public_key(public)
    ):
        raise ConfigError(
            f"cannot use the CA in {certificate_file}: {key_file} is the key of another certificate"
        )
    return InstallationCa(parsed, loaded, where=certificate_file)


def create_ca(
    request: certificate_request.CertificateRequest,
) -> certificate_request.CertificateRequest:
    """Return the request with a new CA."""
    key = ec.generate_private_key(ec.SECP256R1())
    moment = _convert_time(request.now)
    name = _make_name(_CA_NAME)
    certificate = (
        _begin_certificate(name, name, key)
        .not_valid_before(moment - _SKEW)
        .not_valid_after(moment + dt.timedelta(days=_CA_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(_make_key_usage(is_authority=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    content = certificate.public_bytes(serialization.Encoding.PEM)
    return replace(request, ca_certificate=content, ca_key=_encode_key(key))


def _begin_certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .add_extension(identifier, critical=False)
    )


def _make_key_identifier(authority: x509.Certificate) -> x509.AuthorityKeyIdentifier:
    try:
        extension = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier)
    except x509.ExtensionNotFound:
        key = authority.public_key()
        if not isinstance(key, ec.EllipticCurvePublicKey | rsa.RSAPublicKey):
            raise TypeError("the CA has neither an EC nor an RSA key") from None
        return x509.AuthorityKeyIdentifier.from_issuer_public_key(key)
    return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(extension.value)


def _parse_names(names: Sequence[str]) -> list[x509.GeneralName]:
    return list(map(_parse_name, dict.fromkeys(names)))


def _parse_name(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _make_name(text: str) -> x509.Name:
    # A common name has at most 64 characters (RFC 5280).
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _make_key_usage(*, is_authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        encipher_only=False,
        decipher_only=False,
    )


def _encode_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _encode_public_key(key: ec.EllipticCurvePublicKey | rsa.RSAPublicKey) -> bytes:
    return key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def _convert_time(seconds: float) -> dt.datetime:
    return dt.datetime.fromtimestamp(seconds, dt.UTC).replace(microsecond=0)


def check_certificates(certificates: Mapping[str, bytes], now: float) -> None:
    """Raise `ConfigError` for certificates that are not valid now; empty contents are skipped.

    A wrong clock shows itself here, before machines refuse TLS without a readable reason.
    """
    moment = dt.datetime.fromtimestamp(now, dt.UTC)
    problems = []
    for name, content in certificates.items():
        for begin, end in _list_validities(name, content):
            if not begin <= moment < end:
                problems.append(
                    f"the certificate {name} is valid from {format_moment(begin)} to "
                    f"{format_moment(end)}"
                )
                break
    if problems:
        raise ConfigError(
            f"cannot use certificates with this host's clock, which shows {format_moment(moment)}: "
            + "; ".join(problems),
            remedy="see whether the clock is right: timedatectl; correct it with: chronyc "
            "makestep; otherwise create the certificates again",
        )


def _list_validities(name: str, content: bytes) -> list[tuple[dt.datetime, dt.datetime]]:
    if not content.strip():
        return []
    try:
        return [
            read_validity(certificate) for certificate in x509.load_pem_x509_certificates(content)
        ]
    except ValueError as error:
        raise ConfigError(
            f"cannot read the certificate {name}: expected PEM",
            remedy=f"check it with: openssl x509 -noout -text -in {name}",
        ) from error


def read_validity(certificate: x509.Certificate) -> tuple[dt.datetime, dt.datetime]:
    """Return begin and end, in UTC."""
    if hasattr(certificate, "not_valid_before_utc"):
        return certificate.not_valid_before_utc, certificate.not_valid_after_utc
    # Before cryptography 42: naive, in UTC.
    begin, end = certificate.not_valid_before, certificate.not_valid_after
    return begin.replace(tzinfo=dt.UTC), end.replace(tzinfo=dt.UTC)


def format_moment(moment: dt.datetime) -> str:
    """Format a time in UTC, to the second."""
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
