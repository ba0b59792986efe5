"""Rows and causes of NodePools that treenail owns: no advice about HyperShift."""

import dataclasses
from typing import Any

import pytest

from tests.controllers.hosted.status import pool_samples, test_hosted_shapes
from tests.fakes.clock import FakeClock
from tests.fixtures import hosted
from treenail.api import object_meta
from treenail.api.hosted import annotations as hosted_key
from treenail.api.hosted import clusterapi, nodepool
from treenail.controllers.hosted.status import causes, facts, rows, snapshot
from treenail.kube import api_client, resources

Json = dict[str, Any]
NOW = 1795860000.0
OLD, NEW = "0a" * 8, "1b" * 8


def make_cluster() -> Json:
    cluster = hosted.make_hosted_cluster()
    cluster["metadata"]["annotations"] = {hosted_key.SCOPE: hosted_key.OWN_SCOPE}
    return cluster


def make_facts(
    kind: str, *, updated: str = OLD, pool: Json | None = None, target: str = NEW, rolled: str = NEW
) -> facts.PoolFacts:
    """A pool that treenail owns; ``rolled`` is in the name of the user data."""
    document = pool or hosted.make_node_pool("np", kind, current=updated, replicas=1)
    cluster = make_cluster()
    notes = {
        hosted_key.ROLLOUT_CONFIG: "r1", hosted_key.TARGET_CONFIG: target,
        hosted_key.UPDATED_CONFIG: updated,
    }  # fmt: skip
    template: Any = clusterapi.MachineDeployment.from_json(
        hosted.make_machine_deployment(target=rolled, annotations=notes)
    )
    if kind == "InPlace":
        notes[hosted_key.UPDATED_ROLLOUT] = OLD
        made = hosted.make_machine_set(target=rolled, current="", limit="-1", annotations=notes)
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
    # Without HyperShift the namespace has no ConfigMaps with the core of the config.
    found = dataclasses.replace(make_facts(kind, updated=updated), core_configs=0)
    [row] = rows.build_rows([found], now=NOW)
    assert (row.current_hash, row.wanted_hash) == (updated, NEW)
    assert row.state == state
    text = str([(cause.message, cause.next_step) for cause in row.causes])
    assert "HyperShift" not in text
    assert "hypershift" not in text


@pytest.mark.parametrize("change", [{"replicas": 2}, {"replicas": 0}, {"version": "4.21.0"}])
def test_pool_with_missing_machine_or_old_version_is_not_updated(change: Json) -> None:
    version = str(change.pop("version", "4.22.0"))
    pool = hosted.make_node_pool("np", "InPlace", current=NEW, **{"replicas": 1, **change})
    found = make_facts("InPlace", updated=NEW, pool=hosted.with_status(pool, version=version))
    [row] = rows.build_rows([found], now=NOW)
    assert row.state == rows.PoolState.UPDATING


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


def make_condition(kind: str, reason: str, text: str) -> object_meta.Condition:
    return object_meta.Condition(kind, "True", reason, text, hosted.SINCE)


GATE = make_condition("Degraded", "AgentMissing", "node np-0: restart with --agent-image")
DRAIN = make_condition("DrainTimedOut", "NodeDrainTimeout", "node np-0: pods left: shop/web-1")


@pytest.mark.parametrize(
    ("recorded", "kinds", "text", "state"),
    [
        ((), ["NotConducted"], "treenail has not begun", rows.PoolState.UPDATING),
        (None, ["Updating"], "the update begins", rows.PoolState.UPDATING),
        ((GATE,), ["RolloutStopped"], "AgentMissing: node np-0", rows.PoolState.BLOCKED),
        (
            (make_condition("Updating", "", "node np-0 is updating"), DRAIN),
            ["DrainTimedOut", "Updating"],
            "shop/web-1",
            rows.PoolState.UPDATING,
        ),
    ],
)
def test_pool_in_place_says_what_the_record_says(
    recorded: tuple[object_meta.Condition, ...] | None,
    kinds: list[str],
    text: str,
    state: rows.PoolState,
) -> None:
    pool_facts = dataclasses.replace(make_facts("InPlace"), conducted=recorded)
    [row] = rows.build_rows([pool_facts], now=NOW)
    assert [cause.kind for cause in row.causes] == kinds
    assert text in "".join(cause.message for cause in row.causes)
    assert "RolloutPolicy" not in str(row.causes)
    assert row.state == state


