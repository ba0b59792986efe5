"""Certificate signing requests of kubelets: what they request, who requests it, who gets one."""

import base64
import binascii
import datetime as dt
import hashlib
import re
import shlex
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from treenail import clocks, errors
from treenail.api import decode, object_meta
from treenail.api.node import is_placeholder_name
from treenail.kube import api_client, resources
from treenail.provisioning.tokens import bootstrap_tokens
from treenail.provisioning.tokens.bootstrap_tokens import compute_identity
from treenail.provisioning.tokens.certificates import IssuedCertificate
from treenail.provisioning.tokens.tokens import TokenRecord

KUBELET_SIGNER = "kubernetes.io/kube-apiserver-client-kubelet"
_NODE_PREFIX = "system:node:"
_NODES = "system:nodes"
# ValidateKubeletClientCSR of Kubernetes (pkg/apis/certificates/helpers.go).
_USAGES = (
    frozenset({"digital signature", "client auth"}),
    frozenset({"digital signature", "client auth", "key encipherment"}),
)
_AUTO_APPROVED = "AutoApproved"  # pkg/controller/certificates/approver/sarapprove.go
_EXTENSION_REQUEST = "1.2.840.113549.1.9.14"  # RFC 2985, 5.4.2
_MAX_BYTES = 16 * 1024
_KEY_BYTES = 9
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
    key: str = ""
    """Digest of the public key."""
    problem: str = ""
    """Why the request is invalid."""
    machine: str = ""
    """Node name that the access token is for; empty for any."""
    pool: str = ""
    """Pool of the access token."""
    created_at: float = 0.0
    """Seconds since the epoch."""
    is_approved: bool = False
    is_auto_approved: bool = False
    """kube-controller-manager approved it, which lets the group of its token have any name."""
    is_decided: bool = False
    """True when the request is approved or denied."""
    failure: str = ""
    """Why the request was denied, or why its certificate cannot be signed."""
    has_certificate: bool = False
    expires: float = 0.0
    """End of the certificate in seconds since the epoch; 0 without a certificate."""

    @property
    def holder(self) -> str:
        """The identity of the machine, as in `IssuedCertificate.identity`."""
        return f"{self.pool}/{self.machine}" if self.machine else self.identity

    @property
    def certificate(self) -> IssuedCertificate:
        """The certificate that this request has, or that an approval issues."""
        return IssuedCertificate(self.node, self.holder, self.token, self.key, self.expires)

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
        node, key, problem = "", "", ""
        pools = _list_suffixes(groups, bootstrap_tokens.GROUP)
        names = _list_suffixes(groups, bootstrap_tokens.TOKEN_GROUP)
        machines = _list_suffixes(groups, bootstrap_tokens.MACHINE_GROUP)
        try:
            node, key = _read_subject(spec.get_text("request"), spec.get_text_list("usages"))
        except errors.ConfigError as error:
            problem = str(error)
        if max(map(len, (machines, names, pools))) > 1:
            problem = "its groups name several machines, tokens or pools"
        status = fields.get_object("status")
        conditions = status.read_list("conditions", object_meta.Condition)
        decisions = {condition.type: condition for condition in conditions}
        failed = decisions.get("Denied") or decisions.get("Failed")
        identity = user.removeprefix(bootstrap_tokens.USER_PREFIX)
        certificate = status.get_text("certificate")
        return cls(
            name=meta.name,
            uid=meta.uid,
            token="".join(names[:1]) or identity,
            identity=identity,
            node=node,
            key=key,
            problem=problem,
            machine=bootstrap_tokens.decode_name("".join(machines[:1])),
            pool=bootstrap_tokens.decode_name("".join(pools[:1])),
            created_at=clocks.parse_rfc3339(meta.created) or 0.0,
            is_approved=(approval := decisions.get("Approved")) is not None,
            is_auto_approved=approval is not None and approval.reason == _AUTO_APPROVED,
            is_decided=bool(decisions.keys() & {"Approved", "Denied"}),
            failure=(failed.message or failed.reason or failed.type) if failed else "",
            has_certificate=bool(certificate),
            expires=_read_expiry(certificate),
        )


