"""Conditions of an owned NodePool, and who wrote its status."""

from dataclasses import replace
from typing import Any

import pytest

from tests.controllers.hosted.owning.test_machines import make_inputs
from tests.fixtures import hosted
from treenail.api.hosted import annotations as hosted_key
from treenail.api.hosted.clusterapi import ClusterMachine, MachineSet
from treenail.api.object_meta import ObjectMeta
from treenail.controllers.hosted.config.pool_config import PoolConfigError
from treenail.controllers.hosted.owning import conditions, machines

Json = dict[str, Any]
SCOPED = "12:00:00"


def make_writes(
    *writes: tuple[str, str], subresource: str = "status", field: str = ""
) -> ObjectMeta:
    entries = [
        {"manager": name, "time": f"2026-11-28T{time}Z", "subresource": subresource,
         "fieldsV1": {f"f:{field}": {}}}
        for name, time in writes
    ]  # fmt: skip
    return ObjectMeta(others={"managedFields": entries})


@pytest.mark.parametrize(
    ("writes", "other"),
    [
        ([], ""),
        ([("hypershift-operator", "11:00:00")], ""),
        # In progress while the scope changed.
        ([("hypershift-operator", "12:00:30")], ""),
        ([("hypershift-operator", "12:05:00")], "hypershift-operator"),
        ([("treenail-nodepools", "12:04:00"), ("hypershift-operator", "12:03:00")], ""),
        ([("treenail-nodepools", "12:00:10"), ("hypershift-operator", "12:00:30")],
         "hypershift-operator"),
        # The scope was set again after a dispute.
        ([("treenail-nodepools", "11:50:00"), ("hypershift-operator", "11:55:00")], ""),
        ([("treenail-nodepools", "12:04:00"), ("treenail-hosted", "12:05:00")], ""),
    ],
)  # fmt: skip
def test_other_manager_is_one_that_writes_after_treenail(
    writes: list[tuple[str, str]], other: str
) -> None:
    cluster = make_writes(("kubectl", SCOPED), subresource="", field=hosted_key.SCOPE)
    assert conditions.find_other_manager(make_writes(*writes), cluster) == other


def test_write_of_another_part_is_not_the_status() -> None:
    document = make_writes(("kubectl", "13:00:00"), subresource="")
    assert conditions.find_other_manager(document, ObjectMeta("c")) == ""


@pytest.mark.parametrize(
    ("writes", "is_own"),
    [([], False), ([("a", "12:00:00"), ("treenail-nodepools", "12:00:01")], True),
     ([("a", "12:00:02"), ("treenail-nodepools", "12:00:01")], False)],
)  # fmt: skip
def test_last_writer_owned_the_pool(writes: list[tuple[str, str]], is_own: bool) -> None:
    assert conditions.was_owned(make_writes(*writes)) == is_own


COUNTS = {"replicas": 2, "upToDateReplicas": 2, "availableReplicas": 2, "observedGeneration": 3}


@pytest.mark.parametrize(
    ("change", "is_updated"),
    [
        ({}, True),
        ({"replicas": 3}, False),
        ({"upToDateReplicas": 1}, False),
        ({"availableReplicas": 1}, False),
        ({"observedGeneration": 2}, False),
    ],
)
def test_pool_is_updated_only_when_its_machines_are(change: Json, is_updated: bool) -> None:
    document = hosted.make_machine_deployment(target="1b1b1b1b", generation=3)
    document["status"] |= COUNTS | change
    document["metadata"]["annotations"][hosted_key.ROLLOUT_CONFIG] = "r2"
    inputs = make_inputs(document, rollout="r2")
    facts = conditions.StatusFacts(inputs.pool, inputs.owner)
    assert facts.is_updated == is_updated
    marks = conditions.build_marks(facts)
    assert (marks.get(hosted_key.CURRENT_ROLLOUT_CONFIG) == "r2") == is_updated
    assert (marks.get(hosted_key.CURRENT_CONFIG) == "1b1b1b1b") == is_updated


