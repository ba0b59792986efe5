"""The rules of conducting, as tables: who selects, what stops a pool, what a member is."""

import json
from typing import Any

import pytest

from tests.controllers.hosted.conduct.world import FULL_NAME, NEW, OLD, POOL, HostedWorld
from tests.fixtures import hosted
from treenail.api import annotations as key
from treenail.api.hosted import annotations as hosted_key
from treenail.clocks import format_rfc3339
from treenail.controllers.hosted.conduct.conductor import PAUSE_RECHECK_S
from treenail.controllers.hosted.conduct.pool_facts import MAX_UNAVAILABLE
from treenail.errors import ConfigError, ForbiddenError

KINDS = pytest.mark.parametrize("kind", ["InPlace", "Replace"])


def make_world(kind: str = "InPlace", size: int = 3, **policy: Any) -> HostedWorld:
    """A pool with a new target and a policy."""
    world = HostedWorld(kind, size)
    world.set_policy(**policy)
    world.sync()
    world.set_target(NEW)
    if kind == "Replace":
        world._run_machine_sets()
    return world


@KINDS
def test_rollout_reaches_every_member_once(kind: str) -> None:
    world = make_world(kind)
    world.turn(30)
    assert world.is_finished()
    assert sorted(world.list_acted_on()) == ["m0", "m1", "m2"]
    assert world.conditions()["Updated"]["status"] == "True"
    assert world.record()["rollout"]["completedAt"]
    assert "null" not in json.dumps(world.record())
    [policy] = world.management.list("rolloutpolicies")
    assert [(entry["pool"], entry["state"]) for entry in policy["status"]["pools"]] == [
        (FULL_NAME, "Updated")
    ]


@KINDS
def test_pool_at_its_target_has_nothing_to_do(kind: str) -> None:
    world = HostedWorld(kind)
    world.set_policy()
    world.turn(5)
    assert world.list_acted_on() == []
    writes = len(world.management.writes)
    world.turn(5)
    assert len(world.management.writes) == writes


# HyperShift's TestInPlaceUpgradeMaxUnavailable: what it computes of the field, for 4 replicas.
@pytest.mark.parametrize(
    ("field", "annotation", "is_selected_by_us"),
    [
        (None, "1", False),
        (1, "1", False),
        (2, "2", False),
        ("75%", "3", False),
        ("10%", "1", False),
        (0, "1", False),
        ("0%", "1", False),
        ("200%", "8", False),
        (-1, "-1", True),
        (-5, "-5", True),
        ("absent", "", False),
        ("text", "many", False),
        ("not negative", "-0", False),
    ],
)
def test_hypershift_selects_unless_its_limit_is_negative(
    field: object, annotation: str, *, is_selected_by_us: bool
) -> None:
    world = make_world()
    notes = {hosted_key.MAX_UNAVAILABLE: annotation or None}
    world.management.change("machinesets", POOL, {"metadata": {"annotations": notes}})
    world.sync()
    assert (world.list_acted_on() == ["m0"]) is is_selected_by_us, field
    if not is_selected_by_us:
        condition = world.conditions()["Degraded"]
        assert condition["reason"] == "HyperShiftSelects"
        assert (
            '{"spec": {"management": {"inPlace": {"maxUnavailable": -1}}}}'
            in (condition["message"])
        )
        assert world.guest.writes == []


def test_limit_that_has_just_changed_is_seen_before_the_first_write() -> None:
    """The check reads the MachineSet directly: a watch may lag."""
    world = make_world()
    seen = world.find_objects()
    notes = {hosted_key.MAX_UNAVAILABLE: "1"}
    world.management.change("machinesets", POOL, {"metadata": {"annotations": notes}})
    world.find_objects = lambda: seen  # type: ignore[method-assign]
    world.sync()
    assert world.list_acted_on() == []
    assert world.conditions()["Degraded"]["reason"] == "HyperShiftSelects"


def test_target_that_has_just_changed_is_seen_before_the_first_write() -> None:
    world = make_world()
    seen = world.find_objects()
    world.set_target("2c2c2c2c")
    world.find_objects = lambda: seen  # type: ignore[method-assign]
    world.sync()
    assert world.list_acted_on() == []


@pytest.mark.parametrize("strategy", ["RollingUpdate", ""])
def test_replace_pool_without_on_delete_is_left_to_cluster_api(strategy: str) -> None:
    world = make_world("Replace")
    change = {"spec": {"rollout": {"strategy": {"type": strategy or None}}}}
    world.management.change("machinedeployments", POOL, change)
    world.sync()
    assert world.list_acted_on() == []
    assert world.conditions()["Degraded"]["reason"] == "HyperShiftSelects"
    assert "kubectl patch nodepool np -n clusters" in world.conditions()["Degraded"]["message"]


