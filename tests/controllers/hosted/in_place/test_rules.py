"""The rules of updates in place, as tables: limits, stops, repairs, and what is left."""

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.controllers.hosted.conduct.world import OLD, POOL
from tests.controllers.hosted.in_place.world import (
    CONFIG_MAP,
    HASHES,
    NAMESPACE,
    OwnWorld,
    Watcher,
)
from tests.fixtures import hosted
from treenail.api import annotations as key
from treenail.api import component_names
from treenail.api.hosted import annotations as hosted_key
from treenail.api.hosted.nodepool import NodePool
from treenail.clocks import format_rfc3339
from treenail.controllers.drain.decide import DrainNode
from treenail.controllers.hosted.conduct import pool_facts
from treenail.controllers.pools.node_facts import RolloutTarget
from treenail.errors import ConflictError
from treenail.kube import resources

A, B, C = HASHES[:3]


def make_world(size: int = 3, limit: Any = None, **given: Any) -> OwnWorld:
    world = OwnWorld(size, **given)
    world.set_limit(limit)
    world.sync()
    world.set_config(A)
    return world


def test_update_reaches_each_node_once_and_leaves_nothing() -> None:
    world = make_world()
    watcher = Watcher(world, 1)
    world.turn()
    assert world.list_left() == [
        f"configmaps/{CONFIG_MAP}", f"namespaces/{NAMESPACE}", f"rolebindings/{CONFIG_MAP}",
        f"roles/{CONFIG_MAP}",
    ]  # fmt: skip
    world.run(A)
    assert sorted(watcher.given) == [(name, A) for name in ("m0", "m1", "m2")]
    assert world.conditions()["Updated"]["status"] == "True"
    assert world.owner_notes()[hosted_key.UPDATED_ROLLOUT] == A
    before = len(world.guest.writes), len(world.management.writes)
    world.turn(5)
    assert (len(world.guest.writes), len(world.management.writes)) == before


def test_pool_at_its_target_makes_nothing() -> None:
    world = OwnWorld()
    world.turn(3)
    assert world.list_left() == [] == world.guest.writes


def test_pool_without_a_record_of_its_nodes_waits() -> None:
    """Installing treenail rolls nothing."""
    world = make_world()
    world.annotate_owner({hosted_key.UPDATED_CONFIG: None})
    assert not world.find_objects().needs_guest
    world.turn(3)
    assert world.guest.writes == []
    assert "nodepools has not recorded" in world.conditions()["Updating"]["message"]


# HyperShift's TestInPlaceUpgradeMaxUnavailable, for 4 replicas; the others are our refusals.
@pytest.mark.parametrize(
    ("field", "count"),
    [
        (None, 1), (1, 1), (2, 2), ("75%", 3), ("10%", 1), (-1, 1),
        ("100%", 4), ("0%", 0), (0, 0), ("200%", 0), ("many", 0), ("2", 2), ("-1%", 0), ("", 0),
    ],
)  # fmt: skip
def test_limit_counts_existing_machines(field: Any, count: int) -> None:
    world = make_world(4, field)
    world.sync()
    assert len(world.list_assigned(A)) == count
    if count == 0:
        condition = world.conditions()["Degraded"]
        assert "spec.management.inPlace.maxUnavailable of NodePool" in condition["message"]
        assert world.guest.writes == []


def test_limit_of_a_scaled_pool_is_that_of_its_machines() -> None:
    """``spec.replicas`` is missing under autoscaling, and HyperShift then takes one node."""
    world = make_world(4, "50%")
    world.management.change("nodepools", POOL, {"spec": {"replicas": None}})
    world.sync()
    assert len(world.list_assigned(A)) == 2


AAA, BBB, CCC = "aaa", "bbb", "ccc"
NODES = {
    "awaiting1": ("", ""), "awaiting2": ("", ""), "in-progress": ("", CCC),
    "completed": (CCC, CCC), "intermediate": (AAA, BBB),
}  # fmt: skip


