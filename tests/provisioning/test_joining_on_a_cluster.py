"""A kubelet joins a real cluster with the bootstrap token of an access token."""

import base64
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from tests.contract.client import Cluster
from tests.contract.csr import (
    REQUESTS,
    USAGES,
    encode_key,
    make_key,
    make_pkcs10,
    make_request,
    make_two_attributes,
)
from tests.fixtures.clusters import REAL
from tests.fixtures.controllers import CLOCK
from tests.fixtures.objects import collection_of
from tests.provisioning.serving import LIMIT_S
from tests.waiting import wait_until
from treenail.controllers.runtime.informer_set import InformerSet
from treenail.errors import ForbiddenError
from treenail.kube.api_client import Client
from treenail.kube.event_recorder import EventRecorder
from treenail.kube.resources import SECRETS
from treenail.kube.transport.kubeconfig import read_kubeconfig
from treenail.kube.transport.native import HttpTransport
from treenail.manifests.ignition_server import NAME, build_approval_access, build_join_access
from treenail.manifests.installation import InstallOptions
from treenail.manifests.permissions import CONTROLLER_VERBS, build_rules
from treenail.provisioning.approval.controller import ApprovalController
from treenail.provisioning.tokens.bootstrap_tokens import (
    BootstrapCredentials,
    JoinTarget,
    list_identities,
)
from treenail.provisioning.tokens.certificates import CertificateTable, store_certificates
from treenail.provisioning.tokens.token_store import TOKEN_SECRET, TokenStore
from treenail.provisioning.tokens.tokens import (
    TokenRecord,
    TokenTable,
    TokenUse,
    format_token_table,
    make_token,
)
from treenail_lab.apiserver.access.certificates import CertificateIdentity, render_kubeconfig

pytestmark = [pytest.mark.integration]
CLIENT = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH])
RBAC = "rbac.authorization.k8s.io/v1"
SYSTEM_SECRETS = "/api/v1/namespaces/kube-system/secrets"


class JoiningCluster:
    """The real cluster with the access of the server, and of the approval controller."""

    def __init__(self, kubeconfig: Path, folder: Path, stack: ExitStack) -> None:
        self.admin = Cluster.of_kubeconfig(kubeconfig)
        self.folder = folder
        self.namespace = f"treenail-test-{secrets.token_hex(3)}"
        self._stack = stack
        server = yaml.safe_load(kubeconfig.read_text())["clusters"][0]["cluster"]
        self.url: str = server["server"]
        self.authority = base64.b64decode(server["certificate-authority-data"])
        self.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": self.namespace}})
        for name in (NAME, "approver"):
            metadata = {"name": name, "namespace": self.namespace}
            self.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata})
        for document in build_join_access(self.namespace):
            self.create(document)
        role = {"name": f"{self.namespace}-approver"}
        rules = build_rules([CONTROLLER_VERBS["approve"]])
        self.create({"apiVersion": RBAC, "kind": "ClusterRole", "metadata": role, "rules": rules})
        self.create({
            "apiVersion": RBAC,
            "kind": "ClusterRoleBinding",
            "metadata": role,
            "roleRef": {
                "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", **role,
            },
            "subjects": [
                {"kind": "ServiceAccount", "name": "approver", "namespace": self.namespace}
            ],
        })  # fmt: skip

    def create(self, document: dict) -> None:  # type: ignore[type-arg]  # JSON
        self.admin.post(collection_of(document), document).ok()
        self.remove_later(f"{collection_of(document)}/{document['metadata']['name']}")

    def remove_later(self, path: str) -> None:
        self._stack.callback(self.admin.delete, path)

    def store_token(self, record: TokenRecord) -> None:
        """Store an access token, and let the approver change it."""
        metadata = {"name": TOKEN_SECRET, "namespace": self.namespace}
        # The servers have run for a while.
        table = store_certificates(
            TokenTable({record.name: record}), CertificateTable(CLOCK.now() - 600)
        )
        self.create(
            {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": metadata,
                "data": format_token_table(table),
            }
        )
        options = InstallOptions(controllers=("approve",))
        for document in build_approval_access(options, self.namespace):
            if document["kind"] == "RoleBinding":
                # The account of the controllers.
                document["subjects"][0] |= {"name": "approver", "namespace": self.namespace}
            self.create(document)

    @contextmanager
    def run_approvals(self) -> Iterator[tuple[ApprovalController, list[str]]]:
        """Run the controller as its account; yields the keys that its watches enqueue, too."""
        approver = self.connect_account("approver")
        recorder = EventRecorder(approver, "tests", "tests", CLOCK)
        controller = ApprovalController(approver, CLOCK, recorder, self.namespace)
        informers = InformerSet(approver, CLOCK)
        keys: list[str] = []
        controller.register_watches(informers, keys.append)
        informers.start()
        try:
            assert informers.wait_until_synced(LIMIT_S)
            yield controller, keys
        finally:
            informers.stop()

    def read_decision(self, name: str) -> list[str]:
        status = self.admin.get(f"{REQUESTS}/{name}").ok().get("status") or {}
        return [each["type"] for each in status.get("conditions", [])]

    def connect_account(self, name: str) -> Client:
        """Connect as a service account."""
        account = f"/api/v1/namespaces/{self.namespace}/serviceaccounts/{name}/token"
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        token = self.admin.post(account, request).ok()["status"]["token"]
        return self.connect(
            render_kubeconfig(server=self.url, authority=self.authority, user=name, token=token)
        )

    def connect(self, kubeconfig: str) -> Client:
        path = self.folder / f"{secrets.token_hex(4)}.kubeconfig"
        path.write_text(kubeconfig)
        transport = HttpTransport(read_kubeconfig(str(path)), CLOCK, max_kept=4)
        self._stack.callback(transport.close)
        return Client(transport)

    def connect_machine(self, kubeconfig: bytes) -> Cluster:
        path = self.folder / f"{secrets.token_hex(4)}.kubeconfig"
        path.write_bytes(kubeconfig)
        return Cluster.of_kubeconfig(path)


