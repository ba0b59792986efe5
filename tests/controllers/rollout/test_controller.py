"""One pass of the controller at a time, in virtual time."""

from dataclasses import dataclass, field

import pytest

from tests.controllers.rollout.world import World, build_reconciler
from treenail.api import annotations as key
from treenail.controllers.rollout.gates.external import LockServer, PrometheusAlerts
from treenail.controllers.rollout.gates.os_image import OS_IMAGE, GateBlocked, GateWaiting
from treenail.controllers.rollout.nodes import LOCKED_BY, STARTED_AT, WAS_DEGRADED, RolloutTarget
from treenail.controllers.rollout.policy import ROLLOUT_RESUME
from treenail.controllers.rollout.progress import ROLLOUT_STATE
from treenail.controllers.rollout.reconcile import (
    CONFLICT_RETRY_S,
    RolloutReconciler,
    RolloutSettings,
)
from treenail.controllers.rollout.status import COUNTS_INTERVAL_S
from treenail.errors import ForbiddenError, UnreachableError

IMAGE = f"registry.example.com/os@sha256:{'1' * 64}"
LOCKS = "{fleetLock: {url: 'http://locks.example.com', group: workers}}"


def world(nodes: int = 3, policy: str | None = None, **spec: object) -> World:
    """Nodes that have the config old, and a pool that is after new."""
    found = World()
    for number in range(nodes):
        found.add_node(f"n{number}", "old")
    found.set_pool("worker", "new", policy, **spec)
    found.deliver()
    return found


def controller(found: World, gates: object = None, **settings: object) -> RolloutReconciler:
    return build_reconciler(found, gates=gates, settings=RolloutSettings(**settings))  # type: ignore[arg-type]


def turn(found: World, controlled: RolloutReconciler, *, after_s: float = 0.0) -> float | None:
    found.pass_time(after_s)
    found.deliver()
    return controlled.sync_pool("worker")


def asked_for(found: World, config: str = "new") -> list[str]:
    return [name for name, node in found.truth.items() if node.desired_config == config]


def node_writes(found: World) -> list[dict[str, object]]:
    return [body for plural, _, body in found.writes if plural == "nodes"]


def test_a_node_is_given_config_and_image_in_one_conditional_write() -> None:
    found = world(annotations={OS_IMAGE: IMAGE})
    version = found.objects["nodes"]["n0"]["metadata"]["resourceVersion"]
    turn(found, controller(found))
    assert node_writes(found) == [
        {
            "metadata": {
                "resourceVersion": version,
                "annotations": {
                    key.DESIRED_CONFIG: "new",
                    key.DESIRED_OS_IMAGE: IMAGE,
                    STARTED_AT: "2001-09-09T01:46:40Z",
                },
            }
        }
    ]


def test_a_node_keeps_whether_it_was_degraded_when_it_was_given_its_target() -> None:
    found = world()
    failing = {key.STATE: "Degraded", key.DESIRED_CONFIG: "bad"}
    found.change("nodes", "n0", {"metadata": {"annotations": failing}})
    turn(found, controller(found))
    assert found.objects["nodes"]["n0"]["metadata"]["annotations"][WAS_DEGRADED] == "true"
    assert found.truth["n0"].was_degraded
    found.pass_time(600.0)
    found.set_pool("worker", "newer")
    turn(found, controller(found))
    assert asked_for(found, "newer") == ["n0"]
    assert not found.truth["n0"].was_degraded


def test_the_image_is_asked_for_by_the_annotation_of_the_setting() -> None:
    found = world(annotations={OS_IMAGE: IMAGE})
    turn(found, controller(found, image_key=key.DESIRED_IMAGE))
    notes = found.objects["nodes"]["n0"]["metadata"]["annotations"]
    assert notes[key.DESIRED_IMAGE] == IMAGE
    assert key.DESIRED_OS_IMAGE not in notes


def test_the_status_counts_what_was_just_given() -> None:
    found = world(5, maxUnavailable=2)
    turn(found, controller(found))
    assert found.status()["unavailableMachineCount"] == 2
    assert found.said()["Updating"]["reason"] == "RollingOut"


def test_the_record_is_on_the_pool_before_a_node_is_given_anything() -> None:
    found = world()
    turn(found, controller(found))
    kinds = [(plural, ROLLOUT_STATE in str(body)) for plural, _, body in found.writes]
    assert kinds[:2] == [("machineconfigpools", True), ("nodes", False)]


