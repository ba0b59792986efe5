"""Node predicates: every recorded result, and the deliberate differences."""

from typing import Any

import pytest

from tests.controllers.rollout.builders import (
    NEW,
    OLD,
    failed,
    image,
    node,
    on_its_way,
    recorded_image,
    recorded_nodes,
)
from tests.oracle import needs_oracle, records
from treenail.api import annotations as key
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.clocks import parse_rfc3339
from treenail.controllers.pools.node_facts import (
    NodeFacts,
    RolloutTarget,
    overlay_written,
)
from treenail.controllers.pools.os_image import compute_build_target

IMAGE = "quay.example/os@sha256:0"
# A Degraded node whose image annotations are there, under the config it should have: the
# reference counts it as unavailable, which can dead-lock the pool (see `nodes`).
FAILING_BY_IMAGE = 55
# A node without any annotation: to the reference it is unavailable until its first boot is over.
UNTOUCHED = 15


@needs_oracle
def test_node_predicates_agree_with_the_mco() -> None:
    found = records("machines_by_state")
    for number, record in enumerate(found):
        pool = MachineConfigPool.from_json(record["pool"])
        target = compute_build_target(pool, *recorded_image(record))
        nodes = recorded_nodes(record)
        expected = {name: record[name] for name in ("updated", "ready", "unavailable", "degraded")}
        if number == FAILING_BY_IMAGE:
            assert expected["unavailable"] == ["node-0"]
            expected["unavailable"] = []
        if number == UNTOUCHED:
            assert expected["unavailable"] == ["node1"]
            expected["unavailable"] = []
        assert {
            "updated": [each.name for each in nodes if each.is_updated_to(target)],
            "ready": [
                each.name for each in nodes if each.is_updated_to(target) and each.is_in_service
            ],
            "unavailable": [each.name for each in nodes if each.is_unavailable],
            "degraded": [each.name for each in nodes if each.is_degraded],
        } == expected, number
    assert len(found) == 81


def document(**spec: Any) -> dict[str, Any]:
    prefix = "machineconfiguration.openshift.io/"
    return {
        "metadata": {
            "name": "n",
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "labels": {"topology.kubernetes.io/zone": "a"},
            "annotations": {
                prefix + "currentConfig": "old",
                prefix + "desiredConfig": "new",
                prefix + "currentOSImage": "i",
                prefix + "desiredOSImage": "j",
                prefix + "state": "Working",
                prefix + "reason": "because",
                "treenail.io/rollout-started-at": "1970-01-01T00:01:00Z",
            },
        },
        "spec": spec,
        "status": {
            "conditions": [
                {"type": "MemoryPressure", "status": "True"},
                {
                    "type": "Ready",
                    "status": "True",
                    "lastTransitionTime": "1970-01-01T00:02:00Z",
                },
            ]
        },
    }


def test_node_is_parsed_from_json() -> None:
    assert NodeFacts.from_json(document(unschedulable=True)) == NodeFacts(
        name="n",
        labels={"topology.kubernetes.io/zone": "a"},
        created_at="2026-01-01T00:00:00Z",
        is_healthy=True,
        ready_changed_at=120.0,
        unschedulable=True,
        current_config="old",
        desired_config="new",
        current_image="i",
        desired_image="j",
        state="Working",
        reason="because",
    )


@pytest.mark.parametrize(
    ("kind", "status", "healthy"),
    [
        ("Ready", "True", True),
        ("Ready", "False", False),
        ("Ready", "Unknown", False),
        ("DiskPressure", "True", False),
        ("DiskPressure", "Unknown", False),
        ("DiskPressure", "False", True),
        ("NetworkUnavailable", "True", False),
        ("MemoryPressure", "True", True),
        ("PIDPressure", "True", True),
    ],
)
def test_only_some_conditions_make_node_unhealthy(kind: str, status: str, healthy: bool) -> None:
    found = {"status": {"conditions": [{"type": kind, "status": status}]}}
    assert NodeFacts.from_json(found).is_healthy is healthy


@pytest.mark.parametrize(
    ("facts", "done", "failing", "unavailable"),
    [
        (node(), True, False, False),
        (node(unschedulable=True), True, False, True),
        (node(is_healthy=False), True, False, True),
        (node(state="Working"), False, False, True),
        (node(state="Degraded"), False, False, True),
        (on_its_way("n"), False, False, True),
        (failed("n"), False, True, False),
        (failed("n", state="Unreconcilable"), False, True, False),
        (failed("n", unschedulable=True), False, True, True),
        (NodeFacts("n"), False, False, False),
        (NodeFacts("n", desired_config="new"), False, False, True),
        (node(target=image("old", "1")), True, False, False),
        (node(target=image("old", "1"), current_image=""), False, False, True),
        (node(target=image("old", "1"), current_image=None), False, False, True),
    ],
)
def test_node_predicates_depend_on_config_image_and_state(
    facts: NodeFacts, done: bool, failing: bool, unavailable: bool
) -> None:
    assert (facts.is_done, facts.is_failing, facts.is_unavailable) == (done, failing, unavailable)


def test_node_failing_on_image_uses_no_capacity() -> None:
    # The reference takes it for unavailable for ever: its config is the one it should have.
    bad = image("old", "b")
    stuck = node(target=image("old", "a")).with_target(bad, 0.0)
    facts = NodeFacts(
        "n", current_config="old", desired_config="old", current_image=stuck.current_image,
        desired_image=bad.image, state="Degraded",
    )  # fmt: skip
    assert facts.is_failing
    assert not facts.is_unavailable


@pytest.mark.parametrize(
    ("target", "is_assigned"),
    [
        (OLD, True),
        (NEW, False),
        (RolloutTarget("old", ""), False),
        (image("old", "1"), False),
    ],
)
def test_node_without_image_is_assigned_to_target_without_image(
    target: RolloutTarget, is_assigned: bool
) -> None:
    assert node().is_assigned(target) is is_assigned


def test_node_with_image_is_not_assigned_to_target_without_image() -> None:
    facts = node(target=image("old", "1"))
    assert facts.is_assigned(image("old", "1"))
    assert not facts.is_assigned(image("old", "2"))
    assert not facts.is_assigned(image("new", "1"))
    assert not facts.is_assigned(OLD)


def test_written_target_counts_before_cache_shows_it() -> None:
    seen = on_its_way("b")
    found = overlay_written((node("a"), seen, node("c")), {"a": (NEW, 9.0), "b": (NEW, 9.0)})
    assert found == (node("a").with_target(NEW, 9.0), seen, node("c"))
    assert [each.is_unavailable for each in found] == [True, True, False]


@pytest.mark.parametrize("text", ["", "yesterday", "2026-01-01T00:00:00", "2026-13-01T00:00:00Z"])
def test_invalid_time_is_none(text: str) -> None:
    assert parse_rfc3339(text) is None


@pytest.mark.parametrize(
    ("about", "error"), [(IMAGE, "no space left"), ("quay.example/os@sha256:1", "")]
)
def test_prestage_error_of_another_image_is_ignored(about, error) -> None:
    notes = {key.PRESTAGE_IMAGE: IMAGE, key.PRESTAGE_ERROR: f"{about}: no space left"}
    found = {"metadata": {"name": "n", "annotations": notes}}
    assert NodeFacts.from_json(found).prestage_error == error
