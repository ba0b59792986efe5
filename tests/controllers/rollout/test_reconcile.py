"""Single syncs of the reconciler, in virtual time."""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.controllers.rollout.world import Killed, World, count_taken, world
from treenail.api import annotations as key
from treenail.controllers.pools.node_facts import GRACE_S, LOCKED_BY, STARTED_AT, RolloutTarget
from treenail.controllers.pools.os_image import GateAnswer, GateBlocked, GatePending, GateWaiting
from treenail.controllers.pools.pool_status import COUNTS_INTERVAL_S
from treenail.controllers.pools.rollout_policy import LockServer, PrometheusAlerts
from treenail.controllers.pools.rollout_record import ROLLOUT_STATUS
from treenail.controllers.rollout.decide import STALE_RETRY_S
from treenail.controllers.rollout.external_gates import PENDING_RETRY_S, BackgroundGates, LockHolder
from treenail.controllers.rollout.reconcile import (
    CONFLICT_RETRY_S,
)
from treenail.errors import ClusterError, ForbiddenError, UnreachableError
from treenail.kube.resources import MACHINEOSBUILDS, MACHINEOSCONFIGS

IMAGE = f"registry.example.com/os@sha256:{'1' * 64}"
LOCKS = "{fleetLock: {url: 'http://locks.example.com', group: workers}}"


def test_only_node_of_a_cluster_updates_without_a_drain_until_another_one_joins() -> None:
    w = world(1)
    w.start()
    w.turn()
    assert w.notes()[key.DESIRED_CONFIG] == "new"
    assert w.notes()[key.CONTROL_PLANE_TOPOLOGY] == key.SINGLE_REPLICA
    w.add_node("n1", "new")
    w.turn(times=2)
    assert key.CONTROL_PLANE_TOPOLOGY not in w.notes()
    w.change(
        "nodes",
        "n0",
        {"metadata": {"annotations": {key.CONTROL_PLANE_TOPOLOGY: "HighlyAvailable"}}},
    )
    w.turn(times=2)
    assert w.notes()[key.CONTROL_PLANE_TOPOLOGY] == "HighlyAvailable"


def test_members_of_etcd_in_two_pools_and_in_none_update_one_at_a_time() -> None:
    w = World()
    member = {"node-role.kubernetes.io/control-plane": ""}
    for pool, names in (("canary", ["a"]), ("worker", ["b", "c"])):
        for name in names:
            labels = {**member, f"node-role.kubernetes.io/{pool}": ""}
            w.add_node(name, "old", labels=labels)
        w.set_pool(pool, "new", maxUnavailable=2)
    down: list[int] = []
    w.on_write = lambda *_: down.append(count_taken(w.truth))
    w.turn(20.0, "canary", "worker", times=90)
    assert w.find_assigned() == ["a", "b", "c"]
    assert max(down) == 1
    assert count_taken(w.truth) == 0


