"""HyperShift's in-place upgrader and drainer act on the nodes that another program selects.

With ``nodePoolMaxUnavailable: -1`` on the MachineSet the upgrader selects no node, and does
everything else: payload, pods and drains.
"""

import pytest

from tests.fixtures import hosted
from tests.hosted import programs
from tests.hosted.clusters import (
    RELEASE_VERSION,
    WORKLOADS,
    HostedClusters,
    InPlacePool,
    clear_state,
)
from tests.hosted.daemons import UPGRADER, NodeDaemons
from tests.hosted.processes import LoggedProcess
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail.api.hosted import annotations as hosted_key
from treenail.errors import NotFoundError
from treenail.kube.resources import CONFIGMAPS, NODES, PODS

pytestmark = [pytest.mark.integration]

NAMES = ("w1", "w2", "w3")
OLD, NEW, FIXED = hosted.OLD_HASH, hosted.NEW_HASH, "2c2c2c2c"
LIMIT_S = 60.0


@pytest.fixture(autouse=True)
def find_upgrader() -> None:
    programs.find_program("inplace")


@pytest.fixture
def pool(clusters: HostedClusters) -> InPlacePool:
    found = InPlacePool(clusters, "np", NAMES)
    found.create()
    return found


def wait_delivered(clusters: HostedClusters, pool: InPlacePool, value: str) -> None:
    """Wait until the upgrader has written a target's ConfigMap; it selects nodes after that."""
    name = f"{pool.name}-upgrade"

    def is_delivered() -> bool:
        try:
            found = clusters.guest.get(CONFIGMAPS, name, namespace=name)
        except NotFoundError:
            return False
        return bool(found["data"] == {**found["data"], "hash": value})

    wait_until(is_delivered, limit_s=LIMIT_S)


def wait_done(daemons: NodeDaemons, node: str, value: str) -> None:
    def is_done() -> bool:
        found = daemons.get_node(node)
        requested, applied = found.drains
        is_over = found.current == value and found.state == key.NodeState.DONE
        return is_over and requested == applied == f"uncordon-{value}"

    wait_until(is_done, limit_s=LIMIT_S)


def test_negative_limit_selects_no_node(
    clusters: HostedClusters, pool: InPlacePool, daemons: NodeDaemons
) -> None:
    before = {name: clusters.guest.get(NODES, name) for name in NAMES}
    for value in (NEW, FIXED, OLD + "1"):
        pool.set_target(value)
        wait_delivered(clusters, pool, value)
    # One worker reconciles the MachineSet: the targets before the last one are over.
    assert {name: clusters.guest.get(NODES, name) for name in NAMES} == before
    # A node without a state was never updated, and gets a pod that waits.
    wait_until(lambda: pool.find_pods() == set(NAMES), limit_s=LIMIT_S)
    assert hosted_key.UPGRADE_RUNNING in pool.read_machine_set().metadata.annotations
    assert daemons.list_selections() == []


