"""Metrics of pools, from the conditions of pools and the annotations of nodes."""

from dataclasses import replace

import pytest

from tests.fakes.clock import FakeClock
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.clocks import format_rfc3339
from treenail.controllers.pools.holders import WAIT_REASONS, classify_wait
from treenail.controllers.pools.node_facts import NodeFacts
from treenail.controllers.pools.pool_membership import ObservedPool, PoolSnapshot
from treenail.controllers.rollout.pool_metrics import (
    PoolMetrics,
    compute_pool_tables,
)
from treenail.controllers.runtime.controller_metrics import ControllerMetrics

BEGAN = 1_700_000_000.0


def snapshot(message: str = "", *, degraded: str = "") -> PoolSnapshot:
    since = format_rfc3339(BEGAN)
    conditions = [
        {
            "type": "Updating",
            "status": "True",
            "reason": "Waiting" if message else "RollingOut",
            "message": message,
            "lastTransitionTime": since,
        },
        {"type": "Degraded", "status": str(bool(degraded)), "reason": degraded or "AsExpected"},
    ]
    document = {
        "metadata": {"name": "worker"},
        "status": {"machineCount": 3, "updatedMachineCount": 1, "conditions": conditions},
    }
    nodes = (NodeFacts("a", state="Done"), NodeFacts("b", state="Degraded"), NodeFacts("c"))
    return PoolSnapshot(ObservedPool(MachineConfigPool.from_json(document)), nodes)


def tables(found: PoolSnapshot) -> dict[str, dict[tuple[str, ...], float]]:
    return {table.name: table.values for table in compute_pool_tables([found], BEGAN + 90.0)}


def test_nodes_are_counted_by_state_and_by_status() -> None:
    found = tables(snapshot())
    assert {state: count for (_, state), count in found["pool_nodes"].items() if count} == {
        "Done": 1.0,
        "Degraded": 1.0,
        "Unknown": 1.0,
    }
    assert found["pool_machines"]["worker", "total"] == 3.0
    assert found["pool_machines"]["worker", "updated"] == 1.0
    assert found["pool_target_age_seconds"] == {("worker",): 90.0}
    assert found["pool_condition"]["worker", "Updating"] == 1.0
    assert found["pool_halted"] == {("worker",): 0.0}


def test_halt_is_told_apart_from_other_problems() -> None:
    assert tables(snapshot(degraded="Halted"))["pool_halted"] == {("worker",): 1.0}
    assert tables(snapshot(degraded="NodeDegraded"))["pool_halted"] == {("worker",): 0.0}


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("waiting: maxUnavailable (1) reached by worker-0 (cordoned by a user)", "maxUnavailable"),
        ("waiting: the maintenance window opens at 2026-01-03 01:00 UTC", "window"),
        ("wave 1 of 2 is soaking; the next wave starts in 10 min", "soak"),
        ("wave 1 of 2 is in progress", "wave"),
        ("waiting: no configuration is rendered yet", "other"),
        ("waiting: the watch of nodes has just reconnected", "stale"),
        (
            (
                "All nodes are updating to MachineConfig a / Image q.example/build@sha256:1; "
                "waiting for worker-0 (updating for 3 h)"
            ),
            "nodes",
        ),
    ],
)
def test_wait_has_one_of_few_reasons(message: str, reason: str) -> None:
    assert classify_wait(message) == reason
    waits = tables(snapshot(message))["pool_waiting"]
    assert {name for (_, name), value in waits.items() if value} == {reason}
    assert {name for _, name in waits} == set(WAIT_REASONS)


def test_update_duration_is_observed_when_the_node_has_its_target() -> None:
    clock, metrics = FakeClock(), ControllerMetrics()
    measured = PoolMetrics(metrics, clock, list, lambda _node: clock.now() - 40.0)
    before = NodeFacts("a", current_config="a", desired_config="b", state="Working")
    after = replace(before, current_config="b", state="Done")
    for change in ((before, after), (after, after), (None, after), (after, None)):
        measured.observe_node(*change)
    text = metrics.render_text()
    assert "treenail_controller_update_duration_seconds_count 1.0" in text
    assert "treenail_controller_update_duration_seconds_sum 40.0" in text
