"""``treenail-controller run`` with real agents: from the change of a pool to its last node.

The controllers are processes with the account of the manifests, and may do what their roles allow.
"""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.controllers.installed import OPTIONS, denied
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail.clocks import SystemClock
from treenail.kube.informer import Informer
from treenail.kube.resources import (
    LEASES,
    MACHINECONFIGNODES,
    MACHINECONFIGPOOLS,
    MACHINECONFIGS,
    NODES,
    ROLLOUTPOLICIES,
)
from treenail.kube.watch import WatchScope
from treenail.manifests.installation import NAME
from treenail_lab.cluster import POOL, Lab, LabPlan
from treenail_lab.controllers import ControllerReplicas
from treenail_lab.demo import pool
from treenail_lab.images import Image, make_image
from treenail_lab.lifetime.owner import owner
from treenail_lab.machine.settings import MachineSettings
from treenail_lab.workload import Workload

pytestmark = [pytest.mark.integration]

CAREFUL: dict[str, Any] = {"canary": {"nodes": 1, "soak": "1s"}, "maxFailures": 0}
QUICK = ("--settle=0", "--report-blockers-after=2")
LIMIT_S = 60.0
SIZE = 2_000_000
AGENT = "[limits]\nretry_first_s = 0.1\nretry_max_s = 0.5\n"
BEHAVIOUR = MachineSettings(pull_bytes_per_s=8e6, staging_s=0.02, boot_s=0.2)


class Fleet:
    """A pool of three nodes with an application, and its controllers."""

    def __init__(self, folder: Path) -> None:
        self.images = 1
        first = make_image("os", "1", SIZE)
        plan = LabPlan(
            ("n1", "n2", "n3"), (first,), machine_settings=BEHAVIOUR, agent_settings=AGENT
        )
        self.lab = Lab(folder, plan)
        self.controllers = ControllerReplicas(self.lab, arguments=QUICK)
        self.out: dict[str, bool] = {}
        self.most_out = 0
        self._lock = threading.Lock()

    def start(self) -> None:
        self.lab.start()
        self._nodes = Informer(self.lab.client, WatchScope(NODES), SystemClock(), out_of_service)
        self._nodes.add_handler(self._see)
        self._nodes.start()
        self.workload = Workload(self.lab.client, replicas=6)
        self.controllers.create_manifests()
        self.controllers.start_replica()
        self.lab.add_config(pool.build_config("00-worker"))
        self.ask(self.lab.plan.images[0])
        self.settle(self.lab.plan.images[0])
        self.workload.start()

    def stop(self) -> None:
        if hasattr(self, "workload"):
            self.workload.stop()
            self._nodes.stop()
        self.controllers.stop()
        self.lab.stop()

    def begin(self) -> None:
        """Count from zero."""
        with self._lock:
            self.most_out = 0

    # What a person does

    def image(self) -> Image:
        """Another image, in the registry."""
        self.images += 1
        found = make_image("os", str(self.images), SIZE)
        self.lab.add_image(found)
        return found

    def ask(self, image: Image, policy: dict[str, Any] = CAREFUL) -> None:
        """Request an image for the pool's nodes."""
        pool.apply_policy(self.lab, policy)
        pool.apply_pool(self.lab, pool.build_pool(image.pull_spec))

    # How it is

    def settle(self, image: Image) -> None:
        wait_until(lambda: self.said("Updated") == "True" and self.at(image) == 3, limit_s=LIMIT_S)

    def at(self, image: Image) -> int:
        """Count the machines that run the image, are in service and report it."""
        return sum(
            machine.booted_deployment is not None
            and machine.booted_deployment.digest == image.digest
            and self.notes(name).get(key.CURRENT_OS_IMAGE) == image.pull_spec
            and self.notes(name).get(key.STATE) == "Done"
            and not self.out.get(name, True)
            for name, machine in self.lab.machines.items()
        )

    def asked(self, image: Image) -> list[str]:
        return [
            name
            for name in self.lab.machines
            if self.notes(name).get(key.DESIRED_OS_IMAGE) == image.pull_spec
        ]

    def policy(self) -> Any:
        return self.lab.client.get(ROLLOUTPOLICIES, pool.POLICY)

    def notes(self, node: str) -> dict[str, str]:
        return self.lab.read_annotations(node)

    def machine_config_node(self, node: str) -> Any:
        return self.lab.client.get(MACHINECONFIGNODES, node)

    def reported(self, node: str) -> set[str]:
        """The conditions of the MachineConfigNode that are true."""
        conditions = self.machine_config_node(node)["status"]["conditions"]
        return {each["type"] for each in conditions if each["status"] == "True"}

    def pool(self) -> Any:
        return self.lab.client.get(MACHINECONFIGPOOLS, POOL)

    def condition(self, kind: str) -> dict[str, str]:
        found = self.pool().get("status", {}).get("conditions", ())
        return next((dict(each) for each in found if each["type"] == kind), {})

    def said(self, kind: str) -> str:
        return self.condition(kind).get("status", "")

    def config(self) -> str:
        return str(self.pool()["spec"].get("configuration", {}).get("name", ""))

    def leader(self) -> str:
        lease: Any = self.lab.client.get(LEASES, NAME, namespace=OPTIONS.namespace)
        return str(lease["spec"].get("holderIdentity", ""))

    def _see(self, name: str, _before: bool | None, after: bool | None) -> None:
        with self._lock:
            self.out[name] = bool(after)
            self.most_out = max(self.most_out, sum(self.out.values()))