def test_replace_waits_until_cluster_api_has_the_template() -> None:
    """Before, the MachineSet of the old template would create the deleted Machine again."""
    world = HostedWorld("Replace")
    world.set_policy()
    world.sync()
    world.set_target(NEW)
    world.sync()
    assert world.list_acted_on() == []
    assert "waiting: Cluster API has not changed" in world.conditions()["Updating"]["message"]
    world.has_annotation = False
    world._run_machine_sets()
    world.sync()
    assert world.list_acted_on() == []
    world.has_annotation = True
    world._run_machine_sets()
    world.sync()
    assert world.list_acted_on() == ["m0"]


@KINDS
@pytest.mark.parametrize("owner", ["nodepools", "hostedclusters"])
@pytest.mark.parametrize(
    ("until", "is_stopped"),
    [("true", True), ("True", True), ("1", True), ("", False), ("false", False), ("soon", False),
     ("past", False), ("future", True)],
)  # fmt: skip
def test_pause_stops_the_selection(kind: str, owner: str, until: str, *, is_stopped: bool) -> None:
    world = make_world(kind)
    times = {"past": world.seconds - 5, "future": world.seconds + 50}
    text = format_rfc3339(times[until]) if until in times else until
    name = POOL if owner == "nodepools" else hosted.CLUSTER
    world.management.change(owner, name, {"spec": {"pausedUntil": text}})
    delay = world.sync()
    assert (world.list_acted_on() == []) is is_stopped
    if until == "future":
        assert delay == PAUSE_RECHECK_S
        world.turn(after_s=51)
        assert world.list_acted_on() == ["m0"]


@KINDS
def test_policy_that_is_missing_stops_the_pool(kind: str) -> None:
    world = make_world(kind)
    world.set_pool(policy="carefull")
    world.sync()
    assert world.list_acted_on() == []
    condition = world.conditions()["Degraded"]
    assert "annotation treenail.io/rollout-policy of NodePool clusters/np" in condition["message"]
    assert (FULL_NAME, condition["reason"], condition["message"]) in world.warnings
    world.set_policy("carefull")
    world.sync()
    assert world.list_acted_on() == ["m0"]


@pytest.mark.parametrize(
    ("limit", "count"),
    [("1", 1), ("2", 2), ("50%", 2), ("0", 1), ("0%", 1), ("200%", 5), ("99", 5), ("many", 0),
     ("-1", 0), ("", 0), ("1.5", 0), ("9" * 50, 0)],
)  # fmt: skip
@KINDS
def test_limit_is_that_of_the_annotation(kind: str, limit: str, count: int) -> None:
    world = make_world(kind, 5)
    world.set_pool(limit)
    world.sync()
    assert len(world.list_acted_on()) == count
    if not count:
        assert MAX_UNAVAILABLE in world.conditions()["Degraded"]["message"]


@KINDS
def test_canary_halts_the_rollout(kind: str) -> None:
    world = make_world(kind, 4, canary={"nodes": 1}, maxFailures=0, rebootTimeout="5m")
    world.set_pool("3")
    world.bad.add(NEW)
    world.turn(30)
    assert world.list_acted_on() == ["m0"]
    assert world.conditions()["Degraded"]["reason"] == "Halted"
    assert '{"spec": {"resume": {"clusters/np": "1"}}}' in world.conditions()["Degraded"]["message"]
    world.set_policy(
        canary={"nodes": 1}, maxFailures=0, rebootTimeout="5m", resume={FULL_NAME: "1"}
    )
    world.bad.clear()
    world.clear_states()
    world.turn(60)
    assert world.is_finished()


@KINDS
def test_canary_soaks_before_the_next_wave(kind: str) -> None:
    world = make_world(kind, 4, canary={"nodes": 1, "soak": "1h"})
    world.set_pool("3")
    world.turn(30)
    assert world.list_acted_on() == ["m0"]
    assert "is soaking" in world.conditions()["Updating"]["message"]
    world.turn(130)
    assert world.is_finished()


def test_closed_window_selects_nothing() -> None:
    window = {"days": ["Sat"], "start": "03:00", "duration": "1h", "timeZone": "UTC"}
    world = make_world(windows=[window])
    world.turn(3)
    assert world.list_acted_on() == []
    assert "window opens" in world.conditions()["Updating"]["message"]


def test_hosted_cluster_that_is_down_selects_nothing() -> None:
    world = make_world()
    world.guest_problem = "hosted cluster: no answer for 60 s"
    world.sync()
    assert world.list_acted_on() == []
    assert "no answer for 60 s" in world.conditions()["Updating"]["message"]


