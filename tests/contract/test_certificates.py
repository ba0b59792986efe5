"""Bootstrap tokens, and the certificates that kubelets request with them."""

import base64
import secrets
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tests.contract.client import Answer, Cluster, Json
from tests.contract.csr import REQUESTS, make_pkcs10, make_request
from tests.waiting import wait_until
from treenail.clocks import SystemClock, format_rfc3339

SECRETS = "/api/v1/namespaces/kube-system/secrets"
GROUP = "system:bootstrappers:contract"
LIMIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Machines:
    """New machines of a cluster; what they create is removed after the test."""

    cluster: Cluster
    stack: ExitStack

    def create_token(self, **changes: str | None) -> str:
        """Create a bootstrap token; None leaves a field out."""
        identity, secret = secrets.token_hex(3), secrets.token_hex(8)
        fields: dict[str, str | None] = {
            "token-id": identity,
            "token-secret": secret,
            "expiration": format_rfc3339(SystemClock().now() + 600),
            "usage-bootstrap-authentication": "true",
            "auth-extra-groups": GROUP,
        }
        name = f"bootstrap-token-{identity}"
        body = {
            "metadata": {"name": name},
            "type": "bootstrap.kubernetes.io/token",
            "stringData": {
                key: text for key, text in (fields | changes).items() if text is not None
            },
        }
        self.cluster.post(SECRETS, body).ok()
        self.stack.callback(self.cluster.delete, f"{SECRETS}/{name}")
        return f"{identity}.{secret}"

    def connect(self, token: str) -> Cluster:
        """Connect with a token that the API server accepts, once its cache has the Secret."""
        machine = self.cluster.as_bearer(token)
        wait_until(lambda: machine.get(REQUESTS).code != 401, limit_s=LIMIT_S)
        return machine

    def post(self, machine: Cluster, content: bytes, **changes: object) -> Answer:
        """Request a certificate."""
        name = f"contract-{secrets.token_hex(4)}"
        body = make_request(name, content)
        body["spec"] |= changes
        self.stack.callback(self.cluster.delete, f"{REQUESTS}/{name}")
        return machine.post(REQUESTS, body)

    def decide(self, name: str, *types: str) -> Answer:
        """Replace the conditions of a request by its subresource approval."""
        found = self.cluster.get(f"{REQUESTS}/{name}").ok()
        conditions = [{"type": each, "status": "True", "reason": "Contract"} for each in types]
        body = found | {"status": {"conditions": conditions}}
        return self.cluster.put(f"{REQUESTS}/{name}/approval", body)


@pytest.fixture
def machines(cluster: Cluster) -> Iterator[Machines]:
    with ExitStack() as stack:
        yield Machines(cluster, stack)


@pytest.fixture
def bootstrapper(machines: Machines) -> Iterator[Cluster]:
    """A machine that may request certificates.

    The approver of kube-controller-manager approves those of a cluster's administrator at once.
    """
    name = f"contract-{secrets.token_hex(4)}"
    group = f"{GROUP}:{name}"
    bindings = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings"
    binding = {
        "metadata": {"name": name},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole",
                    "name": "system:node-bootstrapper"},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "Group", "name": group}],
    }  # fmt: skip
    machines.cluster.post(bindings, binding).ok()
    machine = machines.connect(machines.create_token(**{"auth-extra-groups": group}))
    wait_until(lambda: machine.get(REQUESTS).code == 200, limit_s=LIMIT_S)
    yield machine
    machines.cluster.delete(f"{bindings}/{name}")


def test_bootstrap_token_of_a_group_without_a_rule_is_forbidden(machines: Machines) -> None:
    token = machines.create_token()
    answer = machines.connect(token).get(REQUESTS)
    assert answer.verdict == (403, "Forbidden")
    user = f"system:bootstrap:{token.partition('.')[0]}"
    assert (
        f'User "{user}" cannot list resource "certificatesigningrequests"'
        in (answer.body["message"])
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"expiration": "2020-01-01T00:00:00Z"},
        {"expiration": "tomorrow"},
        {"usage-bootstrap-authentication": None},
        {"usage-bootstrap-authentication": "True"},
        {"token-secret": "0123456789abcdef"},
        {"token-id": "abcdef"},
        {"auth-extra-groups": "system:masters"},
        {"auth-extra-groups": f"{GROUP},system:bootstrappers:Upper"},
    ],
)
def test_invalid_bootstrap_token_is_unauthorized(
    machines: Machines, changes: dict[str, str | None]
) -> None:
    # The cache of the API server has the Secret before that of a later token.
    token = machines.create_token(**changes)
    machines.connect(machines.create_token())
    assert machines.cluster.as_bearer(token).get(REQUESTS).verdict == (401, "Unauthorized")


