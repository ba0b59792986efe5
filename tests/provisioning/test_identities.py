"""Attacks on the identity of machines: each gets no certificate, or no label."""

import base64
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography import x509

from tests.contract.csr import REQUESTS, make_key
from tests.provisioning.approving import (
    Approvals,
    EarlyClock,
    create_pool,
    delete_node,
    join,
    list_recorded_names,
    read_conditions,
    read_labels,
    read_message,
    run_approval_cluster,
)
from tests.provisioning.serving import LIMIT_S
from tests.provisioning.token_cluster import TokenCluster
from tests.waiting import wait_until
from treenail.errors import ConfigError
from treenail.provisioning.tokens.certificates import (
    CertificateTable,
    read_certificates,
    store_certificates,
)
from treenail.provisioning.tokens.tokens import TokenTable

pytestmark = [pytest.mark.integration]
MASTER = "node-role.kubernetes.io/master"
NODES = "/api/v1/nodes"
READY = {"conditions": [{"type": "Ready", "status": "True"}]}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[TokenCluster]:
    with run_approval_cluster(tmp_path) as found:
        yield found


def clean_up(approvals: Approvals, cluster: TokenCluster, name: str) -> None:
    """Delete a request, as kube-controller-manager does an hour after the approval."""
    cluster.admin.delete(f"{REQUESTS}/{name}").ok()
    approvals.sync(name)


def test_refused_request_is_denied_and_not_approved_after_the_deletion_of_the_node(
    cluster: TokenCluster,
) -> None:
    token, _ = cluster.create_token()
    cluster.admin.post(NODES, {"metadata": {"name": "old"}}).ok()
    approvals = Approvals(cluster)
    join(cluster, token, "takes-over", "old")
    approvals.sync("takes-over")
    approvals.change_nodes(lambda: delete_node(cluster, "old"))
    assert approvals.decide("takes-over") == ["Denied"]
    message = read_message(cluster, "takes-over")
    assert "Node old exists" in message
    assert "--machine old" in message
    assert "approve" not in message


def test_request_from_before_the_deletion_of_its_node_is_denied(cluster: TokenCluster) -> None:
    token, _ = cluster.create_token(machine="worker-1")
    cluster.admin.post(NODES, {"metadata": {"name": "worker-1"}, "status": READY}).ok()
    clock = EarlyClock()
    approvals = Approvals(cluster, clock)
    join(cluster, token, "waits", "worker-1")
    approvals.sync("waits")
    assert read_conditions(cluster, "waits") == []
    clock.behind_s = 0.0
    delete_node(cluster, "worker-1")
    assert approvals.decide("waits") == ["Denied"]
    assert "kubectl delete csr waits" in read_message(cluster, "waits")


@pytest.mark.parametrize("machine", ["", "old"])
def test_request_from_before_an_unseen_deletion_is_denied(
    cluster: TokenCluster, machine: str
) -> None:
    """The controller stopped before the request, and starts after the deletion of the Node."""
    token, _ = cluster.create_token(machine=machine)
    cluster.admin.post(NODES, {"metadata": {"name": "old"}}).ok()
    approvals = Approvals(cluster)
    approvals.sync_until(lambda: "old" in list_recorded_names(cluster))
    approvals.informers.stop()
    join(cluster, token, "takes-over", "old")
    delete_node(cluster, "old")
    assert Approvals(cluster, cluster.real_clock).decide("takes-over") == ["Denied"]


def test_request_from_before_the_first_start_is_denied(cluster: TokenCluster) -> None:
    token, _ = cluster.create_token()
    cluster.admin.post(NODES, {"metadata": {"name": "old"}}).ok()
    join(cluster, token, "takes-over", "old")
    delete_node(cluster, "old")

    clock = EarlyClock()
    clock.behind_s = -30.0
    assert Approvals(cluster, clock).decide("takes-over") == ["Denied"]


