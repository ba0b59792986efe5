"""Writes of a node, on the lab's API server."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.controllers import installed
from tests.fakes.clock import FakeClock
from tests.fixtures.objects import make_object
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail.clocks import SystemClock
from treenail.daemon.cluster.node_client import NodeClient
from treenail.errors import ClusterError, ConfigMissingError, ConfigRejectedError
from treenail.kube.api_client import Client, PatchType
from treenail.kube.event_recorder import EventRecorder, ObjectReference
from treenail.kube.request import ApiRequest, ApiResponse
from treenail.kube.resources import EVENTS, MACHINECONFIGNODES, NODES
from treenail.kube.transport.kubeconfig import read_kubeconfig
from treenail.kube.transport.native import HttpTransport
from treenail.kube.watch import ResourceWatch, WatchScope
from treenail.manifests.installation import build_node_access
from treenail.update.state.ledger_record import Target
from treenail.update.status import NodeEvent, ReportedCondition, StatusReport
from treenail_lab.apiserver.serving.faults import FaultMatch, RejectFault
from treenail_lab.apiserver.serving.server import LabServer

NODE = "n1"
A = Target("rendered-a", f"registry.example.com/os@sha256:{'1' * 64}")
B = Target("rendered-b", f"registry.example.com/os@sha256:{'2' * 64}")
OUT = Target("rendered-out")
EVENT = NodeEvent("Normal", "Rebooted", "into another", is_in_conditions=True)


class Recorded:
    """The recorded Events, by reason."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def record_normal(self, regarding: ObjectReference, reason: str, message: str) -> None:
        self.reasons.append(reason)

    def record_warning(self, regarding: ObjectReference, reason: str, message: str) -> None:
        self.reasons.append(reason)

    def flush_pending(self) -> None:
        """Nothing is kept."""


class Transport(HttpTransport):
    """Counts what is written of MachineConfigNodes, and refuses the given ones."""

    def __init__(self, kubeconfig: Path) -> None:
        super().__init__(read_kubeconfig(str(kubeconfig)), FakeClock())
        self.writes: list[str] = []
        self.refuses: Callable[[ApiRequest], bool] = lambda _: False

    def send(self, request: ApiRequest) -> ApiResponse:
        # An empty patch is how the agent reads its object.
        is_write = request.method == "PATCH" and request.body != b"{}"
        if is_write and "machineconfignodes" in request.path:
            self.writes.append(PatchType(str(request.content_type)).name)
            if self.refuses(request):
                why = "failed to create typed patch object (/n1; Kind=MachineConfigNode): "
                why += ".status.configImage: field not declared in schema"
                status = {"kind": "Status", "code": 500, "message": why}
                return ApiResponse(500, json.dumps(status).encode())
        return super().send(request)


class MonotonicTransport(Transport):
    """Enforces the rule of the MachineConfigNode CRD that the lab's server does not evaluate:
    observedGeneration must not decrease."""

    def __init__(self, kubeconfig: Path, admin: Client) -> None:
        super().__init__(kubeconfig)
        self._admin = admin

    def send(self, request: ApiRequest) -> ApiResponse:
        if request.method == "PATCH" and request.path.endswith(f"machineconfignodes/{NODE}/status"):
            status: Any = self._admin.get(MACHINECONFIGNODES, NODE).get("status") or {}
            applied = json.loads(request.body or b"{}").get("status") or {}
            asked = applied.get("observedGeneration")
            if asked is not None and asked < status.get("observedGeneration", 0):
                why = "observedGeneration must not decrease"
                rejected = {"kind": "Status", "code": 422, "reason": "Invalid", "message": why}
                return ApiResponse(422, json.dumps(rejected).encode())
        return super().send(request)


def applies_images(request: ApiRequest) -> bool:
    return request.content_type == PatchType.APPLY and b"configImage" in (request.body or b"")


