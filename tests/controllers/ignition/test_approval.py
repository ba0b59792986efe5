"""Approval of kubelets' client certificates: the decision, and the controller on the lab."""

import base64
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.contract.client import Cluster
from tests.controllers.ignition.csr import (
    REQUESTS,
    USAGES,
    Json,
    encode_key,
    make_key,
    make_pkcs10,
    make_request,
)
from tests.controllers.ignition.serving import LIMIT_S
from tests.controllers.ignition.token_cluster import TokenCluster, run_token_cluster
from tests.waiting import wait_until
from treenail.controllers.ignition.approval.controller import ApprovalController
from treenail.controllers.ignition.approval.decide import find_refusal
from treenail.controllers.ignition.approval.request import KubeletRequest
from treenail.controllers.ignition.bootstrap_tokens import (
    GROUP,
    BootstrapCredentials,
    JoinTarget,
    list_groups,
)
from treenail.controllers.install.join_access import build_join_access
from treenail.controllers.runtime.informers import Informers
from treenail.kube.events import EventRecorder
from treenail_lab.apiserver.access.certificates import CertificateIdentity, render_kubeconfig

REQUEST = KubeletRequest("csr-1", "uid", "abc234", node="worker-1")


@pytest.mark.parametrize(
    ("request_of", "nodes", "approved", "refusal"),
    [
        (REQUEST, (), (), ""),
        (REQUEST, ("other",), (), ""),
        (REQUEST, ("worker-1",), (), "Node worker-1 exists"),
        (REQUEST, ("worker-1",), ("worker-1",), ""),
        (REQUEST, (), ("worker-2",), "is for 1 machines, and has certificates for worker-2"),
        (replace(REQUEST, uses=2), (), ("worker-2",), ""),
        (replace(REQUEST, machine="worker-1"), ("worker-1",), (), ""),
        (replace(REQUEST, machine="worker-2"), (), (), "is for machine worker-2, not worker-1"),
        (replace(REQUEST, problem="it has alternative names"), (), (), "it has alternative names"),
    ],
)
def test_request_is_approved_for_the_machine_of_its_token_only(
    request_of: KubeletRequest, nodes: tuple[str, ...], approved: tuple[str, ...], refusal: str
) -> None:
    found = find_refusal(request_of, nodes, approved)
    assert refusal in found
    assert bool(found) == bool(refusal)


def parse(document: Json, *, user: str = "system:bootstrap:abc234", groups: tuple[str, ...] = ()):  # type: ignore[no-untyped-def]
    spec = {**document["spec"], "username": user, "groups": [GROUP, *groups]}
    return KubeletRequest.from_json({**document, "spec": spec})


def test_user_and_groups_of_a_request_say_what_its_token_permits() -> None:
    document = make_request("csr-1", make_pkcs10("system:node:worker-1.example"))
    found = parse(
        document,
        groups=("system:bootstrappers:treenail-machine:worker-1:example",
                "system:bootstrappers:treenail-uses:3"),
    )  # fmt: skip
    assert (found.token, found.node, found.machine) == (
        "abc234", "worker-1.example", "worker-1.example",
    )  # fmt: skip
    assert (found.uses, found.problem, found.is_decided) == (3, "", False)


def test_request_without_an_access_token_is_none_of_this_controller() -> None:
    document = make_request("csr-1", make_pkcs10("system:node:worker-1"))
    assert parse(document, user="system:node:worker-1") is None
    assert parse(make_request("a", b"x", signer="example.com/other")) is None
    spec = {**document["spec"], "username": "system:bootstrap:abc234", "groups": ["other"]}
    assert KubeletRequest.from_json({**document, "spec": spec}) is None


@pytest.mark.parametrize(
    ("content", "usages", "problem"),
    [
        (make_pkcs10("system:node:a"), (*USAGES, "server auth"), "its usages are not those"),
        (make_pkcs10("system:node:a", groups=("system:masters",)), USAGES, "its organization"),
        (make_pkcs10("system:node:a", groups=("system:nodes", "system:masters")), USAGES,
         "its organization"),
        (make_pkcs10("system:node:"), USAGES, "its common name"),
        (make_pkcs10("kubernetes-admin"), USAGES, "its common name"),
        (make_pkcs10("system:node:a", names=("a.example",)), USAGES, "it has alternative names"),
        (b"no PEM", USAGES, "it is not a certificate request"),
    ],
)  # fmt: skip
def test_invalid_request_has_a_problem(
    content: bytes, usages: tuple[str, ...], problem: str
) -> None:
    found = parse(make_request("csr-1", content, usages=usages))
    assert found is not None
    assert problem in found.problem


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[TokenCluster]:
    with run_token_cluster(tmp_path) as found:
        for document in build_join_access("treenail-ignition"):
            if document["kind"] == "ClusterRoleBinding":
                bindings = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings"
                found.admin.post(bindings, document).ok()
        yield found