# HyperShift's TestGetNodesToUpgrade: nodes, limit, and those that get the target.
@pytest.mark.parametrize(
    ("nodes", "limit", "selected"),
    [
        (["awaiting1", "awaiting2"], 1, ["awaiting1"]),
        (["awaiting1", "awaiting2"], 2, ["awaiting1", "awaiting2"]),
        (["in-progress"], 1, []),
        (["completed"], 1, []),
        (["awaiting1", "in-progress", "completed"], 2, ["awaiting1"]),
        (["in-progress", "completed", "awaiting1", "awaiting2"], 3, ["awaiting1", "awaiting2"]),
        (["awaiting1", "completed", "intermediate"], 1, ["intermediate"]),
        (["awaiting1", "completed", "intermediate"], 2, ["awaiting1", "intermediate"]),
        # A9-1: more capacity than candidates.
        (["awaiting1", "completed"], 9, ["awaiting1"]),
        (["awaiting1", "in-progress"], 9, ["awaiting1"]),
    ],
)
def test_nodes_to_upgrade_are_those_of_hypershift(
    nodes: list[str], limit: int, selected: list[str]
) -> None:
    world = OwnWorld(0)
    world.set_limit(limit)
    owner = world.management.list("machinesets")[0]
    for name in nodes:
        world.add_machine(owner, name, joined=True)
        current, desired = NODES[name]
        state = "Working" if name == "intermediate" else "Done"
        notes = {key.CURRENT_CONFIG: current or None, key.DESIRED_CONFIG: desired or None}
        world._annotate(name, {**notes, key.STATE: state if current else None})
    world.set_config(CCC)
    world.sync()
    assert sorted(world.list_assigned(CCC)) == sorted(selected)


def test_degraded_node_stops_its_target_and_gets_the_next_one_first() -> None:
    """A9-2."""
    world = make_world(4)
    world.bad.add(A)
    world.turn(20)
    assert len(world.list_assigned(A)) == 1
    [failed] = world.list_assigned(A)
    condition = world.conditions()["Degraded"]
    assert condition["reason"] == "NodeDegraded"
    assert f"node {failed} is degraded with {A}: bad file" in condition["message"]
    world.set_limit(3)
    world.turn(5)
    assert len(world.list_assigned(A)) == 1, "the limit would allow two more"
    world.set_limit(1)
    world.set_config(B)
    world.turn()
    assert world.list_assigned(B) == [failed]
    world.run(B)


def test_policy_with_failures_decides_about_degraded_nodes() -> None:
    world = make_world(4)
    world.set_policy(maxFailures=2)
    world.set_limit(3, "careful")
    world.bad.add(A)
    world.turn(30)
    assert len(world.list_assigned(A)) == 3
    assert world.conditions()["Degraded"]["reason"] == "Halted"


def test_policy_orders_nodes_in_waves() -> None:
    world = make_world(4)
    world.set_policy(canary={"nodes": 1, "soak": "1h"})
    world.set_limit(3, "careful")
    world.turn(20)
    assert len(world.list_assigned(A)) == 1
    world.run(A, 200)


def test_missing_policy_stops_the_pool() -> None:
    world = make_world()
    world.set_limit(1, "missing")
    world.turn(3)
    assert world.guest.writes == []
    assert "RolloutPolicy missing does not exist" in world.conditions()["Degraded"]["message"]


def test_empty_pool_is_complete_only_without_replicas() -> None:
    """A9-12: a pool whose Machines are not there yet is not complete."""
    world = OwnWorld(2)
    for machine in ("m0", "m1"):
        del world.management.objects["machines", machine]
    world.set_config(A)
    world.turn(3)
    assert not world.is_updated(A)
    world.management.change("machinesets", POOL, {"spec": {"replicas": 0}})
    world.turn(2)
    assert world.is_updated(A)


def test_missing_node_uses_capacity_and_stops_no_other() -> None:
    """A9-12: HyperShift stops the pool."""
    world = make_world(3, 2)
    del world.guest.objects["nodes", "m0"]
    world.turn(30)
    assert sorted(world.list_assigned(A)) == ["m1", "m2"]
    assert not world.is_updated(A)
    world.add_node("m0")
    world.run(A)


