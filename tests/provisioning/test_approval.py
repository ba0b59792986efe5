"""Approval of kubelets' client certificates: the decision, and the controller on the lab."""

import base64
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from tests.contract.client import Cluster
from tests.contract.csr import (
    REQUESTS,
    USAGES,
    Json,
    make_pkcs10,
    make_request,
    make_two_attributes,
)
from tests.provisioning.approving import (
    Approvals,
    create_pool,
    join,
    read_conditions,
    run_approval_cluster,
)
from tests.provisioning.serving import LIMIT_S
from tests.provisioning.token_cluster import SECRET, TokenCluster
from tests.waiting import wait_until
from treenail.provisioning.approval.request import (
    KubeletRequest,
    find_name_refusal,
    find_request_refusal,
)
from treenail.provisioning.tokens import bootstrap_tokens
from treenail.provisioning.tokens.bootstrap_tokens import (
    GROUP,
    list_groups,
)
from treenail.provisioning.tokens.certificates import IssuedCertificate
from treenail.provisioning.tokens.tokens import TokenRecord, TokenUse
from treenail_lab.apiserver.access.certificates import CertificateIdentity, render_kubeconfig

DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
CLIENT = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH])
SIGNER = x509.BasicConstraints(ca=True, path_length=None)
NOW = 1_000.0
OWN, OTHER = "abc234", "xyz789"
REQUEST = KubeletRequest(
    "csr-1", "uid", OWN, identity=OWN, node="worker-1", key="k1", pool="worker", created_at=NOW
)
BOUND = replace(REQUEST, machine="worker-1")
USE = TokenUse("10.0.0.1", NOW)
RECORD = TokenRecord(OWN, b"", "worker", NOW + 600, used=(USE,))
MANY = replace(RECORD, uses=9)


@pytest.mark.parametrize(
    ("request_of", "is_ready", "refusal"),
    [
        (REQUEST, None, ""),
        (REQUEST, False, "Node worker-1 exists"),
        (REQUEST, True, "Node worker-1 exists"),
        (BOUND, None, ""),
        (BOUND, False, ""),
        (BOUND, True, "Node worker-1 is Ready"),
        (replace(REQUEST, machine="worker-2"), None, "is for machine worker-2, not worker-1"),
        (replace(REQUEST, problem="it has alternative names"), None, "it has alternative names"),
    ],
)
def test_request_is_for_a_new_node_or_for_that_of_its_token(
    request_of: KubeletRequest, *, is_ready: bool | None, refusal: str
) -> None:
    found = find_request_refusal(request_of, is_ready=is_ready)
    assert (found is None) == (refusal == "")
    assert found is None or refusal in found.reason
    # Nothing changes what is wrong with a request, but a machine can be shut down.
    assert found is None or found.is_final == ("is Ready" not in refusal)


@pytest.mark.parametrize(
    "node",
    ["localhost", "localhost.localdomain", "localhost.example", "fedora", "ubuntu", "master",
     "master-0.example", "master1", "control-plane-2", "kind-control-plane", "controlplane1",
     "infra.control-0.example"],
)  # fmt: skip
def test_placeholder_or_control_plane_name_needs_a_token_for_it(node: str) -> None:
    found = find_request_refusal(replace(REQUEST, node=node), is_ready=None)
    assert found is not None
    assert f"--machine {node}" in found.reason
    assert find_request_refusal(replace(REQUEST, node=node, machine=node), is_ready=None) is None


@pytest.mark.parametrize("node", ["worker-0", "mastery-1", "webmaster.example", "fedora-7"])
def test_name_of_another_machine_is_no_name_of_the_control_plane(node: str) -> None:
    assert find_request_refusal(replace(REQUEST, node=node), is_ready=None) is None


def issue(node: str, identity: str = OWN, key: str = "k1", token: str = OWN) -> IssuedCertificate:
    return IssuedCertificate(node, identity, token, key, NOW + 3600)


SHARED = bootstrap_tokens.compute_identity(OWN, 9, USE.address)
ONE_OF_MANY = replace(REQUEST, identity=SHARED)
TWICE = replace(MANY, used=(replace(USE, responses=2),))
OF_BOUND = issue("worker-1", "worker/worker-1", token="old123")  # a name
BEFORE = issue("worker-1", "", "", "")
"""The machine of a Node that joined without an access token."""