@pytest.fixture
def admin(server: LabServer, client: Client) -> Client:
    installed.apply(server, build_node_access())
    client.create(NODES, {"metadata": {"name": NODE}})
    spec = {"node": {"name": NODE}, "pool": {"name": "worker"}, "configVersion": {"desired": "a"}}
    client.create(MACHINECONFIGNODES, make_object(MACHINECONFIGNODES, NODE, spec))
    return client


class Agent:
    """The clients of one agent process, as the node's user."""

    def __init__(self, server: LabServer, admin: Client | None = None) -> None:
        user = server.write_kubeconfig(f"system:node:{NODE}", ["system:nodes"])
        self.transport = MonotonicTransport(user, admin) if admin else Transport(user)
        self.events = Recorded()
        self.changes = 0
        self.cluster = self.make_client()
        self.cluster.refresh_node()

    def make_client(self) -> NodeClient:
        return NodeClient(
            Client(self.transport),
            self.events,
            node_name=NODE,
            clock=FakeClock(),
            on_change=self._count_change,
        )

    def _count_change(self) -> None:
        self.changes += 1

    def report(
        self, current: Target, desired: Target, *, event: NodeEvent | None = None
    ) -> list[str]:
        """The writes that it takes to tell of it."""
        before = len(self.transport.writes)
        updated = ReportedCondition(
            "Updated", "True" if current == desired else "False", "R", f"{current}"
        )
        report = StatusReport("", {}, (updated,), event, current=current, desired=desired)
        self.cluster.write_report(report)
        return self.transport.writes[before:]


@pytest.fixture
def agent(server: LabServer, admin: Client) -> Iterator[Agent]:
    found = Agent(server)
    yield found
    found.transport.close()


def said(admin: Client) -> tuple[str, Any]:
    """The message of the one condition, and the images."""
    status: Any = admin.get(MACHINECONFIGNODES, NODE)["status"]
    return status["conditions"][0]["message"], status.get("configImage")


def test_leaving_image_mode_removes_images_from_status_with_one_write(
    admin: Client, agent: Agent
) -> None:
    assert agent.report(A, A) == ["APPLY"]
    assert agent.report(A, OUT) == ["APPLY"]
    assert said(admin) == (str(A), {"currentImage": A.image})
    assert agent.report(OUT, OUT) == ["MERGE", "APPLY"]
    assert said(admin) == (str(OUT), None)
    assert agent.report(OUT, Target("rendered-c")) == ["APPLY"]
    assert agent.report(B, B) == ["APPLY"]
    assert said(admin) == (str(B), {"currentImage": B.image, "desiredImage": B.image})


def test_restarted_agent_removes_images_from_status(
    server: LabServer, admin: Client, agent: Agent
) -> None:
    agent.report(A, A)
    another = Agent(server)
    assert another.report(OUT, OUT) == ["MERGE", "APPLY"]
    another.transport.close()
    assert said(admin) == (str(OUT), None)


def test_conditions_are_written_without_images_for_old_crd(admin: Client, agent: Agent) -> None:
    agent.transport.refuses = applies_images
    assert agent.report(A, A, event=EVENT) == ["APPLY", "APPLY"]
    assert said(admin) == (str(A), None)
    assert agent.report(A, B) == ["APPLY"]
    assert agent.events.reasons == []


def test_missing_config_is_named_with_a_remedy(agent: Agent) -> None:
    with pytest.raises(ConfigMissingError) as found:
        agent.cluster.fetch_machine_config(B.config)
    assert str(found.value) == f"cannot read MachineConfig {B.config}: it does not exist"
    assert "desiredConfig" in found.value.remedy


def test_forbidden_config_is_rejected_with_a_remedy(server: LabServer, agent: Agent) -> None:
    agent.transport.close()
    agent.transport = Transport(server.write_kubeconfig("stranger", []))
    cluster = agent.make_client()
    with pytest.raises(ConfigRejectedError, match=f"cannot read MachineConfig {B.config}") as found:
        cluster.fetch_machine_config(B.config)
    assert not isinstance(found.value, ConfigMissingError)
    assert "system:nodes" in found.value.remedy