@pytest.fixture(params=[REAL])
def joining(real_kubeconfig: Path, tmp_path: Path) -> Iterator[JoiningCluster]:
    with ExitStack() as stack:
        yield JoiningCluster(real_kubeconfig, tmp_path, stack)


def test_machine_joins_with_the_bootstrap_token_of_its_access_token(
    joining: JoiningCluster,
) -> None:
    server = joining.connect_account(NAME)
    token, record = make_served_token()
    target = JoinTarget(joining.url, lambda: joining.authority)
    credentials = BootstrapCredentials(server, CLOCK, target)

    kubeconfig = credentials.issue(token, record, "10.0.0.1")
    joining.remove_later(f"{SYSTEM_SECRETS}/bootstrap-token-{record.name}")
    # Another server replaces it with the same.
    assert (
        BootstrapCredentials(server, CLOCK, target).issue(token, record, "10.0.0.1") == kubeconfig
    )
    machine = joining.connect_machine(kubeconfig)
    node, request = f"{joining.namespace}-node", f"{joining.namespace}-csr"
    joining.store_token(record)
    with joining.run_approvals() as (controller, keys):
        key = make_key()
        content = make_pkcs10(f"system:node:{node}", key)
        # The authenticator's cache of Secrets follows a watch.
        wait_until(lambda: machine.get(REQUESTS).code != 401, limit_s=LIMIT_S)
        machine.post(REQUESTS, make_request(request, content)).ok()
        joining.remove_later(f"{REQUESTS}/{request}")
        wait_until(lambda: request in keys, limit_s=LIMIT_S)
        controller.sync_key(request)
    status = joining.admin.get(f"{REQUESTS}/{request}").ok()["status"]
    assert [each["type"] for each in status["conditions"]] == ["Approved"]
    if not joining.admin.has_controllers():
        pytest.skip("no kube-controller-manager signs the certificate")

    def read_certificate() -> str:
        found = joining.admin.get(f"{REQUESTS}/{request}").ok()["status"]
        return found.get("certificate", "")

    identity = CertificateIdentity(
        base64.b64decode(wait_until(read_certificate, limit_s=LIMIT_S)), encode_key(key)
    )
    text = render_kubeconfig(
        server=joining.url, authority=joining.authority, user="kubelet", identity=identity
    )
    kubelet = joining.connect_machine(text.encode())
    kubelet.post("/api/v1/nodes", {"metadata": {"name": node}}).ok()
    joining.remove_later(f"/api/v1/nodes/{node}")
    assert kubelet.get(f"/api/v1/nodes/{node}").code == 200
    credentials.revoke(record.name)
    wait_until(lambda: machine.get(REQUESTS).code == 401, limit_s=LIMIT_S)