def test_joined_node_is_assigned_too() -> None:
    world = make_world(2)
    world.add_machine(world.management.list("machinesets")[0], "m9", joined=True)
    notes = dict.fromkeys((key.CURRENT_CONFIG, key.DESIRED_CONFIG, key.STATE))
    world._annotate("m9", notes)
    world.run(A)
    assert "m9" in world.list_assigned(A)


def test_target_that_returns_is_given_to_nodes_that_left_it() -> None:
    """HyperShift does nothing once target and current hash are equal again."""
    world = make_world(3)
    world.run(A)
    world.set_config(B)
    world.turn(8)
    assert world.list_assigned(B)
    world.set_config(A)
    world.run(A)


def test_content_of_the_old_target_stays_until_the_new_one_is_assigned() -> None:
    world = make_world(3)
    world.turn()
    world.management.change("nodepools", POOL, {"spec": {"pausedUntil": "true"}})
    world.set_config(B)
    world.turn(20)
    assert world.guest.objects["configmaps", CONFIG_MAP]["data"]["hash"] == A
    assert {node.current_config for node in world.nodes().values()} == {OLD, A}
    world.management.change("nodepools", POOL, {"spec": {"pausedUntil": ""}})
    world.run(B)


@pytest.mark.parametrize(
    ("payload", "text"),
    [
        ("", f"Secret token-{POOL}-{B} in namespace clusters-one has no payload yet"),
        (None, f"secrets token-{POOL}-{B}: not found"),
    ],
)
def test_config_that_cannot_be_delivered_is_given_to_no_node(
    payload: str | None, text: str
) -> None:
    world = make_world()
    world.run(A)
    world.set_config(B, payload=payload or "")
    if payload is None:
        del world.management.objects["secrets", f"token-{POOL}-{B}"]
    world.turn(3)
    assert world.list_assigned(B) == []
    assert text in world.conditions()["Updating"]["message"]
    world.set_config(B)
    world.run(B)


@pytest.mark.parametrize(
    ("is_owned", "arguments"),
    [
        (True, "hosted,nodepools --node-pools clusters --control-plane clusters-one"),
        (False, "hosted --control-plane clusters-one"),
    ],
)
def test_command_that_permits_keeps_the_permissions_of_the_other_controller(
    arguments: str, *, is_owned: bool
) -> None:
    """Both controllers have one Role in the namespace of a control plane."""
    objects = replace(make_world().find_objects(), is_owned=is_owned)
    command = pool_facts.describe_permission(objects)
    text = f"run: treenail-controller manifests --only {arguments} | kubectl apply -f -"
    assert command == text


def test_secret_of_another_pool_is_refused() -> None:
    world = make_world()
    notes = {hosted_key.NODE_POOL: "clusters/other"}
    world.management.change("secrets", f"token-{POOL}-{A}", {"metadata": {"annotations": notes}})
    world.turn(2)
    assert world.list_assigned(A) == []
    assert "is not one of NodePool clusters/np" in world.conditions()["Degraded"]["message"]


def test_namespace_of_another_owner_is_neither_used_nor_deleted() -> None:
    world = make_world()
    world.guest.put(resources.NAMESPACES, {"metadata": {"name": NAMESPACE}})
    world.turn(2)
    assert world.list_assigned(A) == []
    assert f"kubectl delete namespace {NAMESPACE}" in world.conditions()["Degraded"]["message"]
    world.set_config(OLD)
    world.turn(5)
    assert world.list_left() == [f"namespaces/{NAMESPACE}"]


# What a guest administrator can write. Done 7.
def assign_foreign(world: OwnWorld) -> None:
    world._annotate("m2", {key.DESIRED_CONFIG: A})


def assign_unknown(world: OwnWorld) -> None:
    world._annotate("m2", {key.DESIRED_CONFIG: "bogus"})


def redirect_assigned(world: OwnWorld) -> None:
    world._annotate("m0", {key.DESIRED_CONFIG: "bogus"})


def undo_assigned(world: OwnWorld) -> None:
    world._annotate("m0", {key.DESIRED_CONFIG: OLD})