@pytest.mark.parametrize("kind", ["Replace", "InPlace"])
@pytest.mark.parametrize("failed", [False, True])
def test_refresh_is_shown_until_all_nodes_have_it(kind: str, *, failed: bool) -> None:
    conditions = [hosted.make_condition("ConfigRefreshProgressing", "True", "Updating", "1 of 2")]
    if failed:
        conditions += [hosted.make_condition("ConfigRefreshDegraded", "True", "Bad", "np-0 failed")]
    pool = hosted.make_node_pool(
        "np", kind, current=OLD, annotations={hosted_key.REFRESH: "InPlace"}, replicas=1
    )
    found = make_facts(kind, pool=hosted.with_status(pool, *conditions), rolled=OLD)
    [row] = rows.build_rows([found], now=NOW)
    shown = [cause for cause in row.causes if cause.kind.startswith("ConfigRefresh")]
    wanted = "ConfigRefreshDegraded" if failed else "ConfigRefreshProgressing"
    assert [cause.kind for cause in shown] == [wanted]
    assert row.state == (rows.PoolState.BLOCKED if failed else rows.PoolState.UPDATING)
    done = make_facts(kind, pool=hosted.with_status(pool, *conditions), rolled=OLD, target=OLD)
    [row] = rows.build_rows([done], now=NOW)
    assert (row.state, row.causes) == (rows.PoolState.UPDATED, ())


def test_degraded_node_of_treenail_is_no_order_to_clear_its_state() -> None:
    notes = {"state": "Degraded", "reason": "no space", "desiredConfig": NEW}
    found = make_facts("InPlace")
    found = dataclasses.replace(found, nodes={"np-0": pool_samples.read_node("np-0", **notes)})
    first = causes.find_causes(found, NOW)[0]
    assert (first.kind, first.message) == ("NodeDegraded", "node np-0 is degraded: no space")
    assert "annotate" not in first.next_step


@pytest.mark.parametrize("updated", [OLD, ""])
def test_token_of_refreshed_user_data_is_found(updated: str) -> None:
    """The Secret's name stays, and its content leads to the token of the new config."""
    objects: list[tuple[resources.Resource, Json]] = [
        (resources.NODEPOOLS, hosted.make_node_pool("np", current=OLD)),
        (resources.HOSTEDCLUSTERS, make_cluster()),
        (resources.HOSTEDCONTROLPLANES, hosted.make_control_plane()),
        (resources.MACHINEDEPLOYMENTS, hosted.make_machine_deployment(target=OLD)),
        (resources.SECRETS, hosted.make_secret(f"user-data-np-{OLD}")),
    ]
    if updated:
        objects[-1][1]["metadata"]["annotations"] = {hosted_key.TARGET_CONFIG: NEW}
    data = {"token": hosted.encode("t"), "reason": hosted.encode("AsExpected")}
    objects.append((resources.SECRETS, hosted.make_secret(f"token-np-{NEW}", data=data)))
    names = [each["metadata"]["name"] for _, each in objects]
    client = api_client.Client(test_hosted_shapes.StoredDocuments(objects, names))
    [row] = rows.build_rows(snapshot.read_pools(client, FakeClock(NOW)), now=NOW)
    missing = [cause for cause in row.causes if cause.kind == "TokenMissing"]
    assert bool(missing) is not bool(updated)
    assert all("hypershift" not in cause.next_step for cause in missing)