def _list_suffixes(groups: tuple[str, ...], prefix: str) -> list[str]:
    return [group.removeprefix(f"{prefix}:") for group in groups if group.startswith(f"{prefix}:")]


def _read_subject(request: str, usages: Sequence[str]) -> tuple[str, str]:
    """Return node name and key digest of a PKCS #10 request in PEM in base64.

    Raises `ConfigError` for anything that a kubelet does not request.
    """
    # Imported late: it takes 30 ms, and few clusters enable the controller.
    from cryptography import exceptions, x509  # noqa: PLC0415 - as above
    from cryptography.hazmat.primitives import serialization  # noqa: PLC0415 - as above
    from cryptography.x509.oid import NameOID  # noqa: PLC0415 - as above

    if frozenset(usages) not in _USAGES or len(usages) != len(set(usages)):
        raise errors.ConfigError(
            f"its usages are not those of a kubelet: {', '.join(sorted(usages))}"
        )
    try:
        parsed = x509.load_der_x509_csr(_decode_pem(request))
        with warnings.catch_warnings():
            # X.509 allows 64 characters in a common name; Go, and so the kubelet, more.
            warnings.simplefilter("ignore", UserWarning)
            subject = parsed.subject
        find = subject.get_attributes_for_oid
        names = [str(attribute.value) for attribute in find(NameOID.COMMON_NAME)]
        groups = [str(attribute.value) for attribute in find(NameOID.ORGANIZATION_NAME)]
        attributes = [attribute.oid.dotted_string for attribute in parsed.attributes]
        extensions = [extension.oid for extension in parsed.extensions]
        public_key = parsed.public_key().public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        )
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
    node = names[0].removeprefix(_NODE_PREFIX) if len(names) == 1 else ""
    is_name = object_meta.is_object_name(node) and names[0] == f"{_NODE_PREFIX}{node}"
    for is_valid, problem in (
        (groups == [_NODES], f"its organization is not {_NODES}"),
        (is_name, f"its common name is not {_NODE_PREFIX} and the name of a Node"),
        (x509.SubjectAlternativeName.oid not in extensions, "it has alternative names"),
        # Readers of PKCS #10 differ in which of two attributes they take.
        (attributes in ([], [_EXTENSION_REQUEST]), "it has attributes that no kubelet sends"),
        (not extensions, "it requests extensions"),
        (len([*subject]) == 2, "its subject has other parts than its organization and its name"),
        (is_signed, "its signature is invalid"),
    ):
        if not is_valid:
            raise errors.ConfigError(problem)
    digest = hashlib.sha256(public_key).digest()
    return node, base64.urlsafe_b64encode(digest[:_KEY_BYTES]).decode("ascii")


def _read_expiry(certificate: str) -> float:
    """Return the end of a certificate in PEM in base64; 0 for one that cannot be read."""
    if not certificate:
        return 0.0
    from cryptography import x509  # noqa: PLC0415 - as above

    try:
        parsed = x509.load_pem_x509_certificate(base64.b64decode(certificate))
    except ValueError:
        return 0.0
    # cryptography before 42 has no time with a zone.
    end = getattr(parsed, "not_valid_after_utc", None) or parsed.not_valid_after
    return float(end.replace(tzinfo=dt.UTC).timestamp())


def _decode_pem(request: str) -> bytes:
    """Return the only block of a request; raise ValueError."""
    content = base64.b64decode(request[:_MAX_BYTES], validate=True)
    match = _PEM.fullmatch(content)
    if match is None:
        raise ValueError
    return base64.b64decode(match[1].replace(b"\n", b""), validate=True)