@pytest.mark.parametrize(
    "attack", [assign_foreign, assign_unknown, redirect_assigned, undo_assigned]
)
def test_target_that_another_account_wrote_is_restored(attack: Any) -> None:
    world = make_world()
    world.is_stuck = {"m0", "m1", "m2"}
    world.turn(2)
    assert world.list_assigned(A) == ["m0"]
    attack(world)
    world.sync()
    assert {name: node.desired_config for name, node in world.nodes().items()} == {
        "m0": A, "m1": OLD, "m2": OLD,
    }  # fmt: skip
    assert ("clusters/np", "TargetRestored") in {each[:2] for each in world.warnings}
    world.is_stuck = set()
    world.run(A)


def change_content(world: OwnWorld) -> None:
    change = {"data": {"config": "evil", "extra": "1", "mode": "refresh"}}
    world.guest.change("configmaps", CONFIG_MAP, change)


def delete_content(world: OwnWorld) -> None:
    del world.guest.objects["configmaps", CONFIG_MAP]


def open_access(world: OwnWorld) -> None:
    everyone = {"subjects": [{"kind": "Group", "name": "system:authenticated"}]}
    world.guest.change("rolebindings", CONFIG_MAP, everyone)


def bind_other_role(world: OwnWorld) -> None:
    world.guest.change("rolebindings", CONFIG_MAP, {"roleRef": {"name": "cluster-admin"}})


def forbid_pods(world: OwnWorld) -> None:
    level = {"pod-security.kubernetes.io/enforce": "restricted"}
    world.guest.change("namespaces", NAMESPACE, {"metadata": {"labels": level}})


@pytest.mark.parametrize(
    "attack", [change_content, delete_content, open_access, bind_other_role, forbid_pods]
)
def test_object_that_another_account_changed_is_restored(attack: Any) -> None:
    world = make_world()
    world.is_stuck = {"m0", "m1", "m2"}
    world.turn(2)

    def list_contents() -> str:
        found = {
            place: {**document, "metadata": document["metadata"].get("labels")}
            for place, document in world.guest.objects.items()
            if place[0] != "nodes"
        }
        return json.dumps(sorted((str(place), body) for place, body in found.items()))

    before = list_contents()
    attack(world)
    assert list_contents() != before
    world.turn(2)
    assert list_contents() == before


def test_node_without_treenail_gets_an_installer_while_it_updates() -> None:
    world = OwnWorld(3)
    world.services = {"m1"}
    for name in ("m0", "m2"):
        world.set_service(name, None)
    world.set_config(A)
    world.sync()
    world.sync()
    [name] = [name for kind, name in world.guest.objects if kind == "pods"]
    assert name == "treenail-installer-m0"
    pod = world.guest.objects["pods", name]
    spec = pod["spec"]
    assert (spec["nodeName"], spec["restartPolicy"]) == ("m0", "OnFailure")
    assert spec["containers"][0]["image"] == world.image
    assert {"name": "config", "configMap": {"name": CONFIG_MAP}} in spec["volumes"]
    world.guest.change("pods", name, {"status": {"phase": "Failed"}})
    uid = pod["metadata"]["uid"]
    world.is_stuck = {"m0"}
    world.turn(2)
    assert world.guest.objects["pods", name]["metadata"]["uid"] != uid, "made again"
    del world.guest.objects["pods", name]  # force-deleted
    world.turn()
    assert ("pods", name) in world.guest.objects
    world.is_stuck = set()
    while not world.is_updated(A):
        world.turn()
        assert len([name for kind, name in world.guest.objects if kind == "pods"]) <= 1
    assert world.list_left() == []
    created = {
        name for verb, kind, name, _ in world.guest.writes if (verb, kind) == ("create", "pods")
    }
    assert created == {"treenail-installer-m0", "treenail-installer-m2"}


def test_agent_of_another_boot_has_a_minute() -> None:
    """The service starts after a reboot; an image without treenail never starts one."""
    world = OwnWorld(1)
    world.set_service("m0", "boot-0")
    world.is_stuck = {"m0"}
    world.set_config(A)
    world.sync()
    world.sync()
    assert ("pods", "treenail-installer-m0") not in world.guest.objects
    world.seconds += 61.0
    world.sync()
    assert ("pods", "treenail-installer-m0") in world.guest.objects
    world.set_service("m0", "boot-1")
    world.sync()
    assert ("pods", "treenail-installer-m0") not in world.guest.objects


