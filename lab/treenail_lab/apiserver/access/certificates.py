"""The lab's certificate authority, and kubeconfigs with its certificates.

The keys are EC keys: making RSA keys takes longer than starting the server.
"""

import base64
import datetime as dt
import ipaddress
import json
import os
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_VALIDITY = dt.timedelta(days=3650)
_SKEW = dt.timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class CertificateIdentity:
    """A certificate and its private key, PEM."""

    certificate: bytes
    private_key: bytes


class CertificateAuthority:
    """Signs certificates; its key is made once in a directory and reused."""

    def __init__(self, directory: Path) -> None:
        self.file = directory / "ca.crt"
        self._key_file = directory / "ca.key"
        if self.file.exists() and self._key_file.exists():
            key = serialization.load_pem_private_key(self._key_file.read_bytes(), password=None)
            if not isinstance(key, ec.EllipticCurvePrivateKey):
                raise ValueError(f"{self._key_file}: not an EC key")
            self._key = key
            self._certificate = x509.load_pem_x509_certificate(self.file.read_bytes())
            return
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._certificate = self._sign_certificate(
            _build_name("treenail-lab", []), self._key, authority=True
        )
        write_private_file(self._key_file, _encode_key(self._key))
        self.file.write_bytes(self.pem)

    @property
    def pem(self) -> bytes:
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    def make_server_identity(self) -> CertificateIdentity:
        """Make a certificate for the server on loopback."""
        key = ec.generate_private_key(ec.SECP256R1())
        names: list[x509.GeneralName] = [
            x509.DNSName("localhost"),
            x509.DNSName("kubernetes.default.svc"),
            x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
            x509.IPAddress(ipaddress.ip_address("::1")),
        ]
        certificate = self._sign_certificate(
            _build_name("treenail-lab-apiserver", []), key, server_names=names
        )
        return CertificateIdentity(
            certificate.public_bytes(serialization.Encoding.PEM), _encode_key(key)
        )

    def make_client_identity(self, user: str, groups: Sequence[str]) -> CertificateIdentity:
        """Make a certificate that authenticates as a user in groups."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._sign_certificate(_build_name(user, groups), key)
        return CertificateIdentity(
            certificate.public_bytes(serialization.Encoding.PEM), _encode_key(key)
        )

    def sign_client_request(self, request: bytes, lifetime: dt.timedelta) -> bytes:
        """Sign a PKCS #10 request in PEM as a client certificate; return it in PEM."""
        parsed = x509.load_pem_x509_csr(request)
        key = parsed.public_key()
        if not isinstance(key, ec.EllipticCurvePublicKey | rsa.RSAPublicKey):
            raise TypeError("the key of the request is neither an EC nor an RSA key")
        now = dt.datetime.now(dt.UTC)
        signed = (
            x509.CertificateBuilder()
            .subject_name(parsed.subject)
            .issuer_name(self._certificate.subject)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _SKEW)
            .not_valid_after(now + lifetime)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_build_key_usage(authority=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([_CLIENT]), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return signed.public_bytes(serialization.Encoding.PEM)

    def make_server_context(self, directory: Path) -> ssl.SSLContext:
        """Make the TLS context of the server, which accepts client certificates of this CA."""
        identity = self.make_server_identity()
        chain = directory / "server.pem"
        write_private_file(chain, identity.private_key + identity.certificate)
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(self.file))
        context.verify_mode = ssl.CERT_OPTIONAL
        context.load_cert_chain(chain)
        return context

    def _sign_certificate(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        *,
        server_names: Sequence[x509.GeneralName] = (),
        authority: bool = False,
    ) -> x509.Certificate:
        now = dt.datetime.now(dt.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(subject if authority else self._certificate.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _SKEW)
            .not_valid_after(now + _VALIDITY)
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            .add_extension(_build_key_usage(authority=authority), critical=True)
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
            )
        )
        if not authority:
            purpose = ExtendedKeyUsageOID.SERVER_AUTH if server_names else _CLIENT
            builder = builder.add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
            builder = builder.add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
        if server_names:
            builder = builder.add_extension(
                x509.SubjectAlternativeName(server_names), critical=False
            )
        return builder.sign(self._key, hashes.SHA256())


_CLIENT = ExtendedKeyUsageOID.CLIENT_AUTH


def render_kubeconfig(
    *,
    server: str,
    authority: bytes,
    user: str,
    identity: CertificateIdentity | None = None,
    token: str = "",
) -> str:
    """Render a kubeconfig with embedded credentials, as JSON, which is YAML."""
    credential = {"token": token} if token else {}
    if identity is not None:
        credential |= {
            "client-certificate-data": _encode_base64(identity.certificate),
            "client-key-data": _encode_base64(identity.private_key),
        }
    cluster = {"server": server, "certificate-authority-data": _encode_base64(authority)}
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "lab", "cluster": cluster}],
        "users": [{"name": user, "user": credential}],
        "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": user}}],
        "current-context": "lab",
    }
    return json.dumps(document, indent=2) + "\n"


def write_private_file(path: Path, content: bytes) -> None:
    """Replace a file that only its owner can read, at every moment."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
    fresh.replace(path)


def _encode_base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _encode_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _build_name(user: str, groups: Sequence[str]) -> x509.Name:
    return x509.Name(
        [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups]
        + [x509.NameAttribute(NameOID.COMMON_NAME, user)]
    )


def _build_key_usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        encipher_only=False,
        decipher_only=False,
    )
