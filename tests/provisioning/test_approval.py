"""Approval of kubelets' client certificates: the decision, and the controller on the lab."""

import base64
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.contract.client import Cluster
from tests.contract.csr import (
    REQUESTS,
    USAGES,
    Json,
    encode_key,
    make_key,
    make_pkcs10,
    make_request,
)
from tests.provisioning.serving import LIMIT_S
from tests.provisioning.token_cluster import NAMESPACE, SECRET, TokenCluster, run_token_cluster
from tests.waiting import wait_until
from treenail.controllers.runtime.informer_set import InformerSet
from treenail.kube.event_recorder import EventRecorder
from treenail.kube.resources import MACHINECONFIGPOOLS
from treenail.manifests.ignition_server import build_join_access
from treenail.manifests.installation import load_crds
from treenail.provisioning.approval.controller import ApprovalController
from treenail.provisioning.approval.request import IssuedCertificate, KubeletRequest, find_refusal
from treenail.provisioning.tokens.bootstrap_tokens import (
    GROUP,
    BootstrapCredentials,
    JoinTarget,
    list_groups,
)
from treenail_lab.apiserver.access.certificates import CertificateIdentity, render_kubeconfig

DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
REQUEST = KubeletRequest("csr-1", "uid", "abc234", node="worker-1")


OWN, OTHER = "abc234", "xyz789"
BOUND = replace(REQUEST, machine="worker-1")


@pytest.mark.parametrize(
    ("request_of", "nodes", "approved", "refusal"),
    [
        (REQUEST, {}, [], ""),
        (REQUEST, {"other": True}, [], ""),
        (REQUEST, {"worker-1": False}, [], "Node worker-1 exists"),
        # The kubelet restarted before it stored its certificate.
        (REQUEST, {}, [(OWN, "worker-1")], ""),
        # Another machine with the same token must not become a Node that has joined.
        (replace(REQUEST, uses=9), {"worker-1": True}, [(OWN, "worker-1")],
         "Node worker-1 exists"),
        (REQUEST, {}, [(OWN, "worker-2")], "is for 1 machines, and has certificates for worker-2"),
        (replace(REQUEST, uses=2), {}, [(OWN, "worker-2")], ""),
        # The Node of the other machine appears a moment after its certificate.
        (REQUEST, {}, [(OTHER, "worker-1")], "a certificate for worker-1 by token xyz789"),
        (BOUND, {}, [(OTHER, "worker-1")], ""),
        (BOUND, {"worker-1": False}, [], ""),
        (BOUND, {"worker-1": False}, [(OWN, "worker-1")], ""),
        (BOUND, {"worker-1": True}, [], "Node worker-1 is Ready"),
        (BOUND, {"worker-1": True}, [(OWN, "worker-1")], "Node worker-1 is Ready"),
        (replace(REQUEST, machine="worker-2"), {}, [],
         "is for machine worker-2, not worker-1"),
        (replace(REQUEST, problem="it has alternative names"), {}, [],
         "it has alternative names"),
    ],
)  # fmt: skip
def test_request_is_approved_for_the_machine_of_its_token_only(
    request_of: KubeletRequest,
    nodes: dict[str, bool],
    approved: list[tuple[str, str]],
    refusal: str,
) -> None:
    found = find_refusal(request_of, nodes, [IssuedCertificate(*each) for each in approved])
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
        (make_pkcs10("system:node:WORKER-1"), USAGES, "its common name"),
        (make_pkcs10("system:node:a\nb"), USAGES, "its common name"),
        (b"no PEM", USAGES, "it is not a certificate request"),
        (make_pkcs10("system:node:a")[:-40] + b"\n", USAGES, "it is not a certificate request"),
    ],
)  # fmt: skip
def test_invalid_request_has_a_problem(
    content: bytes, usages: tuple[str, ...], problem: str
) -> None:
    found = parse(make_request("csr-1", content, usages=usages))
    assert problem in found.problem