def test_selected_node_is_drained_and_updated_alone(
    clusters: HostedClusters, pool: InPlacePool, daemons: NodeDaemons
) -> None:
    pods = {name: pool.add_workload(name) for name in NAMES}
    pool.set_target(NEW)
    pool.select("w2", NEW)
    wait_done(daemons, "w2", NEW)
    wait_until(
        lambda: pool.read_machine("w2").metadata.annotations.get(
            hosted_key.PREFIX + "release-version"
        ),
        limit_s=LIMIT_S,
    )
    assert daemons.list_cordons() == ["w2"]
    assert not daemons.get_node("w2").is_cordoned
    left = {
        str(pod["metadata"]["name"]) for pod in clusters.guest.list(PODS, namespace=WORKLOADS).items
    }
    assert left == {pods["w1"], pods["w3"]}
    for name in ("w1", "w3"):
        found = daemons.get_node(name)
        assert (found.desired, found.state, found.drains) == ("", "", ("", ""))
    # The daemon of an updated node is over; those of the others still wait.
    wait_until(lambda: pool.find_pods() == {"w1", "w3"}, limit_s=LIMIT_S)
    for name in ("w3", "w1"):
        pool.select(name, NEW)
        wait_done(daemons, name, NEW)
    wait_until(lambda: pool.read_machine_set().current_hash == NEW, limit_s=LIMIT_S)
    assert daemons.list_cordons() == ["w2", "w3", "w1"]
    assert daemons.applied == {name: [NEW] for name in NAMES}
    assert pool.find_pods() == set()
    assert UPGRADER not in {change.after.desired_by for change in daemons.list_selections()}
    versions = {
        name: pool.read_machine(name).metadata.annotations.get(
            hosted_key.PREFIX + "release-version"
        )
        for name in NAMES
    }
    # The pool is complete before the upgrader writes it to the last Machine.
    assert versions == {"w1": None, "w2": RELEASE_VERSION, "w3": RELEASE_VERSION}
    # After an update no idle node has a pod.
    pool.set_target(FIXED)
    wait_delivered(clusters, pool, FIXED)
    assert pool.find_pods() == set()


def test_new_target_moves_only_the_nodes_in_flight(
    clusters: HostedClusters, pool: InPlacePool, daemons: NodeDaemons
) -> None:
    """``maxUnavailable`` bounds the selection of idle nodes only."""
    daemons.failing.add(NEW)
    pool.set_target(NEW)
    pool.select("w2", NEW)
    wait_until(lambda: daemons.get_node("w2").drains[1], limit_s=LIMIT_S)
    wait_until(lambda: daemons.get_node("w2").state == key.NodeState.DEGRADED, limit_s=LIMIT_S)
    pool.set_target(FIXED)
    wait_until(
        lambda: (
            "w2" in pool.read_machine_set().metadata.annotations.get(hosted_key.UPGRADE_STOPPED, "")
        ),
        limit_s=LIMIT_S,
    )
    # A degraded node stops the pool before its fix is delivered.
    wait_until(lambda: daemons.get_node("w2").state == key.NodeState.DEGRADED, limit_s=LIMIT_S)
    wait_delivered(clusters, pool, NEW)
    clear_state(clusters, "w2")
    wait_done(daemons, "w2", FIXED)
    assert daemons.applied == {"w2": [FIXED]}
    moved = [(each.after.desired, each.after.desired_by) for each in daemons.list_selections()]
    assert moved == [(NEW, "treenail"), (FIXED, UPGRADER)]
    assert {change.after.name for change in daemons.list_selections()} == {"w2"}


def test_node_that_joins_during_an_update_needs_a_selection(
    clusters: HostedClusters, pool: InPlacePool, daemons: NodeDaemons
) -> None:
    pool.set_target(NEW)
    # Provisioned at the new hash, and without the annotations of a daemon.
    pool.add_node("w4", NEW)
    for name in NAMES:
        pool.select(name, NEW)
    for name in NAMES:
        wait_done(daemons, name, NEW)
    wait_until(lambda: pool.find_pods() == {"w4"}, limit_s=LIMIT_S)
    assert pool.read_machine_set().current_hash == OLD
    pool.select("w4", NEW)
    wait_until(lambda: pool.read_machine_set().current_hash == NEW, limit_s=LIMIT_S)


def test_limit_above_the_idle_nodes_stops_the_pool(
    clusters: HostedClusters, daemons: NodeDaemons, upgrader: LoggedProcess
) -> None:
    """The upgrader panics, and begins again: a conducted pool never comes there."""
    pool = InPlacePool(clusters, "np", ["w1"])
    pool.create(limit="3")
    pool.set_target(NEW)
    wait_delivered(clusters, pool, NEW)
    wait_until(lambda: "Observed a panic" in upgrader.read_log(), limit_s=LIMIT_S)
    assert daemons.get_node("w1").desired == ""
    pool.set_target(NEW, limit="-1")
    pool.select("w1", NEW)
    wait_done(daemons, "w1", NEW)