def list_kubelet_requests(client: api_client.Client) -> Sequence[KubeletRequest]:
    """List the requests of machines with an access token; none where RBAC forbids it.

    Raises `ClusterError`.
    """
    selector = {"fieldSelector": f"spec.signerName={KUBELET_SIGNER}"}

    def parse_page(page: api_client.Listing) -> Iterator[KubeletRequest]:
        for document in page.items:
            with suppress(errors.ConfigError):
                if (request := KubeletRequest.from_json(document)) is not None:
                    yield request

    try:
        return client.list_parsed(resources.CERTIFICATESIGNINGREQUESTS, parse_page, params=selector)
    except (errors.ForbiddenError, errors.NotFoundError):
        return ()


_CONTROL_PLANE_NAME = re.compile(r"(.*[.-])?(master|control-?plane|control|arbiter)[0-9]*([.-].*)?")
"""Names that users, kubeadm, kind and openshift-install give machines of the control plane."""
_MAX_NAMED = 3


class CSRRefusal(NamedTuple):
    """Why a request is not approved, and what the user can do."""

    reason: str
    is_final: bool = True
    """False for a request that waits until its Node is not Ready."""


def find_request_refusal(request: KubeletRequest, *, is_ready: bool | None) -> CSRRefusal | None:
    """Return why a request must not be approved, whatever other machines have.

    ``is_ready`` is that of the requested Node; None if it does not exist.
    """
    if request.problem:
        return CSRRefusal(f"{request.problem}: only a kubelet's own request is approved")
    token, node = request.token, request.node
    if request.machine:
        if node != request.machine:
            return CSRRefusal(
                f"token {token} is for machine {request.machine}, not {node}: give the machine "
                "that host name, or create a token for its name"
            )
        # The machine that runs now would share its identity with the new one.
        waiting = f"Node {node} is Ready: waiting until its machine is shut down"
        return CSRRefusal(waiting, is_final=False) if is_ready else None
    if is_ready is not None:
        return CSRRefusal(
            f"Node {node} exists, and token {token} is not for it: give the machine another host "
            f"name, or, to replace that Node's machine, create a token with --machine {node}"
        )
    if is_placeholder_name(node) or _CONTROL_PLANE_NAME.fullmatch(node):
        return CSRRefusal(
            f"{node} is a placeholder, or a name of the control plane: give the machine another "
            f"host name, or create a token with --machine {node}"
        )
    return None


def find_name_refusal(
    request: KubeletRequest,
    record: TokenRecord,
    certificates: Collection[IssuedCertificate],
    *,
    newer_than: float,
) -> CSRRefusal | None:
    """Return why the machine of a request may not have a certificate for the name.

    ``certificates`` are all that can be valid. A request that is not ``newer_than`` this time may
    be older than the deletion of its Node, whose machine it was refused for.
    """
    token, node = request.token, request.node
    if request.created_at < newer_than:
        return CSRRefusal(
            f"it may be older than the deletion of Node {node}: delete the request, and the "
            f"kubelet creates another one: kubectl delete csr {shlex.quote(request.name)}"
        )
    named = [certificate for certificate in certificates if certificate.node == node]
    own = [certificate for certificate in named if certificate.identity == request.holder]
    # Responses that are being sent count, too: a server that was killed leaves them.
    served = sum(
        use.responses
        for use in record.used
        if compute_identity(record.name, record.uses, use.address) == request.identity
    )
    # Machines behind one address have one bootstrap token. A kubelet that restarts uses its key
    # again (LoadOrGenerateKeyFile in pkg/kubelet/certificate/bootstrap).
    is_other_key = served > 1 and own and all(other.key != request.key for other in own)
    if not request.machine and (len(own) < len(named) or is_other_key):
        return CSRRefusal(
            f"another machine has a certificate for {node}: give this machine another host name, "
            f"or, to replace that machine, create a token with --machine {node}"
        )
    for permitted, names in (
        (served, {other.node for other in certificates if other.identity == request.holder}),
        (record.uses, {other.node for other in certificates if other.token == token}),
    ):
        if node not in names and len(names) >= permitted:
            listed = ", ".join(sorted(names)[:_MAX_NAMED]) or "none"
            return CSRRefusal(
                f"token {token} permits {permitted} names to this machine, and has certificates "
                f"for {listed}: create another token for this machine"
            )
    return None
