"""Certificate signing requests of kubelets."""

import base64
from collections.abc import Sequence
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

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
) -> bytes:
    subject = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups]
    # Without the limit of X.509, as Go writes it; cryptography then warns.
    subject.append(x509.NameAttribute(NameOID.COMMON_NAME, common_name, _validate=False))
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name(subject))
    if names:
        san = x509.SubjectAlternativeName([x509.DNSName(name) for name in names])
        builder = builder.add_extension(san, critical=False)
    signed = builder.sign(key or make_key(), hashes.SHA256())
    return signed.public_bytes(serialization.Encoding.PEM)


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
