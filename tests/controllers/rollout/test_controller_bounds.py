"""The memory of the rollout controller does not grow with the nodes that ever existed."""

from tests.fakes.clock import FakeClock
from tests.kube.cluster import Cluster
from treenail.controllers.rollout.controller import RolloutController
from treenail.controllers.rollout.external_gates import GateClient
from treenail.controllers.rollout.reconcile import RolloutSettings
from treenail.controllers.runtime.web import WebClient
from treenail.kube.api_client import Client
from treenail.kube.event_recorder import EventRecorder


def test_pauses_of_deleted_nodes_are_forgotten() -> None:
    clock, client = FakeClock(0.0), Client(Cluster())
    events = EventRecorder(client, "rollout", "here", clock)
    controller = RolloutController(
        client, clock, GateClient(WebClient()), events, RolloutSettings()
    )
    try:
        for number in range(3000):
            controller.sync_key(f"node/worker-{number}")
            clock.move(1.0)
        assert len(controller._not_before) <= 1001
    finally:
        controller.close()