# HyperShift's TestGetNodesToUpgrade, as (current, desired, state) of each node. Its rows have no
# state; one that reached its hash reports Done.
_AWAITING, _STARTED = ("", "", ""), ("", NEW, "")
_COMPLETE, _OTHER = (NEW, NEW, "Done"), (OLD, "2c2c2c2c", "")


@pytest.mark.parametrize(
    ("nodes", "limit", "selected"),
    [
        ([_AWAITING, _AWAITING], 1, [0]),
        ([_AWAITING, _AWAITING], 2, [0, 1]),
        ([_STARTED], 1, []),
        ([_COMPLETE], 1, []),
        ([_AWAITING, _STARTED, _COMPLETE], 2, [0]),
        ([_STARTED, _COMPLETE, _AWAITING, _AWAITING], 3, [2, 3]),
        # HyperShift itself redirects the third node, whatever the limit is.
        ([_AWAITING, _COMPLETE, _OTHER], 1, []),
        ([_AWAITING, _COMPLETE, _OTHER], 2, [0]),
        # HyperShift panics: more capacity than candidates (hypershift#9309).
        ([_AWAITING], 10, [0]),
    ],
)
def test_selection_is_that_of_hypershift(
    nodes: list[tuple[str, str, str]], limit: int, selected: list[int]
) -> None:
    world = make_world(size=len(nodes))
    world.set_pool(str(limit))
    for number, (current, desired, state) in enumerate(nodes):
        notes = {key.CURRENT_CONFIG: current, key.DESIRED_CONFIG: desired, key.STATE: state}
        world._annotate(f"m{number}", {name: text or None for name, text in notes.items()})
    world.sync()
    assert sorted(world.list_acted_on()) == [f"m{number}" for number in selected]


def test_machine_without_node_uses_capacity() -> None:
    """The pool counts its Machines: HyperShift skips those without a Node (A9-12)."""
    world = make_world()
    del world.guest.objects["nodes", "m2"]
    world.turn(3)
    assert world.list_acted_on() == []
    assert "maxUnavailable (1) reached by m2" in world.conditions()["Updating"]["message"]


def test_missing_machine_of_a_replace_pool_uses_capacity() -> None:
    world = make_world("Replace")
    del world.management.objects["machines", "m2"]
    world.sync()
    assert world.list_acted_on() == []
    assert "(1) reached by np machine 1 (not ready)" in world.conditions()["Updating"]["message"]


def test_node_cannot_pretend_settings_or_an_image() -> None:
    world = make_world()
    pretended = {
        key.CURRENT_OS_IMAGE: "evil", key.PRESTAGE_IMAGE: "evil", key.HEALTH_MODE: "off",
        "treenail.io/fleet-lock": "group https://evil",
    }  # fmt: skip
    for name in ("m0", "m1", "m2"):
        world._annotate(name, pretended)
    world.sync()
    assert world.list_acted_on() == ["m0"]
    world.turn(30)
    assert world.is_finished()
    written = {
        name for _, _, _, body in world.guest.writes for name in body["metadata"]["annotations"]
    }
    assert written == {key.DESIRED_CONFIG}


def test_redirected_node_belongs_to_the_canary() -> None:
    """HyperShift gives a new target to a node that is updating; no other canary is chosen."""
    world = make_world(size=4, canary={"nodes": 1, "soak": "1h"}, maxFailures=0)
    world.turn(2)
    assert world.list_acted_on() == ["m0"]
    world.set_pool("3")
    world.set_target("2c2c2c2c")
    world._run_upgrader()
    assert world.nodes()["m0"].desired_config == "2c2c2c2c"
    world.turn(20)
    assert world.list_acted_on() == ["m0"]
    assert "m0" in world.record()["rollout"]["assigned"] or world.nodes()["m0"].is_done
    assert "is soaking" in world.conditions()["Updating"]["message"]


def test_node_that_hypershift_will_redirect_is_the_canary() -> None:
    """treenail may see the new target before HyperShift redirects the node that updates."""
    world = make_world(canary={"nodes": 1})
    world.set_pool("3")
    world.sync()
    assert world.list_acted_on() == ["m0"]
    world.set_target("2c2c2c2c")
    for _ in range(3):
        world.sync()
    assert world.list_acted_on() == ["m0"]
    world.turn(30)
    assert world.is_finished("2c2c2c2c")


