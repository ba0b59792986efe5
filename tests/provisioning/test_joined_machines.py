"""Requests are joined with Nodes; what is ambiguous is unknown."""

from dataclasses import replace
from typing import Any

import pytest

from tests.provisioning.logged import NOW, make_refusal, make_row
from tests.provisioning.samples import make_pool
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.clocks import format_rfc3339
from treenail.provisioning.approval.request import KubeletRequest
from treenail.provisioning.machines.joined_machines import (
    EXPECT_S,
    ArrivedNode,
    JoinedMachine,
    NodeArrival,
    join_machines,
)
from treenail.provisioning.machines.logged_requests import (
    LoggedRequest,
    RequestOutcome,
    log_request,
)
from treenail.provisioning.tokens.bootstrap_tokens import compute_identity

WORKER = "node-role.kubernetes.io/worker"
SELECTOR = {"matchLabels": {WORKER: ""}}
INFRA = {"matchLabels": {"node-role.kubernetes.io/infra": ""}}
POOLS = (
    MachineConfigPool.from_json(make_pool(nodeSelector=SELECTOR)),
    MachineConfigPool.from_json(make_pool(name="infra", nodeSelector=INFRA)),
)
LATE = NOW + EXPECT_S


def make_node(name: str = "w1", address: str = "10.0.0.5", at: float = NOW + 300, **more: Any):  # type: ignore[no-untyped-def]  # a sample
    document: dict[str, Any] = {
        "metadata": {
            "name": name,
            "creationTimestamp": format_rfc3339(at),
            "labels": more.get("labels", {WORKER: ""}),
            "annotations": more.get("annotations", {}),
        },
        "status": {
            "addresses": [
                {"type": "InternalIP", "address": address},
                {"type": "Hostname", "address": name},
            ],
            "conditions": [
                {
                    "type": "Ready",
                    "status": "True" if "ready_at" in more else "False",
                    "lastTransitionTime": format_rfc3339(more.get("ready_at", at)),
                }
            ],
        },
    }
    return ArrivedNode.from_json(document)


def log_rows(*rows: Any) -> list[LoggedRequest]:
    return [log_request(f"a-{number}", row) for number, row in enumerate(rows)]


def join(*rows: Any, nodes: Any = (), now: float = LATE) -> list[JoinedMachine]:
    return join_machines(log_rows(*rows), nodes, POOLS, now)


def describe(machines: list[JoinedMachine]) -> list[tuple[str, str]]:
    return [(each.arrival.value, each.node) for each in machines]


@pytest.mark.parametrize(
    ("row", "nodes", "expected"),
    [
        (make_row(), [make_node()], ("appeared", "w1")),
        (make_row(address="fd00::5"), [make_node(address="FD00:0::5")], ("appeared", "w1")),
        (make_row(machine="w1"), [make_node(address="10.9.9.9")], ("appeared", "w1")),
        # Another name than that of the token, and its address.
        (make_row(machine="w1"), [make_node("w2")], ("appeared", "w2")),
        (make_row(machine="w1"), [make_node("w2", "10.9.9.9")], ("missing", "")),
        # Through an address that is translated.
        (make_row(), [make_node(address="10.9.9.9")], ("appeared", "w1")),
        (make_row(), [make_node("a", "10.9.9.8"), make_node("b", "10.9.9.9")], ("unknown", "")),
        # Its pool is not known yet.
        (make_row(), [make_node(address="10.9.9.9", labels={})], ("unknown", "")),
        (
            make_row(),
            [make_node(address="10.9.9.9", labels={"node-role.kubernetes.io/infra": ""})],
            ("missing", ""),
        ),
        (
            make_row(),
            [
                make_node(
                    address="10.9.9.9",
                    labels={},
                    annotations={
                        "machineconfiguration.openshift.io/currentConfig": "rendered-worker-1"
                    },
                )
            ],
            ("appeared", "w1"),
        ),
        # The clock of the server is ahead.
        (make_row(), [make_node(at=NOW - 4)], ("appeared", "w1")),
        (make_row(), [], ("missing", "")),
        # Nodes that existed before.
        (make_row(), [make_node("old", "10.9.9.9", NOW - 3600)], ("missing", "")),
        (make_row(), [make_node(at=NOW - 3600)], ("missing", "")),
        # An old member is not the machine of a token for any machine.
        (make_row(), [make_node(at=NOW - 3600, ready_at=NOW - 3000)], ("missing", "")),
        (make_row(token=""), [make_node(at=NOW - 3600, ready_at=NOW - 3000)], ("unknown", "")),
        (
            make_row(machine="w1"),
            [make_node(at=NOW - 3600, ready_at=NOW - 3000)],
            ("unknown", ""),
        ),
        (make_row(), [make_node(at=NOW - 3600, ready_at=NOW + 300)], ("appeared", "w1")),
        (
            make_row(machine="w1"),
            [make_node(address="10.9.9.9", at=NOW - 3600, ready_at=NOW + 300)],
            ("appeared", "w1"),
        ),
        (make_row(), [make_node("a"), make_node("b")], ("unknown", "")),
    ],
)
def test_node_of_a_machine_is_found(row: Any, nodes: Any, expected: tuple[str, str]) -> None:
    assert describe(join(row, nodes=nodes)) == [expected]


