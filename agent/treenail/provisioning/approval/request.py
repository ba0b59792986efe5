"""Certificate signing requests of kubelets: what they request, who requests it, who gets one."""

import base64
import binascii
import re
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from treenail import clocks, errors
from treenail.api import decode, object_meta
from treenail.kube import api_client, resources
from treenail.provisioning.tokens import bootstrap_tokens

KUBELET_SIGNER = "kubernetes.io/kube-apiserver-client-kubelet"
_NODE_PREFIX = "system:node:"
_NODES = "system:nodes"
# ValidateKubeletClientCSR of Kubernetes (pkg/apis/certificates/helpers.go).
_USAGES = (
    frozenset({"digital signature", "client auth"}),
    frozenset({"digital signature", "client auth", "key encipherment"}),
)
_MAX_BYTES = 16 * 1024
# As Go's encoding/pem writes it. Readers of PEM differ in the text around a block: the signer must
# not sign another block than the one that was approved.
_PEM = re.compile(
    rb"-----BEGIN CERTIFICATE REQUEST-----\n([A-Za-z0-9+/=\n]+)-----END CERTIFICATE REQUEST-----\n?"
)


@dataclass(frozen=True, slots=True)
class KubeletRequest:
    """A request for the client certificate of a kubelet, by a machine with an access token."""

    name: str
    uid: str
    token: str
    """Name of the access token."""
    identity: str = ""
    """ID of the bootstrap token."""
    node: str = ""
    """Node name in the request; empty for an invalid request."""
    problem: str = ""
    """Why the request is invalid."""
    machine: str = ""
    """Node name that the access token is for; empty for any."""
    uses: int = 1
    pool: str = ""
    """Pool of the access token."""
    created_at: float = 0.0
    """Seconds since the epoch."""
    is_approved: bool = False
    is_decided: bool = False
    """True when the request is approved or denied."""
    failure: str = ""
    """Why the request was denied, or why its certificate cannot be signed."""
    has_certificate: bool = False

    @classmethod
    def from_json(cls, document: decode.Json) -> "KubeletRequest | None":
        """Parse a CertificateSigningRequest; None for one without an access token.

        kube-apiserver sets user and groups; clients cannot. Raises `ConfigError`.
        """
        fields = decode.Fields.from_json(document, "CertificateSigningRequest")
        meta = fields.get_object("metadata").read(object_meta.ObjectMeta)
        spec = fields.get_object("spec")
        user, groups = spec.get_text("username"), spec.get_text_list("groups")
        if (
            not user.startswith(bootstrap_tokens.USER_PREFIX)
            or bootstrap_tokens.GROUP not in groups
        ):
            return None
        if spec.get_text("signerName") != KUBELET_SIGNER:
            return None
        node, problem = "", ""
        machines = _list_suffixes(groups, bootstrap_tokens.MACHINE_GROUP)
        try:
            node = _read_node_name(
                spec.get_text("request"), frozenset(spec.get_text_list("usages"))
            )
        except errors.ConfigError as error:
            problem = str(error)
        if len(machines) > 1:
            problem = "its groups name several machines"
        status = fields.get_object("status")
        conditions = status.read_list("conditions", object_meta.Condition)
        decisions = {condition.type: condition for condition in conditions}
        failed = decisions.get("Denied") or decisions.get("Failed")
        identity = user.removeprefix(bootstrap_tokens.USER_PREFIX)
        uses = "".join(_list_suffixes(groups, bootstrap_tokens.USES_GROUP)[:1])
        return cls(
            name=meta.name,
            uid=meta.uid,
            token="".join(_list_suffixes(groups, bootstrap_tokens.TOKEN_GROUP)[:1]) or identity,
            identity=identity,
            node=node,
            problem=problem,
            machine=bootstrap_tokens.decode_name("".join(machines[:1])),
            uses=int(uses) if uses.isascii() and uses.isdigit() and len(uses) < 10 else 1,
            pool=bootstrap_tokens.decode_name(
                "".join(_list_suffixes(groups, bootstrap_tokens.GROUP)[:1])
            ),
            created_at=clocks.parse_rfc3339(meta.created) or 0.0,
            is_approved="Approved" in decisions,
            is_decided=bool(decisions.keys() & {"Approved", "Denied"}),
            failure=(failed.message or failed.reason or failed.type) if failed else "",
            has_certificate=bool(status.get_text("certificate")),
        )


def _list_suffixes(groups: tuple[str, ...], prefix: str) -> list[str]:
    return [group.removeprefix(f"{prefix}:") for group in groups if group.startswith(f"{prefix}:")]


