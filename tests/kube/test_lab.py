"""The agent's requests with the credentials of a node, on the lab's API server."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.waiting import wait_until
from treenail.clocks import SystemClock
from treenail.errors import (
    AlreadyExistsError,
    ConflictError,
    ForbiddenError,
    GoneError,
    InvalidError,
    NotFoundError,
    UnreachableError,
)
from treenail.kube.api_client import Client, Json, PatchType, WatchStream
from treenail.kube.event_recorder import EventRecorder, ObjectReference
from treenail.kube.lease import LeaderElectionConfig, LeaderElector
from treenail.kube.resources import CONFIGMAPS, EVENTS, LEASES, NODES
from treenail.kube.transport.kubeconfig import read_kubeconfig
from treenail.kube.transport.native import HttpTransport
from treenail.kube.transport.official import OfficialTransport
from treenail.kube.watch import ResourceWatch, WatchScope
from treenail_lab.apiserver.serving.faults import FaultMatch, RejectFault
from treenail_lab.apiserver.serving.server import LabServer

CLOCK = SystemClock()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LabServer]:
    with LabServer(tmp_path) as found:
        yield found


@pytest.fixture
def admin(server: LabServer) -> Iterator[Client]:
    transport = HttpTransport(read_kubeconfig(str(server.admin_kubeconfig)), CLOCK)
    client = Client(transport)
    client.create(NODES, {"metadata": {"name": "a"}})
    client.create(NODES, {"metadata": {"name": "b"}})
    yield client
    transport.close()


@pytest.fixture(params=["thin", "official"])
def node(request: pytest.FixtureRequest, server: LabServer, admin: Client) -> Iterator[Client]:
    kubeconfig = str(server.write_node_kubeconfig("a"))
    transport = (
        HttpTransport(read_kubeconfig(kubeconfig), CLOCK)
        if request.param == "thin"
        else OfficialTransport.from_kubeconfig(kubeconfig, CLOCK)
    )
    yield Client(transport)
    transport.close()


class Seen:
    """Changes that a watch of Node a reported."""

    def __init__(self, client: Client) -> None:
        self.marks: list[str | None] = []
        self.watch = ResourceWatch(
            client, WatchScope(NODES, field_selector="metadata.name=a"), CLOCK, on_change=self._note
        )
        self.watch.start()

    def _note(self, _key: str, found: Json | None) -> None:
        labels = found["metadata"].get("labels", {}) if found else {}  # type: ignore[attr-defined]  # a dict
        self.marks.append(labels.get("mark"))


def mark(client: Client, value: str) -> None:
    client.patch(NODES, "a", {"metadata": {"labels": {"mark": value}}})


def test_watch_of_own_node_survives_faults(server: LabServer, admin: Client, node: Client) -> None:
    seen = Seen(node)
    wait_until(lambda: len(seen.marks) == 1)
    mark(admin, "one")
    wait_until(lambda: seen.marks[-1] == "one")
    wait_until(lambda: server.cut_watches("nodes"))
    mark(admin, "two")
    wait_until(lambda: seen.marks[-1] == "two")
    server.expire_versions()
    wait_until(lambda: server.cut_watches("nodes"))
    mark(admin, "three")
    wait_until(lambda: seen.marks[-1] == "three")
    seen.watch.stop()

    assert seen.marks == [None, "one", "two", "three"]


def test_each_server_error_raises_its_class(admin: Client, node: Client) -> None:
    body: Json = {"metadata": {"name": "a"}}
    with pytest.raises(NotFoundError):
        admin.get(CONFIGMAPS, "none", namespace="default")
    with pytest.raises(AlreadyExistsError):
        admin.create(NODES, body)
    with pytest.raises(ConflictError):
        admin.update(NODES, "a", {"metadata": {"name": "a", "resourceVersion": "1"}})
    with pytest.raises(InvalidError):
        admin.create(CONFIGMAPS, {"metadata": {"name": "A_"}}, namespace="default")
    with pytest.raises(ForbiddenError):
        node.patch(NODES, "b", {"metadata": {"annotations": {"x": "y"}}})


def test_expired_resource_version_is_gone(server: LabServer, admin: Client, node: Client) -> None:
    params = {"resourceVersion": "1", "fieldSelector": "metadata.name=a"}
    server.expire_versions()
    stream = node.watch(NODES, params=params)

    with pytest.raises(GoneError):
        follow(stream)


def follow(stream: WatchStream) -> None:
    """410 may arrive as the response or as the first event."""
    with closing(stream):
        stream.connect()
        list(stream)


def test_event_of_a_node_is_accepted_and_counted(admin: Client, node: Client) -> None:
    recorder = EventRecorder(node, "treenail", "a", CLOCK)
    for _ in range(3):
        recorder.record_normal(ObjectReference("Node", "a", uid="u"), "Staged", "staged image B")

    (event,) = admin.list(EVENTS, namespace="default").items
    assert (event["reason"], event["count"]) == ("Staged", 3)


def test_overloaded_server_is_unreachable(server: LabServer, admin: Client, node: Client) -> None:
    server.inject_fault(RejectFault(503), FaultMatch(resource="nodes"), times=1)

    with pytest.raises(UnreachableError):
        node.get(NODES, "a")
    assert node.get(NODES, "a")["kind"] == "Node"


def test_annotations_are_applied_by_their_field_manager(admin: Client, node: Client) -> None:
    def applied(**annotations: str) -> object:
        body: Json = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": "a", "annotations": annotations},
        }
        found = node.patch(NODES, "a", body, PatchType.APPLY)
        return found["metadata"].get("annotations")  # type: ignore[attr-defined]  # a dict

    admin.patch(NODES, "a", {"metadata": {"annotations": {"theirs": "1"}}})

    assert applied(one="1", two="2") == {"theirs": "1", "one": "1", "two": "2"}
    assert applied(one="3") == {"theirs": "1", "one": "3"}


def test_paged_list_is_complete(admin: Client) -> None:
    for number in range(7):
        body: Json = {"metadata": {"name": f"c{number}"}}
        admin.create(CONFIGMAPS, body, namespace="kube-public")
    paged = Client(admin._transport, page_size=3)

    found = paged.list(CONFIGMAPS, namespace="kube-public").items
    assert [item["metadata"]["name"] for item in found] == [  # type: ignore[index]  # a dict
        f"c{number}" for number in range(7)
    ]


def test_one_of_two_candidates_leads(admin: Client) -> None:
    leaders: list[str] = []
    elections = [
        LeaderElector(
            admin,
            LeaderElectionConfig("kube-system", "rollout", name),
            CLOCK,
            on_started_leading=lambda name=name: leaders.append(name),
            on_stopped_leading=lambda: None,
        )
        for name in ("first", "second")
    ]
    for _ in range(2):
        for election in elections:
            election.try_acquire_or_renew()
    elections[0].release_lease()
    elections[1].try_acquire_or_renew()

    assert leaders == ["first", "second"]
    lease = admin.get(LEASES, "rollout", namespace="kube-system")
    assert lease["spec"]["leaseTransitions"] == 1  # type: ignore[index]  # a dict