def out_of_service(node: Any) -> bool:
    conditions = node.get("status", {}).get("conditions", ())
    ready = any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
    return bool(node.get("spec", {}).get("unschedulable")) or not ready


@pytest.fixture(scope="module")
def shared() -> Iterator[Fleet]:
    # The sockets' names must stay short.
    with owner.temporary_directory() as folder:
        found = Fleet(folder)
        try:
            found.start()
            yield found
            assert denied(found.lab.server) == frozenset()
        finally:
            found.stop()


@pytest.fixture
def fleet(shared: Fleet) -> Fleet:
    shared.begin()
    return shared


def test_pool_is_rendered_and_its_nodes_drained_and_rebooted_canary_first(fleet: Fleet) -> None:
    before, image = fleet.config(), fleet.image()
    boots = {name: machine.boot_count for name, machine in fleet.lab.machines.items()}
    pool.pause_pool(fleet.lab)
    change = pool.build_config("50-worker", {"kernelArguments": ["audit=1"]})
    fleet.lab.client.create(MACHINECONFIGS, change)
    wait_until(lambda: fleet.config() != before)
    after = fleet.config()
    fleet.ask(image)

    (canary,) = wait_until(lambda: fleet.asked(image), limit_s=LIMIT_S)
    wait_until(lambda: len(fleet.asked(image)) > 1, limit_s=LIMIT_S)
    # No other node was assigned before the canary was complete.
    assert fleet.notes(canary)[key.CURRENT_OS_IMAGE] == image.pull_spec
    fleet.settle(image)

    assert fleet.most_out == 1
    for name, machine in fleet.lab.machines.items():
        notes = fleet.notes(name)
        assert machine.boot_count == boots[name] + 1
        assert notes[key.CURRENT_CONFIG] == after
        assert notes[key.LAST_APPLIED_DRAIN] == f"uncordon-{after}"
        spec = fleet.machine_config_node(name)["spec"]
        assert spec["configVersion"] == {"desired": after}
        assert spec["configImage"] == {"desiredImage": image.pull_spec}
        # What is reported may come a little later than what is so.
        wait_until(lambda name=name: fleet.reported(name) >= {"Updated", "Uncordoned"})  # type: ignore[misc]


MOMENTS: dict[str, Callable[[Fleet, Image], object]] = {
    "the canary was asked": lambda fleet, image: fleet.asked(image),
    "a node is out of service": lambda fleet, image: any(fleet.out.values()),
    "a machine is down": lambda fleet, image: any(not m.is_on for m in fleet.lab.machines.values()),
    "the canary is through": lambda fleet, image: fleet.at(image) == 1,
    "the second node is on its way": lambda fleet, image: len(fleet.asked(image)) == 2,
}


# The walks of tests/controllers/rollout end the controller at any moment; here are real processes.
MOMENT_CASES = [
    pytest.param(each, marks=() if each == "a machine is down" else pytest.mark.long)
    for each in MOMENTS
]


@pytest.mark.parametrize("moment", MOMENT_CASES)
def test_rollout_continues_after_controller_is_killed(fleet: Fleet, moment: str) -> None:
    image = fleet.image()
    fleet.ask(image)
    wait_until(lambda: MOMENTS[moment](fleet, image), limit_s=LIMIT_S)
    fleet.controllers.kill_replica()
    # As a kubelet does: under the name that the lease is held by.
    fleet.controllers.start_replica()
    fleet.settle(image)
    assert fleet.most_out == 1