def test_two_machines_of_one_token_never_have_one_name(cluster: TokenCluster) -> None:
    token, _ = cluster.create_token(uses=10)
    join(cluster, token, "machine-a", "new", "10.0.0.1")
    join(cluster, token, "machine-b", "new", "10.0.0.2")
    approvals = Approvals(cluster)
    found = {approvals.decide(each)[0] for each in ("machine-a", "machine-b")}
    assert found == {"Approved", "Denied"}


def test_two_machines_behind_one_address_never_have_one_name(cluster: TokenCluster) -> None:
    token, record = cluster.create_token(uses=10)
    approvals = Approvals(cluster)
    key = make_key()
    join(cluster, token, "machine-a", "new", key=key)
    assert approvals.decide("machine-a") == ["Approved"]
    # The kubelet uses its key again after a restart.
    join(cluster, token, "again", "new", key=key)
    assert approvals.decide("again") == ["Approved"]
    found = cluster.read_record(record.name)
    (use,) = found.used
    served_twice = replace(found, used=(replace(use, responses=2),))
    cluster.make_store().change(lambda table: (table.put(served_twice), None))
    join(cluster, token, "machine-b", "new")
    assert approvals.decide("machine-b") == ["Denied"]


def test_kubelet_gets_the_certificate_of_its_key_again(cluster: TokenCluster) -> None:
    """It gives the machine nothing that it does not have. A restore of etcd needs it."""
    token, _ = cluster.create_token()
    key = make_key()
    approvals = Approvals(cluster)
    join(cluster, token, "first", "new", key=key)
    assert approvals.decide("first") == ["Approved"]
    approvals.change_nodes(lambda: cluster.admin.post(NODES, {"metadata": {"name": "new"}}).ok())
    join(cluster, token, "again", "new", key=key)
    assert approvals.decide("again") == ["Approved"]
    join(cluster, token, "other", "new")
    assert approvals.decide("other") == ["Denied"]


@pytest.mark.parametrize("is_restarted", [False, True])
def test_name_has_one_certificate_after_its_request_was_cleaned_up(
    cluster: TokenCluster, *, is_restarted: bool
) -> None:
    token, record = cluster.create_token(uses=10)
    other, _ = cluster.create_token()
    approvals = Approvals(cluster)
    join(cluster, token, "first", "new", "10.0.0.1")
    assert approvals.decide("first") == ["Approved"]
    clean_up(approvals, cluster, "first")
    if is_restarted:
        approvals = Approvals(cluster)
    join(cluster, token, "second", "new", "10.0.0.2")
    assert approvals.decide("second") == ["Denied"]
    # Also when nothing is left of the token.
    cluster.make_store().change(lambda table: (table.remove(record.name), None))
    join(cluster, other, "third", "new", "10.0.0.3")
    assert approvals.decide("third") == ["Denied"]
    assert "--machine new" in read_message(cluster, "third")


def test_restored_table_frees_no_name_that_the_controller_gave(cluster: TokenCluster) -> None:
    """A restore of etcd takes rows away, but no certificate from a machine."""
    token, _ = cluster.create_token()
    other, _ = cluster.create_token()
    approvals = Approvals(cluster)
    join(cluster, token, "first", "new")
    assert approvals.decide("first") == ["Approved"]
    sync_end(approvals, cluster, "first")

    def restore(table: TokenTable) -> tuple[TokenTable, None]:
        tokens = {name: replace(record, nodes=()) for name, record in table.tokens.items()}
        return store_certificates(TokenTable(tokens), CertificateTable()), None

    cluster.make_store().change(restore)
    join(cluster, other, "second", "new")
    assert approvals.decide("second") == ["Denied"]


def test_bootstrap_token_has_as_many_names_as_configs_were_sent(cluster: TokenCluster) -> None:
    token, _ = cluster.create_token(uses=10)
    approvals = Approvals(cluster)
    for number in range(3):
        join(cluster, token, f"csr-{number}", f"new-{number}")
    found = [approvals.decide(f"csr-{number}") for number in range(3)]
    assert found == [["Approved"], ["Denied"], ["Denied"]]


