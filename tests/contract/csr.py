"""Certificate signing requests of kubelets."""

import base64
from collections.abc import Sequence
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import AttributeOID, NameOID

Json = dict[str, Any]
USAGES = ("digital signature", "client auth")
SIGNER = "kubernetes.io/kube-apiserver-client-kubelet"
REQUESTS = "/apis/certificates.k8s.io/v1/certificatesigningrequests"


def make_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def encode_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def make_pkcs10(
    common_name: str,
    key: ec.EllipticCurvePrivateKey | None = None,
    *,
    groups: Sequence[str] = ("system:nodes",),
    names: Sequence[str] = (),
    units: Sequence[str] = (),
    extensions: Sequence[x509.ExtensionType] = (),
    password: bytes = b"",
) -> bytes:
    subject = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups]
    # Without the limit of X.509, as Go writes it; cryptography then warns.
    subject.append(x509.NameAttribute(NameOID.COMMON_NAME, common_name, _validate=False))
    subject += [x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, unit) for unit in units]
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name(subject))
    if names:
        san = x509.SubjectAlternativeName([x509.DNSName(name) for name in names])
        builder = builder.add_extension(san, critical=False)
    for extension in extensions:
        builder = builder.add_extension(extension, critical=False)
    if password:
        builder = builder.add_attribute(AttributeOID.CHALLENGE_PASSWORD, password)
    signed = builder.sign(key or make_key(), hashes.SHA256())
    return signed.public_bytes(serialization.Encoding.PEM)


def make_two_attributes(common_name: str, *extensions: x509.ExtensionType) -> bytes:
    """Build a request with an attribute for each extension, which no library does."""
    key = make_key()
    requests = [
        x509.load_pem_x509_csr(make_pkcs10(common_name, key, extensions=[extension]))
        for extension in extensions
    ]
    values = [
        encode_der(0x30, attribute.value) for each in requests for attribute in each.attributes
    ]
    public_key = key.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    identifier = bytes.fromhex("06092a864886f70d01090e")
    attributes = [encode_der(0x30, identifier, encode_der(0x31, value)) for value in values]
    subject = requests[0].subject.public_bytes()
    info = encode_der(
        0x30, b"\x02\x01\x00", subject, public_key, encode_der(0xA0, *sorted(attributes))
    )
    algorithm = bytes.fromhex("300a06082a8648ce3d040302")
    signature = encode_der(0x03, b"\x00", key.sign(info, ec.ECDSA(hashes.SHA256())))
    request = x509.load_der_x509_csr(encode_der(0x30, info, algorithm, signature))
    return request.public_bytes(serialization.Encoding.PEM)


def encode_der(tag: int, *parts: bytes) -> bytes:
    """Encode a value of ASN.1."""
    content = b"".join(parts)
    size = len(content)
    count = 0 if size < 128 else 1 if size < 256 else 2
    prefix = bytes([0x80 | count]) + size.to_bytes(count, "big") if count else bytes([size])
    return bytes([tag]) + prefix + content


def make_request(
    name: str, content: bytes, *, usages: Sequence[str] = USAGES, signer: str = SIGNER
) -> Json:
    return {
        "apiVersion": "certificates.k8s.io/v1",
        "kind": "CertificateSigningRequest",
        "metadata": {"name": name},
        "spec": {
            "request": base64.b64encode(content).decode(),
            "signerName": signer,
            "usages": list(usages),
        },
    }