@pytest.mark.long
def test_second_replica_continues_when_leader_is_killed(fleet: Fleet) -> None:
    image = fleet.image()
    fleet.controllers.start_replica(1)
    log = fleet.controllers.find_log(1)
    assert fleet.leader() == f"{NAME}-0"
    fleet.ask(image)
    wait_until(lambda: any(fleet.out.values()), limit_s=LIMIT_S)
    assert "starting controller " not in log.read_text()
    fleet.controllers.kill_replica(0)
    # The lease would run out after a minute.
    spec: dict[str, object] = {"spec": {"holderIdentity": ""}}
    fleet.lab.client.patch(LEASES, NAME, spec, namespace=OPTIONS.namespace)
    fleet.settle(image)
    assert fleet.leader() == f"{NAME}-1"
    assert "starting controller " in log.read_text()
    assert fleet.most_out == 1

    # One that ends in order gives the lease to the next at once.
    fleet.controllers.start_replica(0)
    image = fleet.image()
    fleet.controllers.stop_replica(1)
    fleet.ask(image)
    fleet.settle(image)
    assert fleet.leader() == f"{NAME}-0"


STAGING: dict[str, Any] = {"prestage": {"maxParallel": 2}, "maxFailures": 0}


def test_all_nodes_stage_before_the_first_is_drained(fleet: Fleet) -> None:
    image = fleet.image()
    fleet.ask(image, STAGING)
    first = wait_until(lambda: fleet.asked(image), limit_s=LIMIT_S)
    for name, machine in fleet.lab.machines.items():
        if name not in first:
            assert machine.staged_deployment is not None
            assert (machine.staged_deployment.digest, machine.is_staged_locked) == (
                image.digest,
                True,
            )
            assert fleet.notes(name)[key.PRESTAGED] == image.pull_spec
    fleet.settle(image)
    assert fleet.most_out == 1
    for name, machine in fleet.lab.machines.items():
        assert machine.staged_deployment is None
        assert (
            not {key.PRESTAGE_IMAGE, key.PRESTAGED, key.PRESTAGE_ERROR} & fleet.notes(name).keys()
        )


def test_missing_image_halts_rollout_before_any_node_changes(fleet: Fleet) -> None:
    good, bad = fleet.image(), make_image("os", "nowhere", SIZE)
    fleet.ask(bad, STAGING)
    wait_until(lambda: fleet.condition("Degraded").get("reason") == "Halted", limit_s=LIMIT_S)
    assert " failed first: prestaging failed: " in fleet.condition("Degraded")["message"]
    assert fleet.asked(bad) == []
    assert {fleet.notes(name)[key.STATE] for name in fleet.lab.machines} == {"Done"}
    fleet.ask(good, STAGING)
    fleet.settle(good)


def test_paused_pool_drops_prestaged_deployments(fleet: Fleet) -> None:
    image = fleet.image()
    machines = fleet.lab.machines.values()
    window = {"days": ["Mon"], "start": "00:00", "duration": "1s", "timeZone": "UTC"}
    fleet.ask(image, {"prestage": {}, "windows": [window]})
    wait_until(lambda: all(machine.is_staged_locked for machine in machines), limit_s=LIMIT_S)
    pool.pause_pool(fleet.lab)
    wait_until(lambda: not any(machine.staged_deployment for machine in machines), limit_s=LIMIT_S)
    assert fleet.most_out == 0
    fleet.ask(image)
    fleet.settle(image)


def test_wrong_image_halts_at_canary_and_another_image_continues(fleet: Fleet) -> None:
    good = fleet.image()
    bad = make_image("os", "bad", SIZE)  # and not in the registry
    fleet.ask(bad)
    wait_until(lambda: fleet.condition("Degraded").get("reason") == "Halted", limit_s=LIMIT_S)
    (canary,) = fleet.asked(bad)
    assert f"is halted: node {canary} failed first: " in fleet.condition("Degraded")["message"]
    assert fleet.most_out == 0
    fleet.ask(good)
    fleet.settle(good)
    assert fleet.said("Degraded") == "False"


@pytest.mark.long
def test_halted_rollout_resumes_on_user_request(fleet: Fleet) -> None:
    image = make_image("os", "late", SIZE)
    fleet.ask(image)
    wait_until(lambda: fleet.condition("Degraded").get("reason") == "Halted", limit_s=LIMIT_S)
    fleet.lab.add_image(image)
    (entry,) = fleet.policy()["status"]["pools"]
    assert (entry["state"], entry["haltedBy"]["node"]) == ("Halted", fleet.asked(image)[0])
    fleet.ask(image, {**CAREFUL, "resume": {"worker": "the image is there now"}})
    fleet.settle(image)
    wait_until(lambda: fleet.policy()["status"]["pools"][0]["state"] == "Updated", limit_s=LIMIT_S)