def test_bootstrap_token_of_a_config_that_was_not_sent_has_no_name(cluster: TokenCluster) -> None:
    token, _ = cluster.create_token(uses=10)
    join(cluster, token, "aborted", "new", is_served=False)
    assert Approvals(cluster).decide("aborted") == ["Denied"]


def test_node_whose_name_another_machine_has_gets_no_label(cluster: TokenCluster) -> None:
    """A machine took the name before a user created a token with --machine for it."""
    create_pool(cluster, {"matchLabels": {MASTER: ""}}, "master")
    stolen, _ = cluster.create_token()
    bound, _ = cluster.create_token(pool="master", machine="new")
    approvals = Approvals(cluster)
    join(cluster, stolen, "attacker", "new", "10.0.0.9")
    assert approvals.decide("attacker") == ["Approved"]
    clean_up(approvals, cluster, "attacker")
    approvals = Approvals(cluster)
    join(cluster, bound, "machine", "new", "10.0.0.1")
    assert approvals.decide("machine") == ["Approved"]
    cluster.admin.post(NODES, {"metadata": {"name": "new"}}).ok()

    def list_messages() -> list[str]:
        found = cluster.admin.get("/api/v1/namespaces/default/events").ok()["items"]
        return [each["message"] for each in found if each["reason"] == "NotLabelled"]

    approvals.sync_until(list_messages)
    assert f"kubectl label node new {MASTER}=" in list_messages()[0]
    assert MASTER not in read_labels(cluster, "new")


def test_name_of_a_named_machine_is_not_free_after_its_request_was_cleaned_up(
    cluster: TokenCluster,
) -> None:
    create_pool(cluster, {"matchLabels": {MASTER: ""}}, "master")
    stolen, _ = cluster.create_token(uses=10)
    bound, record = cluster.create_token(pool="master", machine="new")
    approvals = Approvals(cluster)
    join(cluster, bound, "machine", "new", "10.0.0.1")
    assert approvals.decide("machine") == ["Approved"]
    clean_up(approvals, cluster, "machine")
    cluster.make_store().change(lambda table: (table.remove(record.name), None))
    approvals = Approvals(cluster)
    join(cluster, stolen, "attacker", "new", "10.0.0.9")
    assert approvals.decide("attacker") == ["Denied"]


def test_machine_that_is_installed_again_gets_the_label(cluster: TokenCluster) -> None:
    """Both tokens are for this machine and pool: the certificates have one holder."""
    create_pool(cluster, {"matchLabels": {MASTER: ""}}, "master")
    approvals = Approvals(cluster)
    for name in ("first", "second"):
        token, _ = cluster.create_token(pool="master", machine="new")
        join(cluster, token, name, "new")
        assert approvals.decide(name) == ["Approved"]
        cluster.admin.post(NODES, {"metadata": {"name": "new"}}).ok()
        approvals.sync_until(lambda: MASTER in read_labels(cluster, "new"))
        delete_node(cluster, "new")


@pytest.mark.parametrize("node", ["localhost", "localhost.localdomain", "fedora", "master-3"])
def test_placeholder_and_control_plane_names_need_a_token_for_the_machine(
    cluster: TokenCluster, node: str
) -> None:
    token, _ = cluster.create_token(uses=10)
    bound, _ = cluster.create_token(machine=node)
    join(cluster, token, "machine-a", node, "10.0.0.1")
    join(cluster, bound, "machine-b", node, "10.0.0.2")
    approvals = Approvals(cluster)
    assert approvals.decide("machine-a") == ["Denied"]
    assert approvals.decide("machine-b") == ["Approved"]