def test_group_of_all_bootstrap_tokens_must_not_be_approved_automatically(
    joining: JoiningCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """With this binding, which the documents of Kubernetes propose, each name is approved."""
    if not joining.admin.has_controllers():
        pytest.skip("no kube-controller-manager approves the request")
    role = "system:certificates.k8s.io:certificatesigningrequests:nodeclient"
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role}
    group = {"apiGroup": reference["apiGroup"], "kind": "Group", "name": "system:bootstrappers"}
    binding = {"kind": "ClusterRoleBinding", "metadata": {"name": f"{joining.namespace}-auto"}}
    joining.create({"apiVersion": RBAC, **binding, "roleRef": reference, "subjects": [group]})
    node, request = f"{joining.namespace}-master-0", f"{joining.namespace}-csr"
    joining.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}})
    token, record = make_served_token()
    target = JoinTarget(joining.url, lambda: joining.authority)
    server = joining.connect_account(NAME)
    machine = joining.connect_machine(
        BootstrapCredentials(server, CLOCK, target).issue(token, record, "10.0.0.1")
    )
    joining.remove_later(f"{SYSTEM_SECRETS}/bootstrap-token-{record.name}")
    joining.store_token(record)
    wait_until(lambda: machine.get(REQUESTS).code != 401, limit_s=LIMIT_S)
    machine.post(REQUESTS, make_request(request, make_pkcs10(f"system:node:{node}"))).ok()
    joining.remove_later(f"{REQUESTS}/{request}")
    wait_until(lambda: joining.read_decision(request) == ["Approved"], limit_s=LIMIT_S)
    with joining.run_approvals() as (controller, keys):
        wait_until(lambda: request in keys, limit_s=LIMIT_S)
        controller.sync_key(request)
    assert f"request {request}: kube-controller-manager approved it" in caplog.text


def test_no_request_with_an_access_token_gets_another_identity(joining: JoiningCluster) -> None:
    """Each one is either refused by kube-apiserver, or denied by the approval."""
    node = f"{joining.namespace}-victim"
    joining.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}})
    server = joining.connect_account(NAME)
    token, record = make_served_token()
    target = JoinTarget(joining.url, lambda: joining.authority)
    machine = joining.connect_machine(
        BootstrapCredentials(server, CLOCK, target).issue(token, record, "10.0.0.1")
    )
    joining.remove_later(f"{SYSTEM_SECRETS}/bootstrap-token-{record.name}")
    wait_until(lambda: machine.get(REQUESTS).code != 401, limit_s=LIMIT_S)
    new, victim = make_pkcs10("system:node:new"), make_pkcs10(f"system:node:{node}")
    user = f"system:bootstrap:{record.name}"
    forged = {"username": f"system:node:{node}", "groups": ["system:nodes"], "uid": "1"}
    hostile = {
        "victim": make_request("", victim),
        # kube-apiserver and the signer read the second block.
        "second-block": make_request("", b"x" + new + victim),
        "indented": make_request("", b" " + new + victim),
        "two-blocks": make_request("", new + victim),
        "upper-case": make_request("", make_pkcs10(f"system:node:{node.upper()}")),
        "line-break": make_request("", make_pkcs10("system:node:a\nb")),
        "names": make_request("", make_pkcs10("system:node:new", names=("a.example",))),
        "groups": make_request("", make_pkcs10("system:node:new", groups=("system:nodes", "a"))),
        "admin": make_request("", make_pkcs10("admin", groups=("system:masters",))),
        "unit": make_request("", make_pkcs10("system:node:new", units=("a",))),
        "extension": make_request("", make_pkcs10("system:node:new", extensions=[CLIENT])),
        "attributes": make_request("", make_two_attributes("system:node:new", CLIENT, CLIENT)),
        "localhost": make_request("", make_pkcs10("system:node:localhost")),
        "usages": make_request("", new, usages=(*USAGES, "server auth")),
        "signer": make_request("", new, signer="kubernetes.io/kube-apiserver-client"),
        "serving": make_request("", new, signer="kubernetes.io/kubelet-serving"),
        "garbage": make_request("", b"garbage"),
    }
    for name in ("user", "extra"):
        hostile[name] = make_request("", victim)
        extra = {"extra": {"authentication.kubernetes.io/node-name": [node]}}
        hostile[name]["spec"] |= forged if name == "user" else extra
    created = set()
    for name, request in hostile.items():
        request["metadata"] = {
            "name": f"{joining.namespace}-{name}",
            "annotations": forged_notes(user),
        }
        answer = machine.post(REQUESTS, request)
        if answer.code == 201:
            created.add(request["metadata"]["name"])
            joining.remove_later(f"{REQUESTS}/{request['metadata']['name']}")
            assert answer.ok()["spec"]["username"] == user
        else:
            assert answer.code in (400, 403, 422)
    assert len(created) > 8
    joining.store_token(record)
    with joining.run_approvals() as (controller, _):
        for name in created:
            controller.sync_key(name)
    for name in created:
        found = joining.read_decision(name)
        is_of_a_kubelet = not name.endswith(("-signer", "-serving"))
        assert found == (["Denied"] if is_of_a_kubelet else []), name