def test_a_node_that_changed_meanwhile_is_judged_anew() -> None:
    found = world()
    found.touch("nodes", "n0")
    controlled = controller(found)
    assert controlled.sync_pool("worker") == CONFLICT_RETRY_S
    assert asked_for(found) == []
    turn(found, controlled)
    assert asked_for(found) == ["n0"]


def test_a_pause_takes_effect_between_two_nodes() -> None:
    found = world()
    controlled = controller(found)
    turn(found, controlled)
    found.set_pool("worker", "new", paused=True)
    for _ in range(5):
        turn(found, controlled, after_s=300)
    assert asked_for(found) == ["n0"]
    assert found.truth["n0"].is_done
    assert found.said()["Updating"]["reason"] == "Paused"


def test_nodes_that_never_had_a_config_are_given_their_first_one_by_one() -> None:
    found = World()
    for number in range(3):
        found.add_node(f"n{number}", "old")
        notes = dict.fromkeys((key.CURRENT_CONFIG, key.DESIRED_CONFIG, key.STATE))
        found.change("nodes", f"n{number}", {"metadata": {"annotations": notes}})
    found.set_pool("worker", "new")
    controlled = controller(found)
    turn(found, controlled)
    assert asked_for(found) == ["n0"]
    assert found.status()["unavailableMachineCount"] == 1
    for _ in range(9):
        turn(found, controlled, after_s=300)
    assert found.said()["Updated"]["status"] == "True"


def test_the_node_of_the_controller_itself_goes_last() -> None:
    found = world()
    controlled = controller(found, own_node="n0")
    order = []
    for _ in range(9):
        turn(found, controlled, after_s=300)
        order += [name for name in asked_for(found) if name not in order]
    assert order == ["n1", "n2", "n0"]


def test_a_config_that_does_not_exist_is_given_to_nobody() -> None:
    found = world()
    del found.objects["machineconfigs"]["new"]
    assert turn(found, controller(found)) is not None
    assert asked_for(found) == []
    said = found.said()["Degraded"]
    assert (said["status"], said["reason"]) == ("True", "MissingMachineConfig")
    assert (
        said["message"]
        == "cannot assign MachineConfig new: it does not exist; create it, or correct spec.configuration of pool worker"
    )
    assert found.warnings == [("worker", "MissingMachineConfig", said["message"])]


def test_numbers_alone_are_written_after_a_while() -> None:
    found = world(4, maxUnavailable=2)
    controlled = controller(found)
    turn(found, controlled)
    turn(found, controlled)  # now it waits
    found.flap("n3", healthy=False)
    assert turn(found, controlled, after_s=1.0) == COUNTS_INTERVAL_S - 1.0
    assert found.status()["unavailableMachineCount"] == 2
    turn(found, controlled, after_s=COUNTS_INTERVAL_S)
    assert found.status()["unavailableMachineCount"] == 3


def test_a_server_that_refuses_is_quoted_in_the_status() -> None:
    class NoWrites(World):
        def patch(self, resource, name, body, *patch_type, **more):  # type: ignore[no-untyped-def]
            if resource.plural == "nodes":
                raise ForbiddenError("PATCH nodes n0: may not")
            return super().patch(resource, name, body, *patch_type, **more)

    found = NoWrites()
    found.add_node("n0", "old")
    found.set_pool("worker", "new")
    found.deliver()
    with pytest.raises(ForbiddenError):
        controller(found).sync_pool("worker")
    said = found.said()["Degraded"]
    assert (said["reason"], said["message"]) == ("WriteRefused", "PATCH nodes n0: may not")


def test_a_write_without_an_answer_counts_and_is_made_sure() -> None:
    found = world()
    controlled = controller(found)
    turn(found, controlled)  # the first node
    turn(found, controlled, after_s=500)
    found.pass_time(500)
    found.deliver()
    found.next_fault, found.fault_on = "unreachable", "nodes"
    with pytest.raises(UnreachableError):
        controlled.sync_pool("worker")
    assert asked_for(found) == ["n0", "n1"]
    assert found.status()["unavailableMachineCount"] == 1
    turn(found, controlled)
    assert asked_for(found) == ["n0", "n1", "n2"]


