"""Join of a kubelet with a bootstrap kubeconfig: TLS bootstrapping, and its Node.

As in Kubernetes (pkg/kubelet/certificate/bootstrap), the kubelet makes a key, requests a client
certificate with the bootstrap token, and waits until a controller approves and signs the request.
Then it registers its Node with the certificate.
"""

import base64
import hashlib
import logging
from collections.abc import Callable
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from treenail.config import node_paths
from treenail.errors import AlreadyExistsError, ClusterError, ConfigError, NotFoundError
from treenail.kube.api_client import Client, Json
from treenail.kube.resources import CERTIFICATESIGNINGREQUESTS, NODES
from treenail.kube.transport.kubeconfig import read_kubeconfig
from treenail_lab.apiserver.access.authentication import NODE_PREFIX
from treenail_lab.apiserver.access.authentication import NODES as NODES_GROUP
from treenail_lab.apiserver.access.certificates import (
    CertificateIdentity,
    render_kubeconfig,
    write_private_file,
)
from treenail_lab.apiserver.objects import find_value

log = logging.getLogger(__name__)

KUBECONFIG = "var/lib/kubelet/kubeconfig"
_PENDING_KEY = "var/lib/kubelet/pki/kubelet-client.key.tmp"
_SIGNER = "kubernetes.io/kube-apiserver-client-kubelet"
_USAGES = ("digital signature", "client auth")


class KubeletBootstrap:
    """Joins one machine: call `run_step` until it returns a client."""

    def __init__(
        self, node: str, root: Path, labels: dict[str, str], open_client: Callable[[Path], Client]
    ) -> None:
        """``root`` is that of the machine. ``labels`` are those that the kubelet sets."""
        self.node = node
        self._root = root
        self._labels = labels
        self._open_client = open_client
        self._bootstrap_client: Client | None = None
        self._client: Client | None = None

    def run_step(self) -> Client | None:
        """Do what is next; return a client with the Node's credential when the Node exists.

        Raises `ClusterError` or `ConfigError`; the kubelet tries again.
        """
        kubeconfig = self._root / KUBECONFIG
        if not kubeconfig.exists():
            certificate = self._request_certificate()
            if not certificate:
                return None
            self._write_kubeconfig(kubeconfig, certificate)
            (self._root / _PENDING_KEY).unlink()
        if self._client is None:
            self._client = self._open_client(kubeconfig)
        node: Json = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": self.node, "labels": dict(self._labels)},
        }
        try:
            self._client.create(NODES, node)
        except AlreadyExistsError:
            # After a restart, or a Node of another machine with this name.
            self._client.get(NODES, self.node)
        return self._client

    def _request_certificate(self) -> bytes:
        """Return the certificate, PEM; empty while the request waits for a decision."""
        bootstrap = self._root / node_paths.KUBECONFIG[1:]
        if not bootstrap.exists():
            raise ConfigError(
                f"cannot join {self.node}: the machine has no {node_paths.KUBECONFIG}"
            )
        if self._bootstrap_client is None:
            self._bootstrap_client = self._open_client(bootstrap)
        client, key = self._bootstrap_client, self._load_key()
        name = f"node-csr-{_compute_key_digest(key)}"
        try:
            request = client.get(CERTIFICATESIGNINGREQUESTS, name)
        except NotFoundError:
            log.info("requesting a certificate for node %s", self.node)
            request = client.create(
                CERTIFICATESIGNINGREQUESTS, _build_request(name, _build_pkcs10(self.node, key))
            )
        types = {
            condition["type"] for condition in find_value(request, "status", "conditions") or []
        }
        if types & {"Denied", "Failed"}:
            # A kubelet makes a new key then.
            (self._root / _PENDING_KEY).unlink()
            raise ClusterError(f"request {name} of node {self.node} was refused")
        return base64.b64decode(find_value(request, "status", "certificate") or "")

    def _load_key(self) -> ec.EllipticCurvePrivateKey:
        """Return the key of the pending request; it survives a restart."""
        place = self._root / _PENDING_KEY
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            write_private_file(place, _encode_key(ec.generate_private_key(ec.SECP256R1())))
        key = serialization.load_pem_private_key(place.read_bytes(), password=None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ConfigError(f"{place}: not an EC key")
        return key

    def _write_kubeconfig(self, path: Path, certificate: bytes) -> None:
        bootstrap = read_kubeconfig(str(self._root / node_paths.KUBECONFIG[1:]))
        text = render_kubeconfig(
            server=bootstrap.server,
            authority=bootstrap.ca if isinstance(bootstrap.ca, bytes) else b"",
            user=f"{NODE_PREFIX}{self.node}",
            identity=CertificateIdentity(certificate, _encode_key(self._load_key())),
        )
        write_private_file(path, text.encode())


def _build_request(name: str, content: bytes) -> Json:
    return {
        "apiVersion": CERTIFICATESIGNINGREQUESTS.api_version,
        "kind": CERTIFICATESIGNINGREQUESTS.kind,
        "metadata": {"name": name},
        "spec": {
            "request": base64.b64encode(content).decode("ascii"),
            "signerName": _SIGNER,
            "usages": list(_USAGES),
        },
    }


def _build_pkcs10(node: str, key: ec.EllipticCurvePrivateKey) -> bytes:
    subject = x509.Name([
        x509.NameAttribute(NameOID.ORGANIZATION_NAME, NODES_GROUP),
        x509.NameAttribute(NameOID.COMMON_NAME, f"{NODE_PREFIX}{node}"),
    ])  # fmt: skip
    signed = (
        x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, hashes.SHA256())
    )
    return signed.public_bytes(serialization.Encoding.PEM)


def _compute_key_digest(key: ec.EllipticCurvePrivateKey) -> str:
    public = key.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return hashlib.sha256(public).hexdigest()[:32]


def _encode_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