def test_two_controllers_give_one_name_to_one_machine(cluster: TokenCluster) -> None:
    """Each write of the table is a compare-and-set, and neither sees what the other decides."""
    token, _ = cluster.create_token(uses=10)
    for number in range(4):
        join(cluster, token, f"csr-{number}", "new", f"10.0.0.{number}")
    replicas = [Approvals(cluster) for _ in range(4)]
    for each in replicas:
        each.informers.stop()
    started = threading.Barrier(len(replicas))

    def decide(number: int) -> None:
        started.wait(LIMIT_S)
        replicas[number].controller.sync_key(f"csr-{number}")

    threads = [threading.Thread(target=decide, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    found = [read_conditions(cluster, f"csr-{number}") for number in range(4)]
    assert sorted(found) == [["Approved"], ["Denied"], ["Denied"], ["Denied"]]


def test_name_is_taken_until_the_signed_certificate_ends(cluster: TokenCluster) -> None:
    token, _ = cluster.create_token()
    approvals = Approvals(cluster)
    join(cluster, token, "joins", "new")
    assert approvals.decide("joins") == ["Approved"]
    sync_end(approvals, cluster, "joins")


def sync_end(approvals: Approvals, cluster: TokenCluster, name: str) -> None:
    """Sync until the end of the only certificate is recorded."""

    def read_certificate() -> str:
        found: str = cluster.admin.get(f"{REQUESTS}/{name}").ok()["status"].get("certificate", "")
        return found

    content = base64.b64decode(wait_until(read_certificate, limit_s=LIMIT_S))
    end = x509.load_pem_x509_certificate(content).not_valid_after_utc.timestamp()

    def read_end() -> float:
        (row,) = read_certificates(cluster.make_store().load(), 0.0).rows
        return row.expires

    approvals.sync_until(lambda: read_end() == end)


def test_server_records_nodes_before_it_issues_a_credential(cluster: TokenCluster) -> None:
    """So a request from before the first start of the controller can be approved."""
    cluster.clock.set_wall_clock(EarlyClock().now())
    token, _ = cluster.create_token()
    other, _ = cluster.create_token()
    cluster.admin.post(NODES, {"metadata": {"name": "old"}}).ok()
    replica = cluster.start_replica()
    verdict = replica.access.check(token, "worker", "10.0.0.1")
    wait_until(lambda: replica.store.nodes, limit_s=LIMIT_S)
    assert replica.access.claim(verdict).is_allowed
    assert "old" in list_recorded_names(cluster)
    delete_node(cluster, "old")
    join(cluster, other, "steals", "old")
    join(cluster, token, "joins", "new")
    approvals = Approvals(cluster, cluster.real_clock)
    assert approvals.decide("joins") == ["Approved"]
    assert approvals.decide("steals") == ["Denied"]


def test_unreadable_table_leaves_requests_undecided(cluster: TokenCluster) -> None:
    token, _ = cluster.create_token()
    cluster.make_store().change(lambda table: (replace(table, certificates="AAAA"), None))
    join(cluster, token, "joins", "new")
    approvals = Approvals(cluster)
    wait_until(lambda: "joins" in approvals.keys, limit_s=LIMIT_S)
    with pytest.raises(ConfigError, match="cannot read the certificates"):
        approvals.controller.sync_key("joins")
    assert read_conditions(cluster, "joins") == []


def test_denied_request_cannot_be_approved_by_hand(cluster: TokenCluster) -> None:
    token, _ = cluster.create_token()
    join(cluster, token, "refused", "localhost")
    assert Approvals(cluster).decide("refused") == ["Denied"]
    request = cluster.admin.get(f"{REQUESTS}/refused").ok()
    approved = {"type": "Approved", "status": "True", "reason": "ByHand"}
    conditions = [*request["status"]["conditions"], approved]
    answer = cluster.admin.put(
        f"{REQUESTS}/refused/approval", request | {"status": {"conditions": conditions}}
    )
    assert answer.code == 422