def test_node_that_has_just_joined_has_some_time() -> None:
    world = OwnWorld(1)
    now = format_rfc3339(world.now() - 1)
    world.guest.change("nodes", "m0", {"metadata": {"creationTimestamp": now}})
    world.set_service("m0", None)
    world.is_stuck = {"m0"}
    world.set_config(A)
    world.sync()
    world.sync()
    assert ("pods", "treenail-installer-m0") not in world.guest.objects
    world.seconds += 11.0
    world.sync()
    assert ("pods", "treenail-installer-m0") in world.guest.objects


def test_missing_agent_image_is_reported() -> None:
    world = OwnWorld(1)
    world.image = ""
    world.start()
    world.set_service("m0", None)
    world.set_config(A)
    world.sync()
    world.sync()
    [text] = {text for _, reason, text in world.warnings if reason == "AgentMissing"}
    assert "--agent-image" in text
    record = json.dumps(world.management.objects["configmaps", component_names.HOSTED_ROLLOUTS])
    assert "AgentMissing" in record
    assert not [name for kind, name in world.guest.objects if kind == "pods"]


def test_node_is_done_when_it_serves_again() -> None:
    world = make_world(1)
    node = {key.CURRENT_CONFIG: A, key.DESIRED_CONFIG: A, key.STATE: "Done"}
    world._annotate("m0", {**node, key.DESIRED_DRAIN: f"uncordon-{A}"})
    world.sync()
    assert not world.is_updated(A)
    world._annotate("m0", {key.LAST_APPLIED_DRAIN: f"uncordon-{A}"})
    world.sync()
    assert world.is_updated(A)


def test_completion_is_verified_without_the_watch() -> None:
    world = make_world(1)
    node = {key.CURRENT_CONFIG: A, key.DESIRED_CONFIG: A, key.STATE: "Done"}
    world._annotate("m0", node)
    read = world.guest.get
    changed = {"metadata": {"name": "m0", "annotations": {**node, key.STATE: "Degraded"}}}
    world.guest.get = lambda kind, name, **at: (  # type: ignore[method-assign]
        changed if kind == resources.NODES else read(kind, name, **at)
    )
    world.sync()
    assert not world.is_updated(A)


# Slice 10.
def test_refresh_goes_to_ten_nodes_at_a_time_without_drain() -> None:
    world = make_world(12)
    world.run(A, 200)
    world.set_config(B, rolls=False)
    watcher = Watcher(world, 10)
    world.sync()
    assert len(world.list_assigned(B)) == 10
    assert world.guest.objects["configmaps", CONFIG_MAP]["data"]["mode"] == "refresh"
    drained = {name: world.notes(name).get(key.DESIRED_DRAIN) for name in world.nodes()}
    world.run(B)
    assert len(watcher.given) == 12
    assert drained == {name: world.notes(name).get(key.DESIRED_DRAIN) for name in world.nodes()}
    found = world.management.objects["nodepools", POOL]["status"]["conditions"]
    assert {each["type"]: each["status"] for each in found if "Refresh" in each["type"]} == {
        "ConfigRefreshProgressing": "False", "ConfigRefreshComplete": "True",
        "ConfigRefreshDegraded": "False",
    }  # fmt: skip
    world.set_config(C, rolls=False)
    world.sync()
    assert len(world.list_assigned(C)) == 10, "also the second one after a rollout"


def test_refresh_that_interrupts_a_rollout_is_a_rollout() -> None:
    """Its diff to the nodes that have the old config may need a reboot."""
    world = make_world(3)
    world.turn(3)
    world.set_config(B, rolls=False)
    world.turn(2)
    assert len(world.list_assigned(B)) == 1
    assert "mode" not in world.guest.objects["configmaps", CONFIG_MAP]["data"]
    world.run(B)


def test_refresh_ignores_the_policy_but_not_the_pause() -> None:
    world = make_world(3)
    world.run(A)
    world.set_policy(canary={"nodes": 1, "soakTime": "1h"})
    world.set_limit(1, "careful")
    world.management.change("nodepools", POOL, {"spec": {"pausedUntil": "true"}})
    world.set_config(B, rolls=False)
    world.turn(3)
    assert world.list_assigned(B) == []
    world.management.change("nodepools", POOL, {"spec": {"pausedUntil": ""}})
    world.run(B)