def test_degraded_node_does_not_fail_the_next_target() -> None:
    """HyperShift stops at it until a user clears its state, and redirects it then."""
    world = make_world(canary={"nodes": 1}, maxFailures=0)
    world.bad.add(NEW)
    while world.nodes()["m0"].state != "Degraded":
        world.turn()
    world.set_target("2c2c2c2c")
    world.turn(5)
    assert world.list_acted_on() == ["m0"]
    assert world.conditions()["Degraded"]["status"] == "False"
    world.clear_states()
    world.turn(30)
    assert world.is_finished("2c2c2c2c")


@pytest.mark.parametrize("state", ["Done", "Degraded"])
def test_target_is_written_to_a_node_that_has_it_already(state: str) -> None:
    """The daemon applies the config that it finds, which may be newer than the desired one."""
    world = make_world(canary={"nodes": 1, "soak": "1h"})
    world.sync()
    ahead = {key.CURRENT_CONFIG: NEW, key.DESIRED_CONFIG: "2c2c2c2c", key.STATE: state}
    world._annotate("m2", ahead)
    world.sync()
    desired = world.nodes()["m2"].desired_config
    assert desired == (NEW if state == "Done" else "2c2c2c2c")


def test_new_target_replaces_machines_that_have_not_joined() -> None:
    world = make_world("Replace", 3)
    world.bad.add(NEW)
    world.turn(3)
    [young] = [name for _, name in world.management.objects if name.startswith(f"{POOL}-{NEW}-")]
    world.set_target("2c2c2c2c")
    world.turn(2)
    assert world.list_acted_on()[:2] == ["m0", young]
    world.turn(40)
    assert world.is_finished("2c2c2c2c")


def test_outage_of_the_hosted_cluster_deletes_no_machine() -> None:
    """All Machines then seem to be unhealthy; none of them is free to go."""
    world = make_world("Replace", 4)
    for name in ("m0", "m1", "m2", "m3"):
        world.set_health(name, healthy=False)
    world.sync()
    assert world.list_acted_on() == []
    assert (
        "maxUnavailable (1) reached by m0 (not ready" in world.conditions()["Updating"]["message"]
    )


def test_machine_is_deleted_by_its_uid() -> None:
    world = make_world("Replace")
    seen = world.find_objects()
    world.management.objects["machines", "m0"]["metadata"]["uid"] = "another"
    world.find_objects = lambda: seen  # type: ignore[method-assign]
    world.turn()
    assert world.list_acted_on() == []


def test_selector_of_a_canary_does_not_apply_to_replace() -> None:
    """No label of a Machine survives its replacement."""
    selector = {"matchLabels": {"example.com/canary": ""}}
    world = make_world("Replace", 3, canary={"nodes": 1, "nodeSelector": selector})
    world.turn(30)
    assert world.is_finished()


def test_scaled_down_pool_has_no_place_for_a_deleted_machine() -> None:
    world = make_world("Replace", 3)
    world.sync()
    world.management.change("machinedeployments", POOL, {"spec": {"replicas": 2}})
    world.size = 2
    del world.management.objects["machines", "m0"]
    world.turn(20)
    assert world.is_finished()


@KINDS
def test_deleted_pool_leaves_policy_and_record(kind: str) -> None:
    world = make_world(kind)
    world.turn(2)
    world.conductor.forget()
    [policy] = world.management.list("rolloutpolicies")
    assert policy["status"]["pools"] == []
    assert world.record() == {}


def test_record_that_is_not_json_stops_the_pool() -> None:
    world = make_world()
    world.management.change("configmaps", "treenail-rollouts", {"data": {POOL: "{"}})
    world.start()
    with pytest.raises(ConfigError, match="key np of ConfigMap treenail-rollouts") as failed:
        world.sync()
    assert "kubectl edit configmap treenail-rollouts -n clusters-one" in failed.value.remedy
    assert world.list_acted_on() == []


def test_record_that_cannot_be_written_stops_the_pool() -> None:
    """The record says how far the rollout got, so no node is selected without it."""
    world = make_world()

    def refuse() -> None:
        raise ForbiddenError("configmaps: forbidden")

    world.management.before_write = refuse
    with pytest.raises(ForbiddenError):
        world.sync()
    assert world.list_acted_on() == []


@pytest.mark.parametrize("behind_s", [0.0, 60.0, 3600.0])
def test_replacement_is_waited_for_whatever_the_clock_of_the_api_server(behind_s: float) -> None:
    world = make_world("Replace", canary={"nodes": 1}, maxFailures=0, rebootTimeout="20m")
    world.management._now = lambda: world.seconds - behind_s
    world.bad.add(NEW)
    world.turn(60)
    assert world.list_acted_on() == ["m0"]
    message = world.conditions()["Degraded"]["message"]
    assert "it has not been ready for 20 min" in message
    world.bad.clear()
    world.turn(3)
    assert "has recovered since" in world.conditions()["Degraded"]["message"]