def test_machine_without_a_node_waits_for_the_expected_time() -> None:
    assert describe(join(make_row(), now=LATE - 1)) == [("waiting", "")]
    assert describe(join(make_row(), now=LATE)) == [("missing", "")]
    # Counted from the last config that was sent.
    assert describe(join(make_row(), make_row(NOW + 60), now=LATE)) == [("waiting", "")]


def test_two_machines_and_one_new_node_are_unknown() -> None:
    rows = (make_row(), make_row(address="10.0.0.6"))
    found = join(*rows, nodes=[make_node(address="10.9.9.9")])
    assert describe(found) == [("unknown", ""), ("unknown", "")]
    # One is that of the other machine.
    found = join(*rows, nodes=[make_node(), make_node("w2", "10.9.9.9")])
    assert describe(found) == [("appeared", "w1"), ("appeared", "w2")]


def test_node_that_appeared_before_a_check_is_remembered_after_its_deletion() -> None:
    rows = [replace(log_rows(make_row())[0], is_checked=True, node="w1")]
    assert describe(join_machines(rows, [], POOLS, LATE)) == [("appeared", "w1")]


def test_requests_of_one_address_long_apart_are_of_two_machines() -> None:
    rows = (make_row(NOW - 20 * 3600), make_row(NOW))
    node = make_node(at=NOW - 20 * 3600 + 300, ready_at=NOW - 19 * 3600)
    assert describe(join(*rows, nodes=[node])) == [("appeared", "w1"), ("missing", "")]


@pytest.mark.parametrize(
    ("row", "arrival"),
    [
        (make_refusal(), NodeArrival.UNEXPECTED),
        (make_refusal(token="abc", status=403), NodeArrival.MISSING),
        (make_row(outcome=RequestOutcome.CHECKED), NodeArrival.UNEXPECTED),
        (make_row(outcome=RequestOutcome.DISCONNECTED), NodeArrival.MISSING),
        (make_refusal(outcome=RequestOutcome.DISCONNECTED), NodeArrival.UNEXPECTED),
        (make_refusal(outcome=RequestOutcome.FAILED, status=500), NodeArrival.MISSING),
        (make_refusal(outcome=RequestOutcome.BUSY, status=503), NodeArrival.UNEXPECTED),
        (make_refusal(outcome=RequestOutcome.INVALID, status=404), NodeArrival.UNEXPECTED),
    ],
)
def test_node_is_expected_of_machines_only(row: Any, arrival: NodeArrival) -> None:
    (found,) = join(row)
    assert found.arrival is arrival


def test_refused_request_without_token_gets_no_node_of_the_pool() -> None:
    assert describe(join(make_refusal(), nodes=[make_node(address="10.9.9.9")])) == [
        ("unexpected", "")
    ]


def test_machine_that_changed_its_address_is_not_missing() -> None:
    rows = (
        make_row(outcome=RequestOutcome.DISCONNECTED, address="10.0.0.4"),
        make_row(NOW + 30, address="10.0.0.5"),
    )
    found = join(*rows, nodes=[make_node()])
    assert describe(found) == [("unknown", ""), ("appeared", "w1")]
    assert found[0].reason == "10.0.0.5 received the config with its token"