@pytest.mark.parametrize("has_annotation", [True, False])
def test_refresh_of_a_replace_pool_needs_the_annotation(*, has_annotation: bool) -> None:
    world = OwnWorld(3, upgrade_type="Replace")
    notes = {hosted_key.REFRESH: "InPlace"} if has_annotation else {}
    world.set_limit(None, **notes)
    world.set_config(B, rolls=False)
    assert world.find_objects().writes_nodes is has_annotation
    if not has_annotation:
        return
    world.sync()
    assert sorted(world.list_assigned(B)) == ["m0", "m1", "m2"]
    for _ in range(20):
        world.act_as_agents()
        world.turn()
    assert world.is_updated(B)
    assert world.list_left() == []
    assert [name for verb, _, name, _ in world.management.writes if verb == "delete"] == []
    record = world.management.objects["configmaps", "treenail-rollouts"]["data"]
    assert set(record) == {f"{POOL}_refresh"}


def test_refresh_of_a_replace_pool_waits_for_replacements() -> None:
    world = OwnWorld(3, upgrade_type="Replace")
    world.set_limit(None, **{hosted_key.REFRESH: "InPlace"})
    world.set_config(B, rolls=False)
    secret = {"spec": {"bootstrap": {"dataSecretName": f"user-data-{POOL}-{hosted.NEW_HASH}"}}}
    world.management.change("machines", "m1", secret)
    assert not world.find_objects().has_own_update


def test_replaced_pool_is_updated_and_refreshed_afterwards() -> None:
    world = OwnWorld(3, upgrade_type="Replace")
    world.set_limit(None, **{hosted_key.REFRESH: "InPlace"})
    world.set_config(A)
    assert not world.find_objects().has_own_update
    secret = {"spec": {"bootstrap": {"dataSecretName": f"user-data-{POOL}-{A}"}}}
    for name in ("m0", "m1", "m2"):
        world.management.change("machines", name, secret)
    world.sync()
    assert world.is_updated(A)
    assert world.list_assigned(A) == []
    world.annotate_owner({hosted_key.UPDATED_CONFIG: OLD, hosted_key.UPDATED_ROLLOUT: None})
    world.set_config(B, rolls=False)
    world.sync()
    assert len(world.list_assigned(B)) == 3


def test_degraded_node_at_the_present_target_is_the_only_one_that_counts() -> None:
    world = make_world(2)
    world._annotate("m1", {key.STATE: "Degraded", key.CURRENT_CONFIG: OLD})
    world.sync()
    assert "m1" not in world.list_assigned(OLD)
    assert world.list_assigned(A)
    assert RolloutTarget(A) == RolloutTarget(A, None)


def test_ended_update_does_not_begin_again_while_the_watch_is_behind() -> None:
    world = make_world(1)
    seen = []
    find = world.find_objects
    world.find_objects = lambda: seen.append(find()) or seen[-1]  # type: ignore[func-returns-value,method-assign]
    world.run(A)
    last = seen[-1]
    world.find_objects = lambda: last  # type: ignore[method-assign]
    with pytest.raises(ConflictError):
        world.sync()
    assert world.list_left() == []


@pytest.mark.parametrize(
    ("timeout", "is_unreachable", "limit_s"),
    [
        (None, False, None), ("0s", False, None), ("10m", False, 600.0), ("1m", True, 60.0),
        ("10m", True, 300.0), (None, True, 300.0), ("0s", True, 300.0),
    ],
)  # fmt: skip
def test_drain_is_limited_by_the_pool_and_for_an_unreachable_node(
    timeout: str | None, limit_s: float | None, *, is_unreachable: bool
) -> None:
    spec = {} if timeout is None else {"nodeDrainTimeout": timeout}
    pool = NodePool.from_json(hosted.make_node_pool(POOL, "InPlace", **spec))
    node = DrainNode("m0", is_unreachable=is_unreachable)
    assert pool_facts.limit_drain(pool, node) == limit_s
    assert pool_facts.limit_drain(None, DrainNode("m0")) is None