class Approvals:
    """The controller with its watches; each key is synced when it changes."""

    def __init__(self, cluster: TokenCluster) -> None:
        client = cluster.connect()
        recorder = EventRecorder(client, "tests", "tests", cluster.clock)
        self.controller = ApprovalController(client, cluster.clock, recorder)
        informers = Informers(client, cluster.clock)
        self.keys: list[str] = []
        self.controller.register_watches(informers, self.keys.append)
        cluster.stack.callback(informers.stop)
        informers.start()
        assert informers.wait_until_synced(LIMIT_S)

    def sync_next(self) -> None:
        """Wait for a change, and sync all keys."""
        wait_until(lambda: self.keys, limit_s=LIMIT_S)
        while self.keys:
            self.controller.sync_key(self.keys.pop(0))


def join(cluster: TokenCluster, token: str, name: str, node: str) -> bytes:
    """Create a request with the bootstrap token, as a kubelet does; return its key."""
    record = next(
        each for each in cluster.make_store().load().tokens.values() if each.name in token
    )
    target = JoinTarget(cluster.server.url, cluster.server.ca_file.read_bytes)
    credentials = BootstrapCredentials(cluster.client, cluster.real_clock, target)
    path = cluster.directory / f"{name}.kubeconfig"
    path.write_bytes(credentials.issue(token, record))
    key = make_key()
    kubelet = Cluster.of_kubeconfig(path)
    kubelet.post(REQUESTS, make_request(name, make_pkcs10(f"system:node:{node}", key))).ok()
    # Nothing else is allowed.
    assert kubelet.get("/api/v1/nodes").code == 403
    assert kubelet.get("/api/v1/namespaces/kube-system/secrets").code == 403
    return encode_key(key)


def read_conditions(cluster: TokenCluster, name: str) -> list[str]:
    status = cluster.admin.get(f"{REQUESTS}/{name}").ok().get("status") or {}
    return [each["type"] for each in status.get("conditions", [])]


@pytest.mark.integration
def test_kubelet_with_a_token_gets_the_certificate_of_one_new_node(
    cluster: TokenCluster, caplog: pytest.LogCaptureFixture
) -> None:
    token, record = cluster.create_token()
    assert list_groups(record)[0] == GROUP
    cluster.admin.post("/api/v1/nodes", {"metadata": {"name": "old"}}).ok()
    approvals = Approvals(cluster)
    join(cluster, token, "takes-over", "old")
    approvals.sync_next()
    assert read_conditions(cluster, "takes-over") == []
    assert "Node old exists" in caplog.text
    key = join(cluster, token, "joins", "new")
    approvals.sync_next()
    assert read_conditions(cluster, "joins") == ["Approved"]

    def read_certificate() -> str:
        found: Json = cluster.admin.get(f"{REQUESTS}/joins").ok()
        certificate: str = found["status"].get("certificate", "")
        return certificate

    certificate = base64.b64decode(wait_until(read_certificate, limit_s=LIMIT_S))
    path = cluster.directory / "kubelet"
    path.write_text(
        render_kubeconfig(
            server=cluster.server.url,
            authority=cluster.server.ca_file.read_bytes(),
            user="kubelet",
            identity=CertificateIdentity(certificate, key),
        )
    )
    kubelet = Cluster.of_kubeconfig(path)
    kubelet.post("/api/v1/nodes", {"metadata": {"name": "new"}}).ok()
    assert kubelet.get("/api/v1/nodes/new").code == 200
    assert kubelet.get("/api/v1/nodes/old").code == 403
    # A second machine with the same credential.
    join(cluster, token, "second", "other")
    approvals.sync_next()
    assert read_conditions(cluster, "second") == []
    # The kubelet restarted before it stored its certificate.
    join(cluster, token, "again", "new")
    approvals.sync_next()
    assert read_conditions(cluster, "again") == ["Approved"]


@pytest.mark.integration
def test_token_of_a_machine_permits_its_node_also_when_it_exists(cluster: TokenCluster) -> None:
    token, _ = cluster.create_token(machine="worker-1.example")
    cluster.admin.post("/api/v1/nodes", {"metadata": {"name": "worker-1.example"}}).ok()
    approvals = Approvals(cluster)
    join(cluster, token, "other", "worker-2")
    join(cluster, token, "same", "worker-1.example")
    wait_until(lambda: len(approvals.keys) >= 2, limit_s=LIMIT_S)
    approvals.sync_next()
    assert read_conditions(cluster, "other") == []
    assert read_conditions(cluster, "same") == ["Approved"]
