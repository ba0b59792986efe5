"""Whether a controller leads, from the Lease, and what a user reads about it."""

from pathlib import Path

import pytest

from tests.controllers.status.test_status_table import build, make_world, set_conditions
from tests.fakes.clock import FakeClock
from tests.fixtures.clusters import open_lab
from tests.fixtures.controllers import open_client
from treenail.api.decode import Json
from treenail.cli.controller.main import main
from treenail.cli.controller.status.text import format_leader, format_summary
from treenail.clocks import SystemClock, format_micro_time
from treenail.controllers.status.leader_status import (
    LeaderReader,
    LeaderReport,
    LeaderState,
    evaluate_lease,
)
from treenail.controllers.status.rollout_result import RolloutOutcome, RolloutResult, check_leader
from treenail.controllers.status.status_table import build_rows, build_status_document
from treenail.kube.api_client import Client
from treenail.kube.resources import LEASES, MACHINECONFIGPOOLS, ROLLOUTPOLICIES, Resource
from treenail.manifests.installation import NAME, InstallOptions
from treenail_lab.apiserver.serving.server import LabServer

RBAC = "rbac.authorization.k8s.io"
CLUSTERROLES = Resource(RBAC, "v1", "clusterroles", "ClusterRole", namespaced=False)
CLUSTERROLEBINDINGS = Resource(
    RBAC, "v1", "clusterrolebindings", "ClusterRoleBinding", namespaced=False
)
NAMESPACES = Resource("", "v1", "namespaces", "Namespace", namespaced=False)
NOW = 1_700_000_000.0


def lease(renewed_at: float, holder: str = "a", namespace: str = "treenail") -> Json:
    return {
        "apiVersion": LEASES.api_version,
        "kind": LEASES.kind,
        "metadata": {"name": NAME, "namespace": namespace},
        "spec": {
            "holderIdentity": holder,
            "renewTime": format_micro_time(renewed_at),
            "leaseDurationSeconds": 60 if holder else 1,
        },
    }


@pytest.mark.parametrize(
    ("found", "state"),
    [
        (lease(NOW - 5), LeaderState.LEADING),
        (lease(NOW + 59), LeaderState.LEADING),
        (lease(NOW + 61), LeaderState.UNKNOWN),
        (lease(NOW - 64), LeaderState.LEADING),
        (lease(NOW - 66), LeaderState.NONE),
        (lease(NOW - 5, holder=""), LeaderState.CHANGING),
        (lease(NOW - 31, holder=""), LeaderState.NONE),
        ({"spec": {"holderIdentity": "a"}}, LeaderState.UNKNOWN),
        ({"spec": {"holderIdentity": 7}}, LeaderState.UNKNOWN),
    ],
)
def test_lease_says_whether_its_holder_leads(found: Json, state: LeaderState) -> None:
    report = evaluate_lease(found, now=NOW)
    assert report.state is state
    is_silent = state in (LeaderState.LEADING, LeaderState.CHANGING)
    assert (not report.message, not report.remedy) == (is_silent, is_silent)


def test_states_of_pools_are_unknown_while_no_controller_leads() -> None:
    world = make_world()
    updated = {"type": "Updated", "status": "True"}
    stuck = {"type": "Degraded", "status": "True", "reason": "X", "message": "no CA"}
    set_conditions(world, updated, stuck, observedGeneration=10**6, machineCount=1)
    assert build(world)[0].state == "Degraded"
    gone = LeaderReport(LeaderState.NONE, renewed_at=NOW)
    rows = build_rows(world.list_pools(), world.list_nodes(), {}, now=NOW, leader=gone)
    assert (rows[0].state, rows[0].reported_state, rows[0].blockers) == ("Unknown", "Degraded", ())
    assert format_summary(rows[0]) == "Unknown, last reported Degraded, 0 of 1 nodes updated"
    document = build_status_document(rows, now=NOW, leader=gone)
    assert document["controller"]["state"] == "none"  # type: ignore[index]  # an object
    assert document["pools"][0]["reportedState"] == "Degraded"  # type: ignore[index]  # a list


@pytest.mark.parametrize("outcome", RolloutOutcome)
@pytest.mark.parametrize(
    ("report", "age_s", "expected"),
    [
        (LeaderState.NONE, 299.0, RolloutOutcome.IN_PROGRESS),
        (LeaderState.NONE, 300.0, RolloutOutcome.BLOCKED),
        (LeaderState.ABSENT, 300.0, None),
        (LeaderState.UNKNOWN, 300.0, None),
        (LeaderState.CHANGING, 300.0, None),
    ],
)
def test_outcome_is_not_current_while_no_controller_leads(
    outcome: RolloutOutcome, report: LeaderState, age_s: float, expected: RolloutOutcome | None
) -> None:
    result = RolloutResult("worker", outcome, "m", 1, 1)
    found = check_leader(result, LeaderReport(report, renewed_at=NOW - age_s), now=NOW)
    assert found.outcome is (expected or outcome)
    assert ("last reported: m" in found.message) is (expected is not None)


def create_lease(client: Client, renewed_at: float, namespace: str) -> None:
    client.create(LEASES, lease(renewed_at, namespace=namespace), namespace=namespace)