def test_images_rejected_later_are_removed_from_status(admin: Client, agent: Agent) -> None:
    agent.report(A, A)
    agent.transport.refuses = applies_images
    assert agent.report(B, B) == ["APPLY", "MERGE", "APPLY"]
    assert said(admin) == (str(B), None)


def test_event_is_recorded_when_conditions_are_rejected(server: LabServer, agent: Agent) -> None:
    match = FaultMatch(verb="patch", resource="machineconfignodes/status")
    server.call_api(lambda api: api.faults.inject_fault(RejectFault(500), match))
    for _ in range(2):
        with pytest.raises(ClusterError, match="injected fault"):
            agent.report(A, A, event=EVENT)
    assert agent.events.reasons == ["Rebooted"]


def test_failure_is_an_event_of_the_node_beside_the_conditions(agent: Agent) -> None:
    failed = NodeEvent("Warning", "OSUpdateFailed", "no space left", is_in_conditions=True)
    agent.report(A, A, event=EVENT)
    agent.report(A, B, event=failed)
    agent.report(A, B, event=failed)
    assert agent.events.reasons == ["OSUpdateFailed"]


def test_condition_of_a_failure_ends_with_it(admin: Client, agent: Agent) -> None:
    def degraded() -> str:
        status: Any = admin.get(MACHINECONFIGNODES, NODE)["status"]
        (found,) = [each for each in status["conditions"] if each["type"] == "NodeDegraded"]
        return str(found["status"])

    failed = ReportedCondition("NodeDegraded", "True", "Degraded", "no space left")
    agent.cluster.write_report(StatusReport("", {key.STATE: "Degraded"}, (failed,)))
    assert degraded() == "True"
    waiting = StatusReport("", {key.STATE: "Working", key.REASON: ""})
    agent.cluster.write_report(waiting)
    assert degraded() == "False"
    before = len(agent.transport.writes)
    agent.cluster.write_report(waiting)
    assert len(agent.transport.writes) == before


def test_failure_is_found_by_the_name_of_the_node(admin: Client, agent: Agent) -> None:
    client = Client(agent.transport)
    cluster = NodeClient(
        client,
        EventRecorder(client, "treenail", NODE, FakeClock()),
        node_name=NODE,
        clock=FakeClock(),
        on_change=lambda: None,
    )
    cluster.record_event(NodeEvent("Warning", "OSUpdateFailed", "no space left"))
    selector = f"involvedObject.kind=Node,involvedObject.name={NODE},involvedObject.uid={NODE}"
    (event,) = admin.list(EVENTS, namespace="default", params={"fieldSelector": selector}).items
    assert (event["type"], event["reason"], event["message"]) == (
        "Warning", "OSUpdateFailed", "no space left",
    )  # fmt: skip


def test_conditions_are_written_beside_the_observed_generation_of_the_mco(
    server: LabServer, admin: Client
) -> None:
    ahead = {"status": {"observedGeneration": 2, "configVersion": {"desired": "a"}}}
    admin.patch(MACHINECONFIGNODES, NODE, ahead, subresource="status")
    beside_mco = Agent(server, admin)
    assert beside_mco.report(A, B) == ["APPLY"]
    beside_mco.transport.close()
    status: Any = admin.get(MACHINECONFIGNODES, NODE)["status"]
    assert said(admin)[0] == str(A)
    assert status["observedGeneration"] == 2


def request_of(config: str) -> dict[str, object]:
    return {"metadata": {"annotations": {key.DESIRED_CONFIG: config}}}


def desired_of(agent: Agent) -> str | None:
    node = agent.cluster.get_cached_node()
    return node.annotations.get(key.DESIRED_CONFIG) if node else None


