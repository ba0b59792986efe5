"""Credentials of kubelets in a cluster that one administers: by CertificateSigningRequests."""

import base64
from pathlib import Path

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.contract.client import Cluster, Json
from tests.waiting import wait_until
from treenail_lab.apiserver.access.certificates import write_private_file

_REQUESTS = "/apis/certificates.k8s.io/v1/certificatesigningrequests"
_SIGNER = "kubernetes.io/kube-apiserver-client-kubelet"
_LIMIT_S = 60.0


class NodeAccess:
    """Writes kubeconfigs into a directory. The cluster needs a kube-controller-manager."""

    def __init__(self, kubeconfig: Path, directory: Path) -> None:
        self.kubeconfig = kubeconfig
        self._directory = directory
        self._admin = Cluster.of_kubeconfig(kubeconfig)

    def write_node_kubeconfig(self, node: str) -> Path:
        """Request a signed client certificate of the node, and write its kubeconfig."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._sign(node, build_request(node, key))
        pem = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        document: Json = yaml.safe_load(self.kubeconfig.read_text("utf-8"))
        for user in document["users"]:
            user["user"] = {
                "client-certificate-data": certificate,
                "client-key-data": base64.b64encode(pem).decode(),
            }
        path = self._directory / f"{node}.kubeconfig"
        write_private_file(path, yaml.safe_dump(document).encode())
        return path

    def _sign(self, node: str, request: bytes) -> str:
        """Return the certificate, base64 of PEM."""
        spec = {
            "request": base64.b64encode(request).decode(),
            "signerName": _SIGNER,
            "usages": ["digital signature", "client auth"],
        }
        self._admin.post(_REQUESTS, {"metadata": {"name": node}, "spec": spec}).ok()
        try:
            condition = {"type": "Approved", "status": "True", "reason": "Test", "message": ""}
            approval = {"status": {"conditions": [condition]}}
            self._admin.patch(f"{_REQUESTS}/{node}/approval", approval).ok()

            def read_certificate() -> str:
                status = self._admin.get(f"{_REQUESTS}/{node}").ok()["status"]
                return str(status.get("certificate") or "")

            return wait_until(read_certificate, limit_s=_LIMIT_S)
        finally:
            self._admin.delete(f"{_REQUESTS}/{node}")


def build_request(node: str, key: ec.EllipticCurvePrivateKey) -> bytes:
    """Build the request of a kubelet in PEM."""
    subject = x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, "system:nodes"),
            x509.NameAttribute(NameOID.COMMON_NAME, f"system:node:{node}"),
        ]
    )
    builder = x509.CertificateSigningRequestBuilder().subject_name(subject)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