def test_assignment_writes_config_and_image_in_one_conditional_write() -> None:
    found = world(osImage=IMAGE)
    version = found.objects["nodes"]["n0"]["metadata"]["resourceVersion"]
    found.turn()
    assert found.node_writes() == [
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


def test_assignment_of_degraded_node_records_it() -> None:
    found = world()
    failing = {key.STATE: "Degraded", key.DESIRED_CONFIG: "bad"}
    found.change("nodes", "n0", {"metadata": {"annotations": failing}})
    found.turn()
    at = int(found.seconds)
    assert found.status()["rollout"]["assigned"] == {"n0": at + int(GRACE_S)}
    found.pass_time(600.0)
    found.set_pool("worker", "newer")
    found.turn()
    assert found.find_assigned("newer") == ["n0"]
    assert found.status()["rollout"]["assigned"] == {"n0": at + 600}


def test_image_is_requested_by_the_configured_annotation() -> None:
    found = world(osImage=IMAGE)
    found.start(image_key=key.DESIRED_IMAGE).turn()
    notes = found.notes()
    assert notes[key.DESIRED_IMAGE] == IMAGE
    assert key.DESIRED_OS_IMAGE not in notes


def test_status_counts_nodes_assigned_in_the_same_sync() -> None:
    found = world(5, maxUnavailable=2)
    found.turn()
    assert found.status()["unavailableMachineCount"] == 2
    assert found.conditions()["Updating"]["reason"] == "RollingOut"


def test_record_is_written_before_any_node() -> None:
    found = world()
    found.turn()
    kinds = [(plural, ROLLOUT_STATUS in body.get("status", {})) for plural, _, body in found.writes]
    assert kinds[:2] == [("machineconfigpools", True), ("nodes", False)]


def test_conflicting_node_is_decided_again() -> None:
    found = world()
    found.touch("nodes", "n0")
    assert found.reconciler.sync_pool("worker") == CONFLICT_RETRY_S
    assert found.find_assigned() == []
    found.turn()
    assert found.find_assigned() == ["n0"]


def test_assignment_after_conflict_without_a_change_is_repeated() -> None:
    found = world()
    found.fault_on, found.next_fault = "nodes", "false conflict"
    assert found.turn() == CONFLICT_RETRY_S
    found.turn()
    assert found.find_assigned() == ["n0"]


def test_assignment_with_repeated_conflicts_is_retried_with_backoff() -> None:
    found = world()
    found.fault_on, found.next_fault = "nodes", "false conflict"
    found.turn()
    found.next_fault = "false conflict"
    with pytest.raises(ClusterError, match="cannot assign new to node n0: an admission webhook"):
        found.turn()


def test_pause_stops_further_assignments() -> None:
    found = world()
    found.turn()
    found.set_pool("worker", "new", paused=True)
    found.turn(300, times=5)
    assert found.find_assigned() == ["n0"]
    assert found.truth["n0"].is_done
    assert found.conditions()["Updating"]["reason"] == "Paused"


def test_unassigned_nodes_get_first_config_within_max_unavailable() -> None:
    found = World()
    for number in range(3):
        found.add_node(f"n{number}", "old")
        notes = dict.fromkeys((key.CURRENT_CONFIG, key.DESIRED_CONFIG, key.STATE))
        found.change("nodes", f"n{number}", {"metadata": {"annotations": notes}})
    found.set_pool("worker", "new")
    found.turn()
    assert found.find_assigned() == ["n0"]
    assert found.status()["unavailableMachineCount"] == 1
    found.turn(300, times=9)
    assert found.conditions()["Updated"]["status"] == "True"


def test_own_node_is_assigned_last() -> None:
    found = world()
    found.start(own_node="n0")
    order = []
    for _ in range(9):
        found.turn(300)
        order += [name for name in found.find_assigned() if name not in order]
    assert order == ["n1", "n2", "n0"]


def test_missing_config_is_not_assigned() -> None:
    found = world()
    del found.objects["machineconfigs"]["new"]
    assert found.turn() is not None
    assert found.find_assigned() == []
    degraded = found.conditions()["Degraded"]
    assert (degraded["status"], degraded["reason"]) == ("True", "MissingMachineConfig")
    assert degraded["message"] == (
        "cannot assign MachineConfig new: it does not exist; create it, or correct "
        "spec.configuration of pool worker"
    )
    assert found.warnings == [("worker", "MissingMachineConfig", degraded["message"])]


def test_changed_counts_are_written_after_an_interval() -> None:
    found = world(4, maxUnavailable=2)
    found.turn()
    found.turn()  # reports that it waits
    found.flap("n3", healthy=False)
    assert found.turn(1.0) == COUNTS_INTERVAL_S - 1.0
    assert found.status()["unavailableMachineCount"] == 2
    found.turn(COUNTS_INTERVAL_S)
    assert found.status()["unavailableMachineCount"] == 3


def test_forbidden_write_is_reported_in_the_status() -> None:
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
        found.turn()
    degraded = found.conditions()["Degraded"]
    assert (degraded["reason"], degraded["message"]) == ("WriteRefused", "PATCH nodes n0: may not")


def test_write_without_response_counts_and_is_repeated() -> None:
    found = world()
    found.turn()  # the first node
    found.turn(500)
    found.pass_time(500)
    found.next_fault, found.fault_on = "unreachable", "nodes"
    with pytest.raises(UnreachableError):
        found.turn()
    assert found.find_assigned() == ["n0", "n1"]
    assert found.status()["unavailableMachineCount"] == 1
    found.turn()
    assert found.find_assigned() == ["n0", "n1", "n2"]


def test_bad_image_stops_at_canary_until_resumed() -> None:
    found = world(500, "{canary: {}, soak: 5m}", maxUnavailable="10%")
    found.bad = {RolloutTarget("new")}
    found.turn(120, times=60)
    assert found.find_assigned() == ["n0"]
    degraded = found.conditions()["Degraded"]
    assert degraded["reason"] == "Halted"
    assert "node n0 failed first: it does not boot" in degraded["message"]
    found.bad = set()
    found.set_pool(
        "worker", "newer", "{canary: {}, soak: 5m, resume: {worker: again}}", maxUnavailable="10%"
    )
    found.turn(120, times=120)
    assert found.conditions()["Updated"]["status"] == "True"


@dataclass
class Locks:
    """A lock server with a limited number of locks."""

    most: int = 1
    held: set[str] = field(default_factory=set)
    broken: str = ""
    alert: GateAnswer = None
    on_acquire: Callable[[], None] = lambda: None

    def check_alerts(self, alerts: PrometheusAlerts | None) -> GateAnswer:
        return self.alert

    def acquire_lock(
        self, server: LockServer, holder: LockHolder
    ) -> GateWaiting | GateBlocked | None:
        self.on_acquire()
        if self.broken:
            return GateBlocked(self.broken, "GateUnavailable")
        node = holder.uid
        if node not in self.held and len(self.held) >= self.most:
            return GateWaiting("all locks are taken")
        self.held.add(node)
        return None

    def release_lock(
        self, server: LockServer, holder: LockHolder
    ) -> GateWaiting | GateBlocked | None:
        if self.broken:
            return GateBlocked(self.broken, "GateUnavailable")
        self.held.discard(holder.uid)
        return None


def test_lock_is_held_during_update_and_released_afterwards() -> None:
    found = world(4, LOCKS, maxUnavailable=3)
    locks = Locks(most=2)
    assert found.start(locks).turn() is not None
    assert locks.held == {"uid-n0", "uid-n1"}
    assert found.find_assigned() == ["n0", "n1"]
    assert found.truth["n0"].locked_by == "workers http://locks.example.com"
    assert "all locks are taken" in found.conditions()["Updating"]["message"]
    found.turn(300, times=2)
    found.set_pool("worker", "new", LOCKS, maxUnavailable=3, paused=True)
    found.turn(300, times=4)
    assert locks.held == set()
    assert not any(LOCKED_BY in str(node) for node in found.objects["nodes"].values())


def test_unreachable_gate_blocks_assignment() -> None:
    found = world(4, LOCKS)
    assert found.start(Locks(broken="no answer in time")).turn() is not None
    assert found.find_assigned() == []
    degraded = found.conditions()["Degraded"]
    assert (degraded["reason"], degraded["message"]) == ("GateUnavailable", "no answer in time")


def test_firing_alert_delays_next_node() -> None:
    found = world(3)
    locks = Locks(alert=GateWaiting("waiting: alert ApiErrors is firing"))
    assert found.start(locks).turn() is not None
    assert found.find_assigned() == []
    assert "alert ApiErrors is firing" in found.conditions()["Updating"]["message"]
    locks.alert = None
    found.turn(30)
    assert found.find_assigned() == ["n0"]


def test_deleted_pool_is_forgotten() -> None:
    found = world()
    found.turn()
    found.remove("machineconfigpools", "worker")
    assert found.turn() is None


def test_masters_wait_while_arbiter_is_unavailable() -> None:
    found = World()
    for name, role in (("m0", "master"), ("m1", "master"), ("a0", "arbiter")):
        found.add_node(name, "old")
        labels = {"node-role.kubernetes.io/worker": None, f"node-role.kubernetes.io/{role}": ""}
        found.change("nodes", name, {"metadata": {"labels": labels}})
    for pool in ("master", "arbiter"):
        found.set_pool(pool, "new")
    found.flap("a0", healthy=False)
    found.turn(0.0, "master", "arbiter")
    assert found.find_assigned() == []
    found.flap("a0", healthy=True)
    found.turn(0.0, "arbiter", "master")
    assert found.find_assigned() == ["m0"]


def read_locks(found: World, pool: str = "worker") -> list[str]:
    """The names of the nodes that may hold a lock."""
    return [each["node"] for each in found.status(pool).get("fleetLocks", ())]


def test_lock_is_recorded_before_it_is_requested() -> None:
    found = world(3, LOCKS)
    recorded: list[list[str]] = []
    locks = Locks(on_acquire=lambda: recorded.append(read_locks(found)))
    found.start(locks).turn()
    assert recorded == [["n0"]]


@pytest.mark.parametrize("fault", ["kill before", "kill after", "conflict", "lost"])
def test_lock_is_released_after_a_fault_of_the_assignment(fault: str) -> None:
    found = world(3, LOCKS)
    locks = Locks()

    def fail_assignment() -> None:
        found.fault_on, found.next_fault = "nodes", fault

    locks.on_acquire = fail_assignment
    with suppress(Killed, UnreachableError):
        found.start(locks).turn()
    assert locks.held == {"uid-n0"}
    locks.on_acquire = lambda: None
    found.set_pool("worker", "new", LOCKS, paused=True)
    found.start(locks)
    found.turn(600, times=4)
    assert locks.held == set()
    assert read_locks(found) == []


def test_lock_of_deleted_node_is_released() -> None:
    found = world(3, LOCKS)
    locks = Locks()
    found.start(locks).turn()
    assert locks.held == {"uid-n0"}
    found.remove("nodes", "n0")
    found.start(locks).turn()
    assert "uid-n0" not in locks.held
    assert "n0" not in read_locks(found)


def test_lock_of_node_that_left_its_pool_is_released_at_rest() -> None:
    found = world(3, LOCKS)
    locks = Locks()
    found.start(locks).turn()
    leaves = {"metadata": {"labels": {"node-role.kubernetes.io/worker": None}}}
    found.change("nodes", "n0", leaves)
    found.set_pool("worker", "new", LOCKS, paused=True)
    found.turn()
    assert locks.held == {"uid-n0"}
    found.turn(600, times=3)
    assert locks.held == set()
    assert LOCKED_BY not in found.notes()


def test_lock_of_node_without_pool_is_released_by_its_annotation() -> None:
    found = world(3, LOCKS)
    locks = Locks()
    found.start(locks).turn()
    found.remove("machineconfigpools", "worker")
    for _ in range(3):
        found.pass_time(600)
    assert found.start(locks).turn() is None
    assert found.reconciler.release_orphan("n0") is None
    assert locks.held == set()
    assert not found.truth["n0"].locked_by


def test_lock_is_kept_while_a_watch_is_stale() -> None:
    found = world(3, LOCKS)
    locks = Locks()
    found.start(locks).turn()
    found.pass_time(600)
    found.deliver()
    found.stale_reason = REASON
    found.turn()
    assert found.reconciler.release_orphan("n0") is not None
    assert locks.held == {"uid-n0"}
    found.stale_reason = ""
    found.turn()
    assert "uid-n0" not in locks.held


def test_lock_is_kept_while_its_server_refuses_the_release() -> None:
    found = world(3, LOCKS)
    locks = Locks()
    found.start(locks).turn()
    found.set_pool("worker", "new", LOCKS, paused=True)
    locks.broken = "no answer"
    found.turn(600, times=4)
    assert read_locks(found) == ["n0"]
    locks.broken = ""
    found.turn(30)
    assert (locks.held, read_locks(found)) == (set(), [])


def test_pending_gate_assigns_no_node_and_reports_nothing() -> None:
    found = world(3)
    gates = Locks(alert=GatePending())
    assert found.start(gates).turn() == PENDING_RETRY_S
    assert found.find_assigned() == []
    assert found.conditions()["Updating"]["reason"] == "RollingOut"
    gates.alert = None
    found.turn()
    assert found.find_assigned() == ["n0"]


SETTLE_S = 10.0


def test_image_and_config_of_one_change_reboot_the_canary_once() -> None:
    found = world(3, "{canary: {}}", osImage=IMAGE)
    found.set_pool("worker", "old", "{canary: {}}", osImage=IMAGE)
    assert found.start(image_settle_s=SETTLE_S).turn() == SETTLE_S
    message = found.conditions()["Updating"]["message"]
    assert "the image changed, and MachineConfigs may change with it" in message
    # The render controller writes the config of the same kubectl apply a few seconds later.
    found.set_pool("worker", "new", "{canary: {}}", osImage=IMAGE)
    assert found.start(image_settle_s=SETTLE_S).turn(6) == SETTLE_S - 6
    found.turn(4)
    found.turn(300, times=8)
    assert found.conditions()["Updated"]["status"] == "True"
    assigned = [name for plural, name, body in found.writes if key.DESIRED_CONFIG in str(body)]
    assert sorted(assigned) == ["n0", "n1", "n2"]


def test_config_without_image_does_not_settle() -> None:
    found = world(3)
    found.start(image_settle_s=SETTLE_S).turn()
    assert found.find_assigned() == ["n0"]


def test_settings_of_pool_and_policy_are_written_with_the_target() -> None:
    found = world(2, "{healthMode: Report}", imageFiles="Write", osImage=IMAGE)
    found.turn()
    notes = found.notes()
    assert (notes[key.IMAGE_FILES], notes[key.HEALTH_MODE]) == ("write", "report")
    assert key.IMAGE_FILES not in found.notes("n1")


def test_changed_settings_reach_nodes_that_have_the_target() -> None:
    found = world(2, "{healthMode: Report}", imageFiles="Write", osImage=IMAGE)
    found.turn(300, times=6)
    found.set_pool("worker", "new", "{healthMode: Off}", imageFiles="Baked", osImage=IMAGE)
    found.set_policy("worker", {"healthMode": "Off"})
    found.set_pool("worker", "new", rolloutPolicy="worker", osImage=IMAGE)
    found.turn()
    for name in ("n0", "n1"):
        notes = found.notes(name)
        assert (notes.get(key.IMAGE_FILES), notes[key.HEALTH_MODE]) == (None, "off")


def test_retry_of_the_pool_is_copied_once_per_value() -> None:
    found = world(2, annotations={key.RETRY: "1"})
    found.turn(times=2)
    notes = {name: found.notes(name) for name in ("n0", "n1")}
    assert {each.get(key.RETRY) for each in notes.values()} == {"1"}
    # A later value of the Node is not replaced.
    found.change("nodes", "n0", {"metadata": {"annotations": {key.RETRY: "mine"}}})
    found.turn()
    assert found.notes()[key.RETRY] == "mine"


def test_policy_status_shows_wave_halt_and_window() -> None:
    policy = "{canary: {}, soak: 5m}"
    found = world(3, policy)
    found.bad = {RolloutTarget("new")}

    def read_entries() -> list[object]:
        status = found.objects["rolloutpolicies"]["worker"]["status"]
        return status["pools"]

    found.turn()
    common = {"pool": "worker", "observedGeneration": 1, "config": "new", "wave": 1, "waves": 2}
    assert read_entries() == [{**common, "state": "Progressing"}]
    found.turn(300, times=4)
    halt = {"node": "n0", "reason": "it does not boot"}
    assert read_entries() == [{**common, "state": "Halted", "haltedBy": halt}]
    summary = found.objects["rolloutpolicies"]["worker"]["status"]["summary"]
    assert summary == "worker Halted by n0"
    found.set_policy("worker", {"windows": [CLOSED_WINDOW]})
    found.set_pool("worker", "newer", rolloutPolicy="worker")
    found.turn()
    (entry,) = read_entries()
    assert isinstance(entry, dict)
    assert (entry["state"], entry["nextWindow"]) == ("Progressing", "2001-09-15T01:00:00Z")
    found.set_pool("worker", "newer", rolloutPolicy="worker", nodeSelector={})
    found.turn()
    (entry,) = read_entries()
    assert isinstance(entry, dict)
    assert entry["state"] == "Stalled"
    found.remove("machineconfigpools", "worker")
    found.turn()
    assert read_entries() == []


CLOSED_WINDOW = {"days": ["Sat"], "start": "01:00", "duration": "1h", "timeZone": "UTC"}


def test_policy_that_appears_starts_the_rollout() -> None:
    found = world(2, rolloutPolicy="careful")
    found.turn()
    assert found.conditions()["Stalled"]["reason"] == "MissingRolloutPolicy"
    assert found.conditions()["Updated"]["status"] == "False"
    found.set_policy("careful", {"canary": {}})
    found.turn()
    assert found.find_assigned() == ["n0"]


def test_updated_is_not_about_an_older_generation() -> None:
    found = world(2, "{canary: {}}")
    found.turn(300, times=6)
    assert found.conditions()["Updated"]["status"] == "True"
    found.set_pool("worker", "new", "{canary: {}}", osImage=IMAGE)
    # kubectl wait and kstatus compare these two first.
    generation = found.objects["machineconfigpools"]["worker"]["metadata"]["generation"]
    assert found.status()["observedGeneration"] < generation
    found.turn()
    assert found.status()["observedGeneration"] == generation
    assert found.conditions()["Updated"]["status"] == "False"
    assert found.conditions()["Reconciling"]["status"] == "True"
    found.set_pool("worker", "new", nodeSelector={})
    found.turn()
    assert found.conditions()["Updated"]["status"] == "False"
    states = {kind: found.conditions()[kind]["status"] for kind in ("Reconciling", "Stalled")}
    assert states == {"Reconciling": "False", "Stalled": "True"}


class NeverAnswers(Executor):
    """Threads that hang in every request."""

    def submit(self, fn: Callable[..., object], /, *_: object, **__: object) -> Future[Any]:
        return Future()


def test_gate_that_hangs_stops_only_its_own_pools() -> None:
    found = World()
    gated = "{alerts: {url: 'http://prometheus.example.com', names: [ApiErrors]}}"
    for pool, policy in (("worker", None), *((f"gated{number}", gated) for number in range(20))):
        name = f"n-{pool}"
        found.add_node(name, "old")
        labels = {"node-role.kubernetes.io/worker": None, f"node-role.kubernetes.io/{pool}": ""}
        found.change("nodes", name, {"metadata": {"labels": labels}})
        found.set_pool(pool, "new", policy)
    found.start(BackgroundGates(Locks(), found, NeverAnswers()))
    found.turn(0.0, *sorted(found.objects["machineconfigpools"]))
    assert found.find_assigned() == ["n-worker"]


def test_lock_of_node_in_another_pool_is_released_by_that_pool() -> None:
    found = world(1, LOCKS)
    locks = Locks()
    found.start(locks).turn()
    for _ in range(3):
        found.pass_time(600)
    labels = {"node-role.kubernetes.io/worker": None, "node-role.kubernetes.io/infra": ""}
    found.change("nodes", "n0", {"metadata": {"labels": labels}})
    found.set_pool("infra", "newer", LOCKS)
    found.turn(0.0, "infra", "worker")
    assert locks.held == {"uid-n0"}
    assert (read_locks(found, "infra"), read_locks(found)) == (["n0"], [])
    found.turn(600, "infra", times=4)
    assert (locks.held, read_locks(found, "infra")) == (set(), [])


def put_build(found: World, state: str, digest: str = "", *, served: str = "") -> None:
    """Create the MachineOSConfig of the pool and the build of its config in a state."""
    found.put(
        MACHINEOSCONFIGS,
        {
            "metadata": {"name": "worker"},
            "spec": {"machineConfigPool": {"name": "worker"}},
            "status": {"currentImagePullSpec": served or digest},
        },
    )
    found.put(
        MACHINEOSBUILDS,
        {
            "metadata": {"name": "worker-b"},
            "spec": {"machineConfig": {"name": "new"}, "machineOSConfig": {"name": "worker"}},
            "status": {
                "digestedImagePushSpec": digest,
                "conditions": [{"type": state, "status": "True", "message": "no such package"}],
            },
        },
    )


def test_built_image_is_assigned_side_by_side_with_its_config() -> None:
    found = world()
    put_build(found, "Building")
    found.turn()
    assert found.node_writes() == []
    assert found.conditions()["Updating"]["reason"] == "Building"
    put_build(found, "Succeeded", IMAGE)
    found.turn()
    (written,) = found.node_writes()
    assert written["metadata"]["annotations"] == {  # type: ignore[index]
        key.DESIRED_CONFIG: "new",
        key.DESIRED_OS_IMAGE: IMAGE,
        STARTED_AT: "2001-09-09T01:46:40Z",
    }


def test_status_is_written_after_a_failed_build() -> None:
    found = world()
    put_build(found, "Succeeded", IMAGE)
    found.turn(200.0, times=12)
    assert found.status()["updatedMachineCount"] == 3
    put_build(found, "Failed", served=IMAGE)
    found.flap("n1", healthy=False)
    found.turn(10.0)
    assert found.status()["unavailableMachineCount"] == 1
    assert found.conditions()["Degraded"]["message"] == (
        "image build worker-b for MachineConfigPool worker failed: no such package"
    )


def test_late_success_of_another_build_is_not_rolled_out() -> None:
    found = world()
    put_build(found, "Succeeded", f"{IMAGE[:-1]}2", served=IMAGE)
    found.turn()
    assert found.node_writes() == []
    assert found.conditions()["Updating"]["reason"] == "RollingOut"


def test_nodes_lose_the_image_when_the_machineosconfig_is_deleted() -> None:
    found = world()
    put_build(found, "Succeeded", IMAGE)
    found.turn(200.0, times=12)
    assert found.status()["updatedMachineCount"] == 3
    found.remove(MACHINEOSCONFIGS.plural, "worker")
    found.turn(10.0)
    assert [node.desired_image for node in found.truth.values()] == [None, IMAGE, IMAGE]


REASON = "the watch of nodes is disconnected: connection refused"


def test_stale_watch_stops_assignments_and_is_named_in_the_condition() -> None:
    found = world()
    found.stale_reason = REASON
    assert found.turn() == STALE_RETRY_S
    assert found.node_writes() == []
    updating = found.conditions()["Updating"]
    assert updating["reason"] == "Waiting"
    assert f"waiting: {REASON}" in updating["message"]
    found.stale_reason = ""
    found.turn()
    assert len(found.node_writes()) == 1


def test_stale_watch_repeats_no_unanswered_write() -> None:
    found = world(1)
    found.next_fault, found.fault_on = "unreachable", "nodes"
    with pytest.raises(UnreachableError):
        found.turn()
    found.stale_reason = REASON
    found.turn()
    assert found.node_writes() == []
    found.stale_reason = ""
    found.turn()
    assert len(found.node_writes()) == 1