def test_bootstrap_token_without_an_end_is_valid(machines: Machines) -> None:
    machines.connect(machines.create_token(expiration=None))


def test_deleted_bootstrap_token_becomes_unauthorized(machines: Machines) -> None:
    token = machines.create_token()
    machine = machines.connect(token)
    machines.cluster.delete(f"{SECRETS}/bootstrap-token-{token.partition('.')[0]}").ok()
    wait_until(lambda: machine.get(REQUESTS).code == 401, limit_s=LIMIT_S)


def test_request_has_the_user_of_the_token(machines: Machines, bootstrapper: Cluster) -> None:
    forged = {"username": "admin", "groups": ["system:masters"], "uid": "x"}
    found = machines.post(bootstrapper, make_pkcs10("system:node:a"), **forged).ok()
    assert found["spec"]["username"].startswith("system:bootstrap:")
    groups = found["spec"]["groups"]
    assert "system:bootstrappers" in groups
    assert "system:authenticated" in groups
    assert "system:masters" not in groups
    assert found["spec"].get("uid", "") != "x"
    assert found["status"] == {}


def test_bootstrapper_may_not_approve_its_request(
    machines: Machines, bootstrapper: Cluster
) -> None:
    found = machines.post(bootstrapper, make_pkcs10("system:node:a")).ok()
    path = f"{REQUESTS}/{found['metadata']['name']}"
    assert bootstrapper.put(f"{path}/approval", found).code == 403
    assert bootstrapper.put(path, found).code == 403
    assert bootstrapper.get(path).code == 200


@pytest.mark.parametrize(
    "signer", ["kubernetes.io/kube-apiserver-client-kubelet", "kubernetes.io/*"]
)
def test_approval_needs_a_rule_for_the_signer(
    machines: Machines, bootstrapper: Cluster, signer: str
) -> None:
    name = machines.post(bootstrapper, make_pkcs10("system:node:a")).metadata["name"]
    role = {"name": f"contract-{secrets.token_hex(4)}"}
    rbac = "/apis/rbac.authorization.k8s.io/v1"
    group = "certificates.k8s.io"
    requests = {"apiGroups": [group], "resources": ["certificatesigningrequests/approval"],
                "verbs": ["update"]}  # fmt: skip
    signers = {"apiGroups": [group], "resources": ["signers"], "resourceNames": [signer],
               "verbs": ["approve"]}  # fmt: skip
    machines.cluster.post(f"{rbac}/clusterroles", {"metadata": role, "rules": [requests]}).ok()
    machines.stack.callback(machines.cluster.delete, f"{rbac}/clusterroles/{role['name']}")
    binding = {
        "metadata": role,
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", **role},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", **role}],
    }
    machines.cluster.post(f"{rbac}/clusterrolebindings", binding).ok()
    machines.stack.callback(machines.cluster.delete, f"{rbac}/clusterrolebindings/{role['name']}")
    approver = machines.cluster.as_user(role["name"])
    found = machines.cluster.get(f"{REQUESTS}/{name}").ok()
    body = found | {"status": {"conditions": [{"type": "Approved", "status": "True"}]}}

    def approve() -> str:
        return approver.put(f"{REQUESTS}/{name}/approval", body).body.get("message", "")

    wait_until(lambda: "not permitted to approve requests with signerName" in approve())
    rules = {"rules": [requests, signers]}
    machines.cluster.patch(f"{rbac}/clusterroles/{role['name']}", rules).ok()
    wait_until(lambda: approve() == "", limit_s=LIMIT_S)