def test_lease_is_found_in_another_namespace_unless_one_is_chosen(tmp_path: Path) -> None:
    with LabServer(tmp_path) as server, open_client(server.admin_kubeconfig) as client:
        clock = FakeClock(NOW)
        reader = LeaderReader(client, clock)
        assert reader.read_leader().state is LeaderState.ABSENT
        create_lease(client, NOW, "kube-system")
        # The report is kept for a few seconds.
        assert reader.read_leader().state is LeaderState.ABSENT
        clock.move(5.0)
        found = reader.read_leader()
        assert (found.state, found.namespace) == (LeaderState.LEADING, "kube-system")
        assert LeaderReader(client, clock, "default").read_leader().state is LeaderState.ABSENT


def renew_lease(client: Client, renewed_at: float, namespace: str) -> None:
    spec = {"spec": {"renewTime": format_micro_time(renewed_at)}}
    client.patch(LEASES, NAME, spec, namespace=namespace)


def test_holder_that_renews_leads_whatever_the_clocks_say(tmp_path: Path) -> None:
    with LabServer(tmp_path) as server, open_client(server.admin_kubeconfig) as client:
        create_lease(client, NOW - 600, "default")
        clock = FakeClock(NOW)
        reader = LeaderReader(client, clock, "default")
        assert reader.read_leader().state is LeaderState.NONE
        renew_lease(client, NOW - 595, "default")
        clock.move(5.0)
        assert reader.read_leader().state is LeaderState.LEADING
        clock.move(61.0)
        assert reader.read_leader().state is LeaderState.NONE


def test_server_that_does_not_answer_is_no_missing_permission(tmp_path: Path) -> None:
    with LabServer(tmp_path) as server:
        kubeconfig = server.admin_kubeconfig
    with open_client(kubeconfig) as client:
        report = LeaderReader(client, FakeClock(NOW)).read_leader()
    assert report.state is LeaderState.UNKNOWN
    assert report.remedy == "check the API server: kubectl get --raw /readyz"


def test_clock_behind_the_lease_is_named() -> None:
    report = evaluate_lease(lease(NOW + 300), now=NOW)
    assert report.message.endswith("its Lease was renewed 300 s in the future")
    assert report.remedy.startswith("correct the clock")


@pytest.mark.parametrize(
    ("own_age_s", "mco_age_s", "state"),
    [
        (None, 5, LeaderState.LEADING),
        (3600, 5, LeaderState.LEADING),
        (5, 3600, LeaderState.LEADING),
        (None, 3600, LeaderState.NONE),
        (None, None, LeaderState.ABSENT),
    ],
)
def test_controller_of_the_mco_leads_with_its_own_lease(
    own_age_s: float | None, mco_age_s: float | None, state: LeaderState, tmp_path: Path
) -> None:
    with LabServer(tmp_path) as server, open_client(server.admin_kubeconfig) as client:
        for namespace, name, age_s in (
            (InstallOptions().namespace, NAME, own_age_s),
            ("openshift-machine-config-operator", "machine-config-controller", mco_age_s),
        ):
            if age_s is None:
                continue
            client.create(
                NAMESPACES,
                {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}},
            )
            found = lease(NOW - age_s, namespace=namespace)
            found["metadata"] = {"name": name, "namespace": namespace}
            client.create(LEASES, found, namespace=namespace)
        report = LeaderReader(client, FakeClock(NOW)).read_leader()
        assert report.state is state
        if state is LeaderState.ABSENT:
            assert report.message.startswith("cannot tell whether a controller leads: namespace")


def test_user_without_permission_reads_that_the_leader_is_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_lab(tmp_path) as (server, client):
        allow_reading(client)
        user = str(server.write_kubeconfig("viewer", ["viewers"]))
        assert main(["status", "--kubeconfig", user]) == 0
        shown = capsys.readouterr().out
        assert "cannot tell whether a controller leads: GET leases" in shown
        assert "permit this user to get the Lease treenail-controller in namespace" in shown
        namespace = InstallOptions().namespace
        client.create(
            NAMESPACES,
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}},
        )
        create_lease(client, SystemClock().now() - 3600, namespace)
        assert main(["status", "--kubeconfig", str(server.admin_kubeconfig)]) == 0
        assert capsys.readouterr().out.startswith("no controller leads since ")


def allow_reading(client: Client) -> None:
    """Permit the group viewers to list what the table shows, but not the Lease."""
    rules = [
        {
            "apiGroups": ["", MACHINECONFIGPOOLS.group, ROLLOUTPOLICIES.group],
            "resources": ["nodes", "machineconfigpools", "rolloutpolicies"],
            "verbs": ["get", "list", "watch"],
        }
    ]
    group = {"apiGroup": RBAC, "kind": "Group", "name": "viewers"}
    role = {"apiGroup": RBAC, "kind": "ClusterRole", "name": "viewers"}
    for resource, content in (
        (CLUSTERROLES, {"rules": rules}),
        (CLUSTERROLEBINDINGS, {"roleRef": role, "subjects": [group]}),
    ):
        named = {"apiVersion": resource.api_version, "kind": resource.kind}
        client.create(resource, {**named, "metadata": {"name": "viewers"}, **content})


def test_report_is_escaped_and_wrapped() -> None:
    report = LeaderReport(LeaderState.UNKNOWN, reason="bad\x1b[2J\n" + "word " * 40)
    lines = [str(line) for line in format_leader(report, 80)]
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in "".join(lines)