@pytest.mark.parametrize(
    "first",
    [
        # Go's encoding/pem takes the second block, since the first does not begin a line.
        b"x" + make_pkcs10("system:node:new"),
        b" " + make_pkcs10("system:node:new"),
        b"-----BEGIN" + make_pkcs10("system:node:new"),
        # It takes the first block: the readers must not disagree in either way.
        make_pkcs10("system:node:new"),
        make_pkcs10("system:node:new").replace(b" REQUEST-----\n", b" REQUEST----- \n"),
        make_pkcs10("system:node:new").replace(b"\n", b"\nProc-Type: 4,ENCRYPTED\n\n", 1),
    ],
)
def test_request_with_two_pem_blocks_is_refused(first: bytes) -> None:
    content = first + make_pkcs10("system:node:master-0")
    found = parse(make_request("csr-1", content))
    assert (found.node, found.problem) == (
        "",
        "it is not a certificate request in PEM that can be verified",
    )


def test_long_node_name_is_read_without_a_warning() -> None:
    # X.509 allows 64 characters; Go's crypto/x509, and so the kubelet, has no limit.
    # Kubernetes limits the whole name to 253 characters, not its parts.
    name = f"{'a' * 100}.{'b' * 60}.example"
    with pytest.warns(UserWarning, match="length"):
        content = make_pkcs10(f"system:node:{name}")
    found = parse(make_request("csr-1", content))
    assert (found.node, found.problem) == (name, "")


def test_request_with_two_machine_groups_is_refused() -> None:
    document = make_request("csr-1", make_pkcs10("system:node:a"))
    group = "system:bootstrappers:treenail-machine"
    found = parse(document, groups=(f"{group}:b", f"{group}:c"))
    assert "its groups name several machines" in found.problem


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[TokenCluster]:
    with run_token_cluster(tmp_path) as found:
        for document in build_join_access("treenail-ignition"):
            if document["kind"] == "ClusterRoleBinding":
                bindings = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings"
                found.admin.post(bindings, document).ok()
        for document in load_crds():
            found.admin.post(DEFINITIONS, document).ok()
        yield found


def create_pool(cluster: TokenCluster, selector: Json) -> None:
    """Create the pool of workers."""
    pools = f"/apis/{MACHINECONFIGPOOLS.api_version}/machineconfigpools"
    body = {
        "apiVersion": MACHINECONFIGPOOLS.api_version,
        "kind": MACHINECONFIGPOOLS.kind,
        "metadata": {"name": "worker"},
        "spec": {"nodeSelector": selector},
    }
    cluster.admin.post(pools, body).ok()


class Approvals:
    """The controller with its watches; each key is synced when it changes."""

    def __init__(self, cluster: TokenCluster) -> None:
        client = cluster.connect()
        recorder = EventRecorder(client, "tests", "tests", cluster.clock)
        self.controller = ApprovalController(client, cluster.real_clock, recorder, NAMESPACE)
        self.informers = informers = InformerSet(client, cluster.clock)
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

    def sync_until(self, condition: Callable[[], object]) -> None:
        """Sync what changes until the condition is true."""

        def is_met() -> object:
            while self.keys:
                self.controller.sync_key(self.keys.pop(0))
            return condition()

        wait_until(is_met, limit_s=LIMIT_S)