def test_create_and_update_ignore_the_status_of_a_request(
    machines: Machines, bootstrapper: Cluster
) -> None:
    approved = {"conditions": [{"type": "Approved", "status": "True"}]}
    name = f"contract-{secrets.token_hex(4)}"
    body = make_request(name, make_pkcs10("system:node:a")) | {"status": approved}
    machines.stack.callback(machines.cluster.delete, f"{REQUESTS}/{name}")
    found = bootstrapper.post(REQUESTS, body).ok()
    assert found["status"] == {}
    changed = machines.cluster.put(f"{REQUESTS}/{name}", found | {"status": approved}).ok()
    assert changed["status"] == {}


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"request": ""}, "spec.request"),
        ({"request": base64.b64encode(b"no PEM").decode()}, "spec.request"),
        ({"usages": []}, "spec.usages"),
        ({"usages": ["to rule"]}, "spec.usages[0]"),
        ({"signerName": ""}, "spec.signerName"),
        ({"signerName": "no-domain"}, "spec.signerName"),
    ],
)
def test_invalid_request_for_a_certificate_is_refused(
    machines: Machines, changes: Json, where: str
) -> None:
    answer = machines.post(machines.cluster, make_pkcs10("system:node:a"), **changes)
    assert answer.code == 422, answer.body
    assert where in {field for _, field in answer.causes}


def test_requests_are_selected_by_their_signer(machines: Machines, bootstrapper: Cluster) -> None:
    name = machines.post(bootstrapper, make_pkcs10("system:node:a")).metadata["name"]
    found = []
    for signer in ("kubernetes.io/kube-apiserver-client-kubelet", "example.com/other"):
        listed = machines.cluster.get(REQUESTS, fieldSelector=f"spec.signerName={signer}").ok()
        found.append(name in {each["metadata"]["name"] for each in listed["items"]})
    assert found == [True, False]


def test_decision_of_a_request_is_final(machines: Machines, bootstrapper: Cluster) -> None:
    name = machines.post(bootstrapper, make_pkcs10("system:node:a")).metadata["name"]
    denied = machines.decide(name, "Denied").ok()
    assert [each["type"] for each in denied["status"]["conditions"]] == ["Denied"]
    assert machines.decide(name, "Denied", "Approved").code == 422
    assert machines.decide(name).code == 422
    assert [
        each["type"]
        for each in machines.cluster.get(f"{REQUESTS}/{name}").ok()["status"]["conditions"]
    ] == ["Denied"]


def test_condition_of_a_request_gets_its_times(machines: Machines, bootstrapper: Cluster) -> None:
    name = machines.post(bootstrapper, make_pkcs10("system:node:a")).metadata["name"]
    (condition,) = machines.decide(name, "Approved").ok()["status"]["conditions"]
    assert condition["lastUpdateTime"]
    assert condition["lastTransitionTime"]


@pytest.mark.controllers
def test_approved_request_is_signed(machines: Machines, bootstrapper: Cluster) -> None:
    content = make_pkcs10("system:node:contract-a")
    name = machines.post(bootstrapper, content).metadata["name"]
    machines.decide(name, "Approved").ok()

    def read_certificate() -> str:
        found = machines.cluster.get(f"{REQUESTS}/{name}").ok()["status"]
        return found.get("certificate", "")

    signed = x509.load_pem_x509_certificate(
        base64.b64decode(wait_until(read_certificate, limit_s=LIMIT_S))
    )
    parsed = x509.load_pem_x509_csr(content)
    assert signed.subject == parsed.subject
    assert signed.public_key() == parsed.public_key()
    (common_name,) = signed.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    assert common_name.value == "system:node:contract-a"
    usage = signed.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [ExtendedKeyUsageOID.CLIENT_AUTH]


@pytest.mark.controllers
def test_approved_request_of_no_kubelet_fails(machines: Machines, bootstrapper: Cluster) -> None:
    content = make_pkcs10("system:node:contract-a", groups=["system:masters"])
    name = machines.post(bootstrapper, content).metadata["name"]
    machines.decide(name, "Approved").ok()

    def list_types() -> set[str]:
        found = machines.cluster.get(f"{REQUESTS}/{name}").ok()["status"]
        return {each["type"] for each in found["conditions"]}

    wait_until(lambda: list_types() == {"Approved", "Failed"}, limit_s=LIMIT_S)