def make_served_token(*, uses: int = 1) -> tuple[str, TokenRecord]:
    """Make a token with which a server has sent the config to each machine."""
    token, record = make_token("worker", expires=CLOCK.now() + 600, uses=uses)
    used = tuple(TokenUse(f"10.0.0.{number + 1}", CLOCK.now()) for number in range(uses))
    return token, replace(record, used=used)


def test_name_belongs_to_one_machine_on_a_cluster(joining: JoiningCluster) -> None:
    server = joining.connect_account(NAME)
    token, record = make_served_token(uses=4)
    target = JoinTarget(joining.url, lambda: joining.authority)
    credentials = BootstrapCredentials(server, CLOCK, target)
    joining.store_token(record)
    victim, new = f"{joining.namespace}-victim", f"{joining.namespace}-new"
    joining.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": victim}})
    with joining.run_approvals() as (controller, keys):

        def request(name: str, node: str, number: int) -> list[str]:
            """Request a certificate as a machine with another address; return the decision."""
            machine = joining.connect_machine(credentials.issue(token, record, f"10.0.0.{number}"))
            wait_until(lambda: machine.get(REQUESTS).code != 401, limit_s=LIMIT_S)
            name = f"{joining.namespace}-{name}"
            document = make_request(name, make_pkcs10(f"system:node:{node}"))
            machine.post(REQUESTS, document).ok()
            joining.remove_later(f"{REQUESTS}/{name}")
            wait_until(lambda: name in keys, limit_s=LIMIT_S)
            controller.sync_key(name)
            return joining.read_decision(name)

        for identity in list_identities(record):
            joining.remove_later(f"{SYSTEM_SECRETS}/bootstrap-token-{identity}")
        assert request("takes-over", victim, 1) == ["Denied"]
        takes_over = f"{joining.namespace}-takes-over"
        keys.clear()
        joining.admin.delete(f"/api/v1/nodes/{victim}").ok()
        wait_until(lambda: "/" in keys, limit_s=LIMIT_S)
        controller.sync_key("/")
        controller.sync_key(takes_over)
        assert joining.read_decision(takes_over) == ["Denied"]
        assert request("placeholder", "localhost", 1) == ["Denied"]
        assert request("first", new, 2) == ["Approved"]
        assert request("same-name", new, 3) == ["Denied"]
        assert request("second-name", f"{new}-2", 2) == ["Denied"]
        joining.admin.delete(f"{REQUESTS}/{joining.namespace}-first").ok()
        assert request("after-cleanup", new, 4) == ["Denied"]


def forged_notes(user: str) -> dict[str, str]:
    return {"treenail.io/approved": "true", "username": user}


def test_server_cannot_write_other_secrets_of_the_system(joining: JoiningCluster) -> None:
    server = joining.connect_account(NAME)
    _, record = make_token("worker", expires=0)
    target = JoinTarget(joining.url, lambda: joining.authority)
    other = {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "bootstrap.kubernetes.io/token",
        "metadata": {"name": f"bootstrap-token-{record.name}", "namespace": "kube-system"},
        "stringData": {"token-id": record.name, "token-secret": "x" * 16},
    }
    joining.create(other)

    def is_refused() -> bool:
        try:
            BootstrapCredentials(server, CLOCK, target).revoke(record.name)
        except ForbiddenError:
            return True
        joining.create(other)
        return False

    # The admission policy is in effect some seconds after its creation.
    wait_until(is_refused, limit_s=LIMIT_S)
    with pytest.raises(ForbiddenError, match="may change only its bootstrap tokens"):
        BootstrapCredentials(server, CLOCK, target).issue("tn_x", record, "10.0.0.1")
    with pytest.raises(ForbiddenError):
        TokenStore(server, "kube-system", CLOCK).load()
    account = {"metadata": {"name": f"{joining.namespace}-x"}, "type": "Opaque"}
    with pytest.raises(ForbiddenError, match="may write only its bootstrap tokens"):
        server.create(SECRETS, account, namespace="kube-system")
