"""A rollout with real agents on the lab's machines: staged, drained, rebooted."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.drains import Drains
from tests.fixtures.controllers import CLOCK, run_controllers
from tests.fixtures.objects import add_config, add_policy, add_pool
from tests.waiting import wait_until
from treenail.controllers.rollout.controller import RolloutController
from treenail.controllers.rollout.external_gates import GateClient
from treenail.controllers.rollout.reconcile import RolloutSettings as Rules
from treenail.controllers.runtime.web import WebClient
from treenail.kube.event_recorder import EventRecorder
from treenail.kube.resources import MACHINECONFIGPOOLS
from treenail_lab.cluster import Lab, LabPlan
from treenail_lab.images import make_image
from treenail_lab.machine.settings import MachineSettings

BEFORE = make_image("os", "1", 2_000_000)
AFTER = make_image("os", "2", 2_000_000)
FAST = MachineSettings(pull_bytes_per_s=1e9, staging_s=0.02)
AGENT = "[limits]\nretry_first_s = 0.1\nretry_max_s = 0.5\n"


@pytest.fixture
def lab() -> Iterator[Lab]:
    # The sockets' names must stay short.
    with tempfile.TemporaryDirectory(prefix="tn", dir="/tmp") as folder:
        plan = LabPlan(("n1", "n2"), (BEFORE, AFTER), machine_settings=FAST, agent_settings=AGENT)
        with Lab(Path(folder), plan) as found:
            for config in ("rendered-worker-a", "rendered-worker-b"):
                add_config(found.client, config)
            drains = Drains(found.client, CLOCK)
            drains.start()
            yield found
            drains.stop()


@contextmanager
def rollout(lab: Lab) -> Iterator[None]:
    client = lab.open_client(lab.server.write_kubeconfig("rollout", ["system:masters"]))
    events = EventRecorder(client, "treenail-rollout", "here", CLOCK)
    controller = RolloutController(client, CLOCK, GateClient(WebClient()), events, Rules())
    with run_controllers(client, controller):
        yield


def status(lab: Lab) -> Any:
    found: Any = lab.client.get(MACHINECONFIGPOOLS, "worker")
    return found.get("status", {})


@pytest.mark.integration
@pytest.mark.long
def test_real_agents_update_and_missing_image_stops_at_canary(lab: Lab) -> None:
    add_policy(lab.client, "careful", {"canary": {}, "soak": "0s"})
    add_pool(
        lab.client,
        "worker",
        "rendered-worker-a",
        maxUnavailable=2,
        osImage=BEFORE.pull_spec,
        rolloutPolicy="careful",
    )
    with rollout(lab):
        wait_until(lambda: status(lab).get("updatedMachineCount") == 2, limit_s=60)
        change: dict[str, Any] = {
            "spec": {
                "osImage": AFTER.pull_spec,
                "configuration": {"name": "rendered-worker-b"},
            },
        }
        lab.client.patch(MACHINECONFIGPOOLS, "worker", change)
        wait_until(
            lambda: status(lab).get("configuration", {}).get("name") == "rendered-worker-b",
            limit_s=90,
        )
        booted = {machine.booted_deployment.digest for machine in lab.machines.values()}
        assert booted == {AFTER.digest}

        wrong = f"{AFTER.pull_spec.partition('@')[0]}@sha256:{'0' * 64}"
        lab.client.patch(MACHINECONFIGPOOLS, "worker", {"spec": {"osImage": wrong}})
        wait_until(lambda: status(lab).get("degradedMachineCount") == 1, limit_s=60)
        assigned = [name for name in lab.machines if wrong in lab.read_annotations(name).values()]
        assert len(assigned) == 1
        assert {machine.booted_deployment.digest for machine in lab.machines.values()} == {
            AFTER.digest
        }