@pytest.mark.parametrize(
    ("request_of", "record", "certificates", "refusal"),
    [
        (REQUEST, RECORD, [], ""),
        (REQUEST, RECORD, [issue("other", OTHER, token=OTHER)], ""),
        # The kubelet restarted before it stored its certificate.
        (REQUEST, RECORD, [issue("worker-1")], ""),
        (REQUEST, RECORD, [issue("worker-1", key="k2")], ""),
        (REQUEST, RECORD, [issue("worker-2")], "permits 1 names"),
        (REQUEST, RECORD, [issue("worker-1", OTHER, "k2", OTHER)], "another machine has"),
        (REQUEST, RECORD, [BEFORE], "another machine has"),
        (REQUEST, RECORD, [OF_BOUND], "another machine has"),
        (REQUEST, replace(RECORD, used=()), [], "permits 0 names"),
        # Machines of one token, behind other addresses.
        (ONE_OF_MANY, MANY, [], ""),
        (ONE_OF_MANY, MANY, [issue("worker-1", "other1")], "another machine has"),
        (ONE_OF_MANY, MANY, [issue("worker-2", "other1")], ""),
        (ONE_OF_MANY, MANY, [issue("worker-2", SHARED)], "permits 1 names"),
        (ONE_OF_MANY, MANY, [issue(f"w{n}", f"o{n}") for n in range(9)], "permits 9 names"),
        # Machines behind one address.
        (ONE_OF_MANY, TWICE, [issue("worker-2", SHARED)], ""),
        (ONE_OF_MANY, TWICE, [issue("worker-1", SHARED)], ""),
        (ONE_OF_MANY, TWICE, [issue("worker-1", SHARED, "k2")], "another machine has"),
        # A user names the machine.
        (BOUND, RECORD, [issue("worker-1", OTHER, "k2", OTHER), BEFORE, OF_BOUND], ""),
        (BOUND, RECORD, [issue("worker-2", "x", token="x")], ""),
    ],
)
def test_name_belongs_to_one_machine(
    request_of: KubeletRequest,
    record: TokenRecord,
    certificates: list[IssuedCertificate],
    refusal: str,
) -> None:
    found = find_name_refusal(request_of, record, certificates, newer_than=0.0)
    assert (found is None) == (refusal == "")
    assert found is None or (refusal in found.reason and found.is_final)


def test_named_machine_of_another_pool_has_another_identity() -> None:
    """Else the label of the control plane could go to a machine that joined as a worker."""
    assert BOUND.holder == replace(BOUND, token=OTHER, identity=OTHER).holder
    assert BOUND.holder != replace(BOUND, pool="master").holder
    assert BOUND.holder != REQUEST.holder


def test_request_older_than_the_deletion_of_its_node_is_refused() -> None:
    for request_of in (REQUEST, BOUND):
        assert find_name_refusal(request_of, RECORD, [], newer_than=NOW) is None
        found = find_name_refusal(request_of, RECORD, [], newer_than=NOW + 1)
        assert found is not None
        assert "kubectl delete csr csr-1" in found.reason


def test_refusal_never_advises_to_approve_and_names_three_machines() -> None:
    certificates = [issue(f"w{number}", SHARED) for number in range(9)]
    found = find_name_refusal(ONE_OF_MANY, TWICE, certificates, newer_than=0.0)
    assert found is not None
    assert "w0, w1, w2:" in found.reason
    assert "certificate approve" not in found.reason


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
    assert (found.problem, found.is_decided) == ("", False)


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
        (make_pkcs10("system:node:a", extensions=[CLIENT]), USAGES, "it requests extensions"),
        (make_pkcs10("system:node:a", units=["masters"]), USAGES, "its subject has other parts"),
        (make_pkcs10("system:node:a", password=b"x"), USAGES, "it has attributes that no kubelet"),
        (make_two_attributes("system:node:a", CLIENT, SIGNER), USAGES,
         "it has attributes that no kubelet"),
        (make_two_attributes("system:node:a", CLIENT, CLIENT), USAGES,
         "it has attributes that no kubelet"),
        (make_pkcs10("system:node:a"), (*USAGES, "client auth"), "its usages are not those"),
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


@pytest.mark.parametrize("group", ["treenail-machine", "treenail-token", "treenail"])
def test_request_with_two_groups_of_a_kind_is_refused(group: str) -> None:
    document = make_request("csr-1", make_pkcs10("system:node:a"))
    prefix = f"system:bootstrappers:{group}"
    found = parse(document, groups=(f"{prefix}:b", f"{prefix}:c"))
    assert "its groups name several machines, tokens or pools" in found.problem


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[TokenCluster]:
    with run_approval_cluster(tmp_path) as found:
        yield found


@pytest.mark.integration
def test_kubelet_with_a_token_gets_the_certificate_of_one_new_node(
    cluster: TokenCluster, caplog: pytest.LogCaptureFixture
) -> None:
    token, record = cluster.create_token()
    assert list_groups(record)[0] == GROUP
    cluster.admin.post("/api/v1/nodes", {"metadata": {"name": "old"}}).ok()
    approvals = Approvals(cluster)
    join(cluster, token, "takes-over", "old")
    approvals.sync("takes-over")
    assert read_conditions(cluster, "takes-over") == ["Denied"]
    assert "Node old exists" in caplog.text
    key = join(cluster, token, "joins", "new")
    approvals.sync("joins")
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
    approvals.sync("again")
    assert read_conditions(cluster, "again") == ["Approved"]
    kubelet = Cluster.of_kubeconfig(path)
    approvals.change_nodes(
        lambda: kubelet.post("/api/v1/nodes", {"metadata": {"name": "new"}}).ok()
    )
    assert kubelet.get("/api/v1/nodes/new").code == 200
    assert kubelet.get("/api/v1/nodes/old").code == 403
    # A second machine with the same credential.
    join(cluster, token, "second", "other")
    approvals.sync("second")
    assert read_conditions(cluster, "second") == ["Denied"]
    # The machine has joined: another machine with the token does not become its Node.
    join(cluster, token, "steals", "new")
    approvals.sync("steals")
    assert read_conditions(cluster, "steals") == ["Denied"]