def test_restored_node_with_lower_version_replaces_cached_one(
    server: LabServer, admin: Client, agent: Agent, tmp_path: Path
) -> None:
    watch = ResourceWatch(
        Client(agent.transport),
        WatchScope(NODES, field_selector=f"metadata.name={NODE}"),
        SystemClock(),
        on_change=lambda _, found: agent.cluster.accept_node(found) if found else None,
    )
    watch.add_list_handler(agent.cluster.handle_list)
    admin.patch(NODES, NODE, request_of("rendered-saved"))
    server.save_state(tmp_path / "state.json")
    watch.start()
    try:
        admin.patch(NODES, NODE, request_of("rendered-lost"))
        wait_until(lambda: desired_of(agent) == "rendered-lost")
        agent.cluster.write_report(StatusReport("", {key.STATE: "Working"}))
        server.load_state(tmp_path / "state.json")
        wait_until(lambda: desired_of(agent) == "rendered-saved")
        node = agent.cluster.get_cached_node()
        assert key.STATE not in node.annotations
    finally:
        watch.stop()


def test_conditions_are_written_again_after_list_of_restored_server(
    server: LabServer, admin: Client, agent: Agent, tmp_path: Path
) -> None:
    agent.report(A, B)
    server.save_state(tmp_path / "state.json")
    agent.report(B, B)
    server.load_state(tmp_path / "state.json")
    assert said(admin)[0] == str(A)
    agent.cluster.accept_node(admin.get(NODES, NODE))
    agent.cluster.handle_list()

    assert agent.report(B, B) == ["APPLY"]
    assert said(admin)[0] == str(B)
    assert agent.report(B, B) == []


def test_read_from_restored_server_replaces_cached_node(
    server: LabServer, admin: Client, agent: Agent, tmp_path: Path
) -> None:
    server.save_state(tmp_path / "state.json")
    watched = admin.patch(NODES, NODE, request_of("rendered-lost"))
    agent.cluster.accept_node(watched)
    server.load_state(tmp_path / "state.json")
    agent.cluster.refresh_node()
    assert desired_of(agent) is None


DRAIN = StatusReport("", {key.DESIRED_DRAIN: "drain-b"})


def test_drain_is_not_requested_of_a_node_that_requests_another_target(
    admin: Client, agent: Agent
) -> None:
    admin.patch(NODES, NODE, request_of("rendered-other"))
    agent.changes = 0
    agent.cluster.write_report(DRAIN)
    assert key.DESIRED_DRAIN not in read_annotations(admin)
    assert agent.changes == 1, "the loop decides again"


def test_drain_is_requested_after_the_kubelet_wrote_the_node(admin: Client, agent: Agent) -> None:
    admin.patch(NODES, NODE, {"status": {"images": []}}, subresource="status")
    admin.patch(NODES, NODE, {"metadata": {"labels": {"zone": "a"}}})
    agent.cluster.write_report(DRAIN)
    assert read_annotations(admin)[key.DESIRED_DRAIN] == "drain-b"


def read_annotations(admin: Client) -> dict[str, str]:
    metadata: Any = admin.get(NODES, NODE)["metadata"]
    return dict(metadata.get("annotations", {}))


def test_change_that_a_read_finds_first_wakes_the_loop(
    server: LabServer, admin: Client, agent: Agent
) -> None:
    """The watch finds nothing new afterwards, and the pass that reads may have older facts."""
    agent.changes = 0
    found = admin.patch(NODES, NODE, request_of("rendered-2"))
    agent.cluster.refresh_node()
    assert agent.changes == 1
    agent.cluster.accept_node(found)
    agent.cluster.refresh_node()
    assert agent.changes == 1


def test_change_in_the_response_to_progress_wakes_the_loop(
    server: LabServer, admin: Client, agent: Agent
) -> None:
    agent.changes = 0
    admin.patch(NODES, NODE, request_of("rendered-2"))
    agent.cluster.write_progress(10)
    assert agent.changes == 1
    agent.cluster.write_progress(20)
    assert agent.changes == 1