def _read_node_name(request: str, usages: frozenset[str]) -> str:
    """Return the node name of a PKCS #10 request in PEM in base64; raise `ConfigError`."""
    # Imported late: it takes 30 ms, and few clusters enable the controller.
    from cryptography import exceptions, x509  # noqa: PLC0415 - as above
    from cryptography.x509.oid import NameOID  # noqa: PLC0415 - as above

    if usages not in _USAGES:
        raise errors.ConfigError(
            f"its usages are not those of a kubelet: {', '.join(sorted(usages))}"
        )
    try:
        parsed = x509.load_der_x509_csr(_decode_pem(request))
        with warnings.catch_warnings():
            # X.509 allows 64 characters in a common name; Go, and so the kubelet, more.
            warnings.simplefilter("ignore", UserWarning)
            find = parsed.subject.get_attributes_for_oid
        names = [str(attribute.value) for attribute in find(NameOID.COMMON_NAME)]
        groups = [str(attribute.value) for attribute in find(NameOID.ORGANIZATION_NAME)]
        extensions = [extension.oid for extension in parsed.extensions]
        # It also reads the key, which may be of a curve or an algorithm that is not supported.
        is_signed = parsed.is_signature_valid
    except (
        ValueError,
        TypeError,
        binascii.Error,
        x509.DuplicateExtension,
        x509.InvalidVersion,
        x509.UnsupportedGeneralNameType,
        exceptions.UnsupportedAlgorithm,
    ) as error:
        raise errors.ConfigError(
            "it is not a certificate request in PEM that can be verified"
        ) from error
    if groups != [_NODES]:
        raise errors.ConfigError(f"its organization is not {_NODES}")
    node = names[0].removeprefix(_NODE_PREFIX) if len(names) == 1 else ""
    if not object_meta.is_object_name(node) or names[0] != f"{_NODE_PREFIX}{node}":
        raise errors.ConfigError(f"its common name is not {_NODE_PREFIX} and the name of a Node")
    if x509.SubjectAlternativeName.oid in extensions:
        raise errors.ConfigError("it has alternative names")
    if not is_signed:
        raise errors.ConfigError("its signature is invalid")
    return node


def _decode_pem(request: str) -> bytes:
    """Return the only block of a request; raise ValueError."""
    content = base64.b64decode(request[:_MAX_BYTES], validate=True)
    match = _PEM.fullmatch(content)
    if match is None:
        raise ValueError
    return base64.b64decode(match[1].replace(b"\n", b""), validate=True)


def list_kubelet_requests(client: api_client.Client) -> list[KubeletRequest]:
    """List the requests of machines with an access token; none where RBAC forbids it.

    Raises `ClusterError`.
    """
    selector = {"fieldSelector": f"spec.signerName={KUBELET_SIGNER}"}
    requests = []
    try:
        for page in client.list_pages(resources.CERTIFICATESIGNINGREQUESTS, params=selector):
            for document in page.items:
                try:
                    request = KubeletRequest.from_json(document)
                except errors.ConfigError:
                    continue
                if request is not None:
                    requests.append(request)
    except (errors.ForbiddenError, errors.NotFoundError):
        return []
    return requests


class IssuedCertificate(NamedTuple):
    """A certificate that was approved: who has it holds the identity of the Node."""

    token: str
    """Name of the access token."""
    node: str


def find_refusal(
    request: KubeletRequest, nodes: Mapping[str, bool], approved: Collection[IssuedCertificate]
) -> str:
    """Return why a request must not be approved; empty when it may be.

    ``nodes`` maps names of Nodes to whether they are Ready, and has the requested one if it exists.
    ``approved`` are the certificates of all tokens as far as they are known.
    """
    if request.problem:
        return request.problem
    token, node = request.token, request.node
    if request.machine and node != request.machine:
        return f"token {token} is for machine {request.machine}, not {node}"
    if request.machine and nodes.get(node):
        # The machine that runs now would share its identity with the new one.
        return f"Node {node} is Ready: shut its machine down, or delete the Node"
    if not request.machine and node in nodes:
        return (
            f"Node {node} exists, and token {token} is not for it: delete the Node, or create a "
            f"token with --machine {node}"
        )
    own = {certificate.node for certificate in approved if certificate.token == token}
    # A kubelet that restarted before it stored its certificate requests another one.
    if node not in own and len(own) >= request.uses:
        names = ", ".join(sorted(own))
        return f"token {token} is for {request.uses} machines, and has certificates for {names}"
    others = [
        certificate.token
        for certificate in approved
        if certificate.node == node and certificate.token != token
    ]
    if others and not request.machine:
        return (
            f"another machine has a certificate for {node} by token {others[0]}: create a token "
            f"with --machine {node} to replace that machine"
        )
    return ""