@pytest.mark.parametrize(
    ("machine", "template", "is_updated"),
    [("1b1b1b1b", "np", True), ("0a0a0a0a", "np", False), ("1b1b1b1b", "old", False)],
)
def test_counts_of_another_template_are_not_believed(
    machine: str, template: str, is_updated: bool
) -> None:
    """Cluster API may report the counts of the old template for the new generation."""
    document = hosted.make_machine_deployment(target="1b1b1b1b", generation=3)
    document["status"] |= COUNTS
    machine_set = hosted.make_machine_set(target="1b1b1b1b")
    machine_set["spec"]["template"]["spec"]["infrastructureRef"] = {"name": template}
    inputs = make_inputs(document)
    facts = conditions.StatusFacts(
        inputs.pool,
        inputs.owner,
        [ClusterMachine.from_json(hosted.make_machine("np-0", value=machine))],
        sets=[MachineSet.from_json(machine_set)],
    )
    assert facts.is_updated == is_updated


@pytest.mark.parametrize(("updated", "is_updated"), [("1b1b1b1b", True), ("0a0a0a0a", False)])
def test_set_in_place_is_updated_when_all_nodes_are(updated: str, is_updated: bool) -> None:
    document = hosted.make_machine_set()
    document["metadata"]["annotations"] |= {
        hosted_key.TARGET_CONFIG: "1b1b1b1b", hosted_key.UPDATED_CONFIG: updated
    }  # fmt: skip
    inputs = make_inputs(document, upgrade_type="InPlace")
    marks = conditions.build_marks(conditions.StatusFacts(inputs.pool, inputs.owner))
    assert (marks.get(hosted_key.CURRENT_CONFIG_VERSION) == "1b1b1b1b") == is_updated


def test_condition_of_others_and_unknown_fields_stay() -> None:
    pool = make_inputs().pool
    mine = {**hosted.make_condition("Ready", "False"), "severity": "Warning"}
    other = hosted.make_condition("ValidTuningConfig", "True")
    document: Json = {"status": {"conditions": [other, mine]}}
    deployment = hosted.make_machine_deployment()
    facts = conditions.StatusFacts(
        pool, machines.read_owner(pool, deployment), config=make_inputs().config, is_reached=True
    )
    status: Any = conditions.build_status(facts, document, now=0.0)
    found = {each["type"]: each for each in status["conditions"]}
    assert found["ValidTuningConfig"] == other
    assert found["Ready"]["severity"] == "Warning"
    assert found["Ready"]["status"] == "True"


def test_problem_is_one_condition_with_its_remedy() -> None:
    problem = PoolConfigError("ConfigMap a is missing", reason="ConfigMapMissing", remedy="do it")
    facts = conditions.StatusFacts(make_inputs().pool, None, problem=problem)
    status: Any = conditions.build_status(facts, {}, now=0.0)
    found = {each["type"]: each for each in status["conditions"]}
    condition = found["ValidMachineConfig"]
    assert (condition["status"], condition["reason"]) == ("False", "ConfigMapMissing")
    assert condition["message"] == "ConfigMap a is missing; do it"
    assert "ValidMachineTemplate" not in found


def test_seed_keeps_what_is_there() -> None:
    inputs = make_inputs(seed="")
    assert conditions.build_seed(inputs.pool, inputs.config) == {
        "finalizers": [hosted_key.FINALIZER],
        "annotations": {hosted_key.CURRENT_ROLLOUT_CONFIG: "r1"},
    }
    metadata = replace(inputs.pool.metadata, others={"finalizers": [hosted_key.FINALIZER]})
    seeded = replace(make_inputs(seed="r0").pool, metadata=metadata)
    known = {**metadata.annotations, hosted_key.CURRENT_ROLLOUT_CONFIG: "r0"}
    seeded = replace(seeded, metadata=replace(metadata, annotations=known))
    assert conditions.build_seed(seeded, inputs.config) == {}
