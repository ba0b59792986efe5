"""Certificate signing requests of kubelets: what they request, and who requests it."""

import base64
import binascii
from dataclasses import dataclass

from treenail.api.decode import Fields, Json
from treenail.api.meta import ObjectMeta
from treenail.controllers.ignition.bootstrap_tokens import (
    GROUP,
    MACHINE_GROUP,
    USER_PREFIX,
    USES_GROUP,
    decode_name,
)
from treenail.errors import ConfigError

KUBELET_SIGNER = "kubernetes.io/kube-apiserver-client-kubelet"
_NODE_PREFIX = "system:node:"
_NODES = "system:nodes"
# ValidateKubeletClientCSR of Kubernetes (pkg/apis/certificates/helpers.go).
_USAGES = (
    frozenset({"digital signature", "client auth"}),
    frozenset({"digital signature", "client auth", "key encipherment"}),
)
_MAX_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True)
class KubeletRequest:
    """A request for the client certificate of a kubelet, by a machine with an access token."""

    name: str
    uid: str
    token: str
    """Name of the access token."""
    node: str = ""
    """Node name in the request; empty for an invalid request."""
    problem: str = ""
    """Why the request is invalid."""
    machine: str = ""
    """Node name that the access token is for; empty for any."""
    uses: int = 1
    is_approved: bool = False
    is_decided: bool = False
    """True when the request is approved or denied."""

    @classmethod
    def from_json(cls, document: Json) -> "KubeletRequest | None":
        """Parse a CertificateSigningRequest; None for one without an access token.

        kube-apiserver sets user and groups; clients cannot. Raises `ConfigError`.
        """
        fields = Fields.from_json(document, "CertificateSigningRequest")
        meta = ObjectMeta.from_fields(fields.get_object("metadata"))
        spec = fields.get_object("spec")
        user, groups = spec.get_text("username"), spec.get_text_list("groups")
        if not user.startswith(USER_PREFIX) or GROUP not in groups:
            return None
        if spec.get_text("signerName") != KUBELET_SIGNER:
            return None
        node, problem = "", ""
        try:
            node = _read_node_name(
                spec.get_text("request"), frozenset(spec.get_text_list("usages"))
            )
        except ConfigError as error:
            problem = str(error)
        conditions = fields.get_object("status").iter_objects("conditions")
        decisions = {each.get_text("type") for each in conditions}
        uses = _find_suffix(groups, USES_GROUP)
        return cls(
            name=meta.name,
            uid=meta.uid,
            token=user.removeprefix(USER_PREFIX),
            node=node,
            problem=problem,
            machine=decode_name(_find_suffix(groups, MACHINE_GROUP)),
            uses=int(uses) if uses.isascii() and uses.isdigit() else 1,
            is_approved="Approved" in decisions,
            is_decided=bool(decisions & {"Approved", "Denied"}),
        )


def _find_suffix(groups: tuple[str, ...], prefix: str) -> str:
    found = [each.removeprefix(f"{prefix}:") for each in groups if each.startswith(f"{prefix}:")]
    return found[0] if len(found) == 1 else ""


def _read_node_name(request: str, usages: frozenset[str]) -> str:
    """Return the node name of a PKCS #10 request in PEM in base64; raise `ConfigError`."""
    # Imported late: it takes 30 ms, and few clusters enable the controller.
    from cryptography import x509  # noqa: PLC0415 - as above
    from cryptography.x509.oid import NameOID  # noqa: PLC0415 - as above

    if usages not in _USAGES:
        raise ConfigError(f"its usages are not those of a kubelet: {', '.join(sorted(usages))}")
    try:
        content = base64.b64decode(request[:_MAX_BYTES], validate=True)
        parsed = x509.load_pem_x509_csr(content)
        find = parsed.subject.get_attributes_for_oid
        names = [str(each.value) for each in find(NameOID.COMMON_NAME)]
        groups = [str(each.value) for each in find(NameOID.ORGANIZATION_NAME)]
        extensions = [each.oid for each in parsed.extensions]
    except (ValueError, TypeError, binascii.Error) as error:
        raise ConfigError("it is not a certificate request in PEM") from error
    if groups != [_NODES]:
        raise ConfigError(f"its organization is not {_NODES}")
    if len(names) != 1 or not names[0].startswith(_NODE_PREFIX) or names[0] == _NODE_PREFIX:
        raise ConfigError(f"its common name does not begin with {_NODE_PREFIX}")
    if x509.SubjectAlternativeName.oid in extensions:
        raise ConfigError("it has alternative names")
    if not parsed.is_signature_valid:
        raise ConfigError("its signature is invalid")
    return names[0].removeprefix(_NODE_PREFIX)