def join(cluster: TokenCluster, token: str, name: str, node: str) -> bytes:
    """Create a request with the bootstrap token, as a kubelet does; return its key."""
    record = next(
        each for each in cluster.make_store().load().tokens.values() if each.name in token
    )
    target = JoinTarget(cluster.server.url, cluster.server.ca_file.read_bytes)
    credentials = BootstrapCredentials(cluster.client, cluster.real_clock, target)
    path = cluster.directory / f"{name}.kubeconfig"
    path.write_bytes(credentials.issue(token, record, "10.0.0.1"))
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
        return found["status"].get("certificate", "")

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
    # The kubelet restarted before it stored its certificate.
    join(cluster, token, "again", "new")
    approvals.sync_next()
    assert read_conditions(cluster, "again") == ["Approved"]
    kubelet = Cluster.of_kubeconfig(path)
    kubelet.post("/api/v1/nodes", {"metadata": {"name": "new"}}).ok()
    # The watch of the Nodes enqueues the undecided request.
    wait_until(lambda: "takes-over" in approvals.keys, limit_s=LIMIT_S)
    assert kubelet.get("/api/v1/nodes/new").code == 200
    assert kubelet.get("/api/v1/nodes/old").code == 403
    # A second machine with the same credential.
    join(cluster, token, "second", "other")
    approvals.sync_next()
    assert read_conditions(cluster, "second") == []
    # The machine has joined: another machine with the token does not become its Node.
    join(cluster, token, "steals", "new")
    approvals.sync_next()
    assert read_conditions(cluster, "steals") == []


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


@pytest.mark.integration
def test_machine_of_a_ready_node_is_approved_when_the_node_is_not_ready(
    cluster: TokenCluster,
) -> None:
    token, _ = cluster.create_token(machine="worker-1")
    node = {"metadata": {"name": "worker-1"}}
    ready = {"conditions": [{"type": "Ready", "status": "True"}]}
    cluster.admin.post("/api/v1/nodes", {**node, "status": ready}).ok()
    approvals = Approvals(cluster)
    join(cluster, token, "again", "worker-1")
    approvals.sync_next()
    assert read_conditions(cluster, "again") == []
    lost = {"conditions": [{"type": "Ready", "status": "Unknown"}]}
    cluster.admin.put("/api/v1/nodes/worker-1/status", {**node, "status": lost}).ok()
    approvals.sync_next()
    assert read_conditions(cluster, "again") == ["Approved"]