def test_a_bad_image_stays_with_the_canary_of_500_nodes_until_a_person_has_looked() -> None:
    found = world(500, "{canary: {}, soak: 5m}", maxUnavailable="10%")
    found.bad = {RolloutTarget("new")}
    controlled = controller(found)
    for _ in range(60):
        turn(found, controlled, after_s=120)
    assert asked_for(found) == ["n0"]
    said = found.said()["Degraded"]
    assert said["reason"] == "Halted"
    assert "node n0 failed first: it does not boot" in said["message"]
    found.bad = set()
    found.set_pool("worker", "newer", "{canary: {}, soak: 5m}", maxUnavailable="10%",
                   annotations={ROLLOUT_RESUME: "yes"})  # fmt: skip
    for _ in range(120):
        turn(found, controlled, after_s=120)
    assert found.said()["Updated"]["status"] == "True"


@dataclass
class Locks:
    """A lock server with so many locks."""

    most: int = 1
    held: set[str] = field(default_factory=set)
    broken: str = ""
    alert: GateWaiting | GateBlocked | None = None

    def check_alerts(self, alerts: PrometheusAlerts | None) -> GateWaiting | GateBlocked | None:
        return self.alert

    def acquire_lock(self, server: LockServer, node: str) -> GateWaiting | GateBlocked | None:
        if self.broken:
            return GateBlocked(self.broken, "GateUnavailable")
        if node not in self.held and len(self.held) >= self.most:
            return GateWaiting("all locks are taken")
        self.held.add(node)
        return None

    def release_lock(self, server: LockServer, node: str) -> GateWaiting | GateBlocked | None:
        if self.broken:
            return GateBlocked(self.broken, "GateUnavailable")
        self.held.discard(node)
        return None


def test_a_lock_is_held_while_a_node_is_out_and_given_back_afterwards() -> None:
    found = world(4, LOCKS, maxUnavailable=3)
    locks = Locks(most=2)
    controlled = controller(found, locks)
    assert turn(found, controlled) is not None
    assert locks.held == {"n0", "n1"}
    assert asked_for(found) == ["n0", "n1"]
    assert found.truth["n0"].locked_by == "workers http://locks.example.com"
    assert "all locks are taken" in found.said()["Updating"]["message"]
    turn(found, controlled, after_s=300)
    turn(found, controlled, after_s=300)
    found.set_pool("worker", "new", LOCKS, maxUnavailable=3, paused=True)
    for _ in range(4):
        turn(found, controlled, after_s=300)
    assert locks.held == set()
    assert not any(LOCKED_BY in str(node) for node in found.objects["nodes"].values())


def test_a_gate_that_can_not_be_asked_is_an_error_and_never_a_yes() -> None:
    found = world(4, LOCKS)
    controlled = controller(found, Locks(broken="no answer in time"))
    assert turn(found, controlled) is not None
    assert asked_for(found) == []
    said = found.said()["Degraded"]
    assert (said["reason"], said["message"]) == ("GateUnavailable", "no answer in time")


def test_an_alert_holds_the_next_node_up() -> None:
    found = world(3)
    locks = Locks(alert=GateWaiting("waiting: alert ApiErrors is firing"))
    controlled = controller(found, locks)
    assert turn(found, controlled) is not None
    assert asked_for(found) == []
    assert "alert ApiErrors is firing" in found.said()["Updating"]["message"]
    locks.alert = None
    turn(found, controlled, after_s=30)
    assert asked_for(found) == ["n0"]


def test_a_pool_that_is_gone_is_forgotten() -> None:
    found = world()
    controlled = controller(found)
    turn(found, controlled)
    found.remove("machineconfigpools", "worker")
    found.deliver()
    assert controlled.sync_pool("worker") is None


def test_masters_wait_while_an_arbiter_is_out_of_service() -> None:
    found = World()
    for name, role in (("m0", "master"), ("m1", "master"), ("a0", "arbiter")):
        found.add_node(name, "old")
        labels = {"node-role.kubernetes.io/worker": None, f"node-role.kubernetes.io/{role}": ""}
        found.change("nodes", name, {"metadata": {"labels": labels}})
    for pool in ("master", "arbiter"):
        found.set_pool(pool, "new")
    found.flap("a0", healthy=False)
    found.deliver()
    controlled = controller(found)
    controlled.sync_pool("master")
    controlled.sync_pool("arbiter")
    assert asked_for(found) == []
    found.flap("a0", healthy=True)
    found.deliver()
    controlled.sync_pool("arbiter")
    controlled.sync_pool("master")
    assert asked_for(found) == ["m0"]