@pytest.mark.parametrize(
    ("rows", "step"),
    [
        (
            (make_row(),),
            "it received rendered-worker-1 in Ignition 3.4.0 (165000 bytes)",
        ),
        (
            (make_refusal(token="abc", reason="the token has expired"),),
            "it received no config (status 401): the token has expired",
        ),
        (
            (
                make_row(
                    outcome=RequestOutcome.DISCONNECTED, bytes=30_000, reason="the connection ended"
                ),
            ),
            "it disconnected after 30000 bytes of the config: the connection ended",
        ),
        (
            (make_row(), make_refusal(NOW + 5, token="abc", status=403)),
            "it received rendered-worker-1 in Ignition 3.4.0 (165000 bytes)",
        ),
    ],
)
def test_last_step_names_what_the_machine_received(rows: Any, step: str) -> None:
    (machine,) = join(*rows)
    assert machine.describe_last_step() == step


@pytest.mark.parametrize(
    ("row", "now", "needs_user"),
    [
        (make_row(), LATE, True),
        (make_row(), NOW + 1, False),
        (make_refusal(token="abc"), NOW + 1, True),
        (make_refusal(), LATE, False),
        (make_row(outcome=RequestOutcome.DISCONNECTED), NOW + 1, False),
    ],
)
def test_machine_that_cannot_join_needs_a_user(row: Any, now: float, needs_user: bool) -> None:
    (machine,) = join(row, now=now)
    assert machine.needs_user is needs_user


def make_certificate(node: str = "w1", token: str = "abc", **fields: Any) -> KubeletRequest:
    found: dict[str, Any] = {"identity": token, "created_at": NOW + 200, **fields}
    return KubeletRequest(f"csr-{node}", "uid", token, node=node, **found)


def join_with(*certificates: KubeletRequest, rows: Any, nodes: Any = ()) -> list[JoinedMachine]:
    return join_machines(log_rows(*rows), nodes, POOLS, LATE, certificates=certificates)


def test_machines_behind_one_address_have_the_nodes_of_their_certificates() -> None:
    rows = [make_row(token=token) for token in ("abc", "def", "ghi")]
    nodes = [make_node("w1", "10.9.9.1"), make_node("w2", "10.9.9.2")]
    certificates = [
        make_certificate("w2", "abc", is_approved=True),
        make_certificate("w1", "def", is_approved=True),
    ]
    found = join_with(*certificates, rows=rows, nodes=nodes)
    assert describe(found) == [("appeared", "w2"), ("appeared", "w1"), ("missing", "")]


def test_machines_of_one_token_have_the_nodes_of_their_certificates() -> None:
    rows = [make_row(address=address) for address in ("10.0.0.5", "10.0.0.6")]
    certificates = [
        make_certificate(node, identity=compute_identity("abc", 2, address), is_approved=True)
        for node, address in (("w6", "10.0.0.6"), ("w5", "10.0.0.5"))
    ]
    nodes = [make_node("w5", "10.9.9.1"), make_node("w6", "10.9.9.2")]
    found = join_with(*certificates, rows=rows, nodes=nodes)
    assert describe(found) == [("appeared", "w5"), ("appeared", "w6")]


def test_request_that_is_not_approved_joins_no_node() -> None:
    nodes = [make_node("w1"), make_node("w2")]
    found = join_with(make_certificate("w2"), rows=[make_row()], nodes=nodes)
    assert describe(found) == [("missing", "")]


def test_certificate_of_an_earlier_machine_is_not_of_this_one() -> None:
    old = make_certificate(is_approved=True, created_at=NOW - 7200)
    (found,) = join_with(old, rows=[make_row()])
    assert found.certificate is None


@pytest.mark.parametrize(
    ("fields", "step"),
    [
        ({}, "is not approved"),
        ({"problem": "it has alternative names"}, "is not approved: it has alternative names"),
        ({"is_approved": True}, "was approved and is not signed"),
        ({"is_approved": True, "has_certificate": True}, "was signed"),
        ({"failure": "not in the inventory"}, "was refused: not in the inventory"),
    ],
)
def test_last_step_is_that_of_the_certificate(fields: dict[str, Any], step: str) -> None:
    (machine,) = join_with(make_certificate(**fields), rows=[make_row()])
    assert machine.describe_last_step() == (
        f"the certificate request csr-w1 of its kubelet, for node w1, {step}"
    )
    assert machine.needs_user