@pytest.mark.integration
def test_token_of_a_machine_permits_its_node_also_when_it_exists(cluster: TokenCluster) -> None:
    token, _ = cluster.create_token(machine="worker-1.example")
    cluster.admin.post("/api/v1/nodes", {"metadata": {"name": "worker-1.example"}}).ok()
    approvals = Approvals(cluster)
    join(cluster, token, "other", "worker-2")
    join(cluster, token, "same", "worker-1.example")
    approvals.sync("other", "same")
    assert read_conditions(cluster, "other") == ["Denied"]
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
    approvals.sync("again")
    assert read_conditions(cluster, "again") == []
    lost = {"conditions": [{"type": "Ready", "status": "Unknown"}]}
    cluster.admin.put("/api/v1/nodes/worker-1/status", {**node, "status": lost}).ok()
    assert approvals.decide("again") == ["Approved"]


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
    names = {f"flood-{number}" for number in range(12)}
    for name in sorted(names):
        join(cluster, flooding, name, "old")
    approvals.sync(*names)
    assert caplog.text.count("did not approve certificate request flood-") == 10
    assert caplog.text.count("not reporting further ones") == 1
    found = cluster.admin.get("/api/v1/namespaces/default/events").ok()["items"]
    assert len(found) == 10
    # Another token is reported as before.
    join(cluster, token, "other", "old")
    approvals.sync("other")
    assert "did not approve certificate request other: Node old exists" in caplog.text
    # Requests that are gone no longer count.
    for name in sorted(names):
        cluster.admin.delete(f"{REQUESTS}/{name}").ok()
    approvals.sync(*names)
    join(cluster, flooding, "later", "old")
    approvals.sync("later")
    assert "did not approve certificate request later: Node old exists" in caplog.text


@pytest.mark.integration
def test_approval_of_another_program_is_reported(
    cluster: TokenCluster, caplog: pytest.LogCaptureFixture
) -> None:
    token, _ = cluster.create_token(uses=3)
    approvals = Approvals(cluster)
    for name, reason in (("by-user", "KubectlApprove"), ("by-controller", "AutoApproved")):
        join(cluster, token, name, name)
        document = cluster.admin.get(f"{REQUESTS}/{name}").ok()
        approval = {"type": "Approved", "status": "True", "reason": reason, "message": "m"}
        document["status"] = {"conditions": [approval]}
        cluster.admin.put(f"{REQUESTS}/{name}/approval", document).ok()
        approvals.sync(name)
    assert "did not approve certificate request by-user" not in caplog.text
    reported = "request by-controller: kube-controller-manager approved it, and approves any name"
    assert reported in caplog.text


@pytest.mark.integration
def test_deleted_requests_of_a_token_still_count(cluster: TokenCluster) -> None:
    token, record = cluster.create_token(uses=2)
    approvals = Approvals(cluster)
    for number, node in enumerate(("first", "second", "third")):
        join(cluster, token, node, node, f"10.0.0.{number}")
        approvals.decide(node)
    assert read_conditions(cluster, "third") == ["Denied"]
    # kube-controller-manager deletes them an hour after their approval.
    for node in ("first", "second"):
        cluster.admin.delete(f"{REQUESTS}/{node}").ok()
    wait_until(lambda: {"first", "second"} <= set(approvals.keys), limit_s=LIMIT_S)
    for name, each in (("fourth", approvals), ("fifth", Approvals(cluster))):
        join(cluster, token, name, name, "10.0.0.2")
        assert each.decide(name) == ["Denied"]
    assert cluster.read_record(record.name).nodes == ("first", "second")
    # The first machine was installed again, with the same name.
    join(cluster, token, "again", "first", "10.0.0.0")
    assert approvals.decide("again") == ["Approved"]


@pytest.mark.integration
def test_request_with_a_revoked_token_is_not_approved(
    cluster: TokenCluster, caplog: pytest.LogCaptureFixture
) -> None:
    token, record = cluster.create_token()
    approvals = Approvals(cluster)
    join(cluster, token, "late", "new")
    cluster.make_store().change(lambda table: (table.remove(record.name), None))
    approvals.sync("late")
    assert read_conditions(cluster, "late") == ["Denied"]
    assert f"token {record.name} does not exist, or was revoked" in caplog.text
    cluster.admin.delete(SECRET).ok()
    approvals.controller.sync_key("late")
    assert read_conditions(cluster, "late") == ["Denied"]
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
    assert read_conditions(cluster, "csr-1") == ["Denied"]
