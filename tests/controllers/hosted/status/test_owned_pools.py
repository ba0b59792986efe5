"""Rows and causes of NodePools that treenail owns: no advice about HyperShift."""

from typing import Any

import pytest

from tests.fixtures import hosted
from treenail.api.hosted import annotations as hosted_key
from treenail.api.hosted import clusterapi, nodepool
from treenail.controllers.hosted.status import causes, facts, rows

Json = dict[str, Any]
NOW = 1795860000.0
OLD, NEW = "0a" * 8, "1b" * 8


def make_facts(kind: str, *, updated: str = OLD, pool: Json | None = None) -> facts.PoolFacts:
    document = pool or hosted.make_node_pool("np", kind, current=updated)
    cluster = hosted.make_hosted_cluster()
    cluster["metadata"]["annotations"] = {hosted_key.SCOPE: hosted_key.OWN_SCOPE}
    notes = {
        hosted_key.ROLLOUT_CONFIG: "r1", hosted_key.TARGET_CONFIG: NEW,
        hosted_key.UPDATED_CONFIG: updated,
    }  # fmt: skip
    template: Any = clusterapi.MachineDeployment.from_json(
        hosted.make_machine_deployment(target=NEW, annotations=notes)
    )
    if kind == "InPlace":
        made = hosted.make_machine_set(target="", current="", limit="-1", annotations=notes)
        template = clusterapi.MachineSet.from_json(made)
    machine = clusterapi.ClusterMachine.from_json(hosted.make_machine("np-0", value=updated))
    return facts.PoolFacts(
        nodepool.NodePool.from_json(document),
        nodepool.HostedCluster.from_json(cluster),
        template,
        (machine,),
    )


@pytest.mark.parametrize("kind", ["Replace", "InPlace"])
@pytest.mark.parametrize(
    ("updated", "state"), [(OLD, rows.PoolState.UPDATING), (NEW, rows.PoolState.UPDATED)]
)
def test_row_has_the_hashes_of_treenail(kind: str, updated: str, state: rows.PoolState) -> None:
    [row] = rows.build_rows([make_facts(kind, updated=updated)], now=NOW)
    assert (row.current_hash, row.wanted_hash) == (updated, NEW)
    assert row.state == state
    text = str([(cause.message, cause.next_step) for cause in row.causes])
    assert "HyperShift" not in text
    assert "hypershift" not in text


@pytest.mark.parametrize("kind", ["ValidGeneratedPayload", "ValidMachineConfig"])
def test_condition_of_treenail_has_no_advice_about_hypershift(kind: str) -> None:
    pool = hosted.with_status(
        hosted.make_node_pool("np"), hosted.make_condition(kind, "False", "Bad", "text")
    )
    found = causes.find_causes(make_facts("Replace", pool=pool), NOW)
    assert "Bad: text" in found[0].message
    assert "hypershift" not in found[0].next_step
    assert "ignition-server" not in found[0].next_step


def test_other_manager_is_the_first_cause() -> None:
    pool = hosted.make_node_pool("np")
    pool["metadata"]["managedFields"] = [
        {"manager": "hypershift-operator", "time": hosted.SINCE, "subresource": "status"}
    ]
    first = causes.find_causes(make_facts("Replace", pool=pool), NOW)[0]
    assert first.kind == "ManagedElsewhere"
    assert "hypershift-operator" in first.message