@pytest.mark.integration
def test_node_of_an_approved_kubelet_becomes_a_member_of_the_pool(
    cluster: TokenCluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    role = "node-role.kubernetes.io/worker"
    create_pool(cluster, {"matchLabels": {role: ""}})
    token, _ = cluster.create_token()
    approvals = Approvals(cluster)
    join(cluster, token, "joins", "new")
    approvals.sync_until(lambda: read_conditions(cluster, "joins"))

    def has_role(name: str) -> bool:
        found = cluster.admin.get(f"/api/v1/nodes/{name}").ok()["metadata"]
        return role in (found.get("labels") or {})

    for name in ("other", "new"):
        cluster.admin.post("/api/v1/nodes", {"metadata": {"name": name}}).ok()
    approvals.sync_until(lambda: has_role("new"))
    assert not has_role("other")
    assert "labelled Node new as a member of pool worker" in caplog.text
    # A user removes it.
    cluster.admin.patch("/api/v1/nodes/new", {"metadata": {"labels": {role: None}}}).ok()
    approvals.controller.sync_key("joins")
    assert not has_role("new")


@pytest.mark.integration
def test_node_that_cannot_be_labelled_gets_an_event(cluster: TokenCluster) -> None:
    create_pool(cluster, {"matchExpressions": [{"key": "site", "operator": "Exists"}]})
    token, _ = cluster.create_token()
    approvals = Approvals(cluster)
    join(cluster, token, "joins", "new")
    approvals.sync_until(lambda: read_conditions(cluster, "joins"))
    cluster.admin.post("/api/v1/nodes", {"metadata": {"name": "new"}}).ok()

    def list_events() -> list[Json]:
        found = cluster.admin.get("/api/v1/namespaces/default/events").ok()["items"]
        return [each for each in found if each["reason"] == "NotLabelled"]

    approvals.sync_until(list_events)
    (event,) = list_events()
    assert event["involvedObject"]["name"] == "new"
    assert "requirements other than matchLabels" in event["message"]


@pytest.mark.integration
def test_many_requests_of_one_token_are_reported_ten_times(
    cluster: TokenCluster, caplog: pytest.LogCaptureFixture
) -> None:
    flooding, _ = cluster.create_token()
    token, _ = cluster.create_token()
    cluster.admin.post("/api/v1/nodes", {"metadata": {"name": "old"}}).ok()
    approvals = Approvals(cluster)
    for number in range(12):
        join(cluster, flooding, f"flood-{number}", "old")
    wait_until(lambda: len(set(approvals.keys)) == 12, limit_s=LIMIT_S)
    approvals.sync_next()
    assert caplog.text.count("did not approve certificate request flood-") == 10
    assert caplog.text.count("not reporting further ones") == 1
    found = cluster.admin.get("/api/v1/namespaces/default/events").ok()["items"]
    assert len(found) == 10
    # Another token is reported as before.
    join(cluster, token, "other", "old")
    approvals.sync_next()
    assert "did not approve certificate request other: Node old exists" in caplog.text
    # Requests that are gone no longer count.
    for number in range(12):
        cluster.admin.delete(f"{REQUESTS}/flood-{number}").ok()
    wait_until(lambda: len(set(approvals.keys)) == 12, limit_s=LIMIT_S)
    approvals.sync_next()
    join(cluster, flooding, "later", "old")
    approvals.sync_next()
    assert "did not approve certificate request later: Node old exists" in caplog.text


@pytest.mark.integration
def test_deleted_requests_of_a_token_still_count(cluster: TokenCluster) -> None:
    token, record = cluster.create_token(uses=2)
    approvals = Approvals(cluster)
    for node in ("first", "second", "third"):
        join(cluster, token, node, node)
        approvals.sync_next()
    assert read_conditions(cluster, "third") == []
    # kube-controller-manager deletes them an hour after their approval.
    for node in ("first", "second"):
        cluster.admin.delete(f"{REQUESTS}/{node}").ok()
    wait_until(lambda: {"first", "second"} <= set(approvals.keys), limit_s=LIMIT_S)
    for each in (approvals, Approvals(cluster)):
        each.controller.sync_key("third")
        assert read_conditions(cluster, "third") == []
    assert cluster.read_record(record.name).nodes == ("first", "second")
    # The first machine was installed again, with the same name.
    join(cluster, token, "again", "first")
    approvals.sync_until(lambda: read_conditions(cluster, "again") == ["Approved"])


@pytest.mark.integration
def test_request_with_a_revoked_token_is_not_approved(
    cluster: TokenCluster, caplog: pytest.LogCaptureFixture
) -> None:
    token, record = cluster.create_token()
    approvals = Approvals(cluster)
    join(cluster, token, "late", "new")
    cluster.make_store().change(lambda table: (table.remove(record.name), None))
    approvals.sync_next()
    assert read_conditions(cluster, "late") == []
    assert f"token {record.name} does not exist, or was revoked" in caplog.text
    cluster.admin.delete(SECRET).ok()
    approvals.controller.sync_key("late")
    assert read_conditions(cluster, "late") == []
    assert cluster.admin.get(SECRET).code == 404


@pytest.mark.integration
@pytest.mark.parametrize("is_restarted", [False, True])
def test_two_tokens_never_get_the_certificate_of_one_new_node(
    cluster: TokenCluster, *, is_restarted: bool
) -> None:
    tokens = [cluster.create_token()[0] for _ in range(2)]
    for number, token in enumerate(tokens):
        join(cluster, token, f"csr-{number}", "new")
    approvals = Approvals(cluster)
    # The watch does not show the approval before the next decision.
    approvals.informers.stop()
    approvals.controller.sync_key("csr-0")
    if is_restarted:
        approvals = Approvals(cluster)
    approvals.controller.sync_key("csr-1")
    assert read_conditions(cluster, "csr-0") == ["Approved"]
    assert read_conditions(cluster, "csr-1") == []
